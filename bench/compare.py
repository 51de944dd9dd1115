"""Two results of one benchmark on one machine: what became slower, faster or wrong beyond the noise. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from bench.results import IDENTITY, Case, Result
from kvhal.errors import ConfigError

__all__ = ["Change", "Verdict", "changes", "noise_of"]


class Verdict(Enum):
    """What became of a case; the first three are losses."""

    SLOWER = "slower"
    WRONG = "wrong"
    VANISHED = "vanished"
    FASTER = "faster"
    NEW = "new"
    SAME = "same"

    @property
    def is_loss(self) -> bool:
        return self in (Verdict.SLOWER, Verdict.WRONG, Verdict.VANISHED)


@dataclass(frozen=True, slots=True)
class Change:
    """One case before and after. noise: the share of the old time below which a difference says nothing."""

    name: str
    verdict: Verdict
    old_us: float | None = None
    new_us: float | None = None
    noise: float | None = None
    reason: str = ""

    @property
    def share(self) -> float | None:
        """The change as a share of the old time: 0.1 is ten percent slower."""
        return None if self.old_us is None or self.new_us is None else self.new_us / self.old_us - 1


def changes(old: Result, new: Result, noise: float) -> list[Change]:
    """Every case of either result, in the old one's order. Raises ConfigError for results that cannot be compared."""
    _check_comparable(old, new)
    before, after = ({case.name: case for case in result.cases} for result in (old, new))
    failed = {failure.name: failure.reason for failure in new.failures}
    found = [_change(case, after.get(case.name), noise, failed.get(case.name, "")) for case in before.values()]
    return found + [_added(case) for name, case in after.items() if name not in before]


def noise_of(old: Case, new: Case, noise: float) -> float:
    """The larger of `noise` and what the spreads say: the boxes of the quartiles, laid around the medians, touch."""
    return max(noise, (old.spread_us + new.spread_us) / 2 / old.us)


def _change(old: Case, new: Case | None, noise: float, reason: str) -> Change:
    if new is None:
        return Change(old.name, Verdict.VANISHED, old_us=old.us, reason=reason or "not in the new file")
    limit = noise_of(old, new, noise)
    share = new.us / old.us - 1
    verdict = Verdict.SLOWER if share > limit else Verdict.FASTER if share < -limit else Verdict.SAME
    if not new.is_right:
        verdict, reason = Verdict.WRONG, f"error {new.error!r}, exact {new.exact!r}"
    return Change(old.name, verdict, old.us, new.us, limit, reason)


def _added(case: Case) -> Change:
    if case.is_right:
        return Change(case.name, Verdict.NEW, new_us=case.us)
    reason = f"error {case.error!r}, exact {case.exact!r}"
    return Change(case.name, Verdict.WRONG, new_us=case.us, reason=reason)


def _check_comparable(old: Result, new: Result) -> None:
    differences = list(_differences(old, new))
    if differences:
        raise ConfigError(f"the results cannot be compared: {'; '.join(differences)}; measure both on one machine")


def _differences(old: Result, new: Result) -> Iterator[str]:
    if old.benchmark != new.benchmark:
        yield f"benchmark is {old.benchmark!r} and {new.benchmark!r}"
    for name in IDENTITY:
        if old.where[name] != new.where[name]:
            yield f"{name} is {old.where[name]!r} and {new.where[name]!r}"

"""What a deployment allows, and what was decided for it: the values of `kvhal.policy`, which has the rules."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum, StrEnum

from kvhal import modes
from kvhal.capability.cells import Path, Support
from kvhal.capability.proof import UNPROVED, Proof
from kvhal.errors import ConfigError, Problem, UnsupportedMode
from kvhal.spec import CacheSpec

__all__ = ["Action", "Decision", "OnUnsupported", "Policy", "RequiredEvidence", "SpecDecision"]


class OnUnsupported(Enum):
    """What to do with a mode that is refused."""

    ERROR = "error"
    FALLBACK = "fallback"


class RequiredEvidence(StrEnum):
    """hardware: tests passed on this arch, with these kernels or others. current: with exactly these."""

    HARDWARE = "hardware"
    CURRENT = "current"


class Action(Enum):
    """What a decision says."""

    RUN = "run"
    FALLBACK = "fallback"
    REFUSE = "refuse"


@dataclass(frozen=True, slots=True)
class Policy:
    """What a deployment allows. It narrows the table (deny, require_*) or opts in (experimental).

    fallback: the modes that may be taken instead, in order; used only if `on_unsupported` is FALLBACK. Mode names may
    be aliases and are kept canonical. Raises ConfigError with every problem.
    """

    experimental: bool = False
    deny: tuple[str, ...] = ()
    require_native: bool = False
    on_unsupported: OnUnsupported = OnUnsupported.ERROR
    fallback: tuple[str, ...] = ()
    require_evidence: RequiredEvidence | None = None

    def __post_init__(self) -> None:
        # A truthy string such as "forbid" would opt in, so what a caller built by hand is checked as well.
        problems = [
            Problem(f"policy.{what} is {value!r}; it must be a {kind.__name__}")
            for what, value, kind in (
                ("experimental", self.experimental, bool),
                ("require_native", self.require_native, bool),
                ("on_unsupported", self.on_unsupported, OnUnsupported),
            )
            if not isinstance(value, kind)
        ]
        if self.require_evidence is not None:
            try:
                object.__setattr__(self, "require_evidence", RequiredEvidence(self.require_evidence))
            except ValueError:
                found = f"policy.require_evidence is {self.require_evidence!r}"
                problems.append(Problem(f"{found}; it must be 'hardware', 'current' or None"))
        object.__setattr__(self, "deny", _canonical("policy.deny", self.deny, problems))
        object.__setattr__(self, "fallback", _canonical("policy.fallback", self.fallback, problems))
        if self.on_unsupported is OnUnsupported.FALLBACK and not self.fallback:
            message = "policy.on_unsupported is 'fallback' but policy.fallback lists no mode"
            problems.append(Problem(message, hint="list the modes that may be taken instead, or set it to 'error'"))
        if problems:
            raise ConfigError(*problems)


def _canonical(what: str, names: tuple[str, ...], problems: list[Problem]) -> tuple[str, ...]:
    if isinstance(names, str):
        problems.append(Problem(f"{what} is {names!r}; it must be a list of modes"))
        return ()
    found: list[str] = []
    for name in names:
        try:
            found.append(modes.mode(name).name)
        except ConfigError as exc:
            problems.extend(replace(p, message=f"{what}: {p.message}") for p in exc.problems)
    return tuple(dict.fromkeys(found))


@dataclass(frozen=True, slots=True)
class Decision:
    """What happens to one mode on one arch.

    effective: the mode that will be stored; None if refused. rule: "file:line" of the row, or the policy's key, that
    decided. alternatives: modes that `decide` accepts under the same policy and shapes, best first. ways_out: those,
    with what each needs, and the change that would make the mode asked for accepted, if any would. path, encoding and
    support are those of the effective mode, or of the requested one if refused. links: sources of the requested mode's
    row. when: the versions that row answers for, "" for any. assumed: the versions that were not known and that it
    depends on, as the table assumes them ("triton 3.8.0"). proof: where the effective (or refused) mode stands.
    """

    requested: str
    effective: str | None
    action: Action
    rule: str
    reason: str
    alternatives: tuple[str, ...]
    platform: str
    arch: str
    path: Path | None
    encoding: str
    support: Support
    ways_out: tuple[str, ...] = ()
    links: tuple[str, ...] = ()
    when: str = ""
    assumed: tuple[str, ...] = ()
    proof: Proof = UNPROVED

    @property
    def refused(self) -> bool:
        return self.action is Action.REFUSE

    def raise_if_refused(self) -> None:
        """Raise UnsupportedMode with what was asked, what was found and what to do."""
        if self.refused:
            raise UnsupportedMode(self.message)

    @property
    def message(self) -> str:
        """The decision in words: what was asked, what was found and, if refused, what to do."""
        at = f" (assuming {', '.join(self.assumed)})" if self.assumed else ""
        asked = f"mode {self.requested!r} was asked on platform {self.platform!r}, arch {self.arch!r}{at}"
        match self.action:
            case Action.RUN:
                return f"{asked}: it runs ({self.rule})" + (f"; {self.reason}" if self.reason else "")
            case Action.FALLBACK:
                return f"{asked}: {self.reason}"
            case Action.REFUSE:
                return f"{asked}: refused by {self.rule}: {self.reason}; what to do: {' or '.join(self.ways_out)}"


@dataclass(frozen=True, slots=True)
class SpecDecision:
    """The decisions for a cache spec, one a distinct mode, in the order of first use."""

    spec: CacheSpec
    decisions: tuple[Decision, ...]
    effective: CacheSpec | None

    @property
    def refused(self) -> bool:
        return self.effective is None

    @property
    def effective_spec(self) -> CacheSpec:
        """The spec to plan: the one asked for, or the one after a declared fallback. Raises if refused."""
        if self.effective is None:
            raise UnsupportedMode("\n".join(d.message for d in self.decisions if d.refused))
        return self.effective

    def raise_if_refused(self) -> None:
        """Raise UnsupportedMode with every refusal."""
        _ = self.effective_spec

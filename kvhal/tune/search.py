"""The search of one target: a number at a time from the shipped row on, kept only if right and faster. No torch.

Every candidate that is faster becomes the point from which the rest is tried, until a whole round brings nothing or the
time is up. Before it is kept the best is measured once more against the shipped row, since the best of many noisy
figures looks better than it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from kvhal.errors import DeviceError
from kvhal.kernels.triton.tuning import Tuning
from kvhal.tune.space import STORE, Target, axes, moved, numbers

__all__ = ["BOUND", "NOISE", "Bench", "End", "Found", "Refusal", "Timing", "Verdict", "search"]

# Relative L2 against float64 (kernels/attention.py); store must give the reference's own bytes.
BOUND = 3e-3
# Medians of graph replays on an idle H200 repeat within 1 % (facts/kernels.md).
NOISE = 0.01
# A candidate this much slower than the best on one workload will not win on the others.
HOPELESS = 1.25
_REASON = 240


class Bench(Protocol):
    """The device's part. An exception refuses the candidate; a DeviceError with context_lost ends the search."""

    @property
    def caps_registers(self) -> bool:
        """Whether the compiler takes a cap on registers."""
        ...

    def workloads(self, target: Target) -> Sequence[str]:
        """What is timed for a target, by name."""
        ...

    def key(self, row: Tuning, target: Target) -> Hashable:
        """What the launches make of a row: rows of one key do not differ in this target."""
        ...

    def check(self, row: Tuning, target: Target) -> float:
        """The worst error of the target's results against the reference; for store 0 means the same bytes."""
        ...

    def measure(self, row: Tuning, target: Target, workload: str) -> float:
        """Microseconds a call."""
        ...


class Verdict(Enum):
    """faster: a better row was found. shipped: none is better. failed: the shipped row itself. unreached: no time."""

    FASTER = "faster"
    SHIPPED = "shipped"
    FAILED = "failed"
    UNREACHED = "unreached"


class End(Enum):
    """Why a search ended. time: not everything was tried."""

    DONE = "done"
    TIME = "time"
    INTERRUPTED = "interrupted"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class Timing:
    """Microseconds a call by the shipped row and by the row found."""

    workload: str
    before_us: float
    after_us: float

    @property
    def ratio(self) -> float:
        return self.after_us / self.before_us


@dataclass(frozen=True, slots=True)
class Refusal:
    """A candidate that could not be run, or whose result was wrong."""

    numbers: Mapping[str, int]
    reason: str


@dataclass(frozen=True, slots=True)
class Found:
    """What came of a target. row: the whole row with its best numbers, the shipped ones unless it is faster."""

    target: Target
    verdict: Verdict
    row: Tuning
    end: End = End.DONE
    timings: tuple[Timing, ...] = ()
    tried: int = 0
    refused: tuple[Refusal, ...] = ()
    why: str = ""

    @property
    def ratio(self) -> float:
        """Geometric mean of the times over the shipped row's."""
        return _mean(t.ratio for t in self.timings)


def search(
    bench: Bench,
    target: Target,
    shipped: Tuning,
    *,
    seeds: Iterable[Tuning] = (),
    is_time_up: Callable[[], bool],
    say: Callable[[str], None],
) -> Found:
    """Search `target` from `shipped` on. seeds: rows to try first. is_time_up: asked before every candidate.

    Raises nothing: Ctrl-C and a lost device end the search, and what it had found stands.
    """
    if is_time_up():
        return Found(target, Verdict.UNREACHED, shipped, End.TIME)
    one = _Search(bench, target, shipped, is_time_up, say)
    try:
        return one.run(seeds)
    except KeyboardInterrupt:
        return one.found(End.INTERRUPTED)
    except DeviceError as exc:
        return one.found(End.LOST, str(exc))


@dataclass(slots=True)
class _Search:
    bench: Bench
    target: Target
    shipped: Tuning
    is_time_up: Callable[[], bool]
    say: Callable[[str], None]
    before: dict[str, float] = field(default_factory=dict)
    best: Tuning = field(init=False)
    after: dict[str, float] = field(default_factory=dict)
    seen: set[Hashable] = field(default_factory=set)
    tried: int = 0
    refused: list[Refusal] = field(default_factory=list)
    why: str = ""

    def __post_init__(self) -> None:
        self.best = self.shipped

    def run(self, seeds: Iterable[Tuning]) -> Found:
        self.say(f"{self.target}: the shipped row")
        self.seen.add(self.bench.key(self.shipped, self.target))
        times = self._times(self.shipped)
        if times is None:
            return Found(self.target, Verdict.FAILED, self.shipped, why=self.refused.pop().reason)
        self.before, self.after = times, dict(times)
        for candidate in self._candidates(seeds):
            if self.is_time_up():
                self._confirm()
                return self.found(End.TIME)
            self._consider(candidate)
        self._confirm()
        return self.found(End.DONE)

    def found(self, end: End, why: str = "") -> Found:
        timings = tuple(Timing(name, us, self.after[name]) for name, us in self.before.items())
        verdict = Verdict.UNREACHED if not timings else Verdict.SHIPPED
        if self.best != self.shipped:
            verdict = Verdict.FASTER
        why = why or self.why
        return Found(self.target, verdict, self.best, end, timings, self.tried, tuple(self.refused), why)

    def _candidates(self, seeds: Iterable[Tuning]) -> Iterator[Tuning]:
        """Those not seen yet: the seeds, then the best so far with one number changed, as long as that helps."""
        for seed in seeds:
            if self._is_new(seed):
                yield seed
        best = None
        while best != self.best:
            best = self.best
            for axis in axes(self.target, self.shipped, caps_registers=self.bench.caps_registers):
                for value in axis.values:
                    candidate = moved(self.best, self.target, axis.name, value)
                    if candidate is not None and self._is_new(candidate):
                        yield candidate

    def _is_new(self, candidate: Tuning) -> bool:
        key = self.bench.key(candidate, self.target)
        is_new = key not in self.seen
        self.seen.add(key)
        return is_new

    def _consider(self, candidate: Tuning) -> None:
        """Take the candidate as the best if it is."""
        self.tried += 1
        self.say(f"{self.target}: {_said(numbers(candidate, self.target))}")
        times = self._times(candidate)
        if times is not None and self._score(times) < self._score(self.after) * (1 - NOISE):
            self.best, self.after = candidate, times

    def _times(self, row: Tuning) -> dict[str, float] | None:
        """The row's times, or None: refused (and noted), wrong (and noted) or hopeless."""
        try:
            error = self.bench.check(row, self.target)
            bound = 0.0 if self.target.phase == STORE else BOUND
            # NaN is within no bound.
            if not error <= bound:
                self._refuse(row, f"wrong: its error is {error:.2g}, and {bound:g} is allowed")
                return None
            times: dict[str, float] = {}
            for name in self.bench.workloads(self.target):
                times[name] = self.bench.measure(row, self.target, name)
                if self.after and times[name] > HOPELESS * self.after[name]:
                    return None
        except (
            Exception
        ) as exc:  # a compiler and a driver may raise anything; the search goes on without this candidate
            if isinstance(exc, DeviceError) and exc.context_lost:
                self._refuse(row, _reason(exc))
                raise
            self._refuse(row, _reason(exc))
            return None
        return times

    def _confirm(self) -> None:
        """Measure the best and the shipped row once more, side by side; a gain that does not repeat is none."""
        if self.best == self.shipped:
            return
        self.say(f"{self.target}: the best once more")
        before, after = dict[str, float](), dict[str, float]()
        try:
            for name in self.before:
                before[name] = self.bench.measure(self.shipped, self.target, name)
                after[name] = self.bench.measure(self.best, self.target, name)
        except Exception as exc:
            self._refuse(self.best, _reason(exc))
            self.best, self.after = self.shipped, dict(self.before)
            if isinstance(exc, DeviceError) and exc.context_lost:
                raise
            return
        self.before, self.after = before, after
        if self._score(after) >= 1 - NOISE:
            self.why = f"{_said(numbers(self.best, self.target))} was faster once, and not when measured again"
            self.best, self.after = self.shipped, dict(before)

    def _score(self, times: Mapping[str, float]) -> float:
        return _mean(times[name] / us for name, us in self.before.items())

    def _refuse(self, row: Tuning, reason: str) -> None:
        self.refused.append(Refusal(numbers(row, self.target), reason))


def _mean(ratios: Iterable[float]) -> float:
    logs = [math.log(ratio) for ratio in ratios]
    return math.exp(sum(logs) / len(logs)) if logs else 1.0


def _said(values: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())


def _reason(exc: BaseException) -> str:
    """The innermost cause, in a line: a compiler wraps it in pages of source."""
    while exc.__cause__ is not None and not isinstance(exc, DeviceError):
        exc = exc.__cause__
    first = next(iter(str(exc).strip().splitlines()), "")
    return f"{type(exc).__name__}: {first}"[:_REASON]

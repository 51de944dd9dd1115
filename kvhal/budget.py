"""How many bytes the cache may take: readings x policy -> a sum whose every term is named. Pure; no device, no torch.

Two bounds hold, and the smaller one decides:

- share: the fraction of the total that is this process's, less what the process uses. It counts this process only, so
  what a neighbour takes is not charged to us.
- free: the smaller of the readings before and after profiling, less what is still to come. It keeps us from what a
  neighbour holds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from kvhal.errors import BudgetError, ConfigError, Problem
from kvhal.readings import Figure, Known, MemoryReading, Unknown

__all__ = ["Bound", "Budget", "BudgetPolicy", "BudgetReadings", "Term", "blocks_that_fit", "budget", "check_blocks"]


@dataclass(frozen=True, slots=True)
class BudgetReadings:
    """What was read around a profiling run whose trial cache is closed again.

    start, after: before the run, and after it at rest. peak_bytes: the most this process held during the run, the trial
    cache not counted. weights_bytes: what this process holds that `peak_bytes` does not count (weights loaded before
    the counting began; 0 if the peak includes them). workspace_bytes: what the plan still has to allocate beside the
    cache.
    """

    start: MemoryReading
    after: MemoryReading
    peak_bytes: Figure
    weights_bytes: int = 0
    workspace_bytes: int = 0

    def __post_init__(self) -> None:
        _check_counts(("weights_bytes", self.weights_bytes, 0), ("workspace_bytes", self.workspace_bytes, 0))


@dataclass(frozen=True, slots=True)
class BudgetPolicy:
    """What the deployment allows. fraction: of the total. reserve_bytes: of the free memory, left alone.

    bytes: an explicit size of the cache; it is checked like a computed one. Raises ConfigError.
    """

    fraction: float = 0.9
    reserve_bytes: int = 0
    bytes: int | None = None

    def __post_init__(self) -> None:
        if not 0.0 < self.fraction <= 1.0:
            raise ConfigError(f"fraction is {self.fraction!r}; it must be above 0 and at most 1")
        _check_counts(("reserve_bytes", self.reserve_bytes, 0))
        if self.bytes is not None:
            _check_counts(("bytes", self.bytes, 1))


def _check_counts(*counts: tuple[str, int, int]) -> None:
    wrong = [f"{name} is {value!r}; it must be {least} or more" for name, value, least in counts if value < least]
    if wrong:
        raise ConfigError(*(Problem(message) for message in wrong))


@dataclass(frozen=True, slots=True)
class Term:
    """One line of a sum. nbytes: signed. source: where the figure comes from."""

    name: str
    nbytes: int
    source: str

    def __str__(self) -> str:
        return f"{self.nbytes:+d} {self.name} ({self.source})"


@dataclass(frozen=True, slots=True)
class Bound:
    """One limit on the cache's bytes, as a sum of terms."""

    name: str
    terms: tuple[Term, ...]

    @property
    def nbytes(self) -> int:
        return sum(term.nbytes for term in self.terms)

    def __str__(self) -> str:
        return "\n".join((f"  {self.name}: {self.nbytes} bytes", *(f"    {term}" for term in self.terms)))


@dataclass(frozen=True, slots=True)
class Budget:
    """The cache's bytes (the sum of `terms`), the bound that decided ("share", "free" or "bytes") and every bound."""

    cache_bytes: int
    terms: tuple[Term, ...]
    notes: tuple[str, ...]
    bound_by: str
    bounds: tuple[Bound, ...]


def budget(readings: BudgetReadings, policy: BudgetPolicy) -> Budget:
    """The bytes the cache may take. Raises BudgetError, listing every term, if there are too few."""
    use = _use(readings)
    bounds = tuple(_bounds(readings, policy, use))
    notes = tuple(_notes(readings, use, bounds))
    if policy.bytes is not None:
        return _explicit(policy.bytes, bounds, notes)
    if isinstance(total := _total(readings), Unknown):
        raise BudgetError(
            f"a share of {policy.fraction} of the memory was asked for, but the total is unknown ({total.reason}); "
            f"give the size of the cache in bytes instead{_listed(bounds, notes)}"
        )
    if not any(bound.name == "share" for bound in bounds):
        raise BudgetError(
            f"a share of {policy.fraction} of the memory was asked for, but nothing is known of this process's use; "
            f"give the size of the cache in bytes, or weights_bytes{_listed(bounds, notes)}"
        )
    least = min(bounds, key=lambda bound: bound.nbytes)
    if least.nbytes < 1:
        raise BudgetError(
            f"a cache was asked for and there is no memory for it: its bound by {least.name} is {least.nbytes} bytes; "
            f"raise the fraction, lower the reserve, use a smaller model or batch, or free memory held by other "
            f"processes{_listed(bounds, notes)}"
        )
    return Budget(least.nbytes, least.terms, notes, least.name, bounds)


def _explicit(asked: int, bounds: tuple[Bound, ...], notes: tuple[str, ...]) -> Budget:
    fits = max(0, min((bound.nbytes for bound in bounds), default=asked))
    if asked > fits:
        raise BudgetError(
            f"a cache of {asked} bytes was asked for and {fits} bytes are there; the largest that fits is {fits} bytes"
            f"{_listed(bounds, notes)}"
        )
    if not bounds:
        notes = (*notes, "the size asked for could not be checked: neither a share nor free memory is known")
    return Budget(asked, (Term("explicit size", asked, "policy.bytes"),), notes, "bytes", bounds)


def _listed(bounds: tuple[Bound, ...], notes: tuple[str, ...]) -> str:
    return "".join(f"\n{line}" for line in (*map(str, bounds), *(f"  note: {note}" for note in notes)))


@dataclass(frozen=True, slots=True)
class _Use:
    """What this process uses at rest, and what its peak adds to that. own is Unknown if nothing is known of it."""

    own: Figure
    transient: Known
    notes: tuple[str, ...]


def _use(readings: BudgetReadings) -> _Use:
    own, peak, weights = readings.after.own, readings.peak_bytes, readings.weights_bytes
    if isinstance(own, Known) and isinstance(peak, Known):
        above = max(0, weights + peak.value - own.value)
        return _Use(own, Known(above, f"peak above own use at rest, {peak.source}"), ())
    if isinstance(peak, Known):
        estimate = Known(weights + peak.value, f"estimate: weights {weights} + peak {peak.value}, {peak.source}")
        why = own.reason if isinstance(own, Unknown) else ""
        note = f"own use is the estimate weights + peak, because the process's own figure is unknown ({why})"
        return _Use(estimate, Known(0, "in the estimate of own use"), (note,))
    nothing = Known(0, f"unknown: {peak.reason}")
    note = f"the peak of profiling is unknown ({peak.reason}); nothing is set aside for it but the reserve"
    if isinstance(own, Known):
        return _Use(own, nothing, (note,))
    known = Known(weights, f"estimate: weights {weights}, peak unknown") if weights else own
    return _Use(known, nothing, (note, f"the process's own use is unknown ({own.reason})"))


def _total(readings: BudgetReadings) -> Figure:
    """The total memory; a driver that reports 0 does not know it."""
    total = readings.after.total if isinstance(readings.after.total, Known) else readings.start.total
    if isinstance(total, Known) and total.value < 1:
        return Unknown(f"reported as {total.value} by {total.source}")
    return total


def _bounds(readings: BudgetReadings, policy: BudgetPolicy, use: _Use) -> Iterator[Bound]:
    transient = Term("transient peak", -use.transient.value, use.transient.source)
    workspace = Term("workspace", -readings.workspace_bytes, "plan")
    total = _total(readings)
    if isinstance(total, Known) and isinstance(use.own, Known):
        share = math.floor(total.value * policy.fraction)
        part = Term("share of total", share, f"{policy.fraction} of {total.value}, {total.source}")
        yield Bound("share", (part, Term("own use", -use.own.value, use.own.source), transient, workspace))
    frees = [
        Term(f"free memory {when}", free.value, free.source)
        for when, free in (("at start", readings.start.free), ("after profiling", readings.after.free))
        if isinstance(free, Known)
    ]
    if frees:
        reserve = Term("reserve", -policy.reserve_bytes, "policy")
        yield Bound("free", (min(frees, key=lambda term: term.nbytes), transient, workspace, reserve))


def _notes(readings: BudgetReadings, use: _Use, bounds: tuple[Bound, ...]) -> Iterator[str]:
    yield from use.notes
    start, after = readings.start, readings.after
    for when, free in (("at start", start.free), ("after profiling", after.free)):
        if isinstance(free, Unknown):
            yield f"free memory {when} is unknown ({free.reason})"
    if not any(bound.name == "free" for bound in bounds):
        yield "no reading of free memory: what other processes hold is not taken into account"
    if isinstance(start.free, Known) and isinstance(after.free, Known):
        fell = start.free.value - after.free.value
        if fell < 0:
            yield f"free memory rose by {-fell} bytes during profiling; the smaller reading is used"
        elif isinstance(start.own, Known) and isinstance(after.own, Known):
            others = fell - (after.own.value - start.own.value)
            if others > 0:
                yield f"other users took {others} bytes during profiling; they are not charged to this process's share"


def blocks_that_fit(cache_bytes: int, fixed_bytes: int, block_bytes: int) -> int:
    """How many blocks fit beside what the cache holds once. Raises BudgetError if not even one does."""
    blocks = _most_blocks(cache_bytes, fixed_bytes, block_bytes)
    if blocks < 1:
        raise BudgetError(
            f"a cache of at least one block was asked for: {fixed_bytes + block_bytes} bytes ({fixed_bytes} fixed + "
            f"{block_bytes} a block); {cache_bytes} bytes are there; give the cache more memory, or make the block "
            "smaller (block_size, or a mode of fewer bits)"
        )
    return blocks


def check_blocks(blocks: int, cache_bytes: int, fixed_bytes: int, block_bytes: int) -> None:
    """Raises BudgetError, with the largest number that fits, if `blocks` blocks do not."""
    _check_counts(("the number of blocks", blocks, 1))
    most = _most_blocks(cache_bytes, fixed_bytes, block_bytes)
    if blocks > most:
        raise BudgetError(
            f"{blocks} blocks were asked for: {fixed_bytes + blocks * block_bytes} bytes ({fixed_bytes} fixed + "
            f"{blocks} x {block_bytes}); {cache_bytes} bytes are there; the largest number that fits is {most}"
        )


def _most_blocks(cache_bytes: int, fixed_bytes: int, block_bytes: int) -> int:
    _check_counts(("fixed_bytes", fixed_bytes, 0), ("block_bytes", block_bytes, 1))
    return max(0, cache_bytes - fixed_bytes) // block_bytes

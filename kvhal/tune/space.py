"""What is tuned: targets, each with a few whole numbers of a `Tuning`, and the values they may take. No torch.

A target with a family is the tile of one attend kernel, with its steps of `programs` where it has its own. One without
is what all families share: launch sizes of decode and prefill, the tile over staged contexts, and everything of store.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvhal.errors import ConfigError
from kvhal.kernels.triton.tuning import FAMILIES, PHASES, Tile, Tuning

__all__ = [
    "STAGED",
    "STAGED_KEYS",
    "STORE",
    "TUNED_PHASES",
    "Axis",
    "Target",
    "asked_for",
    "axes",
    "explicit",
    "moved",
    "numbers",
    "taken_from",
    "targets",
    "value_of",
]

STAGED, STORE = "staged", "store"
TUNED_PHASES = (*PHASES, STAGED, STORE)
LAUNCHES = ("decode", "prefill", STAGED, STORE)
# A tile of fewer keys is no matrix product; more spill on every arch compiled so far (kernels/isa.py).
KEYS = (16, 32, 64, 128)
# The staged tile is read in halves where it is masked.
STAGED_KEYS = (32, 64, 128)
NUM_WARPS = (1, 2, 4, 8)
NUM_STAGES = (1, 2, 3, 4)
# 168: twelve single-warp programs a multiprocessor. 255: ptxas aims at fewer by itself and spills to get there.
MAXNREG = (0, 128, 168, 200, 255)
PROGRAMS = (1, 2, 3, 4, 6, 8, 10, 12, 16)
PREFILL_PROGRAMS = (1, 2, 3, 4, 6)
STORE_SMALL = (0, 16, 64, 256, 1024)
_STEP = "programs."
# (tiles of a batch, programs a multiprocessor)
Step = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Target:
    """One thing tuned by itself. family: None for what all families share."""

    phase: str
    family: str | None = None

    def __str__(self) -> str:
        return f"{self.phase} {self.family or ('tile' if self.phase == STAGED else 'launch')}"


@dataclass(frozen=True, slots=True)
class Axis:
    """One number of a target and the values to try, ascending."""

    name: str
    values: tuple[int, ...]


def asked_for(families: Iterable[str], phases: Iterable[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The families and phases named, in the house's order; all where none is. Raises ConfigError for an unknown one."""
    found = []
    for what, asked, known in (("family", families, FAMILIES), ("phase", phases, TUNED_PHASES)):
        named = tuple(asked)
        unknown = [name for name in named if name not in known]
        if unknown:
            raise ConfigError(f"{what} {', '.join(map(repr, unknown))} is unknown; known: {', '.join(known)}")
        found.append(tuple(name for name in known if not named or name in named))
    return found[0], found[1]


def targets(families: Sequence[str], phases: Sequence[str]) -> tuple[Target, ...]:
    """Everything to tune, tiles before the launch sizes that depend on them. What verifies launches as decode does."""
    found = [Target(phase, family) for phase in phases if phase in PHASES for family in families]
    return (*found, *(Target(phase) for phase in phases if phase in LAUNCHES))


def axes(target: Target, row: Tuning, *, caps_registers: bool) -> tuple[Axis, ...]:
    """The numbers of a target. caps_registers: whether the compiler takes a cap on registers."""
    if _is_tile(target):
        caps = (Axis("maxnreg", MAXNREG),) if caps_registers else ()
        keys = STAGED_KEYS if target.phase == STAGED else KEYS
        tile = (Axis("keys", keys), Axis("num_warps", NUM_WARPS), Axis("num_stages", NUM_STAGES), *caps)
        return (*tile, *_step_axes(_tile(row, target).programs))
    if target.phase == STORE:
        return (Axis("store_warps", NUM_WARPS), Axis("store_small", STORE_SMALL))
    if target.phase == "prefill":
        return (Axis("prefill_programs", PREFILL_PROGRAMS),)
    return _step_axes(row.programs)


def _step_axes(steps: Sequence[Step]) -> tuple[Axis, ...]:
    """The last step first: it is the most that the others may reach."""
    return tuple(Axis(f"{_STEP}{step}", PROGRAMS) for step in range(len(steps) - 1, -1, -1))


def value_of(row: Tuning, target: Target, axis: str) -> int:
    """What a row says."""
    of = _tile(row, target) if _is_tile(target) else row
    if axis.startswith(_STEP):
        return of.programs[int(axis.removeprefix(_STEP))][1]
    return int(getattr(of, axis))


def moved(row: Tuning, target: Target, axis: str, value: int) -> Tuning | None:
    """The row with one number changed; None if no launch can be like that."""
    of = _tile(row, target) if _is_tile(target) else row
    change: dict[str, Any] = {axis: value}
    if axis.startswith(_STEP):
        step = int(axis.removeprefix(_STEP))
        steps = tuple((tiles, value if i == step else each) for i, (tiles, each) in enumerate(of.programs))
        # The last step is the size of the grid, so no other may ask for more.
        if max(each for _, each in steps) > steps[-1][1]:
            return None
        change = {"programs": steps}
    found = replace(of, **change)
    return _with_tile(row, target, found) if isinstance(found, Tile) else found


def taken_from(row: Tuning, other: Tuning, target: Target) -> Tuning:
    """`row` with the numbers that `other` has for a target."""
    if _is_tile(target):
        return _with_tile(row, target, _tile(other, target))
    if target.phase == STORE:
        return replace(row, store_small=other.store_small, store_warps=other.store_warps)
    if target.phase == "prefill":
        return replace(row, prefill_programs=other.prefill_programs)
    return replace(row, programs=other.programs)


def numbers(row: Tuning, target: Target) -> dict[str, int]:
    """Every number of a target."""
    return {axis.name: value_of(row, target, axis.name) for axis in axes(target, row, caps_registers=True)}


def explicit(row: Tuning) -> Tuning:
    """The row with every tile written out, so that none follows another phase's or the default's."""
    tiles: dict[str, Any] = {phase: tuple((f, row.tile(f, phase)) for f in FAMILIES) for phase in PHASES}
    return replace(row, **tiles)


def _is_tile(target: Target) -> bool:
    return target.family is not None or target.phase == STAGED


def _tile(row: Tuning, target: Target) -> Tile:
    return row.staged if target.family is None else row.tile(target.family, target.phase)


def _with_tile(row: Tuning, target: Target, tile: Tile) -> Tuning:
    if target.family is None:
        return replace(row, staged=tile)
    pairs = ((f, tile if f == target.family else row.tile(f, target.phase)) for f in FAMILIES)
    tiles: dict[str, Any] = {target.phase: tuple(pairs)}
    return replace(row, **tiles)

"""Tile shapes and launch sizes as data: one `Tuning` an arch, read by the adapters from `tuning.yaml`. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import yaml

from kvhal.errors import ConfigError

__all__ = ["DEFAULT", "FAMILIES", "PHASES", "Tile", "Tuning", "family_of", "load_tunings"]

FAMILIES = ("int8", "float8", "int4", "static", "wide")
PHASES = ("decode", "verify", "prefill")
CONVERSIONS = ("arithmetic", "cast", "asm")


@dataclass(frozen=True, slots=True)
class Tile:
    """One attend kernel. keys: cached tokens a step of the loop. maxnreg: a cap on registers (CUDA), 0 for none.

    rows: most rows an item has, 0 for what the tuning says. many: computed by `many_rows` (then padded to `rows`), else
    by `few_rows`; None for what is usual: prefill is. inline: the tile where V lies in rows (inline pages); None for
    this one, cut shorter by a rule. long: the tile for heads of more than 128 channels; None for this one. slices:
    `few_rows` multiplies queries by so many slices of their channels, a power of two; more take fewer registers.
    programs: steps of its own instead of the row's, for tiles of fewer bytes; none for the row's.
    """

    keys: int = 32
    num_warps: int = 1
    num_stages: int = 3
    maxnreg: int = 0
    rows: int = 0
    many: bool | None = None
    inline: Tile | None = None
    long: Tile | None = None
    slices: int = 1
    programs: tuple[tuple[int, int], ...] = ()

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> Tile:
        """A tile of `tuning.yaml`. Raises ConfigError for an unknown key or slices that are no power of two."""
        unknown = sorted(set(values) - {f.name for f in fields(cls)})
        if unknown:
            raise ConfigError(f"a tile of a tuning names {unknown!r}; known: {[f.name for f in fields(cls)]!r}")
        slices = values.get("slices", 1)
        if slices < 1 or slices & (slices - 1):
            raise ConfigError(f"a tile of a tuning asks for {slices} slices; give a power of two")
        others = {name: cls.parse(values[name]) for name in ("inline", "long") if values.get(name) is not None}
        return cls(**{**values, **others, "programs": _steps(values.get("programs", ()))})


STAGED = Tile(64, num_warps=4, num_stages=2, rows=64)

NARROW = 8


@dataclass(frozen=True, slots=True)
class Tuning:
    """What is measured rather than derived; the same numbers come out whatever stands here.

    decode (items of up to 8 rows), verify (more rows; up to 8 queries a sequence), prefill: (family of encodings, Tile)
    pairs; none means the default's. Items that one tile's warps could not hold get more warps or shorter tiles.
    columns: the least columns of a matrix product. pad_weights: pad the weights of V to `columns` (AMD matrix cores).
    warp_holds: what a warp's registers hold, as a multiple of what they do on sm_90. conversion: how int8 and int4
    codes become fp16. hardware: encodings whose conversion instructions are proven equal to the codec. verify_rows,
    prefill_rows, careful_rows: most rows of the result an item has (the last: of prefill where V may hold NaN).
    programs: (tiles, programs a multiprocessor) steps, ascending; the last serves every larger batch. max_programs:
    what the workspace has room for. prologue: what starting an item costs, in tiles. shared_bytes: shared memory a
    program may use. dependent: the reduction is launched while attend runs (CUDA from sm_90).
    packed: store makes four integer codes at a time (CUDA from sm_90). store_small: calls up to so many tokens take one
    token a program. store_registers: a cap where the hardware converts rows with row words for tiled pages, 0 for none
    (CUDA). direct: calls that are known go past Triton's own launcher, where it was tested (CUDA).
    staged: the tile over contexts staged as fp16. staged_bytes: workspace set aside for them, 0 for no staging.
    staged_rows: fewest rows (queries x query heads) of a call that stages; staged_queries: of a sequence, in queries.
    """

    decode: tuple[tuple[str, Tile], ...] = ()
    verify: tuple[tuple[str, Tile], ...] = ()
    prefill: tuple[tuple[str, Tile], ...] = ()
    columns: int = NARROW
    pad_weights: bool = False
    warp_holds: int = 1
    conversion: str = "arithmetic"
    hardware: tuple[str, ...] = ()
    programs: tuple[tuple[int, int], ...] = ((4096, 4), (12288, 8), (1 << 62, 12))
    prefill_programs: int = 3
    verify_rows: int = 32
    prefill_rows: int = 32
    careful_rows: int = 32
    max_programs: int = 2112
    prologue: int = 4
    shared_bytes: int = 99 << 10
    dependent: bool = False
    packed: bool = False
    store_small: int = 256
    store_warps: int = 2
    store_registers: int = 0
    direct: bool = False
    staged: Tile = STAGED
    staged_bytes: int = 128 << 20
    staged_rows: int = 16384
    staged_queries: int = 64

    @property
    def narrow(self) -> bool:
        """Whether matrix instructions have 8 columns, of whose 16 rows a thread holds two, 8 apart (CUDA).

        AMD's have 16 columns at least, and a thread holds rows side by side.
        """
        return self.columns == NARROW

    @classmethod
    def parse(cls, row: Mapping[str, Any]) -> Tuning:
        """A row of `tuning.yaml`. Raises ConfigError for an unknown key or family."""
        known = {f.name for f in fields(cls)}
        unknown = sorted(set(row) - known)
        if unknown:
            raise ConfigError(f"tuning names {unknown!r}, which no kernel reads; known: {sorted(known)!r}")
        values: dict[str, Any] = dict(row)
        for name in PHASES:
            if name in values:
                missing = sorted(set(FAMILIES) ^ set(values[name]))
                if missing:
                    raise ConfigError(f"tuning {name!r} must name exactly {FAMILIES!r}; {missing!r} is missing or new")
                values[name] = tuple((family, Tile.parse(tile)) for family, tile in values[name].items())
        if "programs" in values:
            values["programs"] = _steps(values["programs"])
        if "hardware" in values:
            values["hardware"] = tuple(values["hardware"])
        if "staged" in values:
            values["staged"] = Tile.parse(values["staged"])
        found = cls(**values)
        if found.conversion not in CONVERSIONS:
            raise ConfigError(f"tuning conversion is {found.conversion!r}; known: {CONVERSIONS!r}")
        return found

    def plain(self) -> dict[str, Any]:
        """The row as `parse` reads it; a phase without tiles of its own is left out."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        for name in PHASES:
            if tiles := values.pop(name):
                values[name] = {family: asdict(tile) for family, tile in tiles}
        return values | {"staged": asdict(self.staged)}

    def tile(self, family: str, phase: str) -> Tile:
        """The tile of a family, from this row or the default."""
        of: tuple[tuple[str, Tile], ...] = getattr(self, phase) or _TILES[phase]
        return dict(of)[family]


def _steps(given: Iterable[Iterable[int]]) -> tuple[tuple[int, int], ...]:
    return tuple((int(tiles), int(each)) for tiles, each in given)


_DECODE = (
    ("int8", Tile(32)),
    ("float8", Tile(32)),
    ("int4", Tile(64)),
    ("static", Tile(32, num_warps=2)),
    ("wide", Tile(16)),
)
_PREFILL = tuple((family, Tile(32, num_warps=4, num_stages=2)) for family in FAMILIES)
_VERIFY = tuple((family, replace(tile, num_warps=2)) for family, tile in _DECODE)
_TILES = {"decode": _DECODE, "verify": _VERIFY, "prefill": _PREFILL}
DEFAULT = Tuning()


def family_of(encoding: str, *, row_scaled: bool) -> str:
    """The family of tiles an encoding belongs to: codes without row words that may hold NaN cost more to read."""
    if encoding in ("int8", "int4"):
        return encoding
    if encoding.startswith("e"):
        return "float8" if row_scaled else "static"
    return "wide"


def load_tunings(path: Path) -> dict[str, Tuning]:
    """Every arch's row of a `tuning.yaml`. Raises ConfigError for an arch named twice and for what `parse` refuses."""
    document = yaml.safe_load(path.read_text(encoding="utf-8"))
    found: dict[str, Tuning] = {}
    for row in document["rows"]:
        values = dict(row)
        tuning = Tuning.parse({key: value for key, value in values.items() if key != "arches"})
        for arch in values["arches"]:
            if arch in found:
                raise ConfigError(f"{path}: arch {arch!r} has two rows; give it one")
            found[arch] = tuning
    return found

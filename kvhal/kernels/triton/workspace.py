"""How an attend call is cut on a GPU, and the bytes of workspace that takes. Pure arithmetic: no torch, no triton.

An item is up to `tokens` consecutive queries of one sequence under one kv head; its columns are (query, query head)
pairs. The tiles of keys of all items of a kv head form one line, cut in a number of equal parts (stream-K) that depends
on shapes only; a program takes one part for one kv head. All heads are cut alike, so that programs side by side read
the same pages at the same time. A program that finishes an item alone writes the result; otherwise it leaves a partial
result in one of its two slots (its first item and its last) and `reduce` joins them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from kvhal.kernels.geometry import LayerGeometry
from kvhal.kernels.triton.constants import pow2
from kvhal.kernels.triton.staging import staging_bytes
from kvhal.kernels.triton.tuning import DEFAULT, Tile, Tuning, family_of
from kvhal.modes import Scaling

__all__ = ["AttendCut", "AttendWorkspace", "triton_workspace_bytes"]

ALIGNMENT = 64
SCHEDULE_BYTES = 32
SEQUENCE_BYTES = 32
ROW_BYTES = 16
MAX_DECODE_QUERIES = 8
PARTIAL_BYTES = 40 << 20
# CUDA C++ Programming Guide, compute capability 8.0 to 12.0: each of a multiprocessor's four schedulers has registers
# for its own warps, which take eight a thread at a time; a program takes 1 KiB of shared memory for itself.
SCHEDULERS = 4
REGISTERS_A_SCHEDULER = 16384
RESERVED_BYTES = 1024
# Fewer single-warp programs than this do not keep memory busy (measured on sm_90): rather load fewer tiles ahead.
ENOUGH_WARPS = 8
# Encodings whose product with the query is one of integers.
INTEGERS = ("int8", "int4")
DTYPES = ("float32", "bfloat16", "float16")
# What one warp holds without spilling (compiled for sm_90): bytes of a tile of K or V, rows x channels of the result,
# keys x columns of scores.
TILE_BYTES_A_WARP = 8192
ACCUMULATED_A_WARP = 2048
SCORES_A_WARP = 1024
ROW_MAJOR_ACCUMULATED = 1024
# The most keys x channels of a tile, rows x channels of a result.
KEYS_BY_CHANNELS = 8192
ACCUMULATED = 8192
MANY_ACCUMULATED = 16384
MANY_CHANNELS = 128
MOST_REGISTERS = 255
SMALL_HEAD = 64
SMALL_TILE_BYTES = 4096
LEAST_SLICE = 32
MOST_KEYS = 64
SHORT_KEYS = 16
DECODE_ROWS = 8


@dataclass(frozen=True, slots=True)
class AttendCut:
    """How one call is cut. rows: columns of the result an item has, a power of two; columns: of the score product.

    many: computed by `many_rows`, else by `few_rows`. tokens: queries an item. pairs: queries are split in two parts,
    which are two columns a row or, with as many columns as rows, two products. slices: of channels, multiplied one
    after another. at_once: programs that run on a multiprocessor at once, 0 if nothing says how many. programs: (tiles
    of a batch, programs a multiprocessor) steps, ascending.
    """

    prefill: bool
    many: bool
    tokens: int
    rows: int
    columns: int
    pairs: bool
    slices: int
    keys: int
    num_warps: int
    num_stages: int
    maxnreg: int
    slots: int
    at_once: int
    programs: tuple[tuple[int, int], ...]

    @classmethod
    @lru_cache(maxsize=1024)
    def of(
        cls,
        g: LayerGeometry,
        num_q_heads: int,
        num_tokens: int,
        num_seqs: int,
        dtype: str,
        tuning: Tuning,
    ) -> AttendCut:
        """The cut for `num_tokens` queries of `dtype` over `num_seqs` sequences."""
        group = num_q_heads // g.num_kv_heads
        each = -(-num_tokens // max(1, num_seqs))
        return cls._cut(g, group, each, dtype, tuning)

    @classmethod
    def _cut(cls, g: LayerGeometry, group: int, each: int, dtype: str, tuning: Tuning) -> AttendCut:
        """The cut for `each` queries a sequence."""
        prefill = each > MAX_DECODE_QUERIES
        encoding, careful = g.k.encoding.name, is_careful(g)
        # Accumulators grow with the head, and masks for a head that is no power of two take registers too.
        dim = max(g.k.head_dim, g.v.head_dim)
        cap = min(ACCUMULATED // pow2(dim) // (1 + careful), 64 if dim == pow2(dim) else 32)
        # By the rows asked for: padding them to a matrix instruction's columns makes no verification of a decode step.
        phase = phase_of(pow2(group * _tokens(each, min(tuning.verify_rows, cap), group)), prefill=prefill)
        usual = tuning.tile(_family(g), phase)
        is_long = dim > MANY_CHANNELS and usual.long is not None
        if dim > MANY_CHANNELS:
            usual = usual.long or usual
        own = usual.inline if _is_row_major(g) else None
        tile = own or usual
        # A bfloat16 key keeps the precision of other queries only in pairs.
        pairs = needs_pairs(encoding, dtype)
        many = (prefill if tile.many is None else tile.many) and not (pairs and encoding == "bfloat16")
        most = tile.rows or _most_rows(tuning, prefill=prefill, careful=careful)
        if many:
            most = max(16, min(most, MANY_ACCUMULATED // pow2(dim) // (1 + (dim > MANY_CHANNELS)) // (1 + careful)))
        else:
            most = min(most, cap)
        tokens = _tokens(each, most, group)
        rows = pow2(group * tokens)
        if many:
            pairs, rows = False, max(16, tile.rows, rows)
        # Parts side by side fill the matrix instructions of few rows. Of more they are two products, whose operands
        # gfx1100 has no registers for.
        beside = 2 if pairs and (rows < tuning.columns or not tuning.narrow) else 1
        columns = max(tuning.columns, rows * beside)
        rows = columns // beside
        shape = _Shape(g, dim, rows, columns, pairs=pairs, prefill=prefill, many=many)
        tile = shape.fitted(tile, tuning, is_own=own is not None, is_long=is_long)
        slices = 1 if many else _slices(g, tile)
        programs = ((1 << 62, tuning.prefill_programs),) * 3 if prefill else tile.programs or tuning.programs
        partial = 4 * rows * (g.v.head_dim + 1)
        slots = 2 * max(1, min(tuning.max_programs, PARTIAL_BYTES // (2 * partial)))
        return cls(
            prefill, many, tokens, rows, columns, pairs, slices, tile.keys, tile.num_warps, tile.num_stages,
            tile.maxnreg, slots, shape.at_once(tile, tuning), programs,
        )  # fmt: skip

    def parts(self, heads: int, processors: int, most_tiles: int = 1 << 62) -> tuple[int, tuple[tuple[int, int], ...]]:
        """(parts of the line, each for `heads` programs; the steps (tiles, parts) by which a smaller batch uses fewer).

        Never more programs than run at once: one that starts when another ends only adds its own beginning to the end.
        most_tiles: a bound on the tiles of all heads; the programs of more need not be launched.
        """
        most = min(self.slots // 2, (self.at_once or self.slots) * processors)
        found = tuple((tiles, max(1, min(most, each * processors) // heads)) for tiles, each in self.programs)
        count = next(parts for tiles, parts in found if most_tiles <= tiles)
        return count, tuple((tiles, min(count, parts)) for tiles, parts in found)

    def most_tiles(self, g: LayerGeometry, num_tokens: int, num_seqs: int, max_blocks: int, tuning: Tuning) -> int:
        """A bound on the tiles of a call of this shape: every sequence as long as its row of the table."""
        items = (num_tokens + num_seqs * (self.tokens - 1)) // self.tokens
        return g.num_kv_heads * items * (-(-max_blocks * g.block_size // self.keys) + tuning.prologue)


@dataclass(frozen=True, slots=True)
class _Shape:
    """What a tile must fit: the products of one item. dim: the larger head size."""

    g: LayerGeometry
    dim: int
    rows: int
    columns: int
    pairs: bool
    prefill: bool
    many: bool

    def fitted(self, tile: Tile, tuning: Tuning, *, is_own: bool, is_long: bool) -> Tile:
        """`tile` with the keys, warps, stages and registers that this shape leaves room for.

        is_own: the tile was chosen for rows of V as they lie (inline pages), so no rule for them applies. is_long: it
        was chosen for heads as long as this.
        """
        keys, warps = self._keys(tile.keys, tuning, is_own=is_own, is_long=is_long), tile.num_warps
        if self._is_held_by_one(tile, tuning):
            keys = min(keys, SHORT_KEYS)
        # A prefill tile says its warps itself, and so does one without a cap on registers.
        elif not (self.many and (self.prefill or not tile.maxnreg)):
            warps = max(warps, self._warps(keys, tuning))
        registers, stages = tile.maxnreg, tile.num_stages
        row_major = _is_row_major(self.g)
        if registers and not (self.prefill or is_careful(self.g) or row_major) and self.dim <= SMALL_HEAD:
            # A small head wants more on its way: longer tiles where they are very small, else more (seen on sm_90).
            if _tile_bytes(self.g, keys) < SMALL_TILE_BYTES:
                keys = min(2 * keys, max(keys, MOST_KEYS), KEYS_BY_CHANNELS // pow2(self.dim))
            else:
                stages += 1
        if registers and (warps > tile.num_warps or self.dim > MANY_CHANNELS or (row_major and not is_own)):
            registers = MOST_REGISTERS
        while stages > 1 and stages * _tile_bytes(self.g, keys) > tuning.shared_bytes:
            stages -= 1
        found = replace(tile, keys=keys, num_warps=warps, num_stages=stages, maxnreg=registers)
        enough = min(ENOUGH_WARPS // warps, self._by_registers(found))
        # Two stages load one tile ahead.
        while found.num_stages > 2 and self.at_once(found, tuning) < enough:
            found = replace(found, num_stages=found.num_stages - 1)
        return found

    def at_once(self, tile: Tile, tuning: Tuning) -> int:
        """Programs that run on a multiprocessor at once, as registers and shared memory say; 0 if no cap says."""
        if not tile.maxnreg:
            return 0
        ahead = max(1, tile.num_stages - 1) * (_tile_bytes(self.g, tile.keys) + 8 * tile.keys)
        parts = 2 if self.pairs and self.columns == self.rows else 1
        itemsize = 1 if self.g.k.encoding.name in INTEGERS else 2
        query = parts * self.columns * pow2(self.g.k.head_dim) * itemsize
        held = ahead + query + 2 * tile.keys * self.rows + RESERVED_BYTES
        warps = (tuning.shared_bytes + RESERVED_BYTES) // held * tile.num_warps
        # Warps that the schedulers cannot share evenly leave three of them waiting for the fourth.
        warps = warps // SCHEDULERS * SCHEDULERS or warps
        return max(1, min(warps // tile.num_warps, self._by_registers(tile)))

    @staticmethod
    def _by_registers(tile: Tile) -> int:
        if not tile.maxnreg:
            return 0
        a_warp = 32 * -(-tile.maxnreg // 8) * 8
        return max(1, REGISTERS_A_SCHEDULER // a_warp * SCHEDULERS // tile.num_warps)

    def _keys(self, keys: int, tuning: Tuning, *, is_own: bool, is_long: bool) -> int:
        keys = max(16, min(keys, KEYS_BY_CHANNELS // pow2(self.dim)))
        is_cut = self.dim > MANY_CHANNELS and not (is_long or self.prefill)
        if is_cut and (_is_row_major(self.g) or self._converts_itself(tuning)):
            # What long rows are turned or converted in takes the registers of half the keys.
            keys = min(keys, SHORT_KEYS)
        if is_own or not _is_row_major(self.g):
            return keys
        # V is turned in registers: short tiles.
        is_small = max(DECODE_ROWS, self.rows) * pow2(self.dim) <= ROW_MAJOR_ACCUMULATED * tuning.warp_holds
        return min(keys, 32 if self.prefill or is_small else 16)

    def _converts_itself(self, tuning: Tuning) -> bool:
        """Whether codes of 8-bit floats are converted by integer instructions."""
        names = (self.g.k.encoding.name, self.g.v.encoding.name)
        return any(name.startswith("e") and name not in tuning.hardware for name in names)

    def _is_crowded(self) -> bool:
        return self.rows > DECODE_ROWS and (_is_row_major(self.g) or is_careful(self.g)) and not self.many

    def _is_held_by_one(self, tile: Tile, tuning: Tuning) -> bool:
        """Whether one warp takes a result of twice the usual size: beside short tiles, which it need not share."""
        accumulated = self.rows * pow2(self.dim) // tuning.warp_holds
        return (
            tile.num_warps == 1
            and bool(tile.maxnreg)
            and SMALL_HEAD < self.dim <= MANY_CHANNELS
            and ACCUMULATED_A_WARP < accumulated <= 2 * ACCUMULATED_A_WARP
            and not (self.many or self.prefill or self._is_crowded())
        )

    def _warps(self, keys: int, tuning: Tuning) -> int:
        """Warps that hold the tile, the result and the scores."""
        g, keys = self.g, min(keys, 32)
        wide = max(pow2(of.head_dim) * of.codes.itemsize for of in (g.k, g.v))
        held = (
            wide * keys // TILE_BYTES_A_WARP,
            self.rows * pow2(self.dim) // ACCUMULATED_A_WARP * (1 + self._is_crowded()),
            keys * self.columns // SCORES_A_WARP,
        )
        return min(8, max(held) // tuning.warp_holds)


@dataclass(frozen=True, slots=True)
class AttendWorkspace:
    """Byte offsets of one call's workspace.

    schedule int32 [parts][8] | sequences int32 [seqs][8] | what becomes of each row int32 [tokens][4] | lse fp32
    [slots][rows] | partial results fp32 [slots][rows][head_dim_v]. Slots: two for each kv head and part.
    """

    schedule: int
    sequences: int
    rows: int
    lse: int
    partial: int
    nbytes: int

    @classmethod
    @lru_cache(maxsize=1024)
    def of(cls, cut: AttendCut, dim: int, num_tokens: int, num_seqs: int) -> AttendWorkspace:
        sizes = (
            SCHEDULE_BYTES * (cut.slots // 2),
            SEQUENCE_BYTES * num_seqs,
            ROW_BYTES * num_tokens,
            4 * cut.slots * cut.rows,
            4 * cut.slots * cut.rows * dim,
        )
        offsets, end = [], 0
        for size in sizes:
            offsets.append(end)
            end += -(-size // ALIGNMENT) * ALIGNMENT
        schedule, sequences, rows, lse, partial = offsets
        return cls(schedule, sequences, rows, lse, partial, end)


@lru_cache(maxsize=1024)
def triton_workspace_bytes(
    geometry: LayerGeometry,
    num_q_heads: int,
    max_tokens: int,
    max_seqs: int | None = None,
    tuning: Tuning = DEFAULT,
) -> int:
    """Bytes of `workspace` that `attend` needs for up to `max_tokens` queries of up to `max_seqs` sequences.

    At any context length and for any dtype of q. max_seqs: None means no more sequences than tokens. Part of it may be
    room for staging, without which long prompts are slower and nothing else changes.
    """
    tokens = max(1, max_tokens)
    seqs = tokens if max_seqs is None else max(1, max_seqs)
    group = num_q_heads // geometry.num_kv_heads
    # Every number of queries a sequence may bring, up to the power of two that a cut rounds it to.
    lengths = [1 << n for n in range(tokens.bit_length() + 1)]
    cuts = [AttendCut._cut(geometry, group, each, dtype, tuning) for each in lengths for dtype in DTYPES]
    most = max(AttendWorkspace.of(cut, geometry.v.head_dim, tokens, seqs).nbytes for cut in cuts)
    return most + staging_bytes(geometry, num_q_heads, tokens, tuning)


def _tokens(each: int, rows: int, group: int) -> int:
    """Queries an item has, if it has up to `rows` rows."""
    return min(pow2(each), max(1, rows // group))


def _most_rows(tuning: Tuning, *, prefill: bool, careful: bool) -> int:
    if not prefill:
        return tuning.verify_rows
    return tuning.careful_rows if careful else tuning.prefill_rows


def _is_row_major(g: LayerGeometry) -> bool:
    """Whether V lies in rows, as in inline pages."""
    return g.v.codes.shape[4] == 1


def _slices(g: LayerGeometry, tile: Tile) -> int:
    """In how many slices a query's row is multiplied: none of less than LEAST_SLICE codes of keys."""
    return max(1, min(tile.slices, pow2(g.k.codes.shape[3]) // LEAST_SLICE))


def needs_pairs(encoding: str, dtype: str) -> bool:
    """Whether q must be split in two to keep its precision in the product with keys of `encoding`."""
    if encoding in INTEGERS:
        return True
    return dtype == "float32" or (encoding == "bfloat16" and dtype != "bfloat16")


def phase_of(rows: int, *, prefill: bool) -> str:
    """Which of a family's tiles serves items of so many rows."""
    if prefill:
        return "prefill"
    return "decode" if rows <= DECODE_ROWS else "verify"


def is_careful(g: LayerGeometry) -> bool:
    """Whether V may hold NaN that only some queries see: codes without a row word carry it themselves."""
    return g.v.scaling is not Scaling.ROW


def _family(g: LayerGeometry) -> str:
    """The family that decides the tile where keys and values differ: the wider, then the one without row words."""
    order = ("int4", "int8", "float8", "static", "wide")
    found = (family_of(s.encoding.name, row_scaled=s.scaling is Scaling.ROW) for s in (g.k, g.v))
    return max(found, key=order.index)


def _tile_bytes(g: LayerGeometry, keys: int) -> int:
    rows = (g.k.codes.shape[3] * g.k.codes.itemsize, g.v.codes.shape[3] * g.v.codes.itemsize)
    return keys * sum(pow2(n) for n in rows)

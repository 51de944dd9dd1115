"""How an attend call is cut on a GPU, and the bytes of workspace that takes. Pure arithmetic: no torch, no triton.

An item is up to `tokens` consecutive queries of one sequence under one kv head; its columns are (query, query head)
pairs. The tiles of keys of all items of a kv head form one line, cut in a number of equal parts (stream-K) that depends
on shapes only; a program takes one part for one kv head. All heads are cut alike, so that programs side by side read
the same pages at the same time. A program that finishes an item alone writes the result; otherwise it leaves a partial
result in one of its two slots (its first item and its last) and `reduce` joins them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from kvhal.kernels.geometry import LayerGeometry
from kvhal.kernels.triton.constants import pow2
from kvhal.kernels.triton.fitting import DECODE_ROWS, INTEGERS, MANY_CHANNELS, ItemShape, is_careful, is_row_major
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
DTYPES = ("float32", "bfloat16", "float16")
# The most rows x channels of a result.
ACCUMULATED = 8192
MANY_ACCUMULATED = 16384
LEAST_SLICE = 32


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
        own = usual.inline if is_row_major(g) else None
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
        shape = ItemShape(g, dim, rows, columns, pairs=pairs, prefill=prefill, many=many)
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


def _family(g: LayerGeometry) -> str:
    """The family that decides the tile where keys and values differ: the wider, then the one without row words."""
    order = ("int4", "int8", "float8", "static", "wide")
    found = (family_of(s.encoding.name, row_scaled=s.scaling is Scaling.ROW) for s in (g.k, g.v))
    return max(found, key=order.index)

"""store, gather and copy_blocks in plain torch: the specification, and the kernels of the CPU platform.

Contract shared with every other platform: `quantize.py` says which codes, `layout.py` where they go; every byte of the
cache that belongs to no slot of the call keeps its value, padding included. K is [tokens, num_kv_heads, head_dim], V
[tokens, num_kv_heads, head_dim_v], both of one dtype (float32, bfloat16 or float16), any strides with a contiguous last
dimension. Errors (SpecMismatch for shapes, dtypes and devices, AddressError for slots and blocks) come before the first
byte moves. Calls from several threads on disjoint slots do not disturb each other: no other slot's byte is rewritten.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from kvhal.errors import AddressError, SpecMismatch
from kvhal.kernels.checks import check_cache, check_integers, check_rows, check_slots
from kvhal.kernels.geometry import LayerGeometry, PageGeometry, StoreGeometry
from kvhal.kernels.pages import RowTarget, find_runs, indices_of, interleave, items_of
from kvhal.kernels.quantize import CODE_DTYPES, Scratch, decode_factor, decode_into, encode, row_scales
from kvhal.modes import Scaling
from kvhal.page import TILE_TOKENS

__all__ = ["add_counts", "check_geometry", "copy_blocks", "gather", "static_scale", "store"]

# Elements converted at a time: with fewer, the 5 us that torch takes an operator dominate (measured on Zen 5).
PIECE_ELEMENTS = 1 << 20
MOVE_BYTES = 1 << 24
BYTE_BITS, WIDE_BITS = 8, 16
_COUNTER_LOCK = threading.Lock()


def store(cache: Tensor, k: Tensor, v: Tensor, slots: Tensor, g: LayerGeometry, *, checked: bool) -> None:
    """Quantize k and v and write them to their slots (-1 is padding and is skipped).

    checked: a bad or repeated slot raises AddressError before anything is written. Not checked: bad slots are skipped
    and counted in `rejected_slots`; of a repeated slot, which row is kept is unspecified. `nonfinite_rows` counts the
    (token, head) rows of K plus of V that were stored and hold NaN or infinity.
    """
    check_geometry(cache, g)
    check_integers("slots", slots, 1)
    check_rows("k", k, slots.shape[0], g, g.k)
    check_rows("v", v, slots.shape[0], g, g.v)
    if k.dtype is not v.dtype:
        raise SpecMismatch(f"k and v must have one dtype; found k {k.dtype} and v {v.dtype}: convert one of them")
    good, rejected = check_slots(slots, g.num_blocks * g.block_size, checked=checked, unique=True)
    scratch = _scratch(g, good.numel())
    nonfinite = 0
    for index, (of, x) in enumerate(((g.k, k), (g.v, v))):
        nonfinite += _store_rows(cache, g, of, index, x.detach(), good, scratch)
    add_counts(cache, g, nonfinite, 0 if rejected is None else rejected.numel())


def gather(cache: Tensor, slots: Tensor, k_out: Tensor, v_out: Tensor, g: LayerGeometry, *, checked: bool) -> None:
    """Read the values of slots into k_out and v_out [n, num_kv_heads, dim] (computed in fp32, then rounded to dtype).

    Slot -1 gives zeros. A bad slot raises AddressError (checked), or gives NaN rows and is counted.
    """
    check_geometry(cache, g)
    check_integers("slots", slots, 1)
    check_rows("k_out", k_out, slots.shape[0], g, g.k)
    check_rows("v_out", v_out, slots.shape[0], g, g.v)
    good, rejected = check_slots(slots, g.num_blocks * g.block_size, checked=checked, unique=False)
    scratch = _scratch(g, good.numel())
    for index, (of, out) in enumerate(((g.k, k_out), (g.v, v_out))):
        _gather_rows(cache, g, of, index, out, good, scratch)
        if rejected is not None:
            out[rejected] = float("nan")
    add_counts(cache, g, 0, 0 if rejected is None else rejected.numel())


def copy_blocks(cache: Tensor, pairs: Tensor, layers: Sequence[PageGeometry], *, checked: bool) -> None:
    """Copy whole pages, (source, destination) int64 [n, 2], in every listed layer as if all at once.

    A block outside a listed layer or a destination named twice raises AddressError in both modes (there is no counter
    to hide it in), before any byte moves. Works layer by layer in column strips, so temporaries stay below 16 MiB
    (or 16 bytes a pair).
    """
    del checked
    check_cache(cache, max((p.base + (p.num_blocks - 1) * p.block_stride + p.nbytes for p in layers), default=0))
    check_integers("pairs", pairs, 2, (torch.int64,))
    if pairs.shape[1] != 2:
        raise SpecMismatch(f"pairs must be [n, 2] (source, destination); found {tuple(pairs.shape)!r}: reshape it")
    if pairs.shape[0] == 0:
        return
    check_pairs(pairs, min((p.num_blocks for p in layers), default=0))
    source, destination = pairs[:, 0].contiguous(), pairs[:, 1].contiguous()
    strip = max(16, MOVE_BYTES // pairs.shape[0] // 16 * 16)
    for layer in layers:
        shape, stride = (layer.num_blocks, layer.nbytes), (layer.block_stride, 1)
        blocks = cache.as_strided(shape, stride, cache.storage_offset() + layer.base)
        for start in range(0, layer.nbytes, strip):
            part = blocks[:, start : start + strip]
            part.index_copy_(0, destination, part.index_select(0, source))


def check_geometry(cache: Tensor, g: LayerGeometry) -> None:
    """`cache` must be the whole storage that `g` describes."""
    check_cache(cache, max(g.counters_offset + 16, g.base + g.num_blocks * g.block_stride - g.block_stride + 1))


def static_scale(cache: Tensor, g: LayerGeometry, of: StoreGeometry, index: int) -> Tensor | None:
    """The fp32 scale (one element) of store `index` (0 k, 1 v) inside the cache, or None if its mode has none."""
    if of.scaling is not Scaling.STATIC:
        return None
    start = g.scales_offset + 4 * index
    return cache[start : start + 4].view(torch.float32)


def add_counts(cache: Tensor, g: LayerGeometry, nonfinite: int, rejected: int) -> None:
    """Add to the counters inside the cache; safe from several threads."""
    if nonfinite or rejected:
        with _COUNTER_LOCK:
            counters = cache[g.counters_offset : g.counters_offset + 16].view(torch.int64)
            counters[0] += nonfinite
            counters[1] += rejected


def _store_rows(
    cache: Tensor, g: LayerGeometry, of: StoreGeometry, index: int, x: Tensor, slots: Tensor, scratch: Scratch
) -> int:
    """Write one store's rows; how many were not finite."""
    scale = static_scale(cache, g, of, index)
    lo = of.codes.shape[4]
    starts, lone = find_runs(slots, lo)
    tokens = starts if lo == 1 else (starts.unsqueeze(1) + torch.arange(lo)).flatten()
    nonfinite = 0
    if tokens.numel():
        target = RowTarget.of(cache, g, of.codes, slots[starts], runs=lo)
        words_at = None if of.words is None else RowTarget.of(cache, g, of.words, slots[tokens])
        for piece in _pieces(tokens.numel(), _tokens_a_piece(g)):
            found = encode(_take(x, tokens[piece]), of.encoding, of.scaling, scale, scratch)
            rows = found.codes if lo == 1 else interleave(found.codes, lo, scratch.wide)
            target.put(slice(piece.start // lo, piece.stop // lo), rows)
            if words_at is not None and found.words is not None:
                words_at.put(piece, found.words)
            nonfinite += found.nonfinite_rows
    return nonfinite + _store_lone(cache, g, of, scale, x, slots, lone, scratch)


def _store_lone(
    cache: Tensor,
    g: LayerGeometry,
    of: StoreGeometry,
    scale: Tensor | None,
    x: Tensor,
    slots: Tensor,
    lone: Tensor,
    scratch: Scratch,
) -> int:
    """Write rows whose interleaved neighbours are not in the call: item by item, so that no neighbour is touched."""
    nonfinite = 0
    for piece in _pieces(lone.numel(), _tokens_a_piece(g)):
        tokens = lone[piece]
        found = encode(_take(x, tokens), of.encoding, of.scaling, scale, scratch)
        items = items_of(cache, g, of.codes, found.codes.dtype)
        items.index_put_(indices_of(g, of.codes, slots[tokens]), found.codes)
        if of.words is not None and found.words is not None:
            RowTarget.of(cache, g, of.words, slots[tokens]).put(slice(None), found.words)
        nonfinite += found.nonfinite_rows
    return nonfinite


def _take(x: Tensor, tokens: Tensor) -> Tensor:
    """The rows of `tokens` (ascending): a slice where they lie side by side."""
    first, count = int(tokens[0]), tokens.numel()
    if int(tokens[-1]) - first == count - 1:
        return x[first : first + count]
    return x[tokens]


def _gather_rows(
    cache: Tensor, g: LayerGeometry, of: StoreGeometry, index: int, out: Tensor, slots: Tensor, scratch: Scratch
) -> None:
    """Write the values of `slots` (padding gives zeros) to `out` [n, heads, dim]."""
    if not slots.numel():
        return
    scale = static_scale(cache, g, of, index)
    padding = slots < 0
    padded = bool(padding.any())
    # Slot 0 stands in for padding, so that -1 is never an index; its rows are then selected out.
    safe = slots.clamp(min=0) if padded else slots
    read_codes = _code_reader(cache, g, of, safe)
    words_at = None if of.words is None else RowTarget.of(cache, g, of.words, safe)
    for piece in _pieces(slots.numel(), _tokens_a_piece(g)):
        part = out[piece]
        direct = out.dtype is torch.float32
        values = part if direct else scratch.wide[: part.numel()].view(part.shape)
        words = None if words_at is None else words_at.get(piece, _word_dtype(of)).squeeze(-1)
        _dequantize(values, read_codes(piece), words, scale, of, scratch)
        if padded:
            values.masked_fill_(padding[piece].view(-1, 1, 1), 0.0)
        if not direct:
            part.copy_(values)


def _code_reader(cache: Tensor, g: LayerGeometry, of: StoreGeometry, slots: Tensor) -> Callable[[slice], Tensor]:
    """A function that reads the codes [n, heads, C] of a piece of `slots`."""
    field, lo = of.codes, of.codes.shape[4]
    dtype = torch.uint8 if of.encoding.bits < WIDE_BITS else CODE_DTYPES[of.encoding.name]
    if lo == 1:
        rows = RowTarget.of(cache, g, field, slots)
        return lambda piece: rows.get(piece, dtype)
    if find_runs(slots, lo).starts.numel() * lo == slots.numel():
        groups = RowTarget.of(cache, g, field, slots[::lo], runs=lo)

        def read_groups(piece: slice) -> Tensor:
            found = groups.get(slice(piece.start // lo, piece.stop // lo), dtype)
            return found.view(*found.shape[:2], -1, lo).permute(0, 3, 1, 2).flatten(0, 1)

        return read_groups
    items, where = items_of(cache, g, field, dtype), indices_of(g, field, slots)
    return lambda piece: items[tuple(i[piece] for i in where)]


def _dequantize(
    out: Tensor, codes: Tensor, words: Tensor | None, scale: Tensor | None, of: StoreGeometry, scratch: Scratch
) -> None:
    """out = code * scale in fp32, or (code - zero) * scale."""
    decode_into(out, codes, of.encoding, scratch.codes)
    factor = decode_factor(of.encoding)
    if factor != 1.0:
        out.mul_(factor)
    if words is not None:
        row_scale, zero = row_scales(words, of.encoding)
        if zero is not None:
            out.sub_(zero.unsqueeze(-1))
        out.mul_(row_scale.unsqueeze(-1))
    elif scale is not None:
        out.mul_(scale)


def _word_dtype(of: StoreGeometry) -> torch.dtype:
    return torch.int32 if of.encoding.bits < BYTE_BITS else torch.float32


def _tokens_a_piece(g: LayerGeometry) -> int:
    """Whole tiles, so that no run is cut."""
    widest = max(g.k.head_dim, g.v.head_dim)
    return max(1, PIECE_ELEMENTS // (g.num_kv_heads * widest * TILE_TOKENS)) * TILE_TOKENS


def _scratch(g: LayerGeometry, tokens: int) -> Scratch:
    """Scratch for one piece of a call on `tokens` tokens."""
    widest = max(g.k.head_dim, g.v.head_dim)
    return Scratch.of(min(_tokens_a_piece(g), tokens) * g.num_kv_heads * widest)


def _pieces(count: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, count)) for start in range(0, count, size))


def check_pairs(pairs: Tensor, num_blocks: int) -> None:
    bad = ((pairs < 0) | (pairs >= num_blocks)).any(1).nonzero().flatten()
    if bad.numel():
        raise AddressError(
            f"blocks to copy must be 0 to {num_blocks - 1}; found {pairs[bad[0]].tolist()!r} at pair {int(bad[0])} "
            f"({bad.numel()} such pairs): nothing was copied; check the block ids"
        )
    values, order = pairs[:, 1].sort(stable=True)
    twins = order[1:][values[1:] == values[:-1]]
    if twins.numel():
        at = int(twins.min())
        raise AddressError(
            f"a block may be a destination once a call; block {int(pairs[at, 1])} is named again at pair {at}: "
            "nothing was copied; drop one of the pairs"
        )

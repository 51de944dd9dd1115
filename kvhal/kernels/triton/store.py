# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"
# Triton's dialect: arguments have no Python types.
"""store: quantise and scatter keys and values, payload and row words, in one launch."""

from __future__ import annotations

import triton
import triton.language as tl

from kvhal.kernels.triton.codec import as_float, encode_int4, encode_rows, load_raw

__all__ = ["store_kernel"]


@triton.jit(do_not_specialize=["num_tokens", "num_slots"])
def store_kernel(
    cache,
    k,
    v,
    slots,
    base: tl.int64,
    block_stride: tl.int64,
    scales_offset: tl.int64,
    counters_offset: tl.int64,
    num_slots: tl.int64,
    num_tokens: tl.int32,
    k_token: tl.int64,
    k_head: tl.int64,
    v_token: tl.int64,
    v_head: tl.int64,
    P: tl.constexpr,
    TOKENS: tl.constexpr,
    HARDWARE_K: tl.constexpr,
    HARDWARE_V: tl.constexpr,
    PACKED: tl.constexpr,
):
    """Program i: TOKENS tokens of kv head i % heads, so that neighbours read and write side by side.

    Slot -1 is skipped, other bad slots are skipped and counted.
    """
    K: tl.constexpr = P.k
    V: tl.constexpr = P.v
    lane = tl.arange(0, TOKENS)
    HEADS: tl.constexpr = P.heads
    token = (tl.program_id(0) // HEADS).to(tl.int64) * TOKENS + lane
    head = (tl.program_id(0) % HEADS).to(tl.int64)
    there = token < num_tokens
    slot = tl.load(slots + token, mask=there, other=-1).to(tl.int64)
    # All loads first, none of which waits for the slot: a store between them would hold back those after it.
    k_first, k_second = _load(k + token * k_token + head * k_head, there, K)
    v_first, v_second = _load(v + token * v_token + head * v_head, there, V)
    ok = (slot >= 0) & (slot < num_slots)
    counters = (cache + counters_offset).to(tl.pointer_type(tl.int64))
    if head == 0:
        rejected = tl.sum(((slot < -1) | (slot >= num_slots)).to(tl.int64), axis=0)
        if rejected > 0:
            tl.atomic_add(counters + 1, rejected)
    safe = tl.where(ok, slot, 0)
    page = base + safe // P.block_size * block_stride
    inside = (safe % P.block_size).to(tl.int32)
    scales = (cache + scales_offset).to(tl.pointer_type(tl.float32))
    bad = _put(cache, k_first, k_second, scales, slot, page, inside, head, ok, K, TOKENS, HARDWARE_K, PACKED)
    bad += _put(cache, v_first, v_second, scales + 1, slot, page, inside, head, ok, V, TOKENS, HARDWARE_V, PACKED)
    count = tl.sum(bad, axis=0)
    if count > 0:
        tl.atomic_add(counters, count.to(tl.int64))


@triton.jit
def _load(rows, there, R: tl.constexpr):
    """Rows [TOKENS, block] at pointers `rows` [TOKENS] as they are; for int4 their two halves."""
    channel = tl.arange(0, R.block)
    mask = there[:, None] & (channel < R.width)[None, :]
    first = load_raw(rows[:, None] + channel[None, :], mask)
    second = first
    if R.encoding == "int4":
        second = load_raw(rows[:, None] + (channel + R.width)[None, :], mask)
    return first, second


@triton.jit
def _put(
    cache,
    x,
    upper,
    scale,
    slot,
    page,
    inside,
    head,
    ok,
    R: tl.constexpr,
    TOKENS: tl.constexpr,
    HARDWARE: tl.constexpr,
    PACKED: tl.constexpr,
):
    """Write rows [TOKENS, block]; int32 [TOKENS], 1 for those that were not finite."""
    channel = tl.arange(0, R.block)
    valid = (channel < R.width)[None, :]
    mask = ok[:, None] & valid
    if R.encoding == "int4":
        codes, words, bad = encode_int4(as_float(x), as_float(upper), valid, R, PACKED)
    else:
        static_scale = tl.full([1], 1.0, tl.float32)
        if R.scaling == "static":
            static_scale = tl.load(scale + tl.arange(0, 1))
        codes, words, bad = encode_rows(as_float(x), static_scale, R, HARDWARE, PACKED)
    if R.scaling == "row":
        W: tl.constexpr = R.words
        at = page + head * W.head + W.offset + inside // R.tile_tokens * W.tile + inside % R.tile_tokens * W.hi
        tl.store(cache.to(tl.pointer_type(tl.int32)) + at // 4, words, mask=ok)
    tile = page + head * R.head + R.offset + inside // R.tile_tokens * R.tile
    within = inside % R.tile_tokens
    at = tile + within // R.los * R.hi + within % R.los * R.lo
    if R.los == 1:
        _scatter(cache, at, codes, channel, mask, R)
    elif TOKENS == R.tile_tokens:
        first = tl.min(tl.where(tl.arange(0, TOKENS) == 0, slot, 1 << 62), axis=0)
        aligned = (first >= 0) & (first % R.tile_tokens == 0)
        follows = tl.min((ok & (slot == first + tl.arange(0, TOKENS))).to(tl.int32), axis=0)
        if aligned & (follows == 1):
            # A whole tile: four tokens of a channel stand together in registers too, and the tile is one wide store.
            start = tl.min(tile, axis=0)
            ROW: tl.constexpr = R.block * R.los
            woven = tl.permute(tl.reshape(codes, [TOKENS // R.los, R.los, R.block]), (0, 2, 1))
            woven = tl.reshape(woven, [TOKENS // R.los * ROW])
            item = tl.arange(0, TOKENS // R.los * ROW)
            pointers = _typed(cache, R) + start // R.size + (item // ROW) * (R.hi // R.size) + item % ROW
            if R.block == R.width:
                tl.store(pointers, woven)
            else:
                tl.store(pointers, woven, mask=item % ROW < R.width * R.los)
        else:
            _scatter(cache, at, codes, channel, mask, R)
    else:
        _scatter(cache, at, codes, channel, mask, R)
    return (bad & ok).to(tl.int32)


@triton.jit
def _scatter(cache, at, codes, channel, mask, R: tl.constexpr):
    """Write each row's codes at its byte address `at` [TOKENS]."""
    tl.store(_typed(cache, R) + (at // R.size)[:, None] + (channel * (R.channel // R.size))[None, :], codes, mask=mask)


@triton.jit
def _typed(cache, R: tl.constexpr):
    """The cache as a pointer to codes: cast before indexing, or codes no longer look contiguous to the compiler."""
    if R.size == 1:
        pointer = cache
    else:
        pointer = cache.to(tl.pointer_type(tl.uint16))
    return pointer

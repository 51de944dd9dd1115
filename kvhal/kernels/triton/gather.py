# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"
# Triton's dialect: arguments have no Python types.
"""gather: the dequantised rows of slots."""

from __future__ import annotations

import triton
import triton.language as tl

from kvhal.kernels.triton.codec import bf16_bits, decode, int4_scale, int4_zero

__all__ = ["gather_kernel"]


@triton.jit(do_not_specialize=["num_tokens", "num_slots"])
def gather_kernel(
    cache,
    slots,
    k_out,
    v_out,
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
):
    """Program (i, head): TOKENS slots of one kv head. Slot -1 gives zeros; another bad slot gives NaN, is counted."""
    K: tl.constexpr = P.k
    V: tl.constexpr = P.v
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    head = tl.program_id(1).to(tl.int64)
    wanted = token < num_tokens
    slot = tl.load(slots + token, mask=wanted, other=-1).to(tl.int64)
    rejected = (slot < -1) | (slot >= num_slots)
    if head == 0:
        count = tl.sum(rejected.to(tl.int64), axis=0)
        if count > 0:
            tl.atomic_add((cache + counters_offset).to(tl.pointer_type(tl.int64)) + 1, count)
    ok = (slot >= 0) & (slot < num_slots)
    safe = tl.where(ok, slot, 0)
    page = base + safe // P.block_size * block_stride
    inside = (safe % P.block_size).to(tl.int32)
    scales = (cache + scales_offset).to(tl.pointer_type(tl.float32))
    fill = tl.where(rejected, float("nan"), 0.0)
    _take(cache, k_out + token * k_token + head * k_head, scales, page, inside, head, wanted, ok, fill, K)
    _take(cache, v_out + token * v_token + head * v_head, scales + 1, page, inside, head, wanted, ok, fill, V)


@triton.jit
def _take(cache, rows, scale, page, inside, head, wanted, ok, fill, R: tl.constexpr):
    """Write the values of one store to the row pointers `rows` [TOKENS]."""
    channel = tl.arange(0, R.block)
    valid = (channel < R.width)[None, :]
    within = inside % R.tile_tokens
    at = page + head * R.head + R.offset + inside // R.tile_tokens * R.tile + within // R.los * R.hi
    at = (at + within % R.los * R.lo) // R.size
    # Cast before indexing, or the compiler no longer sees that codes are contiguous.
    typed = cache if R.size == 1 else cache.to(tl.pointer_type(tl.uint16))
    pointers = typed + at[:, None] + (channel * (R.channel // R.size))[None, :]
    codes = tl.load(pointers, mask=ok[:, None] & valid, other=0)
    word = inside
    factor = fill
    if R.scaling == "row":
        W: tl.constexpr = R.words
        place = page + head * W.head + W.offset + inside // R.tile_tokens * W.tile + within * W.hi
        word = tl.load(cache.to(tl.pointer_type(tl.int32)) + place // 4, mask=ok, other=0)
        if R.encoding == "int4":
            factor = int4_scale(word)
        else:
            factor = word.to(tl.float32, bitcast=True)
    elif R.scaling == "static":
        factor = tl.load(scale) + tl.zeros_like(fill)
    mask = wanted[:, None] & valid
    if R.encoding == "int4":
        zero = int4_zero(word)[:, None]
        low = (decode(codes & 15, R) - zero) * factor[:, None]
        high = (decode(codes >> 4, R) - zero) * factor[:, None]
        _write(rows, channel, tl.where(ok[:, None], low, fill[:, None]), mask)
        _write(rows, channel + R.width, tl.where(ok[:, None], high, fill[:, None]), mask)
    else:
        value = decode(codes, R)
        if R.scaling != "none":
            value = value * factor[:, None]
        _write(rows, channel, tl.where(ok[:, None], value, fill[:, None]), mask)


@triton.jit
def _write(rows, channel, value, mask):
    """Store fp32 values, rounded once to the dtype behind `rows`."""
    to = rows[:, None] + channel[None, :]
    if to.dtype.element_ty == tl.bfloat16:
        # By its bits: the interpreter's cast truncates.
        tl.store(to, bf16_bits(value).to(tl.bfloat16, bitcast=True), mask=mask)
    else:
        tl.store(to, value.to(to.dtype.element_ty), mask=mask)

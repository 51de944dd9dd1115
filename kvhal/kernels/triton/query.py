# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"
# Triton's dialect: arguments have no Python types.
"""The queries of an item as operands: scaled so that nothing is lost in the operand's type, the scale put aside."""

from __future__ import annotations

import triton
import triton.language as tl

from kvhal.kernels.triton.codec import load_float

__all__ = ["query_columns", "query_rows"]

INFINITY = tl.constexpr(0x7F800000)
MAGNITUDE = tl.constexpr(0x7FFFFFFF)
MAGIC = tl.constexpr(12582912.0)


@triton.jit
def query_columns(
    query,
    count,
    q_token,
    q_head,
    R: tl.constexpr,
    GROUP: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PAIRS: tl.constexpr,
    INTEGER: tl.constexpr,
    FULL: tl.constexpr,
):
    """The query as an operand [block, COLUMNS] (for int4 two halves), its scale [ROWS], its sum in codes [ROWS].

    PAIRS: columns 2 r and 2 r + 1 hold the high and the low part of row r. A row with NaN or infinity gets scale NaN.
    """
    column = tl.arange(0, COLUMNS)
    row = column // 2 if PAIRS else column
    channel = tl.arange(0, R.block)
    valid = ((row < GROUP * TOKENS) & (row // GROUP < count))[None, :] & (channel < R.width)[:, None]
    pointers = query + ((row // GROUP).to(tl.int64) * q_token + (row % GROUP).to(tl.int64) * q_head)[None, :]
    pointers = pointers + channel[:, None]
    x = load_float(pointers, valid)
    bits = tl.max(x.to(tl.int32, bitcast=True) & MAGNITUDE, axis=0)
    y = x
    if R.encoding == "int4":
        y = load_float(pointers + R.width, valid)
        bits = tl.maximum(bits, tl.max(y.to(tl.int32, bitcast=True) & MAGNITUDE, axis=0))
    finite = bits < INFINITY
    total = tl.zeros([1], tl.float32)
    if INTEGER:
        scale = tl.maximum(bits.to(tl.float32, bitcast=True), 1e-30) * (1.0 / 127.0)
        inv = tl.where(finite, 1.0 / scale, 0.0)
        is_high = (column % 2 == 0)[None, :]
        high = _split_int8(tl.where(finite[None, :], x, 0.0) * inv[None, :], is_high)
        low = high
        if R.encoding == "int4":
            low = _split_int8(tl.where(finite[None, :], y, 0.0) * inv[None, :], is_high)
            sums = tl.sum(high.to(tl.int32), axis=0) + tl.sum(low.to(tl.int32), axis=0)
            a, c = tl.split(tl.reshape(sums.to(tl.float32), [ROWS, 2]))
            total = a + c * (1.0 / 254.0)
    else:
        # By a power of two, so that nothing is lost: |x| < 2.
        exponent = tl.minimum(tl.maximum(bits & INFINITY, 1 << 23), 253 << 23)
        scale = exponent.to(tl.float32, bitcast=True)
        x = tl.where(finite[None, :], x, 0.0) * ((254 << 23) - exponent).to(tl.float32, bitcast=True)[None, :]
        if R.encoding != "bfloat16":
            high = x.to(tl.float16)
            if PAIRS:
                rest = ((x - high.to(tl.float32)) * 2048.0).to(tl.float16)
                high = tl.where((column % 2 == 0)[None, :], high, rest)
        elif FULL:
            high = tl.where((column % 2 == 0)[None, :], x, 0.0) if PAIRS else x
        else:
            high = x.to(tl.bfloat16)
            if PAIRS:
                rest = ((x - high.to(tl.float32)) * 256.0).to(tl.bfloat16)
                high = tl.where((column % 2 == 0)[None, :], high, rest)
        low = high
    scale = tl.where(finite, scale, float("nan"))
    if PAIRS:
        scale, _ = tl.split(tl.reshape(scale, [ROWS, 2]))
    return high, low, scale, total


@triton.jit
def _split_int8(x, is_high):
    """x in [-127, 127] as two int8: x = high + low / 254."""
    high = (x + MAGIC) - MAGIC
    rest = (((x - high) * 254.0) + MAGIC) - MAGIC
    return tl.where(is_high, high, rest).to(tl.int8)


@triton.jit
def query_rows(
    query,
    count,
    q_token,
    q_head,
    R: tl.constexpr,
    GROUP: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    FULL: tl.constexpr,
):
    """The query as an operand [ROWS, block] (for int4 two halves), its scale [ROWS], its sum as the operand [ROWS].

    Scaled by a power of two, so that |q| < 2 and nothing but the rounding to the operand's type is lost. A row with NaN
    or infinity gets scale NaN.
    """
    row = tl.arange(0, ROWS)
    channel = tl.arange(0, R.block)
    valid = ((row < GROUP * TOKENS) & (row // GROUP < count))[:, None] & (channel < R.width)[None, :]
    pointers = query + ((row // GROUP).to(tl.int64) * q_token + (row % GROUP).to(tl.int64) * q_head)[:, None]
    pointers = pointers + channel[None, :]
    x = load_float(pointers, valid)
    bits = tl.max(x.to(tl.int32, bitcast=True) & MAGNITUDE, axis=1)
    y = x
    if R.encoding == "int4":
        y = load_float(pointers + R.width, valid)
        bits = tl.maximum(bits, tl.max(y.to(tl.int32, bitcast=True) & MAGNITUDE, axis=1))
    finite = bits < INFINITY
    exponent = tl.minimum(tl.maximum(bits & INFINITY, 1 << 23), 253 << 23)
    down = ((254 << 23) - exponent).to(tl.float32, bitcast=True)[:, None]
    first = _operand(tl.where(finite[:, None], x, 0.0) * down, R, FULL)
    second = first
    total = tl.zeros([1], tl.float32)
    if R.encoding == "int4":
        second = _operand(tl.where(finite[:, None], y, 0.0) * down, R, FULL)
        total = tl.sum(first.to(tl.float32), axis=1) + tl.sum(second.to(tl.float32), axis=1)
    return first, second, tl.where(finite, exponent.to(tl.float32, bitcast=True), float("nan")), total


@triton.jit
def _operand(x, R: tl.constexpr, FULL: tl.constexpr):
    """fp32 in the type that codes of `R` are multiplied in."""
    if R.encoding != "bfloat16":
        value = x.to(tl.float16)
    elif FULL:
        value = x
    else:
        value = x.to(tl.bfloat16)
    return value

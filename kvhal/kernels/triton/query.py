# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator,assignment"
# Triton's dialect: arguments have no Python types.
"""The queries of an item as operands: scaled so that nothing is lost in the operand's type, the scale put aside."""

from __future__ import annotations

import triton
import triton.language as tl

from kvhal.kernels.triton.codec import load_float
from kvhal.kernels.triton.convert import pinned

__all__ = ["REST", "afresh", "query_columns", "query_rows", "rest_factor", "sliced"]

INFINITY = tl.constexpr(0x7F800000)
MAGNITUDE = tl.constexpr(0x7FFFFFFF)
MAGIC = tl.constexpr(12582912.0)
# What rounding to an integer leaves, at most a half, times this fits int8.
REST = tl.constexpr(254)


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
    """The query as operands [block, COLUMNS]: of channels (for int4 two halves), then what they leave; scale, sum.

    PAIRS: a row has a high part and what is left of it. With two columns a row they stand side by side, else the third
    and fourth operand hold what is left. Scale and sum in codes are [ROWS]; a row with NaN or infinity gets scale NaN.
    """
    TWICE: tl.constexpr = PAIRS and COLUMNS == ROWS
    column = tl.arange(0, COLUMNS)
    row = column // 2 if COLUMNS > ROWS else column
    is_high = (column % 2 == 0)[None, :]
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
        factor = tl.where(finite, 1.0 / scale, 0.0)
    else:
        # By a power of two, so that nothing is lost: |x| < 2.
        exponent = tl.minimum(tl.maximum(bits & INFINITY, 1 << 23), 253 << 23)
        scale = exponent.to(tl.float32, bitcast=True)
        factor = ((254 << 23) - exponent).to(tl.float32, bitcast=True)
    first, first_rest = _parts(tl.where(finite[None, :], x, 0.0) * factor[None, :], R, INTEGER, FULL)
    second, second_rest = first, first_rest
    if R.encoding == "int4":
        second, second_rest = _parts(tl.where(finite[None, :], y, 0.0) * factor[None, :], R, INTEGER, FULL)
    if PAIRS and not TWICE:
        first = tl.where(is_high, first, first_rest)
        second = tl.where(is_high, second, second_rest)
    if R.encoding == "int4":
        sums = tl.sum(first.to(tl.int32), axis=0) + tl.sum(second.to(tl.int32), axis=0)
        if TWICE:
            total = (sums * REST + tl.sum(first_rest.to(tl.int32), axis=0)).to(tl.float32)
            total += tl.sum(second_rest.to(tl.int32), axis=0).to(tl.float32)
        else:
            a, c = tl.split(tl.reshape(sums.to(tl.float32), [ROWS, 2]))
            total = a + c * (1.0 / REST)
    if TWICE and INTEGER:
        scale = scale * (1.0 / REST)
    scale = tl.where(finite, scale, float("nan"))
    if COLUMNS > ROWS:
        scale, _ = tl.split(tl.reshape(scale, [ROWS, 2]))
    return first, second, first_rest, second_rest, scale, total


@triton.jit
def sliced(x, SLICES: tl.constexpr):
    """x [channels, COLUMNS] as a tuple of SLICES tensors [channels / SLICES, COLUMNS]."""
    slices = (x,)
    if SLICES > 1:
        each = tl.reshape(x, [SLICES, x.shape[0] // SLICES, x.shape[1]])
        which = tl.arange(0, SLICES)[:, None, None]
        slices = ()
        for n in tl.static_range(SLICES):
            slices = slices + (tl.sum(tl.where(which == n, each, 0), axis=0).to(x.dtype),)  # noqa: RUF005  # Triton unpacks none
    return slices


@triton.jit
def afresh(x, i, SLICES: tl.constexpr, CONVERSION: tl.constexpr):
    """One of SLICES of a query, made an operand in the loop, in whose turn i it is used.

    The compiler would make them all before the loop, in registers of all at once. Bytes cannot be `pinned`, because
    AMD's compiler knows no register of four of them; they depend on i, of which there are never 2^30.
    """
    if SLICES > 1:
        if x.dtype == tl.int8:
            x = x ^ ((tl.zeros([1, 1], tl.int32) + i) >> 30).to(tl.int8)
        elif CONVERSION == "cast":
            x = pinned(x)
    return x


@triton.jit
def _parts(x, R: tl.constexpr, INTEGER: tl.constexpr, FULL: tl.constexpr):
    """x as an operand and what that leaves: x = first + rest / `rest_factor`. For integers |x| <= 127."""
    if INTEGER:
        high = (x + MAGIC) - MAGIC
        first = high.to(tl.int8)
        rest = ((((x - high) * REST) + MAGIC) - MAGIC).to(tl.int8)
    elif R.encoding != "bfloat16":
        first = x.to(tl.float16)
        rest = ((x - first.to(tl.float32)) * 2048.0).to(tl.float16)
    elif FULL:
        first = x
        rest = tl.zeros_like(x)
    else:
        first = x.to(tl.bfloat16)
        rest = ((x - first.to(tl.float32)) * 256.0).to(tl.bfloat16)
    return first, rest


@triton.jit
def rest_factor(R: tl.constexpr):
    """By what the second part of a query was multiplied."""
    factor = 2048.0
    if R.encoding == "int8" or R.encoding == "int4":  # noqa: PLR1714  # Triton has no `in`
        factor = 254.0
    elif R.encoding == "bfloat16":
        factor = 256.0
    return factor


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

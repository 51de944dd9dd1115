# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"
# Triton's dialect: arguments have no Python types.
"""Attention of a chunk of a prompt over a part of the cache: many rows share each tile that is read.

S = Q K^T and O = P V, with rows in the long dimension of the matrix instructions. Codes become fp16, which holds each
exactly (bfloat16 stays itself), once a tile for all rows; scales and what a query does not see are as in `few_rows`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvhal.kernels.triton.codec import int4_scale, int4_zero
from kvhal.kernels.triton.convert import (
    float_operand,
    half_of_infinity,
    int8_operand,
    nibble_operands,
    operand_factor,
    settled,
)
from kvhal.kernels.triton.load import blocks_of, load_keys, load_values, load_words, place
from kvhal.kernels.triton.query import query_rows
from kvhal.kernels.triton.schedule import whole_tiles

__all__ = ["many_rows"]

LOWEST = tl.constexpr(-3.0e38)
SMALLEST = tl.constexpr(2.0**-126)
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def many_rows(
    pages,
    query,
    table,
    h,
    begin,
    end,
    position,
    count,
    block_stride,
    num_blocks,
    q_token,
    q_head,
    k_scale,
    v_scale,
    softcap,
    P: tl.constexpr,
    GROUP: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    CONVERSION: tl.constexpr,
    HARDWARE_K: tl.constexpr,
    HARDWARE_V: tl.constexpr,
    FULL: tl.constexpr,
):
    """Tiles `begin` to `end` of one item: (result [block, ROWS], its second half for int4, log-sum-exp to base 2)."""
    K: tl.constexpr = P.k
    V: tl.constexpr = P.v
    CHANNELS: tl.constexpr = P.v.block
    PARTS: tl.constexpr = 2 if P.v.scaling != "row" and KEYS > 16 else 1
    q, q_second, q_scale, q_sum = query_rows(query, count, q_token, q_head, K, GROUP, TOKENS, ROWS, FULL)
    row = tl.arange(0, ROWS)
    if SOFTCAP:
        q_scale = q_scale * (k_scale * operand_factor(K, HARDWARE_K) / softcap)
    else:
        q_scale = q_scale * (k_scale * operand_factor(K, HARDWARE_K) * LOG2E)
    # Where each row stands: rows past the last query count as the last, whose tiles are read anyway.
    at = position + tl.minimum(row // GROUP, count - 1)
    top = tl.full([ROWS], LOWEST, tl.float32)
    weight = tl.zeros([ROWS], tl.float32)
    largest = tl.full([1], SMALLEST, tl.float32)
    total = tl.zeros([ROWS, CHANNELS], tl.float32)
    if P.v.encoding == "int4":
        total2 = tl.zeros([ROWS, CHANNELS], tl.float32)
        zeros = tl.zeros([ROWS], tl.float32)
    else:
        total2 = tl.zeros([1], tl.float32)
        zeros = tl.zeros([1], tl.float32)
    last = position + count - 1
    # Tiles that every query sees whole come first; then those at the end, and where the window starts: smaller ones
    # where V may hold NaN, which takes registers.
    first, inner, outer = whole_tiles(position, last, begin, end, KEYS, P.window)
    blocks = blocks_of(inner, table, first, last, num_blocks, P.block_size, KEYS)
    for i in range(inner, outer):
        coming = blocks_of(i + 1, table, first, last, num_blocks, P.block_size, KEYS)
        top, weight, largest, total, total2, zeros = _tile(
            i, blocks, pages, h, q, q_second, q_scale, q_sum, at, first, last, block_stride, softcap,
            top, weight, largest, total, total2, zeros,
            P, KEYS, SOFTCAP, CONVERSION, HARDWARE_K, HARDWARE_V, FULL, False,
        )  # fmt: skip
        blocks = coming
    inner *= PARTS
    whole = outer * PARTS - inner
    for j in range(begin * PARTS, end * PARTS - whole):
        i = tl.where(j < inner, j, j + whole)
        these = blocks_of(i, table, first, last, num_blocks, P.block_size, KEYS // PARTS)
        top, weight, largest, total, total2, zeros = _tile(
            i, these, pages, h, q, q_second, q_scale, q_sum, at, first, last, block_stride, softcap,
            top, weight, largest, total, total2, zeros,
            P, KEYS // PARTS, SOFTCAP, CONVERSION, HARDWARE_K, HARDWARE_V, FULL, True,
        )  # fmt: skip
    share = v_scale * operand_factor(V, HARDWARE_V) / tl.where(weight == 0.0, 1.0, weight)
    if P.v.scaling == "row":
        share = share * largest
    if P.v.encoding == "int4":
        total = total - zeros[:, None]
        total2 = tl.trans((total2 - zeros[:, None]) * share[:, None])
    return tl.trans(total * share[:, None]), total2, top + tl.log2(weight)


@triton.jit
def _tile(  # noqa: PLR0915  # the loop body, top to bottom
    i,
    blocks,
    pages,
    h,
    q,
    q_second,
    q_scale,
    q_sum,
    at,
    first,
    last,
    block_stride,
    softcap,
    top,
    weight,
    largest,
    total,
    total2,
    zeros,
    P: tl.constexpr,
    KEYS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    CONVERSION: tl.constexpr,
    HARDWARE_K: tl.constexpr,
    HARDWARE_V: tl.constexpr,
    FULL: tl.constexpr,
    MASK: tl.constexpr,
):
    """Fold tile i of keys into the running softmax. MASK: not every query sees all of it."""
    K: tl.constexpr = P.k
    V: tl.constexpr = P.v
    BLOCK_SIZE: tl.constexpr = P.block_size
    UNIT: tl.constexpr = 16 if BLOCK_SIZE % 16 == 0 else 1
    UNITS: tl.constexpr = KEYS // UNIT
    page, inside = place(i, blocks, block_stride, BLOCK_SIZE, KEYS)
    k = load_keys(pages, page, inside, h, K, UNIT, UNITS, KEYS)
    v = load_values(pages, page, inside, h, V, UNIT, UNITS, KEYS)
    if P.k.scaling == "row":
        k_word = load_words(pages, page, inside, h, K, UNIT, UNITS, KEYS)
    if P.v.scaling == "row":
        v_word = load_words(pages, page, inside, h, V, UNIT, UNITS, KEYS)

    if P.k.encoding == "int4":
        low, high = nibble_operands(k, CONVERSION)
        score = tl.dot(q, tl.trans(low))
        score = tl.dot(q_second, tl.trans(high), score)
        score = score - q_sum[:, None] * (int4_zero(k_word) - 8.0)[None, :]
        score = score * int4_scale(k_word)[None, :]
    elif P.k.encoding == "int8":
        score = tl.dot(q, tl.trans(int8_operand(k, CONVERSION)))
    else:
        score = tl.dot(q, tl.trans(float_operand(k, K, HARDWARE_K, FULL, False)), input_precision="ieee")
    if P.k.scaling == "row" and P.k.encoding != "int4":
        score = score * k_word.to(tl.float32, bitcast=True)[None, :]
    score = score * q_scale[:, None]
    if SOFTCAP:
        # tanh x = 1 - 2 / (1 + e^2x)
        score = (1.0 - 2.0 / (1.0 + tl.exp2(score * (2.0 * LOG2E)))) * (softcap * LOG2E)

    key = i * KEYS + tl.arange(0, KEYS)
    if MASK:
        ok = key[None, :] <= at[:, None]
        if P.window > 0:
            ok = ok & (key[None, :] > at[:, None] - P.window)
        score = tl.where(ok, score, float("-inf"))
    highest = tl.maximum(top, tl.max(score, axis=1))
    p = tl.exp2(score - highest[:, None])
    shrink = tl.exp2(top - highest)
    weight = weight * shrink + tl.sum(p, axis=1)
    if P.v.scaling == "row":
        seen = (key <= last) & (key >= first)
        if P.v.encoding == "int4":
            scale = int4_scale(v_word)
        else:
            scale = v_word.to(tl.float32, bitcast=True)
        larger = tl.maximum(largest, tl.max(tl.where(seen & (scale == scale), scale, 0.0), axis=0))
        inv = 1.0 / larger
        shrink = shrink * (largest * inv)
        largest = larger
        p = p * (scale * inv)[None, :]
        if MASK:
            p = tl.where(ok, p, 0.0)
    if P.v.encoding != "bfloat16":
        weights = p.to(tl.float16)
    elif FULL:
        weights = p
    else:
        weights = p.to(tl.bfloat16)
    if P.v.encoding == "int4":
        zero = int4_zero(v_word)
        zero = tl.where(seen & (zero == zero), zero - 8.0, 0.0)
        zeros = zeros * shrink + tl.sum(weights.to(tl.float32) * zero[None, :], axis=1)
    total = total * shrink[:, None]
    if P.v.encoding == "int4":
        low, high = nibble_operands(v, CONVERSION)
        total = tl.dot(weights, _by_keys(low, V, CONVERSION), total)
        total2 = tl.dot(weights, _by_keys(high, V, CONVERSION), total2 * shrink[:, None])
    elif P.v.encoding == "int8":
        total = tl.dot(weights, _by_keys(int8_operand(v, CONVERSION), V, CONVERSION), total)
    else:
        values = _by_keys(float_operand(v, V, HARDWARE_V, FULL, MASK), V, CONVERSION)
        if MASK and P.v.scaling != "row":
            # Zero times NaN is NaN, so bad values are taken out and put back as infinity for those who see them.
            bad = (tl.abs(values) == float("inf")) | (values != values)
            values = tl.where(bad, 0.0, values)
            total = tl.dot(half_of_infinity(ok, FULL), half_of_infinity(bad, FULL), total)
        total = tl.dot(weights, values, total, input_precision="ieee")
    return highest, weight, largest, total, total2, zeros


@triton.jit
def _by_keys(values, R: tl.constexpr, CONVERSION: tl.constexpr):
    """Operands of V as [KEYS, block]."""
    if R.los > 1:
        values = tl.trans(values)
    else:
        values = settled(values, R, CONVERSION)
    return values

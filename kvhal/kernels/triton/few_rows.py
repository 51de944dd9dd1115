# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"
# Triton's dialect: arguments have no Python types.
"""Attention of the few rows of a decode step, or of a verification, over a part of the cache.

The products are swapped (S^T = K Q^T, O^T = V^T P^T): cached tokens and channels stand in the long dimension of the
matrix instructions, and the few columns are the rows of the result, so a program of one warp wastes little. Scales
never touch K or V: those of K multiply the scores, those of V the weights, normalised so that they fit fp16.

What the weights are relative to (a score a row, held as its negative `shift`, and a scale `largest`) rises only when a
tile exceeds it by more than 8 and MOST_SCALE, so that most tiles rescale nothing; sums over keys are left to the end,
but for what each thread adds up by itself. Both are powers of two, so that when they rise, which other rows have a say
in, changes no rounding.

What a query does not see is selected out. A row with row words that holds NaN has a NaN word and clean codes, so
selecting the weights is enough. Codes without row words carry NaN themselves; then tiles that only some queries see
(at the end, and where a window starts) take the careful path, which keeps NaN out of the product and puts it back for
those who see it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvhal.kernels.triton.codec import int4_scale, int4_zero
from kvhal.kernels.triton.convert import (
    float_operand,
    half_of_infinity,
    int4_nibbles,
    int8_operand,
    nibble_operands,
    operand_factor,
    pinned,
    settled,
)
from kvhal.kernels.triton.load import blocks_of, load_keys, load_values, load_words, place
from kvhal.kernels.triton.query import REST, afresh, query_columns, rest_factor, sliced
from kvhal.kernels.triton.schedule import whole_tiles

__all__ = ["few_rows"]

LOWEST = tl.constexpr(-3.0e38)
SMALLEST = tl.constexpr(2.0**-126)
LOG2E = tl.constexpr(1.4426950408889634)
INFINITY = tl.constexpr(0x7F800000)
# A weight stays below 2^8 * 2 * MOST_SCALE = 2^13. MOST_BITS are those of 8.0.
MOST_BITS = tl.constexpr(0x41000000)
MOST_SCALE = tl.constexpr(16.0)


@triton.jit
def few_rows(  # noqa: PLR0915  # one item, top to bottom
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
    COLUMNS: tl.constexpr,
    PAIRS: tl.constexpr,
    SLICES: tl.constexpr,
    ONCE: tl.constexpr,
    KEYS: tl.constexpr,
    SUMS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PAD: tl.constexpr,
    CONVERSION: tl.constexpr,
    HARDWARE_K: tl.constexpr,
    HARDWARE_V: tl.constexpr,
    FULL: tl.constexpr,
):
    """Tiles `begin` to `end` of one item: (result [block, ROWS], its second half for int4, log-sum-exp to base 2).

    SLICES: the channels of queries and keys are multiplied in so many slices, one of them in registers at a time.
    ONCE: keys are converted once, not in each of the warps that multiply them. SUMS: sums over keys are kept in so many
    parts.
    """
    K: tl.constexpr = P.k
    V: tl.constexpr = P.v
    INTEGER: tl.constexpr = P.k.encoding == "int8" or P.k.encoding == "int4"  # noqa: PLR1714  # Triton has no `in`
    CAREFUL: tl.constexpr = P.v.scaling != "row"
    # One loop has loaded its last tile before it comes to it; two have fewer masks, of which many rows need many.
    SINGLE: tl.constexpr = TOKENS == 1 and not CAREFUL
    WIDTH: tl.constexpr = COLUMNS if PAD else ROWS
    CHANNELS: tl.constexpr = P.v.block
    last = position + count - 1
    first, inner, outer = whole_tiles(position, last, begin, end, KEYS, P.window)
    # Asked for first: the loop waits for them, and they for nothing that the query is made of.
    blocks = blocks_of(begin if SINGLE else inner, table, first, last, num_blocks, P.block_size, KEYS)
    q_first, q_second, q_first_rest, q_second_rest, q_scale, q_sum = query_columns(
        query, count, q_token, q_head, K, GROUP, TOKENS, ROWS, COLUMNS, PAIRS, INTEGER, FULL
    )
    q_first, q_second = sliced(q_first, SLICES), sliced(q_second, SLICES)
    q_first_rest, q_second_rest = sliced(q_first_rest, SLICES), sliced(q_second_rest, SLICES)
    row = tl.arange(0, ROWS)
    if SOFTCAP:
        k_factor = k_scale * operand_factor(K, HARDWARE_K) / softcap
    else:
        k_factor = k_scale * operand_factor(K, HARDWARE_K) * LOG2E
    q_scale = q_scale * k_factor
    # Where each column stands: columns past the last query count as the last, whose tiles are read anyway.
    at = position + tl.minimum(row // GROUP, count - 1)
    shift = tl.full([ROWS], -LOWEST, tl.float32)
    weight = tl.zeros([SUMS, ROWS], tl.float32)
    largest = (begin * 0).to(tl.float32) + SMALLEST
    inverse = 1.0 / largest
    total = tl.zeros([CHANNELS, WIDTH], tl.float32)
    if P.v.encoding == "int4":
        total2 = tl.zeros([CHANNELS, WIDTH], tl.float32)
        zeros = tl.zeros([SUMS, ROWS], tl.float32)
    else:
        total2 = tl.zeros([1], tl.float32)
        zeros = tl.zeros([1], tl.float32)
    if SINGLE:
        for i in range(begin, end):
            coming = blocks_of(i + 1, table, first, last, num_blocks, P.block_size, KEYS)
            shift, weight, largest, inverse, total, total2, zeros = _tile(
                i, (i >= inner) & (i < outer), blocks, pages, h, q_first, q_second, q_first_rest, q_second_rest,
                q_scale, q_sum, at, first, last, block_stride, softcap,
                shift, weight, largest, inverse, total, total2, zeros,
                P, TOKENS, ROWS, COLUMNS, PAIRS, SLICES, ONCE, KEYS, SUMS, SOFTCAP, PAD, CONVERSION, HARDWARE_K,
                HARDWARE_V, FULL, INTEGER, False,
            )  # fmt: skip
            blocks = coming
    else:
        for i in range(inner, outer):
            coming = blocks_of(i + 1, table, first, last, num_blocks, P.block_size, KEYS)
            shift, weight, largest, inverse, total, total2, zeros = _tile(
                i, True, blocks, pages, h, q_first, q_second, q_first_rest, q_second_rest,
                q_scale, q_sum, at, first, last, block_stride, softcap,
                shift, weight, largest, inverse, total, total2, zeros,
                P, TOKENS, ROWS, COLUMNS, PAIRS, SLICES, ONCE, KEYS, SUMS, SOFTCAP, PAD, CONVERSION, HARDWARE_K,
                HARDWARE_V, FULL, INTEGER, True,
            )  # fmt: skip
            blocks = coming
        for j in tl.range(begin, end - (outer - inner), num_stages=1):
            i = tl.where(j < inner, j, j + (outer - inner))
            these = blocks_of(i, table, first, last, num_blocks, P.block_size, KEYS)
            shift, weight, largest, inverse, total, total2, zeros = _tile(
                i, False, these, pages, h, q_first, q_second, q_first_rest, q_second_rest,
                q_scale, q_sum, at, first, last, block_stride, softcap,
                shift, weight, largest, inverse, total, total2, zeros,
                P, TOKENS, ROWS, COLUMNS, PAIRS, SLICES, ONCE, KEYS, SUMS, SOFTCAP, PAD, CONVERSION, HARDWARE_K,
                HARDWARE_V, FULL, INTEGER, False,
            )  # fmt: skip
    if PAD:
        total, _ = tl.split(tl.reshape(total, [P.v.block, ROWS, 2]))
    sums = tl.sum(weight, axis=0)
    share = v_scale * operand_factor(V, HARDWARE_V) / tl.where(sums == 0.0, 1.0, sums)
    if not CAREFUL:
        share = share * largest
    if P.v.encoding == "int4":
        if PAD:
            total2, _ = tl.split(tl.reshape(total2, [P.v.block, ROWS, 2]))
        zero = tl.sum(zeros, axis=0)
        total = total - zero[None, :]
        total2 = (total2 - zero[None, :]) * share[None, :]
    return total * share[None, :], total2, tl.log2(sums) - shift


@triton.jit
def _tile(  # noqa: PLR0915  # the loop body, top to bottom
    i,
    is_whole,
    blocks,
    pages,
    h,
    q_first,
    q_second,
    q_first_rest,
    q_second_rest,
    q_scale,
    q_sum,
    at,
    first,
    last,
    block_stride,
    softcap,
    shift,
    weight,
    largest,
    inverse,
    total,
    total2,
    zeros,
    P: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PAIRS: tl.constexpr,
    SLICES: tl.constexpr,
    ONCE: tl.constexpr,
    KEYS: tl.constexpr,
    SUMS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PAD: tl.constexpr,
    CONVERSION: tl.constexpr,
    HARDWARE_K: tl.constexpr,
    HARDWARE_V: tl.constexpr,
    FULL: tl.constexpr,
    INTEGER: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Fold tile i of keys into the running softmax. is_whole: every query sees all of it (WHOLE: always)."""
    K: tl.constexpr = P.k
    V: tl.constexpr = P.v
    BLOCK_SIZE: tl.constexpr = P.block_size
    UNIT: tl.constexpr = 16 if BLOCK_SIZE % 16 == 0 else 1
    UNITS: tl.constexpr = KEYS // UNIT
    TWICE: tl.constexpr = PAIRS and COLUMNS == ROWS
    page, inside = place(i, blocks, block_stride, BLOCK_SIZE, KEYS)
    k = tl.zeros([1], tl.uint8)
    if SLICES == 1:
        k = load_keys(pages, page, inside, h, K, UNIT, UNITS, KEYS)
    v = load_values(pages, page, inside, h, V, UNIT, UNITS, KEYS)
    if P.k.scaling == "row":
        k_word = load_words(pages, page, inside, h, K, UNIT, UNITS, KEYS)
    if P.v.scaling == "row":
        v_word = load_words(pages, page, inside, h, V, UNIT, UNITS, KEYS)

    if INTEGER:
        product = tl.zeros([KEYS, COLUMNS], tl.int32)
        for n in tl.static_range(SLICES):
            codes = _slice(k, pages, page, inside, h, K, UNIT, UNITS, KEYS, n, SLICES)
            q, q2 = afresh(q_first[n], i, SLICES, CONVERSION), afresh(q_second[n], i, SLICES, CONVERSION)
            product = _integer_product(codes, q, q2, product, K, CONVERSION)
        if TWICE:
            product = product * REST
            for n in tl.static_range(SLICES):
                codes = _slice(k, pages, page, inside, h, K, UNIT, UNITS, KEYS, n, SLICES)
                product = _integer_product(codes, q_first_rest[n], q_second_rest[n], product, K, CONVERSION)
        product = product.to(tl.float32)
    else:
        product = tl.zeros([KEYS, COLUMNS], tl.float32)
        if TWICE:
            for n in tl.static_range(SLICES):
                codes = _slice(k, pages, page, inside, h, K, UNIT, UNITS, KEYS, n, SLICES)
                keys = float_operand(codes, K, HARDWARE_K, FULL, False)
                product = tl.dot(keys, q_first_rest[n], product, input_precision="ieee")
            product = product * (1.0 / rest_factor(K))
        for n in tl.static_range(SLICES):
            codes = _slice(k, pages, page, inside, h, K, UNIT, UNITS, KEYS, n, SLICES)
            keys = float_operand(codes, K, HARDWARE_K, FULL, False)
            if ONCE:
                keys = pinned(keys)
            product = tl.dot(keys, afresh(q_first[n], i, SLICES, CONVERSION), product, input_precision="ieee")
    score = product
    if COLUMNS > ROWS:
        high, low = tl.split(tl.reshape(product, [KEYS, ROWS, 2]))
        score = high + low * (1.0 / rest_factor(K))
    if P.k.encoding == "int4":
        score = score - int4_zero(k_word)[:, None] * q_sum[None, :]
        score = score * int4_scale(k_word)[:, None]
    elif P.k.scaling == "row":
        score = score * k_word.to(tl.float32, bitcast=True)[:, None]
    unit = tl.broadcast_to(q_scale[None, :], [KEYS, ROWS])
    if SOFTCAP:
        # tanh x = 1 - 2 / (1 + e^2x)
        score = (1.0 - 2.0 / (1.0 + tl.exp2(score * unit * (2.0 * LOG2E)))) * (softcap * LOG2E)
        unit = tl.full([KEYS, ROWS], 1.0, tl.float32)

    key = i * KEYS + tl.arange(0, KEYS)
    power = tl.fma(score, unit, tl.broadcast_to(shift[None, :], [KEYS, ROWS]))
    if P.v.encoding == "int4":
        scale = int4_scale(v_word)
        zero = int4_zero(v_word) - 8.0
    elif P.v.scaling == "row":
        scale = v_word.to(tl.float32, bitcast=True)
    if not is_whole:
        power = tl.where(_sees(key, at, first, last, P, TOKENS, KEYS, ROWS), power, float("-inf"))
        if P.v.scaling == "row":
            seen = (key <= last) & (key >= first)
            scale = tl.where(seen, scale, 0.0)
            if P.v.encoding == "int4":
                zero = tl.where(seen & (zero == zero), zero, 0.0)
    # Before the branch, which waits for all threads: most tiles are weighed by what is known.
    # As integers, which a warp compares in one instruction: the order of floats from zero up, NaN above all.
    p = tl.exp2(power)
    is_more = tl.max(power.to(tl.int32, bitcast=True)) > MOST_BITS
    if P.v.scaling == "row":
        most = (largest * MOST_SCALE).to(tl.int32, bitcast=True)
        is_more = is_more | (tl.max(scale.to(tl.int32, bitcast=True)) > most)
    if is_more:
        score = score * unit
        if not is_whole:
            score = tl.where(_sees(key, at, first, last, P, TOKENS, KEYS, ROWS), score, float("-inf"))
        top = -shift
        highest = tl.maximum(top, tl.ceil(tl.max(score, axis=0)))
        p = tl.exp2(score - highest[None, :])
        shrink = tl.exp2(top - highest)
        shift = -highest
        weight = weight * shrink[None, :]
        if P.v.scaling == "row":
            bits = tl.max(tl.where(scale == scale, scale, 0.0), axis=0).to(tl.int32, bitcast=True) & INFINITY
            larger = tl.maximum(largest, bits.to(tl.float32, bitcast=True))
            inverse = 1.0 / larger
            shrink = shrink * (largest * inverse)
            largest = larger
        if P.v.encoding == "int4":
            zeros = zeros * shrink[None, :]
        if PAD:
            shrink = tl.reshape(tl.join(shrink, shrink), [COLUMNS])
        total = total * shrink[None, :]
        if P.v.encoding == "int4":
            total2 = total2 * shrink[None, :]
    weight = _add(weight, p, KEYS, SUMS, ROWS)
    if P.v.scaling == "row":
        p = p * (scale * inverse)[:, None]
        # A row of V that is NaN is so for those who see it; what the one query does not see has scale zero by now.
        if TOKENS > 1:  # noqa: SIM102  # compile time, run time
            if not is_whole:
                p = tl.where(_sees(key, at, first, last, P, TOKENS, KEYS, ROWS), p, 0.0)
    if FULL and P.v.encoding == "bfloat16":
        operand = p
    elif P.v.encoding == "bfloat16":
        operand = p.to(tl.bfloat16)
    else:
        operand = p.to(tl.float16)
    wide = operand
    if PAD:
        wide = tl.reshape(tl.join(operand, tl.zeros_like(operand)), [KEYS, COLUMNS])
    if P.v.encoding == "int4":
        # The weights before they are rounded: their rounding then costs no more than that of the codes' own product.
        zeros = _add(zeros, p * zero[:, None], KEYS, SUMS, ROWS)
        values, values2 = nibble_operands(v, CONVERSION)
        if P.v.los == 1:
            values2 = tl.trans(settled(values2, V, CONVERSION))
        total2 = tl.dot(values2, wide, total2)
    elif P.v.encoding == "int8":
        values = int8_operand(v, CONVERSION)
    else:
        values = float_operand(v, V, HARDWARE_V, FULL, not WHOLE)
    if P.v.los == 1:
        values = tl.trans(settled(values, V, CONVERSION))
    if P.v.scaling != "row":  # noqa: SIM102  # compile time, run time
        if not is_whole:
            if TOKENS == 1:
                # What the one query does not see, no column sees.
                values = tl.where(((key <= last) & (key >= first))[None, :], values, 0.0)
            else:
                # Zero times NaN is NaN, so bad values are taken out and put back as infinity for those who see them.
                bad = (tl.abs(values) == float("inf")) | (values != values)
                values = tl.where(bad, 0.0, values)
                sees = half_of_infinity(_sees(key, at, first, last, P, TOKENS, KEYS, ROWS), FULL)
                if PAD:
                    sees = tl.reshape(tl.join(sees, sees), [KEYS, COLUMNS])
                total = tl.dot(half_of_infinity(bad, FULL), sees, total)
    total = tl.dot(values, wide, total, input_precision="ieee")
    return shift, weight, largest, inverse, total, total2, zeros


@triton.jit
def _slice(
    k,
    pages,
    page,
    inside,
    h,
    K: tl.constexpr,
    UNIT: tl.constexpr,
    UNITS: tl.constexpr,
    KEYS: tl.constexpr,
    SLICE: tl.constexpr,
    SLICES: tl.constexpr,
):
    """Codes of one slice of the keys: `k`, which was asked for early, if there is but one."""
    if SLICES == 1:
        codes = k
    else:
        codes = load_keys(pages, page, inside, h, K, UNIT, UNITS, KEYS, SLICE, SLICES)
    return codes


@triton.jit
def _integer_product(k, first, second, product, K: tl.constexpr, CONVERSION: tl.constexpr):
    """Add the product of integer codes with the query (for int4 with its two halves)."""
    if K.encoding == "int4":
        product = tl.dot(int4_nibbles(k, False, CONVERSION), first, product, out_dtype=tl.int32)
        product = tl.dot(int4_nibbles(k, True, CONVERSION), second, product, out_dtype=tl.int32)
    else:
        product = tl.dot(k.to(tl.int8, bitcast=True), first, product, out_dtype=tl.int32)
    return product


@triton.jit
def _add(sums, x, KEYS: tl.constexpr, SUMS: tl.constexpr, ROWS: tl.constexpr):
    """Add [KEYS, ROWS] to sums [SUMS, ROWS], SUMS rows at a time."""
    if KEYS == SUMS:
        total = sums + x
    else:
        total = sums + tl.sum(tl.reshape(x, [KEYS // SUMS, SUMS, ROWS]), axis=0)
    return total


@triton.jit
def _sees(key, at, first, last, P: tl.constexpr, TOKENS: tl.constexpr, KEYS: tl.constexpr, ROWS: tl.constexpr):
    """Which keys of a tile the query of each row sees: bool [KEYS, ROWS]."""
    if TOKENS == 1:
        ok = tl.broadcast_to(((key <= last) & (key >= first))[:, None], [KEYS, ROWS])
    else:
        ok = key[:, None] <= at[None, :]
        if P.window > 0:
            ok = ok & (key[:, None] > at[None, :] - P.window)
    return ok

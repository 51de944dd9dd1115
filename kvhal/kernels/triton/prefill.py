# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"
# Triton's dialect: arguments have no Python types.
"""prefill: attention of a chunk of a prompt over its staged context, whatever mode the cache has.

Staged numbers are fp16 with a power of two a tile: that of keys multiplies the scores of a tile, that of values moves
into the exponent of the weights, so neither costs an instruction a score.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvhal.kernels.triton.attend import finish, write_row
from kvhal.kernels.triton.convert import half_of_infinity
from kvhal.kernels.triton.query import query_rows
from kvhal.kernels.triton.schedule import staged_tiles

__all__ = ["prefill_kernel"]

LOWEST = tl.constexpr(-3.0e38)
SMALLEST = tl.constexpr(2.0**-126)
LOG2E = tl.constexpr(1.4426950408889634)
# Weights below 2^-25 are zero as fp16, so values that far below the largest need no smaller ones.
LEAST_SHIFT = tl.constexpr(-30)


@triton.jit(do_not_specialize=["scale", "softcap", "num_seqs", "tiles"])
def prefill_kernel(  # noqa: PLR0915  # one kernel, one function
    cache,
    q,
    workspace,
    sinks,
    out,
    lse,
    scales_offset: tl.int64,
    q_token: tl.int64,
    q_head: tl.int64,
    o_token: tl.int64,
    o_head: tl.int64,
    lse_token: tl.int64,
    lse_head: tl.int64,
    scale: tl.float32,
    softcap: tl.float32,
    num_seqs: tl.int32,
    tiles: tl.int32,
    sequences_at: tl.int64,
    exponents_at: tl.int64,
    keys_at: tl.int64,
    values_at: tl.int64,
    S: tl.constexpr,
    GROUP: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    CHUNK: tl.constexpr,
    FULL: tl.constexpr,
):
    """Program (i, kv head): the i-th item from the end, since those at the end of a prompt see most.

    Items are numbered by `first row // TOKENS + sequence`, which leaves numbers out and needs no sum over sequences.
    """
    K: tl.constexpr = S.k
    K_BLOCK: tl.constexpr = S.k.block
    V_BLOCK: tl.constexpr = S.v.block
    HALF: tl.constexpr = KEYS // 2
    j = tl.num_programs(0) - 1 - tl.program_id(0)
    h = tl.program_id(1)
    entries = (workspace + sequences_at).to(tl.pointer_type(tl.int32))
    lane = tl.arange(0, CHUNK)
    b = j * 0 - 1
    for start in range(0, num_seqs, CHUNK):
        index = start + lane
        there = index < num_seqs
        first_row = tl.load(entries + index * 8, mask=there, other=0)
        at = tl.load(entries + index * 8 + 6, mask=there, other=-1)
        b = tl.maximum(b, tl.max(tl.where((at >= 0) & (first_row // TOKENS + index <= j), index, -1), axis=0))
    if b >= 0:
        entry = entries + b * 8
        first_row = tl.load(entry)
        queries = tl.load(entry + 1)
        length = tl.load(entry + 2)
        item = j - first_row // TOKENS - b
        if item * TOKENS < queries:
            count = tl.minimum(TOKENS, queries - item * TOKENS)
            position = length - queries + item * TOKENS
            _, low, _ = staged_tiles(queries, length, KEYS, S.window)
            # Staged tile of the context's tile 0, which need not exist.
            origin = h.to(tl.int64) * tiles + tl.load(entry + 6) - low
            query = q + (first_row + item * TOKENS).to(tl.int64) * q_token + (h * GROUP).to(tl.int64) * q_head
            operand, _, q_scale, _ = query_rows(query, count, q_token, q_head, K, GROUP, TOKENS, ROWS, False)
            factor = tl.abs(scale)
            if S.k.scaling == "static":
                factor = factor * tl.load((cache + scales_offset).to(tl.pointer_type(tl.float32)))
            v_scale = 1.0
            if S.v.scaling == "static":
                v_scale = v_scale * tl.load((cache + scales_offset).to(tl.pointer_type(tl.float32)) + 1)
            if SOFTCAP:
                factor = factor / softcap
            else:
                factor = factor * LOG2E
            operand = tl.where(scale < 0.0, -operand, operand)
            finite = q_scale == q_scale
            q_scale = tl.where(finite, q_scale * factor, 1.0)
            row = tl.arange(0, ROWS)
            at = position + tl.minimum(row // GROUP, count - 1)
            top = tl.full([ROWS], LOWEST, tl.float32)
            weight = tl.zeros([ROWS], tl.float32)
            total = tl.zeros([ROWS, V_BLOCK], tl.float32)
            largest = count * 0 + 1
            last = position + count - 1
            # Tiles that every query sees whole; before and after them half tiles, which leave registers for masks.
            begin = 0
            inner = 0
            if S.window > 0:
                begin = tl.maximum(position - S.window + 1, 0) // HALF
                inner = (tl.maximum(last - S.window + 1, 0) + KEYS - 1) // KEYS
            end = last // HALF + 1
            outer = tl.maximum((position + 1) // KEYS, inner)
            inner = tl.minimum(inner * 2, end)
            whole = tl.minimum(outer * 2, end) - inner
            exponents = (workspace + exponents_at).to(tl.pointer_type(tl.int32)) + origin * 2
            keys = (workspace + keys_at).to(tl.pointer_type(tl.float16)) + origin * (KEYS * K_BLOCK)
            values = (workspace + values_at).to(tl.pointer_type(tl.float16)) + origin * (KEYS * V_BLOCK)
            for i in range(inner // 2, (inner + whole) // 2):
                top, weight, largest, total = _tile(
                    i, keys, values, exponents, operand, q_scale, at, softcap, top, weight, largest, total,
                    S, KEYS, 1, SOFTCAP, FULL, False,
                )  # fmt: skip
            for n in range(begin, end - whole):
                i = tl.where(n < inner, n, n + whole)
                top, weight, largest, total = _tile(
                    i, keys, values, exponents, operand, q_scale, at, softcap, top, weight, largest, total,
                    S, HALF, 2, SOFTCAP, FULL, True,
                )  # fmt: skip
            weight = tl.where(finite, weight, float("nan"))
            share = v_scale * (largest << 23).to(tl.float32, bitcast=True) / tl.where(weight == 0.0, 1.0, weight)
            which = row // GROUP
            valid = which < count
            token = (first_row + item * TOKENS + which).to(tl.int64)
            head = h * GROUP + row % GROUP
            factor, natural = finish(top + tl.log2(weight), sinks, head, valid)
            channel = tl.arange(0, V_BLOCK)
            to = out + (token * o_token + head.to(tl.int64) * o_head)[:, None] + channel[None, :]
            write_row(to, total * (share * factor)[:, None], valid[:, None] & (channel < S.v.dim)[None, :])
            if lse is not None:
                tl.store(lse + token * lse_token + head * lse_head, natural, mask=valid)


@triton.jit
def _tile(
    i,
    keys,
    values,
    exponents,
    q,
    q_scale,
    at,
    softcap,
    top,
    weight,
    largest,
    total,
    S: tl.constexpr,
    KEYS: tl.constexpr,
    PARTS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    FULL: tl.constexpr,
    MASK: tl.constexpr,
):
    """Fold tile i of keys, one of PARTS of a staged tile, into the running softmax. MASK: not all see all of it.

    largest: the largest biased exponent of values so far; `total` is in units of its power of two.
    """
    key = i * KEYS + tl.arange(0, KEYS)
    # Offsets from one address, or each thread would keep several addresses of eight bytes.
    k = tl.load(keys + (key[:, None] * S.k.block + tl.arange(0, S.k.block)[None, :]))
    at_v = values + (key[:, None] * S.v.block + tl.arange(0, S.v.block)[None, :])
    v = tl.load(at_v)
    k_exponent = tl.load(exponents + i // PARTS * 2)
    v_exponent = tl.load(exponents + i // PARTS * 2 + 1)
    if MASK:
        ok = key[None, :] <= at[:, None]
        if S.window > 0:
            ok = ok & (key[None, :] > at[:, None] - S.window)
        # Zero times NaN is NaN, so bad values are taken out and put back as infinity for those who see them: before
        # the scores need registers, and V is loaded again after.
        bad = (tl.abs(v) == float("inf")) | (v != v)
        total = tl.dot(half_of_infinity(ok, FULL), half_of_infinity(bad, FULL), total)
    score = tl.dot(q, tl.trans(k))
    # Never zero, or what is not seen would become NaN.
    unit = tl.maximum(q_scale * (k_exponent << 23).to(tl.float32, bitcast=True), SMALLEST)
    if SOFTCAP:
        # tanh x = 1 - 2 / (1 + e^2x)
        score = (1.0 - 2.0 / (1.0 + tl.exp2(score * (unit * (2.0 * LOG2E))[:, None]))) * (softcap * LOG2E)
        unit = tl.full(unit.shape, 1.0, tl.float32)
    if MASK:
        score = tl.where(ok, score, float("-inf"))
    highest = tl.maximum(top, tl.max(score, axis=1) * unit)
    larger = tl.maximum(largest, v_exponent)
    shift = tl.maximum(v_exponent - larger, LEAST_SHIFT)
    p = tl.exp2(score * unit[:, None] - (highest - shift.to(tl.float32))[:, None])
    shrink = tl.exp2(top - highest)
    weight = weight * shrink + tl.sum(p, axis=1) * tl.exp2(-shift.to(tl.float32))
    total = total * (shrink * tl.exp2((largest - larger).to(tl.float32)))[:, None]
    if MASK:
        v = tl.load(at_v)
        v = tl.where((tl.abs(v) == float("inf")) | (v != v), 0.0, v).to(tl.float16)
    total = tl.dot(p.to(tl.float16), v, total)
    return highest, weight, larger, total

# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"
# Triton's dialect: arguments have no Python types.
"""attend: paged attention over a scaled cache, for decode and for chunked prefill.

Each program walks its part of the line of tiles that `schedule` made and leaves finished rows in out and lse, and parts
of rows in the workspace for `reduce`. How an item is computed stands in `few_rows` and `many_rows`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvhal.kernels.triton.codec import bf16_bits
from kvhal.kernels.triton.few_rows import few_rows
from kvhal.kernels.triton.many_rows import many_rows
from kvhal.kernels.triton.schedule import item_tiles

__all__ = ["attend_kernel", "finish", "write_row"]

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
FLOAT_MAX = tl.constexpr(3.4028234663852886e38)


@triton.jit(do_not_specialize=["num_blocks", "softcap", "scale"])
def attend_kernel(  # noqa: PLR0915  # one kernel, one function
    cache,
    q,
    block_table,
    workspace,
    sinks,
    out,
    lse,
    base: tl.int64,
    block_stride: tl.int64,
    scales_offset: tl.int64,
    table_stride: tl.int64,
    num_blocks: tl.int32,
    q_token: tl.int64,
    q_head: tl.int64,
    o_token: tl.int64,
    o_head: tl.int64,
    lse_token: tl.int64,
    lse_head: tl.int64,
    scale: tl.float32,
    softcap: tl.float32,
    schedule_at: tl.int64,
    sequences_at: tl.int64,
    lse_at: tl.int64,
    partial_at: tl.int64,
    P: tl.constexpr,
    GROUP: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PAIRS: tl.constexpr,
    SLICES: tl.constexpr,
    ONCE: tl.constexpr,
    MANY: tl.constexpr,
    KEYS: tl.constexpr,
    SUMS: tl.constexpr,
    PROLOGUE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PAD: tl.constexpr,
    CONVERSION: tl.constexpr,
    HARDWARE_K: tl.constexpr,
    HARDWARE_V: tl.constexpr,
    FULL: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Program (part, kv head): a part of the line of tiles; writes finished rows to out and lse, or parts to its slots.

    DEPENDENT: reduce may be launched while this runs; it waits for the end by itself.
    """
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()
    part = tl.program_id(0) // P.heads
    row = (workspace + schedule_at).to(tl.pointer_type(tl.int32)) + part * 8
    b = tl.load(row)
    item = tl.load(row + 1)
    start = tl.load(row + 2)
    rest = tl.load(row + 3)
    first_row = tl.load(row + 4)
    queries = tl.load(row + 5)
    length = tl.load(row + 6)
    entries = (workspace + sequences_at).to(tl.pointer_type(tl.int32))
    k_scale = scale
    v_scale = 1.0
    if P.k.scaling == "static":
        k_scale = scale * tl.load((cache + scales_offset).to(tl.pointer_type(tl.float32)))
    if P.v.scaling == "static":
        v_scale = v_scale * tl.load((cache + scales_offset).to(tl.pointer_type(tl.float32)) + 1)
    while rest > 0:
        # An item's number is never negative. The compiler does not know, or all that follows from the head alone would
        # wait in registers while the keys of an item pass.
        h = tl.program_id(0) % P.heads + (item >> 31)
        low, high = item_tiles(item * TOKENS, queries, length, TOKENS, KEYS, P.window)
        stop = tl.minimum(start + rest, high - low + PROLOGUE)
        rest -= stop - start
        begin = low + tl.maximum(start - PROLOGUE, 0)
        end = low + stop - PROLOGUE
        if end > begin:
            position = length - queries + item * TOKENS
            count = tl.minimum(TOKENS, queries - item * TOKENS)
            query = q + (first_row + item * TOKENS).to(tl.int64) * q_token + (h * GROUP).to(tl.int64) * q_head
            pages = cache + base
            table = block_table + b.to(tl.int64) * table_stride
            if MANY:
                result, result2, lse2 = many_rows(
                    pages, query, table, h.to(tl.int64), begin, end, position, count, block_stride, num_blocks,
                    q_token, q_head, k_scale, v_scale, softcap,
                    P, GROUP, TOKENS, ROWS, KEYS, SOFTCAP, CONVERSION, HARDWARE_K, HARDWARE_V, FULL,
                )  # fmt: skip
            else:
                result, result2, lse2 = few_rows(
                    pages, query, table, h.to(tl.int64), begin, end, position, count, block_stride, num_blocks,
                    q_token, q_head, k_scale, v_scale, softcap,
                    P, GROUP, TOKENS, ROWS, COLUMNS, PAIRS, SLICES, ONCE, KEYS, SUMS, SOFTCAP, PAD, CONVERSION,
                    HARDWARE_K, HARDWARE_V, FULL,
                )  # fmt: skip
            column = tl.arange(0, ROWS)
            which = column // GROUP
            valid = which < count
            channel = tl.arange(0, P.v.block)
            inside = (channel < P.v.width)[:, None] & valid[None, :]
            if (begin == low) & (end == high):
                token = (first_row + item * TOKENS + which).to(tl.int64)
                head = h * GROUP + column % GROUP
                factor, total = finish(lse2, sinks, head, valid)
                to = out + (token * o_token + head.to(tl.int64) * o_head)[None, :] + channel[:, None]
                write_row(to, result * factor[None, :], inside)
                if P.v.encoding == "int4":
                    write_row(to + P.v.width, result2 * factor[None, :], inside)
                if lse is not None:
                    tl.store(lse + token * lse_token + head * lse_head, total, mask=valid)
            else:
                parts = tl.num_programs(0) // P.heads
                slot = (2 * (h * parts + part) + (begin == low).to(tl.int32)).to(tl.int64)
                place = slot * ROWS + column
                kept = (workspace + partial_at).to(tl.pointer_type(tl.float32)) + (place * P.v.dim)[None, :]
                tl.store(kept + channel[:, None], result, mask=inside)
                if P.v.encoding == "int4":
                    tl.store(kept + (channel + P.v.width)[:, None], result2, mask=inside)
                tl.store((workspace + lse_at).to(tl.pointer_type(tl.float32)) + place, lse2, mask=valid)
        start = 0
        item += 1
        if item * TOKENS >= queries:
            item = 0
            b += 1
            if rest > 0:
                while tl.load(entries + b * 8 + 7) == 0:
                    b += 1
                first_row = tl.load(entries + b * 8)
                queries = tl.load(entries + b * 8 + 1)
                length = tl.load(entries + b * 8 + 2)


@triton.jit
def finish(lse2, sinks, head, valid):
    """(factor of the result, natural log-sum-exp) once the sink of each query head has joined; lse2 is to base 2."""
    factor = tl.full(lse2.shape, 1.0, tl.float32)
    total = lse2
    if sinks is not None:
        sink = tl.load(sinks + head, mask=valid, other=0.0) * LOG2E
        top = tl.maximum(lse2, sink)
        top = tl.where(top == float("-inf"), 0.0, top)
        total = top + tl.log2(tl.exp2(lse2 - top) + tl.exp2(sink - top))
        factor = tl.where(lse2 == float("-inf"), 0.0, tl.exp2(lse2 - total))
    return factor, total * LN2


@triton.jit
def write_row(to, value, mask):
    """Store fp32 results, rounded once; an infinity becomes NaN."""
    # Not value - value == 0: where value is a product, that fuses into a multiply-add and leaves the rounding error.
    value = tl.where(tl.abs(value) <= FLOAT_MAX, value, float("nan"))
    if to.dtype.element_ty == tl.bfloat16:
        tl.store(to, bf16_bits(value).to(tl.bfloat16, bitcast=True), mask=mask)
    else:
        tl.store(to, value.to(to.dtype.element_ty), mask=mask)

# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"
# Triton's dialect: arguments have no Python types.
"""reduce: joins the parts of items that several attend programs shared, and writes the rows nobody computed."""

from __future__ import annotations

import triton
import triton.language as tl

from kvhal.kernels.triton.attend import finish, write_row
from kvhal.kernels.triton.schedule import EMPTY, JOINED, UNREADABLE

__all__ = ["reduce_kernel"]


@triton.jit(do_not_specialize=["parts"])
def reduce_kernel(
    workspace,
    sinks,
    out,
    lse,
    parts: tl.int32,
    o_token: tl.int64,
    o_head: tl.int64,
    lse_token: tl.int64,
    lse_head: tl.int64,
    rows_at: tl.int64,
    lse_at: tl.int64,
    partial_at: tl.int64,
    P: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    CHANNELS: tl.constexpr,
    HEADS: tl.constexpr,
    ALIKE: tl.constexpr,
    WIDTH: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Program (token, i, j): CHANNELS channels of a token's result for HEADS query heads, ALIKE of one item at once.

    WIDTH: ALIKE rounded up to a power of two. A row of an unreadable sequence is NaN; a row that sees nothing, or that
    belongs to no sequence, is zero. DEPENDENT: this grid may have started before attend's ended; what the step's
    schedule says is older than both.
    """
    token = tl.program_id(0)
    row = (workspace + rows_at).to(tl.pointer_type(tl.int32)) + token * 4
    state = tl.load(row)
    w0 = tl.load(row + 1)
    w1 = tl.load(row + 2)
    query = tl.load(row + 3)
    if DEPENDENT:
        # In every program, or this grid could end, and the next kernel start, while attend still runs.
        tl.extra.cuda.gdc_wait()
    if state > 0:
        for i in range(HEADS // ALIKE):
            from_head = tl.program_id(1) * HEADS + i * ALIKE
            _rows(
                workspace, sinks, out, lse, token, from_head, state, w0, w1, query, parts,
                o_token, o_head, lse_token, lse_head, lse_at, partial_at,
                P, GROUP, ROWS, PARTS, CHANNELS, ALIKE, WIDTH,
            )  # fmt: skip


@triton.jit
def _rows(
    workspace,
    sinks,
    out,
    lse,
    token,
    from_head,
    state,
    w0,
    w1,
    query,
    parts,
    o_token,
    o_head,
    lse_token,
    lse_head,
    lse_at,
    partial_at,
    P: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    CHANNELS: tl.constexpr,
    ALIKE: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """ALIKE rows of the result that one item holds: joined where several programs shared it, filled where none did."""
    channel = tl.program_id(2) * CHANNELS + tl.arange(0, CHANNELS)
    lane = tl.arange(0, WIDTH)
    head = from_head + lane
    valid = lane < ALIKE
    inside = valid[:, None] & (channel < P.v.dim)[None, :]
    to = out + token.to(tl.int64) * o_token + (head.to(tl.int64) * o_head)[:, None] + channel[None, :]
    lse_to = token.to(tl.int64) * lse_token + head * lse_head
    is_first = valid & (tl.program_id(2) == 0)
    if state == JOINED:
        row = query * GROUP + head % GROUP
        of_head = from_head // GROUP * parts
        part = tl.arange(0, PARTS)
        top = tl.full([WIDTH], -3.0e38, tl.float32)
        weight = tl.zeros([WIDTH], tl.float32)
        total = tl.zeros([WIDTH, CHANNELS], tl.float32)
        for w in range(w0, w1 + 1, PARTS):
            there = (w + part <= w1)[:, None] & valid[None, :]
            slot = 2 * (of_head + w + part).to(tl.int64) + (w + part == w0).to(tl.int64)
            place = (slot * ROWS)[:, None] + row[None, :]
            e = tl.load((workspace + lse_at).to(tl.pointer_type(tl.float32)) + place, mask=there, other=0.0)
            e = tl.where(there, e, float("-inf"))
            y = tl.load(
                (workspace + partial_at).to(tl.pointer_type(tl.float32))
                + (place * P.v.dim)[:, :, None]
                + channel[None, None, :],
                mask=there[:, :, None] & (channel < P.v.dim)[None, None, :],
                other=0.0,
            )
            highest = tl.maximum(top, tl.max(e, axis=0))
            share = tl.exp2(e - highest[None, :])
            shrink = tl.exp2(top - highest)
            total = total * shrink[:, None] + tl.sum(y * share[:, :, None], axis=0)
            weight = weight * shrink + tl.sum(share, axis=0)
            top = highest
        factor, natural = finish(top + tl.log2(weight), sinks, head, valid)
        share = factor / tl.where(weight == 0.0, 1.0, weight)
        write_row(to, total * share[:, None], inside)
        if lse is not None:
            tl.store(lse + lse_to, natural, mask=is_first)
    else:
        value = tl.where(state == UNREADABLE, float("nan"), 0.0)
        write_row(to, tl.zeros([WIDTH, CHANNELS], tl.float32) + value, inside)
        if lse is not None:
            natural = tl.zeros([WIDTH], tl.float32) + tl.where(state == UNREADABLE, float("nan"), float("-inf"))
            if sinks is not None:
                sink = tl.load(sinks + head, mask=valid, other=0.0)
                natural = tl.where(state == EMPTY, sink.to(tl.float32), natural)
            tl.store(lse + lse_to, natural, mask=is_first)

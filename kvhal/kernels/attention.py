"""attend in plain torch: paged attention over a scaled cache, the specification and the CPU platform's kernel.

Query i of the n of a sequence of length L sits at position L - n + i; it sees keys up to its position, and only the
last `window` of them if the layer has a window. Consecutive query heads share a kv head. In fp32::

    s_j  = q . k_j * scale;  softcap > 0: s_j = softcap * tanh(s_j / softcap)          over the keys it sees
    lse  = log(sum_j exp(s_j) [+ exp(sink of the head)])                                natural logarithm
    out  = sum_j exp(s_j - lse) v_j                                                     rounded once, to out's dtype

A query that sees nothing (length 0) gives zeros and lse -inf (or the sink); so do rows of q past query_starts[-1]
(lse -inf). What a query does not see is selected out, never multiplied by zero: NaN or garbage there changes nothing. A
NaN that it does see makes its result NaN (of V only in the channel it stands in, unless the whole row is NaN), and so
does an infinity of V: out is finite or NaN.

Scales are folded into scores and probabilities. Order of summation is free, so platforms agree to a bound, not to the
bit: relative L2 error 3e-3 against float64 over the dequantised cache, for fp32 and bf16 out alike (rounding to bf16
alone costs at most 2^-9 = 2e-3, the rest is fp32 summation). Large temporaries live in `workspace`, whose size does
not depend on the context (`workspace.py`); concurrent calls need one each.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kvhal.errors import SpecMismatch
from kvhal.kernels.checks import check_floats, check_integers
from kvhal.kernels.chunks import Chunk, ChunkReader
from kvhal.kernels.geometry import LayerGeometry
from kvhal.kernels.reference import add_counts, check_geometry, static_scale
from kvhal.kernels.sequences import Sequence, first_key, sequences_of
from kvhal.kernels.workspace import AttendShape

__all__ = ["attend"]

NAN, MINUS_INF = float("nan"), float("-inf")


def attend(
    cache: Tensor,
    q: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_starts: Tensor,
    sinks: Tensor | None,
    workspace: Tensor,
    out: Tensor,
    lse: Tensor | None,
    g: LayerGeometry,
    *,
    scale: float,
    softcap: float,
    checked: bool,
) -> None:
    """Attention of q [tokens, num_q_heads, head_dim] over the cache, into out [tokens, num_q_heads, head_dim_v].

    block_table int32 or int64 [num_seqs, max_blocks]; seq_lens int32 or int64 [num_seqs], the new tokens included;
    query_starts int32 [num_seqs + 1], prefix sums of query lengths; sinks fp32 [num_q_heads]; lse fp32 [tokens,
    num_q_heads]; workspace uint8 of `attend_workspace_bytes`. Checked: a block id the sequence needs outside the cache,
    a seq_len below its query length or beyond its block table raise AddressError before any arithmetic. Not checked:
    that sequence's out and lse are NaN, and each bad id (or the length) is counted in `rejected_slots`.
    """
    check_geometry(cache, g)
    _check(q, block_table, seq_lens, query_starts, sinks, out, lse, g)
    tokens, num_q_heads = q.shape[:2]
    shape = AttendShape.of(g, num_q_heads, max(1, tokens))
    parts = _carve(workspace, shape)
    sequences = sequences_of(g, block_table, seq_lens, query_starts, tokens, checked=checked)
    work = _Work.of(cache, g, shape, parts, block_table, sinks, num_q_heads, scale, softcap)
    for sequence in sequences:
        if sequence.bad:
            rows = slice(sequence.first_row, sequence.first_row + sequence.queries)
            _fill(out, lse, rows, NAN, NAN)
            continue
        for start in range(0, sequence.queries, shape.queries):
            count = min(shape.queries, sequence.queries - start)
            rows = slice(sequence.first_row + start, sequence.first_row + start + count)
            result, result_lse = work.slice_of(q[rows], sequence, start)
            out[rows].copy_(result)
            if lse is not None:
                lse[rows].copy_(result_lse)
    _fill(out, lse, slice(int(query_starts[-1]), tokens), 0.0, MINUS_INF)
    add_counts(cache, g, 0, sum(s.bad for s in sequences))


@dataclass(frozen=True, slots=True)
class _Work:
    """What every slice of queries of one call shares. Scores are [kv heads, group * queries, keys]."""

    g: LayerGeometry
    reader: ChunkReader
    parts: dict[str, Tensor]
    block_table: Tensor
    sinks: Tensor | None
    group: int
    k_factor: float
    v_factor: float
    softcap: float

    @classmethod
    def of(
        cls,
        cache: Tensor,
        g: LayerGeometry,
        shape: AttendShape,
        parts: dict[str, Tensor],
        block_table: Tensor,
        sinks: Tensor | None,
        num_q_heads: int,
        scale: float,
        softcap: float,
    ) -> _Work:
        reader = ChunkReader.of(cache, g, shape, parts)
        k_static, v_static = static_scale(cache, g, g.k, 0), static_scale(cache, g, g.v, 1)
        k_factor = scale * reader.k_factor * (1.0 if k_static is None else float(k_static))
        v_factor = reader.v_factor * (1.0 if v_static is None else float(v_static))
        group = num_q_heads // g.num_kv_heads
        return cls(g, reader, parts, block_table, sinks, group, k_factor, v_factor, softcap)

    def slice_of(self, q: Tensor, sequence: Sequence, start: int) -> tuple[Tensor, Tensor]:
        """Queries `start` on of a sequence: (out fp32 [n, num_q_heads, head_dim_v], lse fp32 [n, num_q_heads])."""
        heads, group, count = self.g.num_kv_heads, self.group, q.shape[0]
        rows = group * count
        query = _view(self.parts["query"], heads, rows, self.g.k.head_dim)
        query.view(heads, group, count, -1).copy_(q.unflatten(1, (heads, group)).permute(1, 2, 0, 3))
        query.mul_(self.k_factor)
        state = self._start(rows, count)
        first, last = sequence.position(start), sequence.position(start + count - 1)
        if sequence.length:
            table = self.block_table[sequence.index]
            for chunk in self.reader.chunks(table, first_key(self.g, first), last + 1):
                self._add(state, query, chunk, first, count)
        return self._finish(state, count)

    def _start(self, rows: int, count: int) -> _State:
        heads = self.g.num_kv_heads
        total = _view(self.parts["sum"], heads, rows, self.g.v.head_dim).zero_()
        if self.sinks is None:
            return _State(torch.full((heads, rows, 1), MINUS_INF), torch.zeros(heads, rows, 1), total)
        sinks = self.sinks.view(heads, self.group, 1, 1).expand(-1, -1, count, 1).reshape(heads, rows, 1)
        return _State(sinks.to(torch.float32, copy=True), torch.ones(heads, rows, 1), total)

    def _add(self, state: _State, query: Tensor, chunk: Chunk, first: int, count: int) -> None:
        """Fold one chunk of keys into the running softmax."""
        heads, rows, _ = query.shape
        hidden = self._hidden(chunk, first, count)
        scores = _view(self.parts["scores"], heads, rows, chunk.keys)
        keys, k_scale = self.reader.k(chunk)
        torch.bmm(query, keys.transpose(1, 2), out=scores)
        if k_scale is not None:
            scores.mul_(k_scale.unsqueeze(1))
        if self.softcap > 0:
            scores.mul_(1.0 / self.softcap).tanh_().mul_(self.softcap)
        by_query = scores.view(heads, self.group, count, chunk.keys)
        if hidden is not None:
            by_query.masked_fill_(hidden, MINUS_INF)
        # A row that has seen nothing keeps maximum -inf, and -inf - -inf is NaN: such a row is shifted by 0 instead.
        top = torch.maximum(state.top, scores.amax(-1, keepdim=True))
        shift = top.masked_fill(top == MINUS_INF, 0.0)
        scores.sub_(shift).exp_()
        shrink = torch.sub(state.top, shift).exp_()
        state.top.copy_(top)
        state.weight.mul_(shrink).add_(scores.sum(-1, keepdim=True))
        values, v_scale = self.reader.v(chunk)
        if v_scale is not None:
            scores.mul_(v_scale.unsqueeze(1))
            if hidden is not None:
                by_query.masked_fill_(hidden, 0.0)
        product = _view(self.parts["product"], heads, rows, self.g.v.head_dim)
        _weigh(scores, values, hidden, product, self.parts["narrow"])
        state.total.mul_(shrink).add_(product)

    def _hidden(self, chunk: Chunk, first: int, count: int) -> Tensor | None:
        """Which keys each query does not see: bool [queries, keys]; None if every query sees all of them."""
        last = first + count - 1
        if chunk.last <= first and chunk.first >= first_key(self.g, last):
            return None
        at = torch.arange(first, first + count, dtype=torch.int32).unsqueeze(1)
        positions = chunk.positions.unsqueeze(0)
        hidden = self.parts["hidden"].view(torch.bool)[: count * chunk.keys].view(count, chunk.keys)
        torch.gt(positions, at, out=hidden)
        if self.g.window:
            hidden.logical_or_(positions <= at - self.g.window)
        return hidden

    def _finish(self, state: _State, count: int) -> tuple[Tensor, Tensor]:
        heads, group = self.g.num_kv_heads, self.group
        lse = state.top + state.weight.log()
        total = state.total.mul_(self.v_factor).div_(state.weight.masked_fill(state.weight == 0, 1.0))
        total.nan_to_num_(nan=NAN, posinf=NAN, neginf=NAN)
        shape = (heads, group, count, -1)
        return total.view(shape).permute(2, 0, 1, 3).flatten(1, 2), lse.view(shape).permute(2, 0, 1, 3).flatten(1)


@dataclass(frozen=True, slots=True)
class _State:
    """The running softmax of a slice: maximum and weight [kv heads, rows, 1], weighted values [kv heads, rows, dim]."""

    top: Tensor
    weight: Tensor
    total: Tensor


def _weigh(scores: Tensor, values: Tensor, hidden: Tensor | None, product: Tensor, spare: Tensor) -> None:
    """product = scores @ values, where a value that a query does not see counts for nothing, NaN included."""
    if hidden is not None:
        # Keys that no query of the slice sees are the common garbage (a last page's tail): take them out at once.
        values.masked_fill_(hidden.all(0).view(1, -1, 1), 0.0)
    torch.bmm(scores, values, out=product)
    if hidden is None or bool(product.sum().isfinite()):
        return
    bad = _view(spare, *values.shape).copy_(values.isfinite().logical_not_())
    values.masked_fill_(bad > 0, 0.0)
    torch.bmm(scores, values, out=product)
    # Zero times NaN is NaN, so which queries see a bad value is counted apart, in ones and zeros.
    (heads, keys, dim), count = values.shape, hidden.shape[0]
    seen = hidden.logical_not().to(torch.float32).expand(heads, count, keys)
    touched = torch.bmm(seen, bad) > 0
    product.view(heads, -1, count, dim).masked_fill_(touched.unsqueeze(1), NAN)


def _view(part: Tensor, *shape: int) -> Tensor:
    return part.view(torch.float32)[: math.prod(shape)].view(shape)


def _fill(out: Tensor, lse: Tensor | None, rows: slice, value: float, lse_value: float) -> None:
    out[rows] = value
    if lse is not None:
        lse[rows] = lse_value


def _carve(workspace: Tensor, shape: AttendShape) -> dict[str, Tensor]:
    if workspace.dtype is not torch.uint8 or workspace.dim() != 1 or not workspace.is_contiguous():
        raise SpecMismatch(
            f"workspace must be contiguous bytes (uint8, one dimension); found {workspace.dtype} "
            f"{tuple(workspace.shape)!r}: allocate attend_workspace_bytes(...)"
        )
    if workspace.numel() < shape.nbytes or workspace.data_ptr() % 16:
        raise SpecMismatch(
            f"workspace must have {shape.nbytes} bytes at an address that is a multiple of 16; found "
            f"{workspace.numel()} bytes at {workspace.data_ptr() % 16} past one: plan with max_tokens of this call"
        )
    return {name: workspace[offset : offset + nbytes] for name, offset, nbytes in shape.parts}


def _check(
    q: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_starts: Tensor,
    sinks: Tensor | None,
    out: Tensor,
    lse: Tensor | None,
    g: LayerGeometry,
) -> None:
    if q.dim() != 3 or q.shape[1] == 0 or q.shape[1] % g.num_kv_heads:
        raise SpecMismatch(
            f"q must be [tokens, num_q_heads, head_dim] with num_q_heads a multiple of {g.num_kv_heads} kv heads; "
            f"found {tuple(q.shape)!r}: reshape it"
        )
    tokens, heads, _ = q.shape
    check_floats("q", q, (tokens, heads, g.k.head_dim), "the cache declares head_dim")
    check_floats("out", out, (tokens, heads, g.v.head_dim), "out has q's rows and heads and the head_dim of v")
    check_integers("block_table", block_table, 2)
    check_integers("seq_lens", seq_lens, 1)
    check_integers("query_starts", query_starts, 1)
    counts = (block_table.shape[0], seq_lens.shape[0], query_starts.shape[0] - 1)
    if len(set(counts)) != 1:
        raise SpecMismatch(
            "block_table, seq_lens and query_starts must agree on the number of sequences (query_starts has one more "
            f"entry); found {counts!r}: pass them from one batch"
        )
    for name, tensor, shape in (("sinks", sinks, (heads,)), ("lse", lse, (tokens, heads))):
        if tensor is not None and (tensor.dtype is not torch.float32 or tuple(tensor.shape) != shape):
            raise SpecMismatch(
                f"{name} must be float32 {shape!r}; found {tensor.dtype} {tuple(tensor.shape)!r}: convert it"
            )

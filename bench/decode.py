"""attend on a GPU: the time of one layer's call, and its error against float64.

The schedule of a step (`launch.prepare`) is built before, as a step builds it once for all its layers; kind "schedule"
times it alone. Each call reads other pages through another block table, so that the L2 cache holds none of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from bench.cases import BLOCK_SIZE, AttendCase
from bench.peers import Dequantised, PeerRun
from bench.pools import CacheShape, Pool
from bench.results import READ, Case, Ceiling, Failure, floor_us
from bench.timing import Call, Timer, rotations
from kvhal.kernels.geometry import LayerGeometry
from kvhal.kernels.triton import launch
from kvhal.kernels.triton.workspace import triton_workspace_bytes

__all__ = ["Attend", "measure", "run"]

# Batches up to this many sequences are checked whole, of larger ones three sequences.
CHECKED_WHOLE = 8
# Queries whose float64 scores are held at a time.
CHECKED_QUERIES = 64
POISON = 0xFF


@dataclass(frozen=True, slots=True)
class Attend:
    """Everything one case's calls need, on one device.

    tables int32 [sets, seqs, blocks a sequence]: the sets share no block. lengths int32 [seqs]; q and out
    [seqs * queries, q_heads, head_dim] in bfloat16.
    """

    case: AttendCase
    pool: Pool
    tables: Tensor
    lengths: Tensor
    starts: Tensor
    q: Tensor
    out: Tensor
    workspace: Tensor

    @classmethod
    def of(cls, case: AttendCase, device: torch.device, sets: int | None = None) -> Attend:
        """Fill a cache for `case`. sets: page sets to rotate through; None takes as many as the L2 cache asks for."""
        torch.manual_seed(0)
        shape = CacheShape(case.mode, case.kv_heads, case.head_dim, case.layout, case.window)
        blocks = -(-case.length // BLOCK_SIZE)
        if case.is_ragged:
            lengths = torch.randint(1, case.length + 1, (case.seqs,), dtype=torch.int32).to(device)
        else:
            lengths = torch.full((case.seqs,), case.length, dtype=torch.int32, device=device)
        if sets is None:
            sets = rotations(_tokens_read(case, lengths) * shape.token_bytes)
        pool = Pool.filled(shape, sets * case.seqs * blocks, device)
        tables = torch.randperm(sets * case.seqs * blocks, device=device).int().view(sets, case.seqs, blocks)
        tokens = case.seqs * case.queries
        q = torch.randn(tokens, case.q_heads, case.head_dim, device=device, dtype=torch.bfloat16)
        nbytes = triton_workspace_bytes(pool.geometry, case.q_heads, tokens, case.seqs, launch.tuning_of(device))
        return cls(
            case=case,
            pool=pool,
            tables=tables,
            lengths=lengths,
            starts=torch.arange(case.seqs + 1, dtype=torch.int32, device=device) * case.queries,
            q=q,
            out=torch.empty_like(q),
            workspace=torch.full((nbytes,), POISON, dtype=torch.uint8, device=device),
        )

    @property
    def geometry(self) -> LayerGeometry:
        return self.pool.geometry

    @property
    def scale(self) -> float:
        return float(self.case.head_dim**-0.5)

    @property
    def nbytes(self) -> int:
        """Bytes of the cache that one call must read."""
        case = self.case
        shape = CacheShape(case.mode, case.kv_heads, case.head_dim, case.layout, case.window)
        return _tokens_read(case, self.lengths) * shape.token_bytes

    def prepare(self, index: int = 0) -> None:
        """Build the schedule; it holds for every table, since it depends on lengths only."""
        launch.prepare(
            self.pool.data, self.case.q_heads, self.q.dtype, self.q.shape[0], self.tables[index], self.lengths,
            self.starts, self.workspace, self.geometry, checked=False,
        )  # fmt: skip

    def attend(self, index: int = 0) -> None:
        """One call over page set `index`."""
        launch.attend(
            self.pool.data, self.q, self.tables[index], self.lengths, self.starts, None, self.workspace, self.out,
            None, self.geometry, scale=self.scale, softcap=0.0, checked=False, prepared=True,
        )  # fmt: skip

    def calls(self) -> list[Call]:
        """What is timed: one call for each page set."""
        each = self.prepare if self.case.kind == "schedule" else self.attend
        return [partial(each, index) for index in range(self.tables.shape[0])]

    def checked_error(self) -> float:
        """The error of a call whose outputs and workspace were poisoned before."""
        self.out.fill_(math.nan)
        self.workspace.fill_(POISON)
        self.prepare()
        self.attend()
        return self.error_of(self.out)

    def error_of(self, out: Tensor) -> float:
        """The largest relative L2 error of a checked sequence of page set 0. Raises ArithmeticError for NaN or inf."""
        error = max(self._error_of(out, sequence) for sequence in self.checked_sequences())
        if not math.isfinite(error):
            raise ArithmeticError("the result holds NaN or infinity, or was not written everywhere")
        return error

    def checked_sequences(self) -> list[int]:
        count = self.case.seqs
        return list(range(count)) if count <= CHECKED_WHOLE else [0, count // 2, count - 1]

    def _error_of(self, out: Tensor, sequence: int) -> float:
        case, length = self.case, int(self.lengths[sequence])
        k, v = (x.double() for x in self.pool.values(self.slots_of(sequence, length), torch.float32))
        rows = slice(sequence * case.queries, (sequence + 1) * case.queries)
        grouped = (case.queries, case.kv_heads, case.q_heads // case.kv_heads, case.head_dim)
        q, found = (x[rows].double().view(grouped) for x in (self.q, out))
        keys = torch.arange(length, device=q.device)
        wrong = total = 0.0
        for start in range(0, case.queries, CHECKED_QUERIES):
            part = slice(start, start + CHECKED_QUERIES)
            position = length - case.queries + torch.arange(case.queries, device=q.device)[part, None]
            hidden = keys > position
            if case.window:
                hidden |= keys <= position - case.window
            scores = torch.einsum("qhgd,nhd->qhgn", q[part], k) * self.scale
            weights = scores.masked_fill(hidden[:, None, None, :], -math.inf).softmax(-1)
            right = torch.einsum("qhgn,nhd->qhgd", weights, v)
            wrong += float((found[part] - right).square().sum())
            total += float(right.square().sum())
        # Python's max would pass over a NaN that is not first.
        return math.sqrt(wrong / total) if math.isfinite(wrong) else math.inf

    def slots_of(self, sequence: int, length: int) -> Tensor:
        """Slots of the first `length` tokens of a sequence in page set 0."""
        pages = self.tables[0, sequence].long()
        return (pages[:, None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE, device=pages.device)).flatten()[:length]

    def dequantised(self) -> Dequantised:
        """The whole cache as bfloat16, for peers."""
        blocks = self.geometry.num_blocks
        slots = torch.arange(blocks * BLOCK_SIZE, device=self.q.device)
        k, v = self.pool.values(slots, torch.bfloat16)
        shape = (blocks, BLOCK_SIZE, self.case.kv_heads, self.case.head_dim)
        return Dequantised(self.case, k.view(shape), v.view(shape), self.tables, self.lengths, self.starts, self.q)


def run(
    cases: Iterable[AttendCase], device: torch.device, timer: Timer, ceilings: Sequence[Ceiling], peers: PeerRun
) -> Iterator[Case | Failure]:
    """Measure each case, and beside it the peers that serve it. One that raises is a failure; the others still run."""
    for case in cases:
        try:
            yield measure(case, device, timer, ceilings, peers)
        except Exception as exc:  # noqa: BLE001  # whatever one case raises, the device time of the others is not lost
            yield Failure(case.name, f"{type(exc).__name__}: {exc}")
        if device.type == "cuda":
            # Caches of very different size follow each other; cached segments of one do not serve the next.
            torch.cuda.empty_cache()


def measure(case: AttendCase, device: torch.device, timer: Timer, ceilings: Sequence[Ceiling], peers: PeerRun) -> Case:
    """One case. Prefill is bound by arithmetic and a schedule reads no cache, so neither has a floor."""
    setup = Attend.of(case, device)
    setup.prepare()
    timing = timer(setup.calls())
    is_bound_by_memory = case.kind not in ("prefill", "schedule")
    return Case(
        name=case.name,
        us=timing.us,
        spread_us=timing.spread_us,
        labels=case.labels,
        nbytes=setup.nbytes if is_bound_by_memory else None,
        floor_us=floor_us(ceilings, READ, setup.nbytes) if is_bound_by_memory else None,
        error=setup.checked_error(),
        peers=() if case.kind == "schedule" else peers.beside(case, setup.dequantised, setup.error_of),
    )


def _tokens_read(case: AttendCase, lengths: Tensor) -> int:
    """Cached tokens that the queries of all sequences see together."""
    seen = lengths if case.window is None else lengths.clamp(max=case.window + case.queries - 1)
    return int(seen.sum())

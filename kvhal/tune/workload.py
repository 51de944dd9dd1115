"""What is run on the device to judge a tuning row: attention over pages of a pool, and stores into a small cache.

Both run the launches that the operators run, with the row that `launch.set_tuning` was given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from kvhal.kernels import reference
from kvhal.kernels.geometry import LayerGeometry
from kvhal.kernels.triton import launch
from kvhal.kernels.triton.tuning import Tuning
from kvhal.kernels.triton.workspace import AttendCut, triton_workspace_bytes
from kvhal.layout import Layout
from kvhal.tune.pool import BLOCK, Heads, Pool

__all__ = ["Attend", "Shape", "Store", "cut_of"]

DTYPE = torch.bfloat16
POISON = 0xFF
# Of the cache that stores are checked on.
CHECKED_BLOCKS = 64
# Tokens of a decode step, each in a page of its own; more come from prompts, which fill pages.
MOST_SINGLE = 256
# Rows of a sequence, and sequences of a batch, that are compared with the reference.
_JUDGED_ROWS = 8
_JUDGED = 8
_MOST_SETS = 64


@dataclass(frozen=True, slots=True)
class Shape:
    """A batch: cached tokens (the new ones included) and queries of each sequence."""

    name: str
    lengths: tuple[int, ...]
    queries: tuple[int, ...]

    @classmethod
    def even(cls, seqs: int, length: int, queries: int = 1) -> Shape:
        name = f"{seqs}x{length}" if queries == 1 else f"{seqs}x{length} q{queries}"
        return cls(name, (length,) * seqs, (queries,) * seqs)

    @property
    def pages(self) -> int:
        """Columns of the block table."""
        return -(-max(self.lengths) // BLOCK)

    @property
    def blocks(self) -> int:
        return self.pages * len(self.lengths)


@dataclass(slots=True)
class Attend:
    """One batch over a pool. tables: [sets, sequences, pages], each set of different pages as far as the pool goes."""

    pool: Pool
    shape: Shape
    heads: Heads
    tables: Tensor
    lens: Tensor
    starts: Tensor
    q: Tensor
    out: Tensor
    work: Tensor
    right: list[tuple[list[int], Tensor]] = field(default_factory=list)

    @classmethod
    def of(cls, pool: Pool, shape: Shape, heads: Heads, rotate_bytes: int) -> Attend:
        device, seqs, tokens = pool.data.device, len(shape.lengths), sum(shape.queries)
        least = -(-rotate_bytes // (shape.blocks * pool.g.block_stride))
        sets = max(1, min(_MOST_SETS, least, pool.g.num_blocks // shape.blocks))
        order = torch.randperm(pool.g.num_blocks, generator=torch.Generator().manual_seed(1))[: sets * shape.blocks]
        tables = order.int().view(sets, seqs, shape.pages).to(device)
        ends = torch.tensor([0, *shape.queries]).cumsum(0).int()
        q = torch.randn((tokens, heads.kv * heads.group, heads.dim), generator=torch.Generator().manual_seed(2))
        there = q.to(DTYPE).to(device)
        lens = torch.tensor(shape.lengths, dtype=torch.int32, device=device)
        empty = torch.empty(0, dtype=torch.uint8, device=device)
        return cls(pool, shape, heads, tables, lens, ends.to(device), there, torch.empty_like(there), empty)

    def error(self, row: Tuning) -> float:
        """Relative L2 of the judged rows against float64 attention over what the reference reads from the pages."""
        self._prepare(row)
        self.out.fill_(float("nan"))
        self._attend(self.tables[0])
        self.right = self.right or [self._right(b) for b in self._judged()]
        wrong = sum(float((self.out[rows].double().cpu() - right).square().sum()) for rows, right in self.right)
        size = sum(float(right.square().sum()) for _, right in self.right)
        return float((wrong / size) ** 0.5)

    def calls(self, row: Tuning) -> list[Callable[[], object]]:
        """The attends of one layer, their schedule made before as a step does it."""
        self._prepare(row)
        return [partial(self._attend, table) for table in self.tables]

    def _prepare(self, row: Tuning) -> None:
        heads = self.heads.kv * self.heads.group
        nbytes = triton_workspace_bytes(self.pool.g, heads, self.q.shape[0], len(self.shape.lengths), row)
        if self.work.shape[0] < nbytes:
            self.work = torch.empty(nbytes, dtype=torch.uint8, device=self.q.device)
        self.work.fill_(POISON)
        launch.prepare(
            self.pool.data, heads, self.q.dtype, self.q.shape[0], self.tables[0], self.lens, self.starts, self.work,
            self.pool.g, checked=False,
        )  # fmt: skip

    def _attend(self, table: Tensor) -> None:
        launch.attend(
            self.pool.data, self.q, table, self.lens, self.starts, None, self.work, self.out, None, self.pool.g,
            scale=self.heads.dim**-0.5, softcap=0.0, checked=False, prepared=True,
        )  # fmt: skip

    def _judged(self) -> list[int]:
        """The sequences that are compared: all of a small batch, else the first and the last."""
        seqs = [b for b, queries in enumerate(self.shape.queries) if queries]
        is_even = len(set(self.shape.lengths)) == 1
        return [seqs[0], seqs[-1]][: len(seqs)] if is_even or len(seqs) > _JUDGED else seqs

    def _right(self, b: int) -> tuple[list[int], Tensor]:
        """(rows of q, their result in float64) of sequence b."""
        length, queries = self.shape.lengths[b], self.shape.queries[b]
        first = sum(self.shape.queries[:b])
        step = max(1, queries // _JUDGED_ROWS)
        at = [*range(0, queries - 1, step), queries - 1]
        k, v = self.pool.rows_of(self.tables[0, b], length)
        rows = [first + i for i in at]
        x = self.q[rows].double().cpu().view(len(at), self.heads.kv, self.heads.group, -1)
        scores = torch.einsum("qhgd,nhd->qhgn", x, k) * self.heads.dim**-0.5
        for row, i in enumerate(at):
            scores[row, :, :, length - queries + i + 1 :] = float("-inf")
        right = torch.einsum("qhgn,nhd->qhgd", scores.softmax(-1), v)
        return rows, right.flatten(1, 2)


@dataclass(slots=True)
class Store:
    """Stores of one family. Rows and slots are made on the CPU, so that the reference stores the very same.

    checks: (k, v, slots, the bytes that the reference leaves) on a poisoned cache, in turn.
    """

    layout: Layout
    heads: Heads
    device: torch.device
    checks: list[tuple[Tensor, Tensor, Tensor, Tensor]] = field(default_factory=list)
    pool: Pool | None = None

    def wrong_bytes(self, counts: Sequence[int]) -> float:
        """Bytes that differ from the reference's, after stores of single tokens, whole pages and what is neither."""
        if not self.checks:
            self.checks = list(self._right(counts))
        cache, wrong = self._poisoned().data.to(self.device), 0
        g = LayerGeometry.of(self.layout.with_blocks(CHECKED_BLOCKS), 0)
        for k, v, slots, right in self.checks:
            launch.store(
                cache, k.to(self.device), v.to(self.device), slots.to(self.device), g, checked=False
            )  # fmt: skip
            wrong += int((cache.cpu() != right).sum())
        return float(wrong)

    def calls(self, count: int, rotate_bytes: int) -> list[Callable[[], object]]:
        """Stores of `count` tokens: single random slots up to MOST_SINGLE, whole pages above."""
        if self.pool is None:
            self.pool = Pool.empty(self.layout, self.device)
        g, data = self.pool.g, self.pool.data
        row_bytes = 2 * self.heads.kv * self.heads.dim * DTYPE.itemsize
        sets = max(2, min(_MOST_SETS, rotate_bytes // (count * row_bytes)))
        generator = torch.Generator(self.device).manual_seed(3)
        found: list[Callable[[], object]] = []
        for _ in range(sets):
            shape = (2, count, self.heads.kv, self.heads.dim)
            k, v = torch.randn(shape, generator=generator, device=self.device).to(DTYPE)
            if count <= MOST_SINGLE:
                slots = torch.randperm(g.num_blocks * BLOCK, generator=generator, device=self.device)[:count]
            else:
                pages = torch.randperm(g.num_blocks, generator=generator, device=self.device)[: -(-count // BLOCK)]
                slots = (pages[:, None] * BLOCK + torch.arange(BLOCK, device=self.device)).flatten()[:count]
            found.append(partial(launch.store, data, k, v, slots, g, checked=False))
        return found

    def _poisoned(self) -> Pool:
        """On the CPU."""
        found = Pool.empty(self.layout.with_blocks(CHECKED_BLOCKS), torch.device("cpu"))
        found.data[: found.layout.groups[0].nbytes] = POISON
        return found

    def _right(self, counts: Sequence[int]) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
        cache, generator, most = self._poisoned(), torch.Generator().manual_seed(4), CHECKED_BLOCKS * BLOCK
        for count in sorted({min(count, most) for count in counts}):
            scattered = torch.randperm(most, generator=generator)[:count]
            scattered[6::7] = -1
            start = int(torch.randint(0, most - count + 1, (1,), generator=generator))
            for slots in (scattered, torch.arange(count), torch.arange(start, start + count)):
                k, v = (self._rows(count, generator) for _ in range(2))
                reference.store(cache.data, k, v, slots, cache.g, checked=True)
                yield k, v, slots, cache.data.clone()

    def _rows(self, count: int, generator: torch.Generator) -> Tensor:
        """Rows of very different size; zeros, a NaN and an infinity among them."""
        x = torch.randn((count, self.heads.kv, self.heads.dim), generator=generator)
        x *= torch.exp(3 * torch.randn((count, self.heads.kv, 1), generator=generator))
        x[0] = 0.0
        for at, value in ((1, float("nan")), (2, float("inf"))):
            if count > at:
                x[at, 0, 0] = value
        return x.to(DTYPE)


def cut_of(layout: Layout, shape: Shape, heads: Heads, row: Tuning) -> AttendCut:
    """How the launches cut a batch under a row; needs no device."""
    g = LayerGeometry.of(layout, 0)
    seqs, tokens = len(shape.lengths), sum(shape.queries)
    return AttendCut.of(g, heads.kv * heads.group, tokens, seqs, str(DTYPE).removeprefix("torch."), row)

"""What `kvhal run` does with a live cache: prefill, decode, read back, move, and check every result against float64.

The data come from a fixed seed. Sequences are ragged, their blocks scattered over the whole cache, and tokens are
capped, so that a cache of any size is checked in seconds.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvhal.layout import GroupLayout
from kvhal.lease import CacheLease
from kvhal.movement import Blocks
from kvhal.run import check, oracle
from kvhal.run.check import Check
from kvhal.run.workload import SEED, NormalData
from kvhal.spec import OpaqueStore, ScaledStore
from kvhal.step import Step

__all__ = ["GroupRun", "exercise"]

MAX_TOKENS = 1024
MAX_SEQUENCES = 4
FULL_STEPS = 16
MAX_LAYERS = 3


@dataclass(frozen=True, slots=True)
class GroupRun:
    """What ran on one group. layers: those tested; readers: layers that read another's pages."""

    group: str
    layers: tuple[int, ...]
    readers: tuple[int, ...]
    sequence_lens: tuple[int, ...]
    prefill_chunks: int
    is_window_crossed: bool
    checks: tuple[Check, ...]


def exercise(lease: CacheLease) -> tuple[GroupRun, ...]:
    """Use every group of `lease` and check the results. Takes one step a group, of the planned shape."""
    return tuple(_Run(lease, placed).result() for placed in lease.layout.groups)


# k and v of each sequence, by layer.
_Rows = dict[int, list[tuple[Tensor, Tensor]]]


class _Run:
    """The exercise of one group."""

    def __init__(self, lease: CacheLease, placed: GroupLayout) -> None:
        self.lease = lease
        self.placed = placed
        self.group = placed.group
        self.data = NormalData(lease, placed)
        self.layers = _some(self.group.layers)
        self.readers = tuple(layer for layer, source in lease.layout.spec.shares if source in self.layers)[:1]
        self.lengths, self.blocks, self.spare = _batch(lease, placed)
        self.checks: list[Check] = []

    def result(self) -> GroupRun:
        chunks = self._attend() if self.group.k is not None else 0
        if any(isinstance(s, OpaqueStore) for s in self.group.stores):
            self._fill_opaque()
        self._move()
        window = self.group.window
        return GroupRun(
            group=self.group.name,
            layers=self.layers,
            readers=self.readers,
            sequence_lens=self.lengths if self.group.k is not None else (),
            prefill_chunks=chunks,
            is_window_crossed=window is not None and window < max(self.lengths),
            checks=tuple(self.checks),
        )

    def _attend(self) -> int:
        """Prefill in chunks and decode one token, each stored and attended through the step; the number of chunks."""
        step = self.lease.step(group=self.group.name)
        width = max(map(len, self.blocks))
        step.update(block_table=torch.tensor([[*row, *[0] * (width - len(row))] for row in self.blocks]))
        original = {layer: [self.data.rows(layer, n) for n in self.lengths] for layer in self.layers}
        every = (*self.layers, *self.readers)
        errors: list[tuple[float, float]] = []
        chunks = list(_chunks(self.lengths, self.lease.plan.step.max_tokens))
        for number, chunk in enumerate(chunks):
            self._store(step, chunk, original)
            # Every layer decodes; prefill chunks take turns.
            turn = every if chunk is chunks[-1] else (every[number % len(every)],)
            errors += (self._errors(step, layer, chunk, original[self._source(layer)]) for layer in turn)
        self._check_reads(original)
        k, v = self._stored()
        together = math.hypot(check.ROUND_TRIP[k.encoding][0], check.ROUND_TRIP[v.encoding][0])
        self._check(
            "attend",
            _worst(e for e, _ in errors),
            check.KERNEL_BOUND,
            "against float64 over the same codes: bfloat16 rounding",
        )
        why = "against float64 over the original k, v: both round trips x 1.2 + rounding"
        self._check("attend, original", _worst(e for _, e in errors), 1.2 * together + check.KERNEL_BOUND, why)
        return len(chunks) - 1

    def _store(
        self, step: Step, chunk: list[tuple[int, int]], original: dict[int, list[tuple[Tensor, Tensor]]]
    ) -> None:
        step.update(
            slots=torch.cat([self._slots(i, a, b) for i, (a, b) in enumerate(chunk)]),
            seq_lens=torch.tensor([b for _, b in chunk]),
            query_lens=torch.tensor([b - a for a, b in chunk]),
        )
        for layer in self.layers:
            k, v = (
                torch.cat([rows[kv][a:b] for rows, (a, b) in zip(original[layer], chunk, strict=True)]) for kv in (0, 1)
            )
            self.lease.layer(layer).store(k, v, step)

    def _errors(
        self, step: Step, layer: int, chunk: list[tuple[int, int]], original: list[tuple[Tensor, Tensor]]
    ) -> tuple[float, float]:
        """Relative L2 of one attend call against float64 over what the cache holds, and over the original."""
        q = self.data.queries(layer, sum(b - a for a, b in chunk))
        cache = self.lease.layer(layer)
        out = cache.attend(q, step)
        held: list[Tensor] = []
        meant: list[Tensor] = []
        start = 0
        for i, (a, b) in enumerate(chunk):
            rows, start = q[start : start + b - a], start + b - a
            if a == b:
                continue
            for into, (k, v) in ((held, cache.gather(self._slots(i, 0, b))), (meant, original[i])):
                into.append(self._float64(rows, k[:b], v[:b], a))
        return oracle.relative_l2(out, torch.cat(held)), oracle.relative_l2(out, torch.cat(meant))

    def _float64(self, q: Tensor, k: Tensor, v: Tensor, first: int) -> Tensor:
        return oracle.attention(q, k, v, first=first, scale=q.shape[-1] ** -0.5, window=self.group.window)

    def _check_reads(self, original: _Rows) -> None:
        """Every stored row read back: against its bytes decoded by the oracle, and against the original."""
        slots = torch.cat([self._slots(i, 0, n) for i, n in enumerate(self.lengths)])
        read, trips = [], {"k": [0.0], "v": [0.0]}
        for layer in (*self.layers, *self.readers):
            found = self.lease.layer(layer).gather(slots)
            source = original[self._source(layer)]
            bytes_say = oracle.read_rows(self.lease, layer, slots)
            for at, name in enumerate("kv"):
                read.append(oracle.relative_l2(found[at], bytes_say[at]))
                trips[name].append(oracle.relative_l2(found[at], torch.cat([rows[at] for rows in source])))
        self._check("gather", _worst(read), check.READ_BOUND, "against the bytes decoded in float64: fp32 rounding")
        for store in self._stored():
            bound, why = check.ROUND_TRIP[store.encoding]
            self._check(f"round trip {store.name}", _worst(trips[store.name]), bound, f"against the original: {why}")

    def _fill_opaque(self) -> None:
        """Write the opaque stores of the used blocks and read them back; attention over them is another question."""
        wrong = 0
        for store in (s for s in self.group.stores if isinstance(s, OpaqueStore)):
            for layer in self.layers:
                for block in (b for row in self.blocks for b in row):
                    wanted = self.data.opaque(self.lease.view(store.name, layer).tensor()[block])
                    self.lease.view(store.name, layer).tensor()[block].copy_(wanted)
                    wrong += int((self.lease.view(store.name, layer).tensor()[block] != wanted).sum())
        self._check("opaque stores", wrong, 0, "differ after being written through the views", "items")

    def _move(self) -> None:
        """Copy a used block to a spare one, export it, clear it and import it again; all must be the same bytes."""
        used, name = self.blocks[0][0], self.group.name
        before = self._bytes(used)
        wrong = 0
        if self.spare is not None:
            self.lease.copy_blocks([(used, self.spare)], group=name)
            wrong += int((self._bytes(self.spare) != before).sum())
        blob = self.lease.export_blocks([used], group=name).to_bytes()
        for part in self.lease.layout.ranges(used, name):
            self.lease.bytes_at("uint8", part.offset, (part.nbytes,), (1,)).zero_()
        self.lease.import_blocks(Blocks.from_bytes(blob), [used], group=name)
        wrong += int((self._bytes(used) != before).sum())
        how = "differ after copy, export and import" if self.spare is not None else "differ after export and import"
        self._check("move blocks", wrong, 0, how, "bytes")

    def _source(self, layer: int) -> int:
        return self.lease.layout.spec.source_of(layer)

    def _bytes(self, block: int) -> Tensor:
        parts = self.lease.layout.ranges(block, self.group.name)
        return torch.cat([self.lease.bytes_at("uint8", p.offset, (p.nbytes,), (1,)) for p in parts])

    def _slots(self, sequence: int, first: int, last: int) -> Tensor:
        size, row = self.group.block_size, self.blocks[sequence]
        places = [row[i // size] * size + i % size for i in range(first, last)]
        return torch.tensor(places, dtype=torch.int64, device=self.lease.torch_device)

    def _stored(self) -> tuple[ScaledStore, ScaledStore]:
        assert self.group.k is not None
        assert self.group.v is not None
        return self.group.k, self.group.v

    def _check(self, name: str, measured: float, bound: float, why: str, unit: str = "relative L2") -> None:
        self.checks.append(Check(name, self.group.name, measured, bound, unit, why))


def _worst(errors: Iterable[float]) -> float:
    """The largest; NaN, which compares with nothing, is worse than any."""
    return max(errors, key=lambda e: math.inf if math.isnan(e) else e)


def _some(layers: tuple[int, ...]) -> tuple[int, ...]:
    """The first, a middle and the last layer."""
    picked = {layers[0], layers[len(layers) // 2], layers[-1]}
    return tuple(sorted(picked))[:MAX_LAYERS]


def _batch(lease: CacheLease, placed: GroupLayout) -> tuple[tuple[int, ...], list[list[int]], int | None]:
    """Ragged sequence lengths, the blocks of each, and a block of none (None if there is only one block)."""
    shape, size = lease.plan.step, placed.group.block_size
    usable = max(1, placed.num_blocks - 1)
    count = min(MAX_SEQUENCES, shape.max_seqs, shape.max_tokens, usable)
    tokens = min(MAX_TOKENS, FULL_STEPS * shape.max_tokens)
    longest = max(1, min(tokens // 2, shape.max_blocks * size, usable // count * size))
    # A third, a fifth: lengths that are no multiple of a block.
    lengths = tuple(max(1, (longest - i) // d) for i, d in enumerate((1, 2, 3, 5)[:count]))
    needed = [-(-n // size) for n in lengths]
    chosen = random.Random(SEED).sample(range(placed.num_blocks), min(placed.num_blocks, sum(needed) + 1))  # noqa: S311  # not a secret
    if placed.num_blocks - 1 not in chosen:
        chosen[0] = placed.num_blocks - 1  # the last block has the largest offsets
    rows = [[chosen.pop(0) for _ in range(n)] for n in needed]
    return lengths, rows, chosen[0] if chosen else None


def _chunks(lengths: Sequence[int], max_tokens: int) -> Iterator[list[tuple[int, int]]]:
    """Position ranges of each sequence, a chunk at a time: prefill of all tokens but one, then that one."""
    done, last = [0] * len(lengths), [n - 1 for n in lengths]
    share = max(1, max_tokens // len(lengths))
    while done != last:
        chunk = [(a, min(a + share, end)) for a, end in zip(done, last, strict=True)]
        done = [b for _, b in chunk]
        yield chunk
    yield [(n - 1, n) for n in lengths]

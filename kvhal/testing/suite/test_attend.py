"""Attention over the cache against float64 over what the cache holds."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvhal.lease import CacheLease
from kvhal.run.oracle import read_rows, relative_l2
from kvhal.testing import right
from kvhal.testing.cases import Case
from kvhal.testing.plugin import Measure

# Rounding q, the products and the output to 16 bits costs about 1.7e-3, fp32 summation the rest; see kernels/attention.
BOUND = 3e-3
LENGTHS = (37, 1, 24)
DTYPES = (torch.float32, torch.bfloat16)
# Rows (queries x query heads) of the long prompts: beyond `staged_rows` of every tuning row.
LONG_ROWS = 18000


class Batch:
    """Sequences of ragged length in scattered blocks of a poisoned cache."""

    def __init__(self, case: Case, lease: CacheLease, lengths: tuple[int, ...] = LENGTHS, seed: int = 1) -> None:
        self.case, self.lease, self.lengths = case, lease, lengths
        size = case.shape.block_size
        order = torch.randperm(
            lease.layout.groups[0].num_blocks, generator=torch.Generator().manual_seed(seed)
        ).tolist()
        width = -(-max(lengths) // size)
        self.blocks = [[order.pop() for _ in range(-(-n // size))] for n in lengths]
        self.table = case.tensor([row + [0] * (width - len(row)) for row in self.blocks], torch.int32)
        slots = [s for row, n in zip(self.blocks, lengths, strict=True) for s in self.slots(row, n)]
        lease.layer(1).store(*case.rows(len(slots), seed), case.tensor(slots))

    def slots(self, row: list[int], length: int) -> list[int]:
        size = self.case.shape.block_size
        return [row[i // size] * size + i % size for i in range(length)]

    def queries(self, lens: tuple[int, ...], dtype: torch.dtype, seed: int = 9) -> Tensor:
        shape = self.case.shape
        q = torch.randn((sum(lens), shape.q_heads, shape.head_dim), generator=torch.Generator().manual_seed(seed))
        return q.to(self.case.device, dtype)

    def wanted(self, q: Tensor, lens: tuple[int, ...], **options: object) -> tuple[Tensor, Tensor]:
        """(out, lse) of every sequence in float64."""
        parts = []
        start = 0
        for row, length, n in zip(self.blocks, self.lengths, lens, strict=True):
            k, v = read_rows(self.lease, 1, self.case.tensor(self.slots(row, length)))
            scale = options.get("scale") or self.case.shape.head_dim**-0.5
            rest = {name: value for name, value in options.items() if name != "scale"}
            window = self.case.shape.window
            parts.append(right.attention(q[start : start + n], k, v, scale=scale, window=window, **rest))  # type: ignore[arg-type]  # options of both
            start += n
        return torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts])


def blocks_for(case: Case, lengths: tuple[int, ...] = LENGTHS) -> int:
    return sum(-(-n // case.shape.block_size) for n in lengths) + 2


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("lens", [(1, 1, 1), (3, 1, 8), (37, 1, 24)], ids=["decode", "chunks", "prefill"])
def test_attention_is_within_its_bound(case: Case, lens: tuple[int, ...], dtype: torch.dtype, measure: Measure) -> None:
    with case.allocate(blocks=blocks_for(case)) as lease:
        batch = Batch(case, lease)
        q = batch.queries(lens, dtype)
        wanted, _ = batch.wanted(q, lens)
        found = lease.layer(1).attend(
            q, batch.table, case.tensor(LENGTHS, torch.int32), query_lens=case.tensor(lens, torch.int32)
        )
        assert found.dtype is dtype
        measure("attend: relative L2", relative_l2(found.cpu(), wanted), BOUND)


def test_long_prompts_are_within_their_bound(case: Case, measure: Measure) -> None:
    """So many rows that a platform may take a way of its own; one row in 33 is judged, all must be finite."""
    tokens = LONG_ROWS // case.shape.q_heads // 3 + 1
    lens, lengths = (tokens, tokens, tokens, 1), (tokens + 40, tokens, tokens + 7, 9)
    with case.allocate(blocks=blocks_for(case, lengths)) as lease:
        batch = Batch(case, lease, lengths)
        q = batch.queries(lens, torch.bfloat16)
        found = lease.layer(1).attend(
            q, batch.table, case.tensor(lengths, torch.int32), query_lens=case.tensor(lens, torch.int32)
        )
        assert bool(found.isfinite().all())
        first, errors = 0, []
        for row, length, n in zip(batch.blocks, lengths, lens, strict=True):
            k, v = (x.cpu() for x in read_rows(lease, 1, case.tensor(batch.slots(row, length))))
            for i in sorted({0, n - 1, *range(5, n, 33)}):
                one, end = slice(first + i, first + i + 1), length - n + i + 1
                wanted, _ = right.attention(
                    q[one], k[:end], v[:end], scale=case.shape.head_dim**-0.5, window=case.shape.window
                )
                errors.append(relative_l2(found[one].cpu(), wanted))
            first += n
        measure("attend, long prompts: relative L2", max(errors), BOUND)


def test_softcap_sinks_scale_and_lse(case: Case, measure: Measure) -> None:
    lens = (2, 1, 1)
    with case.allocate(blocks=blocks_for(case)) as lease:
        batch = Batch(case, lease)
        q = batch.queries(lens, torch.float32)
        sinks = torch.linspace(-1.0, 2.0, case.shape.q_heads).to(case.device)
        lse = torch.empty((q.shape[0], case.shape.q_heads), device=case.device)
        found = lease.layer(1).attend(
            q,
            batch.table,
            case.tensor(LENGTHS, torch.int32),
            query_lens=case.tensor(lens, torch.int32),
            scale=0.11,
            softcap=4.0,
            sinks=sinks,
            lse=lse,
        )
        wanted, wanted_lse = batch.wanted(q, lens, scale=0.11, softcap=4.0, sinks=sinks)
        measure("attend, softcap and sinks: relative L2", relative_l2(found.cpu(), wanted), BOUND)
        measure("attend, lse: relative L2", relative_l2(lse.cpu(), wanted_lse), BOUND)


def test_a_step_gives_what_plain_tensors_give(case: Case, measure: Measure) -> None:
    with case.allocate(blocks=blocks_for(case)) as lease:
        batch = Batch(case, lease)
        q, lengths = batch.queries((1, 1, 1), torch.float32), case.tensor(LENGTHS, torch.int32)
        step = lease.step()
        step.update(block_table=batch.table, seq_lens=lengths)
        plain, stepped = lease.layer(1).attend(q, batch.table, lengths), lease.layer(1).attend(q, step)
        measure("attend, step: relative L2", relative_l2(stepped.cpu(), plain.cpu()), BOUND)


def test_what_a_query_does_not_see_cannot_leak(case: Case) -> None:
    """Poison everywhere else, the tail of the last page included; a NaN that is seen does show."""
    with case.allocate(blocks=blocks_for(case)) as lease:
        batch = Batch(case, lease)
        q, lengths = batch.queries((1, 1, 1), torch.float32), case.tensor(LENGTHS, torch.int32)
        clean = lease.layer(1).attend(q, batch.table, lengths)
        assert bool(clean.isfinite().all())
        last = case.tensor(batch.slots(batch.blocks[0], LENGTHS[0])[-1:])
        k, v = case.rows(1, seed=11)
        v[:] = float("nan")
        lease.layer(1).store(k, v, last)
        seen = lease.layer(1).attend(q, batch.table, lengths)
        assert bool(seen[0].isnan().all())
        torch.testing.assert_close(seen[1:], clean[1:])


def test_a_sequence_of_no_tokens_gives_zeros(case: Case) -> None:
    with case.allocate(blocks=blocks_for(case)) as lease:
        batch = Batch(case, lease)
        lengths = case.tensor((LENGTHS[0], 0, LENGTHS[2]), torch.int32)
        found = lease.layer(1).attend(batch.queries((1, 1, 1), torch.float32), batch.table, lengths)
        assert float(found[1].abs().max()) == 0.0
        assert bool(found.isfinite().all())

"""The schedule of a step against one written out tile by tile."""

from __future__ import annotations

import pytest
import torch

from kvhal.kernels.triton import launch, schedule
from kvhal.kernels.triton.workspace import AttendCut, AttendWorkspace, triton_workspace_bytes
from tests.kernels.oracle import make
from tests.kernels.test_attend import Batch
from tests.triton.interpreted.check_attend import check

BATCHES = {
    "decode": ([100, 3, 0, 61, 500], [1, 1, 1, 1, 1]),
    "few queries": ([100, 3, 7, 61], [3, 1, 2, 4]),
    "one long sequence": ([700], [1]),
    "prompts": ([100, 40], [40, 9]),
}


def line_of(one: Batch, cut: AttendCut, prologue: int) -> list[tuple[int, int, int]]:
    """(sequence, item, virtual tile in it) of every virtual tile of one kv head."""
    window, line = one.cache.geometry.window, []
    for sequence, (length, queries) in enumerate(zip(one.lengths, one.queries, strict=True)):
        for item in range(-(-queries // cut.tokens) if length else 0):
            first, last = item * cut.tokens, min(queries, (item + 1) * cut.tokens) - 1
            positions = [length - queries + n for n in (first, last)]
            lowest = max(0, positions[0] - window + 1) if window else 0
            tiles = -(-(positions[1] + 1) // cut.keys) - lowest // cut.keys
            line += [(sequence, item, n) for n in range(prologue + tiles)]
    return line


@pytest.mark.parametrize("window", [None, 24])
@pytest.mark.parametrize("heads", [1, 2, 5, 64])
@pytest.mark.parametrize("name", BATCHES)
def test_every_head_is_cut_alike_in_equal_parts(name: str, heads: int, window: int | None) -> None:
    lengths, queries = BATCHES[name]
    cache = make("int8_per_token_head", blocks=64, heads=heads, dim=16, window=window)
    one = Batch(cache, lengths, queries, q_heads=2 * heads)
    g, tokens, tuning = cache.geometry, one.q.shape[0], launch.tuning_of(torch.device("cpu"))
    nbytes = triton_workspace_bytes(g, one.q_heads, tokens, len(lengths))
    workspace = torch.full((nbytes,), 0xFF, dtype=torch.uint8)
    starts = torch.tensor([sum(queries[:n]) for n in range(len(queries) + 1)], dtype=torch.int32)
    seq_lens = torch.tensor(lengths, dtype=torch.int32)
    launch.prepare(
        cache.data, one.q_heads, one.q.dtype, tokens, one.table, seq_lens, starts, workspace, g, checked=True
    )  # fmt: skip
    cut = AttendCut.of(g, one.q_heads, tokens, len(lengths), "float32", tuning)
    prologue = tuning.prologue
    line = line_of(one, cut, prologue)
    work = AttendWorkspace.of(cut, g.v.head_dim, tokens, len(lengths))
    most = cut.most_tiles(g, tokens, len(lengths), one.table.shape[1], tuning)
    launched, tiles = cut.parts(heads, launch.INTERPRETED_PROCESSORS, most)[0], len(line)
    rows = workspace[work.schedule : work.schedule + 32 * launched].view(torch.int32).view(launched, 8).tolist()
    parts, at = sum(row[3] > 0 for row in rows), 0
    assert parts == min(launched, tiles)
    for sequence, item, tile, count, first_row, new, length in (row[:7] for row in rows[:parts]):
        assert (sequence, item, tile) == line[at]
        assert (first_row, new, length) == (starts[sequence], queries[sequence], lengths[sequence])
        assert count in (tiles // parts, -(-tiles // parts))
        at += count
    assert at == tiles
    assert [row[3] for row in rows[parts:]] == [0] * (launched - parts)
    part_of = [part for part, row in enumerate(rows[:parts]) for _ in range(row[3])]
    told = workspace[work.rows : work.rows + 16 * tokens].view(torch.int32).view(tokens, 4).tolist()
    for sequence, (length, new) in enumerate(zip(lengths, queries, strict=True)):
        for query in range(new):
            state, *where = told[int(starts[sequence]) + query]
            if not length:
                assert state == schedule.EMPTY.value
                continue
            item = query // cut.tokens
            held = [part_of[n] for n, tile in enumerate(line) if tile[:2] == (sequence, item) and tile[2] >= prologue]
            assert where == [held[0], held[-1], query % cut.tokens]
            assert state == (schedule.JOINED.value if held[0] < held[-1] else schedule.WRITTEN.value)


@pytest.mark.parametrize("heads", [5, 16])
def test_heads_that_do_not_divide_the_programs_or_outnumber_them(heads: int) -> None:
    """12 programs: two parts of five heads each, or one part of sixteen, which is never joined."""
    cache = make("int8_per_token_head", blocks=48, heads=heads, dim=16)
    check(Batch(cache, [300, 5, 120], [1, 1, 1], q_heads=2 * heads))

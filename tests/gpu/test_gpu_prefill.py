"""attend over staged contexts on a GPU: the tests of `tests/kernels/staged.py`, and captured calls."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvhal.kernels.triton import launch
from kvhal.kernels.triton.workspace import triton_workspace_bytes
from tests.kernels import oracle, staged
from tests.kernels.oracle import make
from tests.kernels.staged import *  # noqa: F403  # the tests
from tests.kernels.test_attend import BOUND, Batch

pytestmark = pytest.mark.gpu
DEVICE = "cuda"


@pytest.mark.parametrize("direct", [False, True])
def test_a_captured_prefill_follows_its_lengths(direct: bool, device: torch.device) -> None:
    """One graph: what is staged, and what is read from the pages, changes with the lengths between replays."""
    one = Batch(make("int8_per_token_head", blocks=64, dim=64), [300, 200, 90], [40, 30, 20], q_heads=4)
    g, tokens = one.cache.geometry, one.q.shape[0]
    tuning = replace(staged.with_room(one, 12), direct=direct)
    launch.set_tuning(0, tuning)
    data, q, table = one.cache.data.to(device), one.q.to(device), one.table.to(device)
    lengths = torch.tensor(one.lengths, dtype=torch.int32, device=device)
    starts = torch.tensor([0, 40, 70, 90], dtype=torch.int32, device=device)
    nbytes = triton_workspace_bytes(g, 4, tokens, 3, tuning)
    work = torch.full((nbytes,), 0xFF, dtype=torch.uint8, device=device)
    out = torch.empty_like(q)

    def step() -> None:
        launch.attend(data, q, table, lengths, starts, None, work, out, None, g, scale=0.1, softcap=0.0, checked=False)

    for _ in range(3):
        step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    # Room for 12 tiles of 32 tokens.
    for now, places in (
        ([300, 200, 90], [0, -1, -1]),
        ([100, 200, 60], [0, 4, -1]),
        ([90, 70, 40], [0, 3, 6]),
        ([300, 30, 90], [0, 10, -1]),
    ):
        lengths.copy_(torch.tensor(now))
        out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert staged.places_in(work, one, tuning) == places
        kept = [slots[:n] for slots, n in zip(one.slots, now, strict=True)]
        for i, (first, last) in enumerate(((0, 40), (40, 70), (70, 90))):
            k, v = (one.cache.values(name, kept[i]) for name in ("k", "v"))
            right, _ = oracle.attention(one.q[first:last].double().numpy(), k, v, scale=0.1)
            assert oracle.relative(out[first:last].cpu(), right) <= BOUND

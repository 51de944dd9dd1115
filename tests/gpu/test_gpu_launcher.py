"""A call launched directly leaves what the plain launch leaves, and only calls that are the same go there."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kvhal.kernels import reference
from kvhal.kernels.triton import launch
from kvhal.kernels.triton.workspace import triton_workspace_bytes
from tests.gpu.test_kernels import registered as registered  # a fixture
from tests.kernels import oracle
from tests.kernels.oracle import Cache, make
from tests.kernels.test_attend import BOUND, Batch

pytestmark = pytest.mark.gpu


def rows(count: int) -> Tensor:
    return torch.randn(count, 2, 64, device="cuda", dtype=torch.bfloat16)


def shifted(x: Tensor) -> Tensor:
    """The same values at an address that is no multiple of 16."""
    room = torch.empty(x.numel() + 1, dtype=x.dtype, device=x.device)[1:].view_as(x)
    assert room.data_ptr() % 16
    return room.copy_(x)


def test_stores_are_the_same_bytes_whichever_way_they_go() -> None:
    cache = make("int8_per_token_head", blocks=40, heads=2, dim=64)
    data, g = cache.data.cuda(), cache.geometry
    for step in range(5):
        k, v, slots = rows(7), rows(7), torch.randperm(640, device="cuda")[:7]
        if step == 3:
            k, v = shifted(k), shifted(v)
        launch.store(data, k, v, slots, g, checked=False)
        reference.store(cache.data, k.cpu(), v.cpu(), slots.cpu(), g, checked=False)
        assert torch.equal(data.cpu(), cache.data)


def attended(cache: Cache, one: Batch, q: Tensor, stream: Any = None) -> Tensor:
    g = cache.geometry
    starts = torch.tensor([0, *np.cumsum(one.queries)], dtype=torch.int32).cuda()
    out = torch.full((q.shape[0], one.q_heads, g.v.head_dim), float("nan"), device="cuda")
    work = torch.full(
        (triton_workspace_bytes(g, one.q_heads, q.shape[0], len(one.lengths), launch.tuning_of(q.device)),),
        0xFF, dtype=torch.uint8, device="cuda",
    )  # fmt: skip
    given = (
        cache.data.cuda(), q, one.table.cuda(), torch.tensor(one.lengths, dtype=torch.int32).cuda(), starts, None, work,
        out, None, g,
    )  # fmt: skip
    torch.cuda.synchronize()
    with torch.cuda.stream(stream or torch.cuda.current_stream()):
        launch.attend(*given, scale=g.k.head_dim**-0.5, softcap=0.0, checked=False)
    torch.cuda.synchronize()
    return out.cpu()


def test_attends_are_right_whichever_way_they_go() -> None:
    cache = make("int8_per_token_head", blocks=64, heads=2, dim=64)
    one = Batch(cache, [300, 40, 7], [1, 1, 1], q_heads=8)
    right, _ = one.right()
    q = one.q.cuda()
    for given, stream in ((q, None), (q, None), (shifted(q), None), (q, torch.cuda.Stream()), (q.clone(), None)):
        assert oracle.relative(attended(cache, one, given, stream), right) <= BOUND


def test_threads_do_not_mix_their_arguments() -> None:
    from concurrent.futures import ThreadPoolExecutor

    cache = make("int8_per_token_head", blocks=64, heads=2, dim=64)
    batches = [Batch(cache, [length], [1], q_heads=8) for length in (300, 40, 150, 7)]
    rights = [one.right()[0] for one in batches]

    def work(index: int) -> float:
        one = batches[index % 4]
        found = attended(cache, one, one.q.cuda(), torch.cuda.Stream())
        return float(oracle.relative(found, rights[index % 4]))

    with ThreadPoolExecutor(4) as pool:
        assert max(pool.map(work, range(64))) <= BOUND

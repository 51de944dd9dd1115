"""torch.compile(fullgraph) of a layer's store and attend equals eager and copies no cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from kvhal import CacheSpec
from kvhal.hal import Hal
from kvhal.step import Step


def spec_of(mode: str) -> CacheSpec:
    scales: dict[str, Any] = {"k_scale": 0.02, "v_scale": 0.02} if mode == "fp8_e4m3" else {}
    return CacheSpec.uniform(mode=mode, num_layers=2, num_kv_heads=2, head_dim=32, num_q_heads=4, **scales)


@pytest.mark.parametrize("mode", ["int8_per_token_head", "fp8_e4m3"])
@pytest.mark.parametrize("addressing", ["checked", "counted"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_store_and_attend_compile_whole_and_equal_eager(hal: Hal, mode: str, addressing: str) -> None:
    torch.compiler.reset()
    plan = hal.plan(spec_of(mode), num_blocks=8, max_seqs=2, max_tokens=4, addressing=addressing)
    k, v, q = torch.randn(2, 2, 32), torch.randn(2, 2, 32), torch.randn(2, 4, 32)
    table = torch.tensor([[3, 1], [5, 0]], dtype=torch.int32)
    with hal.allocate(plan) as eager, hal.allocate(plan) as other:

        def refill(step: Step, length: int) -> None:
            slots = torch.tensor([48 + length - 1, 80 + length - 1])
            step.update(slots=slots, block_table=table, seq_lens=torch.tensor([length, length]))

        layers, mirror = [eager.layer(i) for i in range(2)], [other.layer(i) for i in range(2)]
        steps = eager.step(), other.step()

        def forward(k: torch.Tensor, v: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
            for layer in mirror:
                layer.store(k, v, steps[1])
                q = layer.attend(q, steps[1])
            return q

        counter = CompileCounterWithBackend("inductor")
        compiled = torch.compile(forward, fullgraph=True, backend=counter)
        address = other.cache_tensor().data_ptr()
        for length in range(1, 6):
            refill(steps[0], length)
            refill(steps[1], length)
            wanted = q
            for layer in layers:
                layer.store(k * length, v, steps[0])
                wanted = layer.attend(wanted, steps[0])
            got = compiled(k * length, v, q)
            assert torch.equal(got, wanted)
            assert torch.equal(eager.cache_tensor(), other.cache_tensor())
        assert counter.frame_count == 1
        assert other.cache_tensor().data_ptr() == address
        del compiled
        torch.compiler.reset()


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_the_compiled_graph_copies_no_cache(hal: Hal) -> None:
    """No tensor of the cache's size is made while the compiled function runs: measured at the allocator."""
    torch.compiler.reset()
    plan = hal.plan(spec_of("int8_per_token_head"), num_blocks=4096, max_seqs=2, max_tokens=4, max_context=32)
    with hal.allocate(plan) as lease:
        layer, step = lease.layer(0), lease.step()
        step.update(slots=torch.tensor([0, 16]), block_table=torch.tensor([[0], [1]]), seq_lens=torch.tensor([1, 1]))
        k, q = torch.randn(2, 2, 32), torch.randn(2, 4, 32)

        @torch.compile(fullgraph=True)
        def forward(k: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
            layer.store(k, k, step)
            return layer.attend(q, step)

        forward(k, q)
        with torch.profiler.profile(profile_memory=True) as profiler:
            forward(k, q)
        taken = [e.cpu_memory_usage for e in profiler.events()]
        assert sum(size > 0 for size in taken) > 0
        assert max(taken) < plan.nbytes / 16
        del forward
        torch.compiler.reset()

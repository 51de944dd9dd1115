"""The lifecycle on a real GPU, by the device's own readings: every byte back, whoever held views of it."""

from __future__ import annotations

import gc
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import kvhal
from kvhal.contract import Adopted
from kvhal.detection import registry
from kvhal.detection.host import HostFacts
from kvhal.errors import CaptureActive, DeviceError, StaleView
from kvhal.hal import Hal
from kvhal.lease import CacheLease
from kvhal.plan import Plan
from kvhal.readings import Known, Unknown
from kvhal.spec import CacheSpec
from kvhal.torch_cuda import Seams
from kvhal_rocm import RocmPlatform

pytestmark = pytest.mark.gpu

GIB, MIB = 2**30, 2**20
# What other tensors, library handles and torch's shared segments move between two readings.
NOISE = 64 * MIB


def plan_of(nbytes: int) -> Plan:
    """A plan of about `nbytes`. A plan is the same on every platform, so the CPU's table decides it."""
    spec = CacheSpec.uniform(
        mode="int8_per_token_head", num_layers=12, num_kv_heads=8, head_dim=128, num_q_heads=32, block_size=16
    )
    hal = kvhal.get("cpu")
    one = hal.plan(spec, num_blocks=1, max_seqs=8)
    return one.with_blocks(max(1, nbytes // one.layout.block_bytes))


def free(gpu: Hal) -> int:
    """Free memory as the device says it, cached bytes of torch returned first."""
    gc.collect()
    torch.cuda.synchronize(gpu.device.index)
    torch.cuda.empty_cache()
    return int(torch.cuda.mem_get_info(gpu.device.index)[0])


class Attention:
    """An attention layer that keeps strided views of the scales, as vLLM PR 39224's did."""

    def __init__(self, lease: CacheLease, layer: int) -> None:
        self.k_scale = lease.view("k_word", layer).tensor()
        self.v_scale = lease.view("v_word", layer).tensor()


def test_every_byte_comes_back_from_24_leaked_views(gpu: Hal) -> None:
    plan = plan_of(8 * GIB)
    start = free(gpu)
    lease = gpu.allocate(plan)
    assert start - free(gpu) >= plan.nbytes
    layers = [Attention(lease, layer) for layer in range(12)]
    release = lease.close()
    assert len(release.holders) == 24
    assert release.is_complete, release
    assert isinstance(release.confirmation.returned, Known), release.confirmation
    assert release.confirmation.returned.value >= 0.95 * plan.nbytes
    assert abs(start - free(gpu)) <= NOISE
    for layer in layers:
        with pytest.raises(StaleView):
            layer.k_scale.sum()


def test_dropping_the_caches_alone_returns_nothing(gpu: Hal) -> None:
    """The fault that started this project, shown on plain tensors: a small strided view pins the whole storage."""
    start, nbytes = free(gpu), 2 * GIB
    cache = torch.empty(nbytes // 4, dtype=torch.float32, device=gpu.platform.torch_device(gpu.device))
    scale = cache.as_strided((1024, 8), (4096, 1), 128)
    del cache
    assert start - free(gpu) >= nbytes
    del scale
    assert abs(start - free(gpu)) <= NOISE


def test_a_stale_view_cannot_write_into_the_next_cache(gpu: Hal) -> None:
    plan = plan_of(64 * MIB)
    lease = gpu.allocate(plan)
    leaked = lease.view("k_word", 0).tensor()
    lease.close()
    with gpu.allocate(plan) as second:
        second.cache_tensor().zero_()
        with pytest.raises(StaleView):
            leaked.fill_(1.0)
        assert int(torch.count_nonzero(second.cache_tensor())) == 0


def test_adopted_memory_is_left_as_the_engine_had_it(gpu: Hal) -> None:
    plan = plan_of(256 * MIB)
    device = gpu.platform.torch_device(gpu.device)
    engine = torch.full((plan.nbytes + 8192,), 0xA5, dtype=torch.uint8, device=device)
    before = free(gpu)
    lease = gpu.allocate(plan, Adopted(engine.untyped_storage(), 4096, plan.nbytes, "the engine"))
    lease.poison()
    leaked = lease.view("k", 0).tensor()
    release = lease.close()
    assert (release.ours, release.asked) == (False, 0)
    with pytest.raises(StaleView):
        leaked.sum()
    assert bool((engine[:4096] == 0xA5).all())
    assert bool((engine[4096 + plan.nbytes :] == 0xA5).all())
    assert abs(before - free(gpu)) <= NOISE


def test_a_capture_refuses_allocate_and_close_and_goes_on(gpu: Hal) -> None:
    plan = plan_of(64 * MIB)
    x = torch.zeros(16, device=gpu.platform.torch_device(gpu.device))
    lease = gpu.allocate(plan)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with pytest.raises(CaptureActive):
            gpu.allocate(plan)
        with pytest.raises(CaptureActive):
            lease.close()
        x.add_(1)
    graph.replay()
    assert float(x.sum()) == 16
    assert lease.is_open
    graph.reset()
    assert lease.close().is_complete


def test_out_of_memory_leaves_the_context_usable(gpu: Hal) -> None:
    start = free(gpu)
    total = gpu.memory().total
    assert isinstance(total, Known)
    with pytest.raises(DeviceError, match="bytes were asked of") as caught:
        gpu.allocate(plan_of(total.value + GIB))
    assert (caught.value.kind, caught.value.context_lost) == ("out_of_memory", False)
    with gpu.allocate(plan_of(64 * MIB)) as lease:
        lease.poison()
        assert int(lease.view("k", 0).tensor().max()) == 0xFF
    assert abs(start - free(gpu)) <= NOISE


def test_another_arch_is_refused_before_a_byte_is_taken(gpu: Hal) -> None:
    start = free(gpu)
    wrong = replace(gpu.device, arch="gfx90a" if gpu.device.arch != "gfx90a" else "sm_90")
    with pytest.raises(DeviceError, match="nothing was allocated") as caught:
        gpu.platform.allocate(plan_of(GIB), wrong)
    assert caught.value.kind == "arch_mismatch"
    assert abs(start - free(gpu)) <= NOISE


def test_own_use_follows_a_lease_or_says_why_it_is_unknown(gpu: Hal) -> None:
    plan = plan_of(GIB)
    before = gpu.memory().own
    with gpu.allocate(plan):
        after = gpu.memory().own
    if isinstance(before, Known) and isinstance(after, Known):
        assert abs(after.value - before.value - plan.nbytes) <= NOISE
    else:
        assert isinstance(after, Unknown)
        assert after.reason


def test_a_profile_that_captures_a_graph_leaves_the_device_as_it_was(gpu: Hal) -> None:
    plan = plan_of(GIB)
    start = free(gpu)

    def workload(trial: CacheLease) -> None:
        scratch = torch.zeros(256 * MIB, dtype=torch.uint8, device=trial.torch_device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            trial.bytes_at("uint8", 0, (4096,), (1,)).add_(1)
        trial.bind_drop("graph", graph.reset)
        graph.replay()
        scratch.add_(1)

    profile = gpu.platform.profile(workload, plan, gpu.device)
    assert profile.release.is_complete, profile.release
    assert abs(start - free(gpu)) <= NOISE
    peak, trial = profile.reading("workload").peak, profile.reading("trial").peak
    assert isinstance(peak, Known)
    assert isinstance(trial, Known)
    assert peak.value - trial.value >= 256 * MIB


def test_a_process_may_fork_after_probing(gpu: Hal) -> None:
    """Probing and planning start no runtime, so a forked child can still open the device."""
    script = f"""
import os, sys
sys.path[:0] = {sys.path!r}
from tests.gpu.conftest import adapter
from tests.gpu.test_gpu_lifecycle import plan_of
import torch
platform = adapter({"rocm" if torch.version.hip else "cuda"!r})
device = platform.probe().devices[0]
platform.memory(device)
plan = plan_of(64 << 20)
assert not torch.cuda.is_initialized()
child = os.fork()
if child == 0:
    with platform.allocate(plan, device) as lease:
        lease.poison()
    os._exit(0 if lease.release.is_complete else 1)
assert os.waitpid(child, 0)[1] == 0
assert not torch.cuda.is_initialized()
"""
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=root, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr


def test_the_switch_of_the_masquerade_is_named_in_everything_it_finds(gpu: Hal) -> None:
    facts = HostFacts.read()
    facts = replace(facts, env={**facts.env, "KVHAL_MASQUERADE": "rocm"})
    platform = RocmPlatform(Seams(host=facts))
    choice = registry.choose(facts, "rocm", {"rocm": platform})
    is_masked = facts.torch_hip is None
    for said in (choice.reason, choice.probe.devices[0].name, " ".join(choice.probe.notes)):
        assert ("never evidence" in said) == is_masked
    assert (choice.probe.devices[0].arch in platform.capabilities().archs) != is_masked

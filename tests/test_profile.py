"""Profiling owns its trial; what it measured is read after the scope."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from kvhal import CacheSpec, DeviceError, LeakedView, Plan
from kvhal.hal import Hal
from kvhal.lease import CacheLease
from kvhal.readings import Known, MemoryReading, Unknown
from kvhal_cpu import CpuPlatform

MIB = 1 << 20


def plan_of(hal: Hal, **options: Any) -> Plan:
    spec = CacheSpec.uniform(mode="int8_per_token_head", num_layers=2, num_kv_heads=2, head_dim=64, num_q_heads=4)
    return hal.plan(spec, num_blocks=8, max_seqs=2, **options)


def test_the_profile_has_every_phase_in_order(hal: Hal) -> None:
    profile = hal.platform.profile(lambda trial: trial.poison(), plan_of(hal), hal.device)
    assert [p.name for p in profile.phases] == ["baseline", "trial", "workload", "released"]
    assert profile.trial_bytes == plan_of(hal).nbytes
    assert profile.release.is_complete
    times = [p.seconds for p in profile.phases]
    assert times == sorted(times)


def test_the_workloads_peak_is_measured(hal: Hal) -> None:
    """64 MiB touched and dropped inside the workload show in the peak, not in the reading after."""

    def workload(_: CacheLease) -> None:
        torch.ones(64 * MIB, dtype=torch.uint8)

    profile = hal.platform.profile(workload, plan_of(hal), hal.device)
    taken = profile.workload_bytes
    assert isinstance(taken, Known)
    assert 60 * MIB <= taken.value <= 80 * MIB


def test_an_unknown_peak_stays_unknown(hal: Hal, monkeypatch: pytest.MonkeyPatch) -> None:
    platform = CpuPlatform()
    reading = MemoryReading(Known(MIB, "t"), Known(MIB, "t"), Known(1, "t"), Unknown("no peak here"))
    monkeypatch.setattr(platform, "memory", lambda _: reading)
    profile = platform.profile(lambda _: None, plan_of(hal), hal.device)
    assert profile.workload_bytes == Unknown("no peak here")


def test_a_workload_that_raises_leaves_nothing_behind(hal: Hal) -> None:
    """PUB-09 a: the original exception passes, the real cache has the planned number of blocks."""
    plan = plan_of(hal)
    storages: list[StorageWeakRef] = []

    def workload(trial: CacheLease) -> None:
        storages.append(StorageWeakRef(trial.cache_tensor().untyped_storage()))
        leaked = trial.view("k", 0).tensor()
        raise KeyError(str(leaked.shape))

    with pytest.raises(KeyError):
        hal.platform.profile(workload, plan.with_blocks(2), hal.device)
    assert storages[0].expired()
    with hal.allocate(plan) as lease:
        assert lease.layout.groups[0].num_blocks == 8


def test_a_scope_that_failed_has_no_profile(hal: Hal) -> None:
    scope = hal.profiling(plan_of(hal))
    with pytest.raises(ValueError, match="stop"), scope:
        raise ValueError("stop")
    with pytest.raises(RuntimeError, match="has not ended normally"):
        _ = scope.profile


def test_a_leak_does_not_hide_the_workloads_own_error(hal: Hal) -> None:
    kept: list[torch.Tensor] = []

    def workload(trial: CacheLease) -> None:
        kept.append(trial.view("k", 0).tensor())
        raise ValueError("the cause")

    with pytest.raises(ValueError, match="the cause"):
        hal.platform.profile(workload, plan_of(hal, on_leak="raise"), hal.device)
    with pytest.raises(LeakedView, match="item of a list"):
        hal.platform.profile(lambda t: kept.append(t.view("k", 0).tensor()), plan_of(hal, on_leak="raise"), hal.device)


@pytest.mark.parametrize("step", ["reset_peak", "memory", "synchronize"])
@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_failure_at_any_reading_returns_to_baseline(
    hal: Hal, step: str, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    platform = CpuPlatform()
    storages: list[StorageWeakRef] = []
    reserve, real = platform.reserve, getattr(platform, step)
    calls = iter(range(100))

    def watched(*args: Any) -> torch.UntypedStorage:
        storage = reserve(*args)
        storages.append(StorageWeakRef(storage))
        return storage

    def fail_once(*args: Any) -> Any:
        if next(calls) == at:
            raise DeviceError("injected", kind="test")
        return real(*args)

    monkeypatch.setattr(platform, "reserve", watched)
    monkeypatch.setattr(platform, step, fail_once)
    # The first `at` calls pass, so a step that is called less often than that is not reached.
    with contextlib.suppress(DeviceError):
        platform.profile(lambda _: None, plan_of(hal), hal.device)
        assert next(calls) <= at
    assert all(s.expired() for s in storages)
    monkeypatch.undo()
    platform.allocate(plan_of(hal), hal.device).close()

"""Memory is taken as planned, has one owner, and comes back whatever happens."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from kvhal.capability.cells import Support
from kvhal.errors import CacheError, CaptureActive, DeviceError, LeakedView, StaleView
from kvhal.lease import CacheLease
from kvhal.readings import Known
from kvhal.testing.cases import SHAPES, Case, Claim, Subject, bytes_of

_LARGE_BYTES = 64 << 20


class Attention:
    """Keeps a tensor the way engines do."""

    def __init__(self, scale: torch.Tensor) -> None:
        self.kept_scale = scale


def alive(lease: CacheLease) -> StorageWeakRef:
    return StorageWeakRef(lease.cache_tensor().untyped_storage())


def _note(seen: list[tuple[str, bool]], name: str, storage: StorageWeakRef) -> None:
    seen.append((name, storage.expired()))


def case_of(claim: Claim) -> Case:
    return Case(claim, claim.shapes()[0])


def fill(claim: Claim, lease: CacheLease) -> None:
    case = case_of(claim)
    lease.layer(0).store(*case.rows(8, seed=1), case.tensor(range(8)))


def test_what_is_taken_is_what_was_planned_and_all_comes_back(case: Case) -> None:
    plan = case.plan()
    with case.claim.hal.allocate(plan) as lease:
        assert lease.cache_tensor().untyped_storage().nbytes() == plan.nbytes == plan.layout.nbytes
        assert lease.asked_bytes == plan.nbytes
        lease.step()
        assert lease.asked_bytes == plan.total_bytes
        storage = alive(lease)
    assert storage.expired()
    assert lease.release is not None
    assert lease.release.asked == plan.total_bytes
    assert lease.release.is_complete, str(lease.release)
    assert lease.release.holders == ()


def test_closing_twice_gives_the_first_result(claim: Claim) -> None:
    lease = claim.hal.allocate(claim.plan())
    assert lease.close() is lease.close()


def test_a_closed_lease_refuses_every_use(claim: Claim) -> None:
    lease, case = claim.hal.allocate(claim.plan()), case_of(claim)
    layer, view, step, (k, v), slots = (
        lease.layer(0),
        lease.view("k", 0),
        lease.step(),
        case.rows(1, 1),
        case.tensor([0]),
    )
    lease.close()
    uses: list[Callable[[], object]] = [
        lambda: layer.store(k, v, slots), lambda: layer.gather(slots), view.tensor, lease.cache_tensor,
        lambda: lease.layer(0), lease.step, lease.counters, lambda: lease.copy_blocks([(0, 1)]), lambda: step.slots,
    ]  # fmt: skip
    for use in uses:
        with pytest.raises(StaleView):
            use()


def test_a_tensor_somebody_kept_keeps_no_byte_and_reads_nothing(claim: Claim) -> None:
    """The fault that started this project: a view of the old cache's scales that outlives it."""
    lease = claim.hal.allocate(claim.plan(on_leak="revoke"))
    fill(claim, lease)
    field = "k_word" if lease.layout.groups[0].fields[-1].name.endswith("word") else "v"
    kept, storage = lease.view(field, 0).tensor(), alive(lease)
    release = lease.close()
    assert storage.expired()
    assert release.is_complete, str(release)
    assert [h.action for h in release.holders] == ["revoked"]
    with claim.hal.allocate(claim.plan()) as second:
        fill(claim, second)
        before = bytes_of(second)
        with pytest.raises(StaleView):
            kept.fill_(1)
        assert torch.equal(bytes_of(second), before)


def test_a_leak_is_named_where_the_policy_says_raise(claim: Claim) -> None:
    lease = claim.hal.allocate(claim.plan(on_leak="raise"))
    holder, storage = Attention(lease.view("v", 0).tensor()), alive(lease)
    with pytest.raises(LeakedView, match="attribute 'kept_scale' of Attention"):
        lease.close()
    assert storage.expired()
    with pytest.raises(StaleView):
        holder.kept_scale.sum()


def test_an_exception_inside_gives_the_bytes_back_and_passes_through(claim: Claim) -> None:
    storages: list[StorageWeakRef] = []

    def work(lease: CacheLease) -> NoReturn:
        storages.append(alive(lease))
        fill(claim, lease)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), claim.hal.allocate(claim.plan()) as lease:
        work(lease)
    assert storages[0].expired()


@pytest.mark.parametrize("step", ["synchronize", "drop_captures", "memory", "trim", "confirm_released"])
def test_a_failing_step_of_close_keeps_no_byte(claim: Claim, step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lease = claim.hal.allocate(claim.plan())
    storage = alive(lease)

    def fail(*_: object) -> NoReturn:
        raise DeviceError(f"injected into {step}", kind="test")

    monkeypatch.setattr(claim.hal.platform, step, fail)
    with pytest.raises(DeviceError, match=f"injected into {step}"):
        lease.close()
    assert storage.expired()
    assert not lease.is_open


@pytest.mark.parametrize("step", ["reserve", "torch_device"])
def test_a_failed_allocation_keeps_no_byte(claim: Claim, step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    platform, taken = claim.hal.platform, []
    reserve = platform.reserve
    plan = claim.plan()

    def watched(*arguments: Any) -> torch.UntypedStorage:
        storage = reserve(*arguments)
        taken.append(StorageWeakRef(storage))
        if step == "torch_device":
            monkeypatch.setattr(platform, "torch_device", fail)
        else:
            fail()
        return storage

    def fail(*_: object) -> NoReturn:
        raise DeviceError("injected", kind="test")

    monkeypatch.setattr(platform, "reserve", watched)
    with pytest.raises(DeviceError, match="injected") as caught:
        claim.hal.allocate(plan)
    caught.value.__traceback__ = None
    del caught
    gc.collect()
    assert [storage.expired() for storage in taken] == [True]


def test_a_trial_never_outlives_its_scope(claim: Claim) -> None:
    plan = claim.plan()
    scope = claim.hal.profiling(plan.with_blocks(2))
    with scope as trial:
        fill(claim, trial)
        storage = alive(trial)
        with pytest.raises(CacheError, match="trial lease"):
            claim.hal.allocate(plan)
    assert storage.expired()
    assert scope.profile.release.is_complete, str(scope.profile.release)
    assert [phase.name for phase in scope.profile.phases] == ["baseline", "trial", "workload", "released"]
    claim.hal.allocate(plan).close()


def test_a_workload_that_fails_leaves_no_trial_behind(claim: Claim) -> None:
    def workload(trial: CacheLease) -> NoReturn:
        storages.append(alive(trial))
        raise ZeroDivisionError

    storages: list[StorageWeakRef] = []
    with pytest.raises(ZeroDivisionError):
        claim.hal.platform.profile(workload, claim.plan(), claim.hal.device)
    assert storages[0].expired()
    claim.hal.allocate(claim.plan()).close()


def test_nothing_is_taken_or_freed_during_a_capture(claim: Claim, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = claim.plan()
    lease = claim.hal.allocate(plan)
    monkeypatch.setattr(claim.hal.platform, "is_capturing", lambda _: True)
    for call in (lease.close, lease.step, lambda: claim.hal.allocate(plan)):
        with pytest.raises(CaptureActive):
            call()
    monkeypatch.undo()
    assert lease.close().is_complete


def test_what_is_bound_goes_first_and_newest_first(claim: Claim) -> None:
    lease = claim.hal.allocate(claim.plan())
    seen: list[tuple[str, bool]] = []
    storage = alive(lease)
    for name in ("first", "second"):
        lease.bind_drop(name, partial(_note, seen, name, storage))
    lease.close()
    assert seen == [("second", False), ("first", False)]


def test_ten_caches_one_after_another_leave_nothing(claim: Claim) -> None:
    for _ in range(10):
        with claim.hal.allocate(claim.plan()) as lease:
            fill(claim, lease)
        assert lease.release is not None
        assert lease.release.is_complete, str(lease.release)


def test_a_release_shows_at_the_device_where_the_table_says_so(subject: Subject) -> None:
    operation = subject.table.operation("release_visibly", subject.hal.device.arch)
    claims = subject.claims()
    if operation.support is not Support.RUN or not claims:
        assert operation.reason
        return
    plan = claims[0].plan(shape=SHAPES[0])
    lease = subject.hal.allocate(plan.with_blocks(_LARGE_BYTES // plan.layout.block_bytes))
    release = lease.close()
    assert release.is_complete, str(release)
    assert isinstance(release.confirmation.returned, Known)
    assert release.confirmation.returned.value >= 0.95 * release.asked

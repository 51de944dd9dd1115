"""A lease gives every byte back, says who kept it from doing so, and refuses every use after."""

from __future__ import annotations

import gc
import multiprocessing
import os
import threading
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

import kvhal
from kvhal import (
    AddressError,
    Adopted,
    CacheError,
    CacheSpec,
    CaptureActive,
    DeviceError,
    ForkedLease,
    LeakedView,
    Plan,
    SpecMismatch,
    StaleView,
)
from kvhal.contract import Confirmation
from kvhal.hal import Hal
from kvhal.layout import ForeignView
from kvhal.lease import CacheLease
from kvhal.readings import Known, MemoryReading, Unknown
from kvhal_cpu import CpuPlatform

MIB = 1 << 20


def small(mode: str = "int8_per_token_head", **changes: Any) -> CacheSpec:
    base: dict[str, Any] = {"mode": mode, "num_layers": 2, "num_kv_heads": 2, "head_dim": 64, "num_q_heads": 4}
    return CacheSpec.uniform(**{**base, **changes})


def plan_of(hal: Hal, blocks: int = 8, **changes: Any) -> Plan:
    options = {name: changes.pop(name) for name in ("on_leak", "addressing", "order", "layout") if name in changes}
    return hal.plan(small(**changes), num_blocks=blocks, max_seqs=2, **options)


def alive(lease: CacheLease) -> StorageWeakRef:
    return StorageWeakRef(lease.cache_tensor().untyped_storage())


def fill(lease: CacheLease, seed: int = 0, tokens: int = 20) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    k = torch.randn(tokens, 2, 64, generator=generator)
    v = torch.randn(tokens, 2, 64, generator=generator)
    for layer in range(lease.layout.spec.num_layers):
        lease.layer(layer).store(k + layer, v - layer, torch.arange(tokens))
    return k, v


def test_planned_bytes_are_the_allocated_bytes(hal: Hal) -> None:
    """PUB-21: for every mode, layout and order."""
    for mode in ("bfloat16", "float16", "int8_per_token_head", "fp8_per_token_head", "int4_per_token_head"):
        for layout in ("tiled", "inline"):
            for order in ("layer_major", "block_major"):
                plan = plan_of(hal, mode=mode, layout=layout, order=order)
                with hal.allocate(plan) as lease:
                    assert lease.cache_tensor().untyped_storage().nbytes() == plan.nbytes
                assert lease.release is not None
                assert (lease.release.asked, lease.release.returned) == (plan.nbytes, plan.nbytes)
                assert lease.release.is_complete


def test_closing_twice_returns_the_first_result(hal: Hal) -> None:
    lease = hal.allocate(plan_of(hal))
    first = lease.close()
    assert lease.close() is first
    assert first.holders == ()


def test_a_closed_lease_refuses_every_use(hal: Hal) -> None:
    lease = hal.allocate(plan_of(hal))
    layer, view, step = lease.layer(0), lease.view("k", 0), lease.step(2, 2, 2)
    lease.close()
    k = torch.zeros(1, 2, 64)
    uses: list[Callable[[], object]] = [
        lambda: layer.store(k, k, torch.tensor([0])),
        lambda: layer.gather(torch.tensor([0])),
        lambda: layer.attend(torch.zeros(1, 4, 64), torch.zeros(1, 1), torch.ones(1)),
        lambda: view.tensor(), lambda: lease.layer(0), lambda: lease.step(), lambda: lease.counters(),
        lambda: lease.copy_blocks([(0, 1)]), lambda: lease.export_blocks([0]), lambda: lease.poison(),
        lambda: step.update(seq_lens=torch.tensor([1])), lambda: step.slots, lambda: lease.bind_drop("x", print),
        lease.__enter__, lease.cache_tensor,
    ]  # fmt: skip
    for use in uses:
        with pytest.raises(StaleView):
            use()
    assert "stale" in repr(view)
    assert "closed" in repr(lease)


def test_a_stale_view_cannot_write_into_the_next_cache(hal: Hal) -> None:
    """The fault that started this project: a scale view of the old cache writing into the new one's memory."""
    plan = plan_of(hal, blocks=512)
    lease = hal.allocate(plan)
    kept = lease.view("k_word", 0).tensor()
    release = lease.close()
    assert release.is_complete
    with hal.allocate(plan) as second:
        fill(second)
        before = second.cache_tensor().clone()
        with pytest.raises(StaleView):
            kept.fill_(1.0)
        assert torch.equal(second.cache_tensor(), before)


class Attention:
    """Holds scale views the way engines do; `cache` may be anything (PUB-09 c)."""

    def __init__(self, lease: CacheLease, cache: object) -> None:
        self.kv_cache = cache
        self.k_scale = lease.view("k_word", 0).tensor()
        self.v_scale = lease.view("v_word", 0).tensor()


@pytest.mark.parametrize("cache", [None, [], "payload"])
def test_layers_that_keep_scale_views_do_not_keep_the_bytes(hal: Hal, cache: object) -> None:
    """PUB-09 b and c, PUB-19: layers stay alive after the engine is gone; the storage must not."""
    lease = hal.allocate(plan_of(hal))
    payload = lease.view("k", 0).tensor() if cache == "payload" else cache
    layers = [Attention(lease, payload) for _ in range(3)]
    storage = alive(lease)
    del payload
    release = lease.close()
    assert storage.expired()
    assert release.is_complete
    named = " ".join(h.description for h in release.holders)
    assert "attribute 'k_scale' of Attention" in named
    assert "attribute 'v_scale' of Attention" in named
    with hal.allocate(plan_of(hal)) as second:
        k, _ = fill(second)
        got, _ = second.layer(0).gather(torch.arange(20))
        assert float((got - k).norm() / k.norm()) < 0.02
    for layer in layers:
        with pytest.raises(StaleView):
            layer.k_scale.sum()


def test_a_cache_view_holds_nothing(hal: Hal) -> None:
    lease = hal.allocate(plan_of(hal, on_leak="raise"))
    view = lease.layer(0).k_scale
    assert view.tensor().shape == (8, 2, 1, 16, 1, 1)
    assert lease.close().holders == ()


def test_on_leak_raise_names_the_holder_and_still_gives_the_bytes_back(hal: Hal) -> None:
    lease = hal.allocate(plan_of(hal, on_leak="raise"))
    storage, leaked = alive(lease), lease.view("v", 1).tensor()
    with pytest.raises(LeakedView, match="local 'leaked'"):
        lease.close()
    assert storage.expired()
    assert lease.release is not None
    assert lease.close() is lease.release
    del leaked


def test_foreign_readers_are_quarantined_and_not_counted_as_returned(hal: Hal) -> None:
    lease = hal.allocate(plan_of(hal))
    lease.poison()
    array = lease.view("k", 0).tensor().numpy()
    consumer = torch.utils.dlpack.from_dlpack(lease.view("v", 0).tensor())
    release = lease.close()
    assert (release.returned, release.pinned) == (0, release.asked)
    assert not release.is_complete
    named = " ".join(h.description for h in release.holders)
    assert "local 'array'" in named
    assert "local 'consumer'" in named
    assert np.all(array == 0xFF)
    assert bool((consumer == 0xFF).all())


def test_close_during_an_exception_gives_the_bytes_back_and_lets_it_pass(hal: Hal) -> None:
    def work(lease: CacheLease) -> None:
        inside = lease.view("k", 0).tensor()
        raise ValueError(str(inside.dtype))

    storage = None
    with pytest.raises(ValueError, match="uint8"), hal.allocate(plan_of(hal)) as lease:
        storage = alive(lease)
        work(lease)
    assert storage is not None
    assert storage.expired()


def test_bound_drops_run_first_and_newest_first(hal: Hal) -> None:
    order: list[str] = []
    lease = hal.allocate(plan_of(hal))
    lease.bind_drop("graph", lambda: order.append(f"graph {lease.is_open}"))
    lease.bind_drop("ipc", lambda: order.append(f"ipc {lease.is_open}"))
    lease.close()
    assert order == ["ipc True", "graph True"]


def test_a_drop_that_fails_keeps_no_byte(hal: Hal) -> None:
    ran: list[str] = []

    def fail() -> None:
        raise OSError("graph destroy failed")

    lease = hal.allocate(plan_of(hal))
    storage = alive(lease)
    lease.bind_drop("first", lambda: ran.append("first"))
    lease.bind_drop("bad", fail)
    with pytest.raises(OSError, match="graph destroy failed") as caught:
        lease.close()
    assert "'bad'" in caught.value.__notes__[0]
    assert ran == ["first"]
    assert storage.expired()
    assert lease.close().is_complete


STEPS = ("synchronize", "drop_captures", "memory", "trim", "confirm_released")


@pytest.mark.parametrize("step", STEPS)
def test_a_failure_at_any_step_of_close_returns_to_baseline(
    hal: Hal, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    platform = CpuPlatform()
    lease = platform.allocate(plan_of(hal), hal.device)
    storage = alive(lease)

    def fail(*_: object) -> None:
        raise DeviceError("injected", kind="test")

    monkeypatch.setattr(platform, step, fail)
    with pytest.raises(DeviceError, match="injected"):
        lease.close()
    assert storage.expired()
    assert lease.close().asked == lease.layout.nbytes


@pytest.mark.parametrize("step", ["torch_device", "reserve", "memory"])
def test_a_failure_at_any_step_of_allocate_returns_to_baseline(
    hal: Hal, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    platform = CpuPlatform()
    storages: list[StorageWeakRef] = []
    reserve = platform.reserve

    def watched(*args: Any) -> torch.UntypedStorage:
        storage = reserve(*args)
        storages.append(StorageWeakRef(storage))
        return storage

    calls = iter(range(100))

    def fail(*_: object) -> None:
        raise DeviceError(f"injected {next(calls)}", kind="test")

    monkeypatch.setattr(platform, "reserve", watched)
    monkeypatch.setattr(platform, step, fail)
    with pytest.raises(DeviceError, match="injected") as caught:
        platform.allocate(plan_of(hal), hal.device)
    assert all(s.expired() for s in storages), caught


def test_a_step_that_cannot_be_made_keeps_no_byte(hal: Hal, monkeypatch: pytest.MonkeyPatch) -> None:
    with hal.allocate(plan_of(hal)) as lease:
        asked = lease.asked_bytes
        with pytest.raises(SpecMismatch, match="buffer 'slots' is contiguous int32"):
            lease.step(4, 2, 2, slots=torch.zeros(4, dtype=torch.int32))
        with pytest.raises(kvhal.ConfigError, match="max_seqs is -1"):
            lease.step(4, -1, 2)
        assert lease.asked_bytes == asked


def test_capturing_refuses_what_allocates_frees_or_waits(hal: Hal, monkeypatch: pytest.MonkeyPatch) -> None:
    platform = CpuPlatform()
    plan = plan_of(hal)
    lease = platform.allocate(plan, hal.device)
    counted = platform.allocate(plan_of(hal, addressing="counted"), hal.device)
    step = counted.step(2, 2, 2)
    step.update(slots=torch.tensor([0]), block_table=torch.zeros(1, 1, dtype=torch.int32), seq_lens=torch.tensor([1]))
    k, q = torch.ones(1, 2, 64), torch.ones(1, 4, 64)
    monkeypatch.setattr(platform, "is_capturing", lambda _: True)
    refused: list[Callable[[], object]] = [
        lease.close,
        lambda: platform.allocate(plan, hal.device),
        lambda: lease.step(2, 2, 2),
        lambda: lease.layer(0).store(k, k, torch.tensor([0])),
        lambda: lease.layer(0).attend(q, torch.zeros(1, 1, dtype=torch.int32), torch.tensor([1])),
        lambda: counted.layer(0).attend(q, torch.zeros(1, 1, dtype=torch.int32), torch.tensor([1])),
    ]
    for call in refused:
        with pytest.raises(CaptureActive):
            call()
    counted.layer(0).store(k, k, step)
    counted.layer(0).attend(q, step)
    monkeypatch.undo()
    assert lease.close().is_complete
    assert counted.close().is_complete


def test_the_counters_are_part_of_the_cache(hal: Hal) -> None:
    with hal.allocate(plan_of(hal, addressing="counted")) as lease:
        k = torch.ones(4, 2, 64)
        k[1, 0, 3] = float("nan")
        lease.layer(0).store(k, torch.ones(4, 2, 64), torch.tensor([0, 1, 999, -7]))
        counters = lease.counters()
        assert (counters.nonfinite_rows, counters.rejected_slots) == (1, 2)
        raw = lease.bytes_at("int64", lease.layout.counters_offset, (2,), (8,))
        assert raw.tolist() == [1, 2]
        del raw


def test_a_sharing_layer_reads_its_source_and_cannot_store(hal: Hal) -> None:
    with hal.allocate(hal.plan(small(num_layers=3, shares={2: 0}), num_blocks=4)) as lease:
        k = torch.randn(4, 2, 64)
        lease.layer(0).store(k, k, torch.arange(4))
        with pytest.raises(SpecMismatch, match="layer 2 shares the pages of layer 0.*store through layer 0"):
            lease.layer(2).store(k, k, torch.arange(4))
        assert torch.equal(lease.layer(2).gather(torch.arange(4))[0], lease.layer(0).gather(torch.arange(4))[0])
        with pytest.raises(kvhal.ConfigError, match="layer 3 is not in this spec"):
            lease.layer(3)


def test_each_layer_reads_its_own_bytes_in_one_shared_buffer(hal: Hal) -> None:
    """PUB-03: one engine buffer for all layers, block-major, at a storage offset that is not zero."""
    plan = plan_of(hal, blocks=4, num_layers=3, order="block_major")
    engine = torch.full((plan.nbytes + 4096,), 0xA5, dtype=torch.uint8)
    memory = Adopted(engine.untyped_storage(), 2048, plan.nbytes, owner="the engine")
    with hal.allocate(plan, memory=memory) as lease:
        for layer in range(3):
            value = torch.full((64, 2, 64), float(layer + 1))
            lease.layer(layer).store(value * 10.0**layer, value, torch.arange(64))
        for layer in range(3):
            k, v = lease.layer(layer).gather(torch.arange(64))
            torch.testing.assert_close(k, torch.full_like(k, (layer + 1) * 10.0**layer), rtol=1e-6, atol=0)
            torch.testing.assert_close(v, torch.full_like(v, layer + 1.0), rtol=1e-6, atol=0)
    assert lease.release is not None
    assert not lease.release.ours
    assert (lease.release.asked, lease.release.returned) == (0, 0)
    assert "not ours: the memory stays with the engine" in str(lease.release)
    assert engine[:2048].unique().tolist() == [0xA5]
    assert engine[2048 + plan.nbytes :].unique().tolist() == [0xA5]


def test_adopting_memory_that_does_not_fit_is_refused_untouched(hal: Hal) -> None:
    plan = plan_of(hal, layout="inline")
    engine = torch.full((plan.nbytes,), 0xA5, dtype=torch.uint8)
    with pytest.raises(SpecMismatch, match="memory given has"):
        hal.allocate(plan, memory=Adopted(engine.untyped_storage(), 0, plan.nbytes - 16, owner="e"))
    with pytest.raises(SpecMismatch, match="multiple of 16"):
        hal.allocate(plan, memory=Adopted(engine.untyped_storage(), 8, plan.nbytes - 8, owner="e"))
    view = ForeignView((8, 4, 2, 136), (2176, 272, 136, 1))
    with pytest.raises(SpecMismatch, match=r"dimension 1 \(block_size\) is 4"):
        hal.allocate(plan, memory=Adopted(engine.untyped_storage(), 0, plan.nbytes, "e", view))
    assert engine.unique().tolist() == [0xA5]


def test_an_engines_tensor_is_adopted_with_its_shape(hal: Hal) -> None:
    plan = hal.plan(small("bfloat16", num_layers=1), num_blocks=4, layout="inline")
    store = torch.zeros(plan.nbytes // 2, dtype=torch.bfloat16)
    pages = store[: 4 * 16 * 2 * 128].view(4, 16, 2, 128)
    memory = Adopted.tensor(pages, owner="engine")
    assert memory.view == ForeignView((4, 16, 2, 256), (8192, 512, 256, 1))
    with pytest.raises(SpecMismatch, match="needs 32784 bytes and the memory given has 32768"):
        hal.allocate(plan, memory=memory)
    whole = Adopted(memory.storage, 0, plan.nbytes, "engine", memory.view)
    with hal.allocate(plan, memory=whole) as lease:
        k = torch.randn(64, 2, 64).bfloat16()
        lease.layer(0).store(k, k + 1, torch.arange(64))
        assert torch.equal(pages.view(64, 2, 128), torch.cat([k, k + 1], -1))


def test_threads_may_store_and_attend_on_disjoint_slots(hal: Hal) -> None:
    tokens = 64
    k, v = torch.randn(8, tokens, 2, 64), torch.randn(8, tokens, 2, 64)
    # Neighbouring threads write interleaved tokens of the same tiles.
    slots = [torch.arange(tokens) * 8 + t for t in range(8)]
    with hal.allocate(plan_of(hal, blocks=32)) as lease, hal.allocate(plan_of(hal, blocks=32)) as serial:
        for t in range(8):
            serial.layer(0).store(k[t], v[t], slots[t])
        errors: list[BaseException] = []

        def work(t: int) -> None:
            try:
                lease.layer(0).store(k[t], v[t], slots[t])
                lease.layer(0).gather(slots[t])
            except BaseException as exc:
                errors.append(exc)

        threads = [threading.Thread(target=work, args=(t,)) for t in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert errors == []
        assert torch.equal(lease.cache_tensor(), serial.cache_tensor())


def _in_child(lease: CacheLease, queue: Any) -> None:
    answers = []
    for use in (lease.cache_tensor, lambda: lease.layer(0), lambda: lease.view("k", 0).tensor(), lease.counters):
        try:
            use()
            answers.append("no error")
        except ForkedLease as exc:
            answers.append(str(exc))
    release = lease.close()
    queue.put((answers, release.returned, release.ours, os.getpid()))


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_cannot_use_the_lease_and_touches_nothing(hal: Hal) -> None:
    context = multiprocessing.get_context("fork")
    with hal.allocate(plan_of(hal)) as lease:
        k, _ = fill(lease)
        queue = context.Queue()
        child = context.Process(target=_in_child, args=(lease, queue))
        child.start()
        answers, returned, ours, pid = queue.get(timeout=60)
        child.join()
        assert child.exitcode == 0
        assert pid != os.getpid()
        assert all("forked child" in a for a in answers), answers
        assert (returned, ours) == (0, False)
        got, _ = lease.layer(0).gather(torch.arange(20))
        assert float((got - k).norm() / k.norm()) < 0.02
    assert lease.release is not None
    assert lease.release.is_complete


def test_an_unclosed_lease_warns_with_its_allocation_site(hal: Hal) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        lease = hal.allocate(plan_of(hal))
        del lease
        gc.collect()
    messages = [str(w.message) for w in caught if w.category is ResourceWarning]
    assert len(messages) == 1
    assert "test_lease.py:" in messages[0]
    assert "never closed" in messages[0]


def test_200_cycles_of_allocate_profile_close_do_not_grow(hal: Hal) -> None:
    plan = plan_of(hal, blocks=64)

    def cycle() -> None:
        scope = hal.profiling(plan.with_blocks(4))
        with scope as trial:
            fill(trial)
        assert scope.profile.release.is_complete
        with hal.allocate(plan) as lease:
            fill(lease)
        assert lease.release is not None
        assert lease.release.is_complete

    for _ in range(20):
        cycle()
    gc.collect()
    objects, storages = len(gc.get_objects()), count_storages()
    resident = psutil.Process().memory_info().rss
    for _ in range(200):
        cycle()
    gc.collect()
    assert count_storages() <= storages
    # One object leaked a cycle would be 200; 200 leaked leases would be 212 MiB.
    assert len(gc.get_objects()) - objects < 100
    assert psutil.Process().memory_info().rss - resident < 32 * MIB


def count_storages() -> int:
    return sum(issubclass(type(o), torch.UntypedStorage) for o in gc.get_objects())


def test_a_large_release_is_confirmed_by_the_resident_set(hal: Hal) -> None:
    plan = plan_of(hal, blocks=1)
    plan = plan.with_blocks(64 * MIB // plan.layout.block_bytes)
    lease = hal.allocate(plan)
    release = lease.close()
    assert isinstance(release.confirmation.returned, Known)
    assert release.confirmation.returned.value >= 0.95 * plan.nbytes
    assert release.returned == plan.nbytes


class LyingPlatform(CpuPlatform):
    """PUB-20: the storage dies but the device's reading does not move."""

    def confirm_released(
        self, before: MemoryReading, expected: int, device: kvhal.detection.probe.DeviceFacts
    ) -> Confirmation:
        return Confirmation(Known(4096, "free memory of the device"), "device", 0.0)


def test_a_release_the_device_does_not_see_is_never_called_returned(hal: Hal) -> None:
    plan = plan_of(hal)
    release = LyingPlatform().allocate(plan, hal.device).close()
    assert release.returned == 4096
    assert not release.is_complete


def test_a_reading_that_is_unknown_is_said_so(hal: Hal) -> None:
    release = hal.allocate(plan_of(hal)).close()
    assert isinstance(release.confirmation.returned, Unknown)
    assert "below what the resident set resolves" in release.confirmation.returned.reason
    assert release.is_complete


def test_more_memory_than_is_free_is_refused_before_it_is_touched(hal: Hal) -> None:
    plan = plan_of(hal, blocks=1)
    huge = plan.with_blocks((1 << 50) // plan.layout.block_bytes)
    with pytest.raises(DeviceError, match="plan fewer blocks") as caught:
        hal.allocate(huge)
    assert caught.value.kind == "out_of_memory"
    assert caught.value.exit_code == 4


def test_while_a_trial_is_open_a_serving_lease_is_refused(hal: Hal) -> None:
    plan = plan_of(hal)
    with hal.profiling(plan):
        with pytest.raises(CacheError, match="a trial lease .* is open"):
            hal.allocate(plan)
        with pytest.raises(CacheError, match="a trial lease"):
            hal.profiling(plan).__enter__()
    hal.allocate(plan).close()


def test_copying_blocks_moves_payload_and_scales_as_if_at_once(hal: Hal) -> None:
    """PUB-18: overlapping pairs, a cycle and a duplicate."""
    with hal.allocate(plan_of(hal, blocks=8)) as lease:
        fill(lease, tokens=128)
        before = lease.export_blocks(list(range(8))).payload
        lease.copy_blocks([(1, 4), (4, 1), (0, 5), (0, 6)])
        after = lease.export_blocks(list(range(8))).payload
        expected = before[:, [0, 4, 2, 3, 1, 0, 0, 7]]
        assert torch.equal(after, expected)
        for bad in ([(0, 8)], [(-1, 0)], [(0, 1), (2, 1)]):
            with pytest.raises(AddressError):
                lease.copy_blocks(bad)
        assert torch.equal(lease.export_blocks(list(range(8))).payload, expected)
        lease.copy_blocks([])


def test_groups_must_be_named_where_there_are_several(hal: Hal) -> None:
    stores = tuple(kvhal.ScaledStore.of(n, "int8_per_token_head", 2, 64) for n in ("k", "v"))
    spec = CacheSpec((kvhal.CacheGroup("a", (0,), 16, stores, 4), kvhal.CacheGroup("b", (1,), 16, stores, 4, window=8)))
    with hal.allocate(hal.plan(spec, num_blocks=2)) as lease:
        with pytest.raises(SpecMismatch, match=r"several groups \['a', 'b'\]"):
            lease.copy_blocks([(0, 1)])
        step = lease.step(group="b")
        with pytest.raises(SpecMismatch, match="layer 0 is in group 'a' and the step is over group 'b'"):
            lease.layer(0).store(torch.ones(1, 2, 64), torch.ones(1, 2, 64), step)


def test_opaque_stores_are_owned_copied_and_moved(hal: Hal) -> None:
    latent = kvhal.OpaqueStore("latent", "bfloat16", (32,))
    state = kvhal.OpaqueStore("state", "float32", (3, 5), per="block")
    spec = CacheSpec((kvhal.CacheGroup("mla", (0, 1), 16, (latent, state)),))
    with hal.allocate(hal.plan(spec, num_blocks=4)) as lease:
        rows = lease.view("latent", 1).tensor()
        assert rows.shape == (4, 1, 1, 16, 32, 1)
        rows.copy_(torch.arange(4 * 16 * 32).remainder(97).view(rows.shape))
        lease.view("state", 1).tensor()[2] = 2.5
        wanted = rows[2].clone()
        lease.copy_blocks([(2, 0)])
        assert torch.equal(rows[0], wanted)
        assert lease.view("state", 1).tensor()[0].unique().tolist() == [2.5]
        with pytest.raises(SpecMismatch, match="only opaque stores"):
            lease.layer(0)
        with pytest.raises(SpecMismatch, match="has no field 'rope'"):
            lease.view("rope", 0)
        del rows
    assert lease.release is not None
    assert lease.release.is_complete

"""One owner for each byte: who is found at release, what is revoked, what is quarantined."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import dlpack

from kvhal import Adopted, StaleView
from kvhal.region import Region, RegionRelease

NBYTES = 1 << 16


@dataclass
class Owned:
    region: Region
    alive: StorageWeakRef

    def view(self) -> torch.Tensor:
        return self.region.tensor("uint8", 0, (NBYTES,), (1,))


@pytest.fixture
def owned() -> Iterator[Owned]:
    storage = torch.UntypedStorage(NBYTES)
    owned = Owned(Region.own(storage, NBYTES), StorageWeakRef(storage))
    del storage
    owned.view().fill_(7)
    yield owned
    owned.region.release()


class Attention:
    """An attention-like object that keeps scale views, as engines do."""

    k_scale: torch.Tensor


def test_release_without_holders_frees_the_storage(owned: Owned) -> None:
    assert owned.region.release() == RegionRelease(NBYTES, 0, ())
    assert owned.alive.expired()


def test_a_second_release_does_nothing(owned: Owned) -> None:
    owned.region.release()
    assert owned.region.release() == RegionRelease(0, 0, ())


def test_a_released_region_makes_no_tensor(owned: Owned) -> None:
    owned.region.release()
    with pytest.raises(StaleView, match="closed KV cache"):
        owned.view()


def leak_strided(owned: Owned, keep: Attention) -> None:
    keep.k_scale = owned.region.tensor("float32", 64, (8, 4), (1024, 16))


def leak_dtype_view(owned: Owned, keep: Attention) -> None:
    keep.k_scale = owned.view().view(torch.int32)


def leak_slice(owned: Owned, keep: Attention) -> None:
    keep.k_scale = owned.view()[100:200]


def leak_inference_view(owned: Owned, keep: Attention) -> None:
    with torch.inference_mode():
        keep.k_scale = owned.view()[::2]


def leak_parameter(owned: Owned, keep: Attention) -> None:
    keep.k_scale = torch.nn.Parameter(owned.region.tensor("float32", 0, (16,), (4,)), requires_grad=False)


@pytest.mark.parametrize("leak", [leak_strided, leak_dtype_view, leak_slice, leak_inference_view, leak_parameter])
def test_a_leaked_view_is_named_and_revoked(owned: Owned, leak: Callable[[Owned, Attention], None]) -> None:
    keep = Attention()
    leak(owned, keep)
    freed = owned.region.release()
    assert owned.alive.expired()
    assert (freed.returned, freed.pinned) == (NBYTES, 0)
    assert [h.action for h in freed.holders] == ["revoked"]
    assert "attribute 'k_scale' of Attention" in freed.holders[0].description


@pytest.mark.parametrize(
    "use",
    [
        lambda t: t + 1, lambda t: t[0], lambda t: t.sum(), lambda t: t.data_ptr(), repr, lambda t: t.numpy(),
        lambda t: t.fill_(0), lambda t: t.shape, lambda t: torch.add(torch.ones(1), t), np.asarray,
        lambda t: t.tolist(), lambda t: t.untyped_storage(), dlpack.from_dlpack, len, lambda t: t.clone(),
    ],
)  # fmt: skip
def test_any_use_of_a_revoked_tensor_raises(owned: Owned, use: Callable[[torch.Tensor], Any]) -> None:
    held = owned.view()
    owned.region.release()
    with pytest.raises(StaleView, match="lease was closed"):
        use(held)


def test_views_of_views_go_before_their_bases(owned: Owned) -> None:
    base = owned.view()
    derived = [base[:10], base.view(torch.int16), base[5:].view(torch.uint8)]
    freed = owned.region.release()
    assert owned.alive.expired()
    assert len(freed.holders) == 4
    for tensor in (base, *derived):
        with pytest.raises(StaleView):
            tensor.sum()


def test_a_view_held_by_a_closure_is_named(owned: Owned) -> None:
    def make() -> Callable[[], torch.Tensor]:
        held = owned.view()
        return lambda: held * 1

    read = make()
    freed = owned.region.release()
    assert "closure of test_a_view_held_by_a_closure_is_named.<locals>.make.<locals>.<lambda>" in (
        freed.holders[0].description
    )
    with pytest.raises(StaleView):
        read()


def test_a_local_of_a_running_function_is_named(owned: Owned) -> None:
    leftover = owned.view()
    freed = owned.region.release()
    description = freed.holders[0].description
    assert "local 'leftover' of test_a_local_of_a_running_function_is_named" in description
    assert "test_region.py:" in description
    del leftover


def test_items_of_containers_and_globals_are_named(owned: Owned) -> None:
    keep = {"layers": [owned.view()]}
    globals()["kept_by_this_module"] = owned.view()
    try:
        descriptions = sorted(h.description for h in owned.region.release().holders)
    finally:
        del globals()["kept_by_this_module"]
    assert len(descriptions) == 2
    assert "global 'kept_by_this_module' of module" in descriptions[0]
    assert "item of a list" in descriptions[1]
    del keep


def test_a_view_kept_by_a_traceback_is_revoked(owned: Owned) -> None:
    def fail() -> None:
        inside = owned.view()
        raise ValueError(str(inside.shape))

    with pytest.raises(ValueError, match=str(NBYTES)) as caught:
        fail()
    freed = owned.region.release()
    assert owned.alive.expired()
    assert "local 'inside'" in freed.holders[0].description
    assert caught.value is not None


def test_a_garbage_cycle_is_no_holder(owned: Owned) -> None:
    cycle: dict[str, Any] = {"view": owned.view()}
    cycle["self"] = cycle
    del cycle
    assert owned.region.release() == RegionRelease(NBYTES, 0, ())


def test_holders_are_found_after_gc_freeze(owned: Owned) -> None:
    keep = Attention()
    leak_strided(owned, keep)
    gc.collect()
    gc.freeze()
    try:
        freed = owned.region.release()
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()
    assert owned.alive.expired()
    assert "k_scale" in freed.holders[0].description


def test_a_numpy_holder_is_quarantined_and_reads_its_old_values(owned: Owned) -> None:
    array = owned.view()[:100].numpy()
    freed = owned.region.release()
    assert (freed.returned, freed.pinned) == (0, NBYTES)
    assert [h.action for h in freed.holders] == ["quarantined"]
    assert "numpy array (100,): local 'array'" in freed.holders[0].description
    gc.collect()
    assert not owned.alive.expired()
    assert array.tolist() == [7] * 100
    del array
    gc.collect()
    assert owned.alive.expired()


def test_the_compilers_fake_tensors_are_left_alone(owned: Owned) -> None:
    """They live on after torch.compile, and asking one for its memory warns."""
    with FakeTensorMode():
        fake = torch.empty(16)
    array = owned.view().numpy()
    assert "local 'array'" in owned.region.release().holders[0].description
    del array, fake


def test_a_numpy_array_inside_an_object_is_named(owned: Owned) -> None:
    keep = {"arrays": [owned.view().numpy()]}
    freed = owned.region.release()
    assert "item of a list" in freed.holders[0].description
    assert int(keep["arrays"][0].sum()) == 7 * NBYTES


def test_a_dlpack_consumer_is_quarantined_and_reads_its_old_values(owned: Owned) -> None:
    consumer = dlpack.from_dlpack(owned.view())
    freed = owned.region.release()
    assert (freed.returned, freed.pinned) == (0, NBYTES)
    assert "local 'consumer'" in freed.holders[0].description
    assert int(consumer.sum()) == 7 * NBYTES
    del consumer
    gc.collect()
    assert owned.alive.expired()


def test_a_dlpack_capsule_is_quarantined_though_nobody_can_be_named(owned: Owned) -> None:
    capsule: Any = owned.view().__dlpack__()
    freed = owned.region.release()
    assert freed.pinned == NBYTES
    assert not owned.alive.expired()
    consumer = dlpack.from_dlpack(capsule)
    assert int(consumer[0]) == 7
    del consumer, capsule
    gc.collect()
    assert owned.alive.expired()


def test_a_numpy_array_that_is_gone_pins_nothing(owned: Owned) -> None:
    array = owned.view().numpy()
    del array
    assert owned.region.release() == RegionRelease(NBYTES, 0, ())


def test_a_tensor_with_weak_references_is_quarantined_not_broken(owned: Owned) -> None:
    """swap_tensors refuses tensors that have weak references; the holder keeps reading valid memory."""
    held = owned.view()
    reference = weakref.ref(held)
    freed = owned.region.release()
    assert freed.pinned == NBYTES
    assert [h.action for h in freed.holders] == ["quarantined"]
    assert int(held[0]) == 7
    del held
    assert reference() is None
    assert owned.alive.expired()


def test_autograd_that_saved_a_view_is_quarantined(owned: Owned) -> None:
    weight = torch.ones(16, requires_grad=True)
    result = (owned.region.tensor("float32", 0, (16,), (4,)) * weight).sum()
    freed = owned.region.release()
    assert freed.pinned == NBYTES
    result.backward()
    assert weight.grad is not None


def test_adopted_memory_is_not_freed_and_only_our_tensors_are_revoked() -> None:
    engine = torch.full((3 * NBYTES,), 9, dtype=torch.uint8)
    theirs = engine[NBYTES : 2 * NBYTES]
    region = Region.adopt(Adopted(engine.untyped_storage(), NBYTES, NBYTES, "engine"), NBYTES)
    ours = region.tensor("uint8", 0, (NBYTES,), (1,))
    assert ours.data_ptr() == engine.data_ptr() + NBYTES
    ours.fill_(1)
    freed = region.release()
    assert (freed.returned, freed.pinned) == (0, 0)
    assert ["local 'ours'" in h.description for h in freed.holders] == [True]
    with pytest.raises(StaleView):
        ours.sum()
    assert int(theirs.to(torch.int64).sum()) == NBYTES
    assert engine[:NBYTES].unique().tolist() == [9]
    assert engine[2 * NBYTES :].unique().tolist() == [9]


def test_adopted_regions_forget_tensors_that_died() -> None:
    engine = torch.zeros(NBYTES, dtype=torch.uint8)
    region = Region.adopt(Adopted(engine.untyped_storage(), 0, NBYTES, "engine"), NBYTES)
    for _ in range(100):
        region.tensor("uint8", 0, (NBYTES,), (1,))
    assert len(region._made) == 1
    assert region.release() == RegionRelease(0, 0, ())

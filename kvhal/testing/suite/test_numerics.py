"""The same bytes on every platform: against the reference on the CPU bit for bit, and against the definitions."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvhal.kernels import reference
from kvhal.kernels.geometry import PageGeometry
from kvhal.lease import CacheLease
from kvhal.modes import Scaling
from kvhal.testing import right
from kvhal.testing.cases import Case, bytes_of, rows_of
from kvhal.testing.plugin import Measure

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def expected_store(lease: CacheLease, k: Tensor, v: Tensor, slots: Tensor) -> Tensor:
    """The whole cache after the reference, on the CPU, has stored into a copy of it."""
    copy = bytes_of(lease)
    geometry = lease.layer(0).geometry
    reference.store(copy, k.cpu(), v.cpu(), slots.cpu(), geometry, checked=lease.is_checked)
    return copy


def store_both(measure: Measure, lease: CacheLease, k: Tensor, v: Tensor, slots: Tensor) -> None:
    wanted = expected_store(lease, k, v, slots)
    lease.layer(0).store(k, v, slots)
    measure("store: bytes that differ", int((bytes_of(lease) != wanted).sum()), 0)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_store_is_the_reference_bit_for_bit(case: Case, dtype: torch.dtype, measure: Measure) -> None:
    with case.allocate() as lease:
        slots = case.scattered(24)
        slots[5] = slots[17] = -1
        store_both(measure, lease, *case.rows(24, seed=1, dtype=dtype), case.tensor(slots))


def test_every_amplitude_is_stored_like_the_reference(case: Case, measure: Measure) -> None:
    with case.allocate() as lease:
        store_both(measure, lease, *case.hard_rows(40, seed=2), case.tensor(case.scattered(40)))


def test_nan_and_infinity_are_stored_and_counted_like_the_reference(case: Case, measure: Measure) -> None:
    with case.allocate(addressing="counted") as lease:
        k, v = case.rows(12, seed=3)
        k[1, 0, 3], k[4, :, 0], v[6, 0, 7], v[1, 0, 0] = float("nan"), float("inf"), float("-inf"), float("nan")
        store_both(measure, lease, k, v, case.tensor(case.scattered(12)))
        assert lease.counters().nonfinite_rows == 3 + case.shape.heads


def test_strided_rows_are_stored_like_packed_ones(case: Case, measure: Measure) -> None:
    with case.allocate() as lease:
        k, v = (torch.cat([t, t + 1], dim=-1)[..., : t.shape[-1]] for t in case.rows(9, seed=4))
        assert not k.is_contiguous()
        store_both(measure, lease, k, v, case.tensor(case.scattered(9)))


def test_stored_rows_are_what_the_definitions_say(case: Case, measure: Measure) -> None:
    """Independent of every kernel, the reference included."""
    group = case.claim.spec(case.shape).groups[0]
    with case.allocate() as lease:
        slots = case.tensor(case.scattered(40))
        given = case.hard_rows(40, seed=5)
        lease.layer(1).store(*given, slots)
        scales = lease.layout.spec.stored_scales(1)
        for store, x, scale in zip((group.k, group.v), given, scales, strict=True):
            assert store is not None
            wanted = right.rows(x, store, scale)
            found = rows_of(lease, 1, store.name, slots).numpy()
            measure(f"definition of {store.encoding}: codes that differ", int((found != wanted.codes).sum()), 0)
            if store.mode_.scaling is Scaling.ROW:
                words = rows_of(lease, 1, f"{store.name}_word", slots).view(torch.int32)[..., 0].numpy().view("uint32")
                measure("definition: row words that differ", int((words != wanted.words).sum()), 0)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_gather_is_the_reference_bit_for_bit(case: Case, dtype: torch.dtype, measure: Measure) -> None:
    with case.allocate() as lease:
        stored = case.scattered(20)
        k, v = case.hard_rows(20, seed=6)
        k[2, 0, 1] = float("nan")
        lease.layer(0).store(k, v, case.tensor(stored))
        slots = case.tensor([*reversed(stored), -1, *stored[:3]])
        found = lease.layer(0).gather(slots, dtype)
        copy, geometry = bytes_of(lease), lease.layer(0).geometry
        k_wanted, v_wanted = (torch.empty(t.shape, dtype=dtype) for t in found)
        reference.gather(copy, slots.cpu(), k_wanted, v_wanted, geometry, checked=True)
        for one, other in zip(found, (k_wanted, v_wanted), strict=True):
            measure("gather: values that differ", _differences(one.cpu(), other), 0)
        assert float(found[0][20].abs().max()) == 0.0


def test_copied_blocks_are_the_reference_bit_for_bit(case: Case, measure: Measure) -> None:
    with case.allocate() as lease:
        slots = case.tensor(range(6 * case.shape.block_size))
        for layer in range(2):
            lease.layer(layer).store(*case.rows(slots.shape[0], seed=layer), slots)
        pairs = [(0, 3), (3, 0), (1, 4), (1, 5)]
        wanted = bytes_of(lease)
        reference.copy_blocks(wanted, torch.tensor(pairs), PageGeometry.all_of(lease.layout), checked=True)
        lease.copy_blocks(pairs)
        measure("copy_blocks: bytes that differ", int((bytes_of(lease) != wanted).sum()), 0)


def test_blocks_cross_to_another_cache_and_back(case: Case, measure: Measure) -> None:
    with case.allocate() as lease, case.allocate() as other:
        slots = case.tensor(range(2 * case.shape.block_size))
        lease.layer(1).store(*case.rows(slots.shape[0], seed=7), slots)
        moved = lease.export_blocks([0, 1])
        other.import_blocks(moved, [4, 2])
        again = other.export_blocks([4, 2])
        measure("moved blocks: bytes that differ", int((again.payload != moved.payload).sum()), 0)


def test_keys_and_values_may_be_kept_in_different_modes(case: Case, measure: Measure) -> None:
    for value_mode in case.claim.other_modes():
        spec = case.claim.spec(case.shape, value_mode=value_mode)
        with case.claim.hal.allocate(case.plan(spec)) as lease:
            lease.poison()
            store_both(measure, lease, *case.hard_rows(40, seed=8), case.tensor(case.scattered(40)))


def _differences(found: Tensor, wanted: Tensor) -> int:
    """How many values differ in their bits; which NaN it is does not count."""
    kind = torch.int32 if found.dtype is torch.float32 else torch.int16
    same = (found.view(kind) == wanted.view(kind)) | (found.isnan() & wanted.isnan())
    return int((~same).sum())

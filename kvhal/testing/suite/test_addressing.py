"""A slot or block outside the cache raises before a byte moves (checked), or is skipped and counted (counted)."""

from __future__ import annotations

import pytest
import torch

from kvhal.errors import AddressError
from kvhal.testing.cases import Case, Claim, bytes_of

BAD: dict[str, list[int | None]] = {
    "below": [0, -7, 2],
    "above": [0, 1 << 40, 2],
    "just above": [0, None, 2],
    "twice": [0, 2, 2],
}


def case_of(claim: Claim) -> Case:
    return Case(claim, claim.shapes()[0])


def slots_of(case: Case, what: str) -> list[int]:
    end = 6 * case.shape.block_size
    return [end if slot is None else slot for slot in BAD[what]]


@pytest.mark.parametrize("what", BAD)
def test_checked_addressing_raises_and_writes_nothing(claim: Claim, what: str) -> None:
    case = case_of(claim)
    with case.allocate() as lease:
        before = bytes_of(lease)
        with pytest.raises(AddressError):
            lease.layer(0).store(*case.rows(3, seed=1), case.tensor(slots_of(case, what)))
        assert torch.equal(bytes_of(lease), before)


@pytest.mark.parametrize("what", ["below", "above", "just above"])
def test_counted_addressing_skips_and_counts(claim: Claim, what: str) -> None:
    case = case_of(claim)
    rows = case.rows(3, seed=1)
    with case.allocate(addressing="counted") as lease, case.allocate() as other:
        slots = slots_of(case, what)
        lease.layer(0).store(*rows, case.tensor(slots))
        other.layer(0).store(*rows, case.tensor([slots[0], -1, slots[2]]))
        pages = lease.layout.groups[0]
        area = slice(pages.offset, pages.offset + pages.nbytes)
        assert torch.equal(bytes_of(lease)[area], bytes_of(other)[area])
        assert lease.counters().rejected_slots == 1
        k, _ = lease.layer(0).gather(case.tensor(slots))
        assert bool(k[1].isnan().all())
        assert bool(k[[0, 2]].isfinite().all())
        assert lease.counters().rejected_slots == 2


def test_padding_is_never_an_index(claim: Claim) -> None:
    case = case_of(claim)
    with case.allocate() as lease:
        before = bytes_of(lease)
        lease.layer(0).store(*case.rows(3, seed=1), case.tensor([-1, -1, -1]))
        assert torch.equal(bytes_of(lease), before)
        k, v = lease.layer(0).gather(case.tensor([-1]))
        assert float(k.abs().max()) == float(v.abs().max()) == 0.0


@pytest.mark.parametrize("block", [-1, 6, 1 << 30])
def test_a_bad_block_raises_or_spoils_only_its_own_sequence(claim: Claim, block: int) -> None:
    case = case_of(claim)
    shape = case.shape
    table = case.tensor([[0], [block]], torch.int32)
    lengths = case.tensor([3, 3], torch.int32)
    q = torch.ones((2, shape.q_heads, shape.head_dim), device=case.device)
    with case.allocate() as checked, case.allocate(addressing="counted") as counted:
        for lease in (checked, counted):
            lease.layer(0).store(*case.rows(3, seed=1), case.tensor([0, 1, 2]))
        with pytest.raises(AddressError):
            checked.layer(0).attend(q, table, lengths)
        found = counted.layer(0).attend(q, table, lengths)
        assert bool(found[0].isfinite().all())
        assert bool(found[1].isnan().all())
        assert counted.counters().rejected_slots == 1


@pytest.mark.parametrize("pairs", [[(0, 6)], [(-1, 0)], [(0, 1), (2, 1)]], ids=["outside", "negative", "twice"])
def test_blocks_that_cannot_be_copied_raise_and_move_nothing(claim: Claim, pairs: list[tuple[int, int]]) -> None:
    case = case_of(claim)
    with case.allocate() as lease:
        before = bytes_of(lease)
        with pytest.raises(AddressError):
            lease.copy_blocks(pairs)
        assert torch.equal(bytes_of(lease), before)


def test_counters_add_up_over_calls(claim: Claim) -> None:
    case = case_of(claim)
    with case.allocate(addressing="counted") as lease:
        k, v = case.rows(3, seed=1)
        k[0, 0, 0] = float("inf")
        for _ in range(3):
            lease.layer(0).store(k, v, case.tensor([0, -5, 4]))
        counters = lease.counters()
        assert (counters.nonfinite_rows, counters.rejected_slots) == (3, 3)

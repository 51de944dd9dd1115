"""Every byte is where the layout says, and no other byte is touched."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvhal.contract import Adopted
from kvhal.testing.cases import Case, bytes_of

_CANARY = 0xA5
_MARGIN = 4096


def adopted(case: Case, **options: Any) -> tuple[Tensor, int, Adopted]:
    """An engine's buffer full of canaries, the bytes of a plan, and the middle of the buffer to adopt."""
    nbytes = case.plan(**options).nbytes
    engine = torch.full((nbytes + 2 * _MARGIN,), _CANARY, dtype=torch.uint8, device=case.device)
    return engine, nbytes, Adopted(engine.untyped_storage(), _MARGIN, nbytes, owner="the test")


def test_nothing_outside_the_range_is_written(case: Case) -> None:
    engine, nbytes, memory = adopted(case)
    with case.claim.hal.allocate(case.plan(), memory=memory) as lease:
        lease.poison()
        slots = case.tensor(case.scattered(20))
        lease.layer(1).store(*case.rows(20, seed=1), slots)
        lease.layer(1).gather(slots)
        lease.copy_blocks([(0, 5), (1, 2)])
    assert lease.release is not None
    assert not lease.release.ours
    assert engine[:_MARGIN].unique().tolist() == [_CANARY]
    assert engine[_MARGIN + nbytes :].unique().tolist() == [_CANARY]


def test_padding_between_pages_is_never_touched(case: Case) -> None:
    placed = case.plan().layout.groups[0]
    stride = placed.page_stride + 64
    engine, _, memory = adopted(case, page_stride=stride)
    with case.claim.hal.allocate(case.plan(page_stride=stride), memory=memory) as lease:
        layout = lease.layout
        slots = case.tensor(range(6 * case.shape.block_size))
        for layer in range(2):
            lease.layer(layer).store(*case.rows(slots.shape[0], seed=layer), slots)
        lease.copy_blocks([(0, 5)])
    content = torch.zeros(engine.shape[0], dtype=torch.bool)
    for block in range(6):
        for part in layout.ranges(block):
            content[_MARGIN + part.offset : _MARGIN + part.offset + part.nbytes] = True
    pages = slice(_MARGIN, _MARGIN + layout.groups[0].nbytes)
    assert engine.cpu()[pages][~content[pages]].unique().tolist() == [_CANARY]


def test_a_store_writes_its_own_rows_and_nothing_else(case: Case) -> None:
    with case.allocate() as lease:
        before = bytes_of(lease)
        slots = case.scattered(7)
        lease.layer(1).store(*case.rows(7, seed=2), case.tensor(slots))
        changed = (bytes_of(lease) != before).nonzero().flatten().tolist()
        placed = lease.layout.groups[0]
        own: set[int] = set()
        for slot in slots:
            block, token = divmod(slot, case.shape.block_size)
            page = placed.layer_offset(1) + block * placed.block_stride
            for field in placed.fields:
                for head in range(field.shape[0]):
                    for channel in range(field.shape[3]):
                        at = page + field.address(head, token, channel)
                        own.update(range(at, at + field.itemsize))
        assert changed
        assert set(changed) <= own


def test_layers_have_pages_of_their_own(case: Case) -> None:
    with case.allocate() as lease:
        slots = case.tensor(range(8))
        rows = [case.rows(8, seed=layer) for layer in range(2)]
        for layer in range(2):
            lease.layer(layer).store(*rows[layer], slots)
        first = lease.layer(0).gather(slots)
        lease.layer(1).store(*rows[0], slots)
        again = lease.layer(0).gather(slots)
        assert torch.equal(first[0], again[0])
        assert torch.equal(first[1], again[1])

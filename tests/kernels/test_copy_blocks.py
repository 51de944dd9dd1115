from __future__ import annotations

import pytest
import torch

from kvhal.errors import AddressError, SpecMismatch
from kvhal.kernels import operators, reference
from kvhal.layout import Layout
from kvhal.spec import CacheGroup, CacheSpec, OpaqueStore, ScaledStore
from tests.kernels.oracle import Cache, make

assert operators.SCHEMAS
PAIRS = [[1, 4], [4, 1], [0, 2], [2, 3]]


def blocks_of(cache: Cache) -> list[list[bytes]]:
    data = cache.data.numpy()
    return [
        [data[r.offset : r.offset + r.nbytes].tobytes() for r in cache.layout.ranges(block)]
        for block in range(cache.layout.groups[0].num_blocks)
    ]


@pytest.mark.parametrize("strip", [16, 1 << 24])
@pytest.mark.parametrize("kind", ["tiled", "inline"])
@pytest.mark.parametrize("order", ["layer_major", "block_major"])
def test_pages_move_whole_and_all_at_once(kind: str, order: str, strip: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "MOVE_BYTES", strip)
    cache = make("int8_per_token_head", blocks=6, kind=kind, order=order, layers=3, heads=3, dim=24, page_align=256)
    cache.data.random_(256)
    before, raw = blocks_of(cache), cache.data.clone()
    torch.ops.kvhal.copy_blocks(cache.data, torch.tensor(PAIRS), cache.pages, True)
    right = list(before)
    for source, destination in PAIRS:
        right[destination] = before[source]
    assert blocks_of(cache) == right
    content = torch.zeros(cache.data.numel(), dtype=torch.bool)
    for block in range(6):
        for r in cache.layout.ranges(block):
            content[r.offset : r.offset + r.nbytes] = True
    assert torch.equal(cache.data[~content], raw[~content])


def test_opaque_stores_move_with_their_block() -> None:
    k, v = (ScaledStore.of(name, "int4_per_token_head", 1, 8) for name in ("k", "v"))
    stores = (k, v, OpaqueStore("state", "uint8", (3,), per="block"))
    cache = Cache(Layout.of(CacheSpec((CacheGroup("g", (0, 1), 16, stores, num_q_heads=1),)), 3))
    cache.data.random_(256)
    before = blocks_of(cache)
    assert len(before[0][0]) % 2 == 1
    torch.ops.kvhal.copy_blocks(cache.data, torch.tensor([[0, 2]]), cache.pages, True)
    assert blocks_of(cache) == [before[0], before[1], before[0]]


@pytest.mark.parametrize("checked", [True, False])
@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        ([[0, 1], [0, 4]], r"0 to 3; found \[0, 4\] at pair 1"),
        ([[-1, 1]], r"found \[-1, 1\] at pair 0"),
        ([[0, 1], [2, 3], [3, 1]], "block 1 is named again at pair 2"),
    ],
)
def test_bad_pairs_are_named_before_any_byte_moves(pairs: list[list[int]], message: str, checked: bool) -> None:
    cache = make(blocks=4, layers=2)
    cache.data.random_(256)
    before = cache.data.clone()
    with pytest.raises(AddressError, match=message):
        torch.ops.kvhal.copy_blocks(cache.data, torch.tensor(pairs), cache.pages, checked)
    assert torch.equal(cache.data, before)


def test_no_pairs_is_nothing_to_do_and_other_shapes_are_refused() -> None:
    cache = make(blocks=4)
    before = cache.data.clone()
    torch.ops.kvhal.copy_blocks(cache.data, torch.empty(0, 2, dtype=torch.int64), cache.pages, True)
    assert torch.equal(cache.data, before)
    with pytest.raises(SpecMismatch, match=r"pairs must be \[n, 2\]"):
        torch.ops.kvhal.copy_blocks(cache.data, torch.zeros(2, 3, dtype=torch.int64), cache.pages, True)
    with pytest.raises(SpecMismatch, match="pairs must be torch.int64"):
        torch.ops.kvhal.copy_blocks(cache.data, torch.zeros(2, 2, dtype=torch.int32), cache.pages, True)

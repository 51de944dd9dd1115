"""store, gather and copy_blocks in the interpreter: every byte is the reference's."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from kvhal.errors import AddressError, SpecMismatch
from kvhal.kernels import operators, reference
from kvhal.kernels.geometry import PageGeometry
from kvhal.kernels.triton import launch
from kvhal.kernels.triton.tuning import Tuning
from tests.kernels.oracle import MODES, Cache, make
from tests.kernels.test_golden import GOLDEN, MODE_OF
from tests.kernels.test_golden import rows as golden_rows

assert operators.SCHEMAS
KINDS = ("tiled", "inline")
SCATTERED = torch.tensor([60, 0, 1, 2, 3, 17, 16, -1, 63, 5])


def rows(cache: Cache, count: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Rows of very different size, with zeros, tiny ones, NaN and infinity among them."""
    g = cache.geometry
    found = []
    for dim in (g.k.head_dim, g.v.head_dim):
        x = torch.randn(count, g.num_kv_heads, dim) * torch.exp(3 * torch.randn(count, g.num_kv_heads, 1))
        x[0] = 0.0
        x[1, 0] = -0.0
        x[2] = x[2].abs() + 3
        x[3] *= 1e-38
        x[4] *= 1e-42
        x[5, 0, dim // 2] = math.nan
        x[6, -1, 0] = -math.inf
        found.append(x.to(dtype))
    return found[0], found[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("mode", "encoding"), MODES)
def test_store_writes_the_bytes_of_the_reference(
    mode: str, encoding: str | None, kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = (make(mode, encoding, kind=kind, dim=24, dim_v=40, layers=2, layer=1, page_align=256) for _ in "ab")
    k, v = rows(here, len(SCATTERED), dtype)
    launch.store(here.data, k, v, SCATTERED, here.geometry, checked=True)
    reference.store(there.data, k, v, SCATTERED, there.geometry, checked=True)
    assert torch.equal(here.data, there.data)
    # Sixteen tokens a program: a whole tile, and one that is not aligned.
    monkeypatch.setattr(launch, "tuning_of", lambda _: Tuning(store_small=0))
    for start in (16, 37):
        k, v = rows(here, 16, dtype)
        slots = torch.arange(start, start + 16, dtype=torch.int32)
        launch.store(here.data, k, v, slots, here.geometry, checked=False)
        reference.store(there.data, k, v, slots, there.geometry, checked=False)
        assert torch.equal(here.data, there.data)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("encoding", MODE_OF)
def test_golden_pages(encoding: str, kind: str, dtype: torch.dtype) -> None:
    cache = make(
        MODE_OF[encoding],
        encoding,
        blocks=GOLDEN["blocks"],
        heads=GOLDEN["kv_heads"],
        dim=GOLDEN["head_dim"],
        block_size=GOLDEN["block_size"],
        kind=kind,
    )
    cache.data[: cache.layout.counters_offset] = int(GOLDEN["poison"], 16)
    slots = torch.tensor(GOLDEN["slots"])
    k, v = golden_rows("k").to(dtype), golden_rows("v").to(dtype)
    launch.store(cache.data, k, v, slots, cache.geometry, checked=True)
    assert cache.data[: cache.layout.groups[0].nbytes].numpy().tobytes().hex() == GOLDEN["pages"][encoding][kind]
    assert cache.counters == (0, 0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("mode", "encoding"), MODES)
def test_gather_reads_every_code_as_the_reference_does(mode: str, encoding: str | None, kind: str) -> None:
    cache = make(mode, encoding, kind=kind, blocks=8, dim=24, dim_v=40)
    end = cache.layout.scales_offset or cache.layout.counters_offset
    cache.data[:end] = torch.randint(0, 256, (end,), dtype=torch.uint8)
    slots = torch.tensor([5, 6, 7, 127, -1, 128, -3, 0])
    for dtype, bits in ((torch.float32, torch.int32), (torch.bfloat16, torch.int16)):
        here, there = ([torch.full((8, 2, dim), 7.0, dtype=dtype) for dim in (24, 40)] for _ in "ab")
        launch.gather(cache.data, slots, here[0], here[1], cache.geometry, checked=False)
        reference.gather(cache.data, slots, there[0], there[1], cache.geometry, checked=False)
        for a, b in zip(here, there, strict=True):
            assert bool(((a.view(bits) == b.view(bits)) | (a.isnan() & b.isnan())).all())
    assert cache.counters == (0, 8)


@pytest.mark.parametrize("kind", KINDS)
def test_copy_blocks_reads_all_before_it_writes(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "MOVE_BYTES", 1024)
    here, there = (make("int8_per_token_head", blocks=6, kind=kind, layers=2, heads=3, dim=24) for _ in "ab")
    there.data.random_(256)
    here.data.copy_(there.data)
    pairs = torch.tensor([[1, 4], [4, 1], [0, 2], [2, 3]])
    layers = PageGeometry.all_of(here.layout)
    launch.copy_blocks(here.data, pairs, layers)
    reference.copy_blocks(there.data, pairs, layers, checked=True)
    assert torch.equal(here.data, there.data)


def test_bad_slots_are_named_or_counted() -> None:
    cache = make()
    before = cache.data.clone()
    k, v = rows(cache, 8, torch.float32)
    slots = torch.tensor([0, 64, 2, -7, -1, 5, 6, 7])
    with pytest.raises(AddressError, match="slot 64 at position 1"):
        launch.store(cache.data, k, v, slots, cache.geometry, checked=True)
    assert torch.equal(cache.data, before)
    launch.store(cache.data, k, v, slots, cache.geometry, checked=False)
    assert cache.counters == (4, 2)


def test_tensors_that_do_not_fit_are_named() -> None:
    cache, g = make(), make().geometry
    k = torch.zeros(4, 2, 32)
    with pytest.raises(SpecMismatch, match="k must have a contiguous last dimension"):
        launch.store(cache.data, torch.zeros(4, 32, 2).transpose(1, 2), k, torch.arange(4), g, checked=True)
    with pytest.raises(SpecMismatch, match="one dtype"):
        launch.store(cache.data, k, k.bfloat16(), torch.arange(4), g, checked=True)
    with pytest.raises(SpecMismatch, match="on the cache's device, cpu; found meta"):
        launch.store(cache.data, k.to("meta"), k, torch.arange(4), g, checked=True)

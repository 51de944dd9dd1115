"""The Triton kernels on a real GPU against the CPU: bytes bit for bit, attention against float64.

Run on a machine with a GPU: `pytest -m gpu -v tests/gpu` (with pytest-xdist, `-n 14` for this file and
`test_gpu_prefill.py`, which compile much and measure no memory; -v, so that a run that is cut has named its failures).
Data are made and judged on the CPU by `tests/kernels/oracle.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kvhal.errors import AddressError
from kvhal.kernels import operators
from kvhal.kernels.geometry import LayerGeometry
from tests.kernels import oracle
from tests.kernels.oracle import MODES, Cache, make
from tests.kernels.test_attend import BOUND, Batch

assert operators.SCHEMAS
pytestmark = pytest.mark.gpu
KINDS = ("tiled", "inline")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(autouse=True, scope="module")
def registered() -> None:
    from pathlib import Path

    from kvhal.kernels.triton import launch
    from kvhal.kernels.triton import operators as registered_here
    from kvhal.kernels.triton.tuning import load_tunings

    assert registered_here.LIBRARY
    arch = "sm_{}{}".format(*torch.cuda.get_device_capability())
    known = load_tunings(Path(__file__).parents[2] / "platforms/kvhal_cuda/tuning.yaml")
    if torch.version.hip is None and arch in known:
        launch.set_tuning(0, known[arch])


@dataclass
class Twin:
    """One cache on the CPU and its copy on the GPU."""

    cache: Cache
    data: Tensor

    @classmethod
    def of(cls, cache: Cache) -> Twin:
        return cls(cache, cache.data.cuda())

    def store(self, k: Tensor, v: Tensor, slots: Tensor, *, checked: bool = True) -> None:
        torch.ops.kvhal.store(self.cache.data, k, v, slots, self.cache.packed, checked)
        torch.ops.kvhal.store(self.data, k.cuda(), v.cuda(), slots.cuda(), self.cache.packed, checked)

    def same(self) -> bool:
        return torch.equal(self.cache.data, self.data.cpu())


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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("mode", "encoding"), MODES)
@pytest.mark.parametrize(
    ("dim", "dim_v", "heads"), [(128, 128, 8), (80, 112, 3), (16, 40, 1), (256, 64, 5), (512, 512, 1)]
)
def test_store_is_exact(
    dim: int, dim_v: int, heads: int, mode: str, encoding: str | None, kind: str, dtype: torch.dtype
) -> None:
    for count in (40, 300):
        twin = Twin.of(make(mode, encoding, kind=kind, blocks=24, heads=heads, dim=dim, dim_v=dim_v, layers=2, layer=1))
        scattered = torch.randperm(384)[:count]
        scattered[::7] = -1
        twin.store(*rows(twin.cache, count, dtype), scattered)
        assert twin.same()
        twin.store(*rows(twin.cache, 320, dtype), torch.arange(16, 336))
        twin.store(*rows(twin.cache, 290, dtype), torch.arange(3, 293))
        assert twin.same()


@pytest.mark.parametrize("dim", [24, 40, 64, 128])
@pytest.mark.parametrize("mode", ["int8_per_token_head", "int4_per_token_head", "fp8_per_token_head"])
def test_rows_that_start_anywhere_are_stored_exactly(mode: str, dim: int) -> None:
    """Unaligned rows are read one element a thread, so that a thread's elements side by side are of several rows."""
    twin = Twin.of(make(mode, blocks=24, heads=3, dim=dim))
    for dtype in DTYPES:
        wide = torch.zeros(2, 320, 3, dim + 1, dtype=dtype)
        k, v = wide[0, :, :, 1:], wide[1, :, :, 1:]
        k[:], v[:] = rows(twin.cache, 320, dtype)
        gpu = wide.cuda()
        torch.ops.kvhal.store(twin.cache.data, k, v, torch.arange(320), twin.cache.packed, True)
        torch.ops.kvhal.store(
            twin.data, gpu[0, :, :, 1:], gpu[1, :, :, 1:], torch.arange(320).cuda(), twin.cache.packed, True
        )
        assert twin.same()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("encoding", ["int8", "e4m3fn", "e4m3fnuz", "int4"])
def test_golden_pages(encoding: str, kind: str) -> None:
    from tests.kernels.test_golden import GOLDEN, MODE_OF
    from tests.kernels.test_golden import rows as golden

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
    data, slots = cache.data.cuda(), torch.tensor(GOLDEN["slots"]).cuda()
    torch.ops.kvhal.store(data, golden("k").cuda(), golden("v").cuda(), slots, cache.packed, True)
    assert data[: cache.layout.groups[0].nbytes].cpu().numpy().tobytes().hex() == GOLDEN["pages"][encoding][kind]


@pytest.mark.parametrize("mode", ["int8_per_token_head", "fp8_per_token_head", "int4_per_token_head", "fp8_e4m3"])
def test_many_random_rows_are_exact(mode: str) -> None:
    """Four million codes a store: a rounding that differs once in a million shows."""
    twin = Twin.of(make(mode, blocks=256, heads=8, dim=128))
    k, v = (torch.randn(4096, 8, 128) * torch.exp(torch.randn(4096, 8, 1)) for _ in range(2))
    twin.store(k.bfloat16(), v.bfloat16(), torch.arange(4096))
    assert twin.same()
    twin.store(k, v, torch.randperm(4096))
    assert twin.same()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("mode", "encoding"), MODES)
def test_gather_is_exact_for_every_code(mode: str, encoding: str | None, kind: str) -> None:
    cache = make(mode, encoding, kind=kind, blocks=8, heads=3, dim=80, dim_v=24)
    end = cache.layout.scales_offset or cache.layout.counters_offset
    cache.data[:end] = torch.randint(0, 256, (end,), dtype=torch.uint8)
    data, slots = cache.data.cuda(), torch.tensor([5, 6, 7, 8, 127, -1, 128, -3, 0, 1, 2, 64])
    for dtype in DTYPES:
        outs = [torch.full((12, 3, dim), 7.0, dtype=dtype) for dim in (80, 24)]
        there = [x.cuda() for x in outs]
        torch.ops.kvhal.gather(cache.data, slots, *outs, cache.packed, False)
        torch.ops.kvhal.gather(data, slots.cuda(), *there, cache.packed, False)
        for a, b in zip(outs, there, strict=True):
            bits = {4: torch.int32, 2: torch.int16}[a.element_size()]
            c = b.cpu()
            assert bool(((a.view(bits) == c.view(bits)) | (a.isnan() & c.isnan())).all())
    assert torch.equal(data[cache.layout.counters_offset :].cpu(), cache.data[cache.layout.counters_offset :])


@pytest.mark.parametrize("kind", KINDS)
def test_copy_blocks_reads_all_before_it_writes(kind: str) -> None:
    cache = make("int8_per_token_head", blocks=6, kind=kind, layers=3, heads=3, dim=24, page_align=256)
    cache.data.random_(256)
    data, pairs = cache.data.cuda(), torch.tensor([[1, 4], [4, 1], [0, 2], [2, 3]])
    torch.ops.kvhal.copy_blocks(cache.data, pairs, cache.pages, True)
    torch.ops.kvhal.copy_blocks(data, pairs.cuda(), cache.pages, True)
    assert torch.equal(data.cpu(), cache.data)


def attend(one: Batch, *, checked: bool = True, **given: Any) -> tuple[Tensor, Tensor]:
    """`Batch.attend` on the GPU; the workspace starts poisoned."""
    from kvhal.kernels.triton import launch
    from kvhal.kernels.triton.workspace import triton_workspace_bytes

    g, tokens = one.cache.geometry, one.q.shape[0]
    starts = torch.tensor([0, *np.cumsum(one.queries)], dtype=torch.int32).cuda()
    out = torch.full((tokens, one.q_heads, g.v.head_dim), 7.0, dtype=given.get("out_dtype", torch.float32)).cuda()
    lse = torch.full((tokens, one.q_heads), 7.0).cuda()
    tuning = launch.tuning_of(out.device)
    nbytes = triton_workspace_bytes(g, one.q_heads, tokens, len(one.lengths), tuning)
    sinks = given.get("sinks")
    torch.ops.kvhal.attend(
        given.get("data", one.cache.data.cuda()),
        one.q.cuda(),
        one.table.cuda(),
        torch.tensor(given.get("lengths", one.lengths), dtype=torch.int32).cuda(),
        starts,
        None if sinks is None else sinks.cuda(),
        torch.full((nbytes,), 0xFF, dtype=torch.uint8).cuda(),
        out,
        lse,
        one.cache.packed,
        given.get("scale", g.k.head_dim**-0.5),
        given.get("softcap", 0.0),
        checked,
    )
    return out.cpu(), lse.cpu()


def check(one: Batch, **given: Any) -> None:
    out, lse = attend(one, **given)
    right, right_lse = one.right(**given)
    assert bool(out.isfinite().all())
    found = oracle.relative(out, right)
    assert found <= BOUND, found
    seen = np.isfinite(right_lse)
    # q is split in 15 bits for integer keys; scores here reach 30.
    assert np.allclose(lse.numpy()[seen], right_lse[seen], atol=2e-3, rtol=1e-4)
    assert bool((lse[torch.from_numpy(~seen)] == -math.inf).all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("mode", "encoding"), MODES)
def test_attend_in_every_mode(mode: str, encoding: str | None, kind: str, dtype: torch.dtype) -> None:
    for queries in ([1, 1, 1, 1], [1, 3, 4, 2], [1, 100, 33, 64]):
        cache = make(mode, encoding, kind=kind, blocks=160, heads=2, dim=128, k_scale=0.02, v_scale=0.02)
        check(Batch(cache, [5, 2000, 33, 64], queries, q_heads=8, dtype=dtype), out_dtype=dtype)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "mode", ["int8_per_token_head", "int4_per_token_head", "fp8_per_token_head", "bfloat16", "fp8_e4m3"]
)
@pytest.mark.parametrize(
    ("dim", "dim_v", "heads", "group"),
    [
        (16, 16, 1, 1),
        (64, 64, 8, 16),
        (80, 80, 3, 2),
        (96, 96, 5, 1),
        (112, 112, 8, 4),
        (192, 128, 1, 16),
        (128, 192, 2, 8),
        (256, 256, 1, 5),
        (512, 512, 1, 3),
        (8, 24, 3, 7),
    ],
)
def test_attend_in_every_shape(dim: int, dim_v: int, heads: int, group: int, mode: str, kind: str) -> None:
    for queries in ([1, 1, 1, 0], [1, 4, 2, 0], [1, 17, 60, 0]):
        cache = make(mode, kind=kind, blocks=40, heads=heads, dim=dim, dim_v=dim_v, k_scale=0.02, v_scale=0.02)
        check(Batch(cache, [1, 17, 500, 0], queries, q_heads=heads * group))


@pytest.mark.parametrize("block_size", [16, 48, 128])
@pytest.mark.parametrize("window", [None, 1, 16, 33, 100, 300])
@pytest.mark.parametrize("mode", ["int8_per_token_head", "bfloat16"])
def test_windows_softcap_and_sinks(mode: str, window: int | None, block_size: int) -> None:
    for queries in ([2, 1, 1, 1], [5, 200, 129, 1]):
        cache = make(mode, blocks=60, block_size=block_size, window=window, dim=64)
        check(Batch(cache, [5, 400, 129, 1], queries, q_heads=4), sinks=torch.randn(4), softcap=3.0)


@pytest.mark.parametrize("block_size", [1, 3, 24])
def test_inline_takes_any_block_size(block_size: int) -> None:
    cache = make("int4_per_token_head", kind="inline", blocks=300, block_size=block_size, dim=64)
    check(Batch(cache, [150, 7], [3, 7], q_heads=4))


@pytest.mark.parametrize(("heads", "group"), [(2, 8), (4, 3), (2, 7)])
@pytest.mark.parametrize("mode", ["int8_per_token_head", "int4_per_token_head", "bfloat16"])
def test_many_sequences_with_a_few_queries(mode: str, heads: int, group: int) -> None:
    """More than 4,096 rows, whose parts are joined several heads at once; one sequence is shared by many programs."""
    lengths, queries = [9000, *range(3, 181)], [2, *(1 + n % 4 for n in range(178))]
    cache = make(mode, blocks=1700, heads=heads, dim=64, dim_v=48)
    check(Batch(cache, lengths, queries, q_heads=heads * group), sinks=torch.linspace(-1.0, 1.0, heads * group))


def test_long_ragged_batch() -> None:
    lengths = [0, 1, 9000, 17, 4096, 31, 333, 2048]
    for mode in ("int8_per_token_head", "int4_per_token_head", "fp8_per_token_head", "bfloat16"):
        cache = make(mode, blocks=1100, heads=8, dim=128)
        check(Batch(cache, lengths, [1] * 8, q_heads=32, dtype=torch.bfloat16), out_dtype=torch.bfloat16)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("mode", "encoding"), MODES)
def test_what_a_query_does_not_see_changes_nothing(mode: str, encoding: str | None, kind: str) -> None:
    cache = make(mode, encoding, kind=kind, blocks=16, window=20, k_scale=0.02, v_scale=0.02)
    one = Batch(cache, [40, 35], [3, 1], q_heads=4)
    before = attend(one)
    bad = torch.full((19, 2, 32), math.nan)
    bad[::2] = math.inf
    poisoned = torch.tensor([*one.slots[0][:18], one.slots[0][39]])
    torch.ops.kvhal.store(cache.data, bad, bad, poisoned, cache.packed, True)
    after = attend(one)
    for row in (0, 1, 3):
        assert torch.equal(before[0][row].isnan(), after[0][row].isnan())
        assert oracle.relative(after[0][row], before[0][row].double().numpy()) <= 1e-6
        assert torch.allclose(before[1][row], after[1][row])
    assert bool(after[0][2].isnan().all())


@pytest.mark.parametrize("queries", [1, 3, 20])
@pytest.mark.parametrize("mode", ["bfloat16", "fp8_e4m3"])
def test_a_bad_value_stays_in_its_channel(mode: str, queries: int) -> None:
    cache = make(mode, blocks=16, k_scale=0.02, v_scale=0.02)
    one = Batch(cache, [40], [queries], q_heads=4)
    right = one.right()[0]
    k, v = (torch.from_numpy(cache.values(name, one.slots[0])).float() for name in ("k", "v"))
    v[39, 1, 7], v[39, 1, 9] = math.nan, math.inf
    torch.ops.kvhal.store(cache.data, k, v, torch.tensor(one.slots[0]), cache.packed, True)
    out, _ = attend(one)
    touched = torch.zeros(queries, 4, 32, dtype=torch.bool)
    touched[-1, 2:, 7] = touched[-1, 2:, 9] = True
    assert torch.equal(out.isnan(), touched)
    assert oracle.relative(out[~touched], right[~touched.numpy()]) <= BOUND


def test_bad_blocks_and_lengths_are_named_or_counted() -> None:
    cache = make(blocks=64)
    one = Batch(cache, [100, 40], [2, 1], q_heads=2)
    right = one.right()[0]
    one.table[0, 2], one.table[0, 5] = -1, 64
    with pytest.raises(AddressError, match="sequence 0: block table entry 2 is -1"):
        attend(one)
    data = cache.data.cuda()
    out, lse = attend(one, checked=False, data=data)
    assert bool(out[:2].isnan().all() & lse[:2].isnan().all())
    assert oracle.relative(out[2:], right[2:]) <= BOUND
    assert data[cache.layout.counters_offset :].view(torch.int64).tolist()[:2] == [0, 2]


def test_blocks_beyond_two_gibibytes() -> None:
    from kvhal.layout import Layout
    from kvhal.spec import CacheSpec

    blocks = 140_000
    layout = Layout.of(
        CacheSpec.uniform(mode="int8_per_token_head", num_layers=1, num_kv_heads=8, head_dim=128), blocks
    )
    data = torch.zeros(layout.nbytes, dtype=torch.uint8, device="cuda")
    g = LayerGeometry.of(layout, 0)
    ids = torch.tensor([0, 63_549, 63_550, 127_100, blocks - 1])
    slots = (ids[:, None] * 16 + torch.arange(16)).flatten()
    k, v = torch.randn(80, 8, 128), torch.randn(80, 8, 128)
    torch.ops.kvhal.store(data, k.cuda(), v.cuda(), slots.cuda(), g.pack(), True)
    small = make(blocks=5, heads=8, dim=128)
    torch.ops.kvhal.store(small.data, k, v, torch.arange(80), small.packed, True)
    size = layout.groups[0].page_stride
    for index, block in enumerate(ids.tolist()):
        assert torch.equal(data[block * size : (block + 1) * size].cpu(), small.data[index * size : (index + 1) * size])
    one = Batch(small, [80], [1], q_heads=32)
    torch.ops.kvhal.store(small.data, k, v, torch.tensor(one.slots[0]), small.packed, True)
    torch.ops.kvhal.store(data, k.cuda(), v.cuda(), slots.cuda(), g.pack(), True)
    right = one.right()[0]
    one.cache.geometry, one.table = g, ids.int().view(1, -1)
    out, _ = attend(one, data=data)
    assert oracle.relative(out, right) <= BOUND


def test_a_captured_step_follows_its_lengths() -> None:
    """Store and attend in one graph; lengths, slots and table change between replays, shapes do not."""
    from kvhal.kernels.triton import launch
    from kvhal.kernels.triton.workspace import triton_workspace_bytes

    cache = make("int8_per_token_head", blocks=200, heads=2, dim=64)
    g, data = cache.geometry, cache.data.cuda()
    q, k, v = (torch.randn(4, h, 64, device="cuda", dtype=torch.bfloat16) for h in (8, 2, 2))
    slots = torch.full((4,), -1, dtype=torch.int64, device="cuda")
    table = torch.zeros(4, 40, dtype=torch.int32, device="cuda")
    lengths, starts = (
        torch.zeros(4, dtype=torch.int32, device="cuda"),
        torch.arange(5, dtype=torch.int32, device="cuda"),
    )
    nbytes = triton_workspace_bytes(g, 8, 4, 4, launch.tuning_of(q.device))
    work, out = torch.full((nbytes,), 0xFF, dtype=torch.uint8, device="cuda"), torch.empty_like(q)

    def step() -> None:
        torch.ops.kvhal.store(data, k, v, slots, cache.packed, False)
        torch.ops.kvhal.attend(data, q, table, lengths, starts, None, work, out, None, cache.packed, 0.125, 0.0, False)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for now in ([5, 100, 33, 64], [6, 0, 600, 1], [640, 640, 640, 640]):
        ids = torch.randperm(200)[:160].view(4, 40).int()
        everything = (ids[:, :, None] * 16 + torch.arange(16)).view(4, -1)
        kk, vv = torch.randn(2560, 2, 64), torch.randn(2560, 2, 64)
        torch.ops.kvhal.store(data, kk.cuda(), vv.cuda(), everything.flatten().cuda(), cache.packed, True)
        table.copy_(ids)
        lengths.copy_(torch.tensor(now))
        slots.copy_(torch.tensor([int(everything[i, n - 1]) if n else -1 for i, n in enumerate(now)]))
        graph.replay()
        torch.cuda.synchronize()
        cache.data.copy_(data.cpu())
        for i, n in enumerate(now):
            if not n:
                assert not out[i].any()
                continue
            kept = everything[i, :n].tolist()
            right, _ = oracle.attention(
                q[i : i + 1].double().cpu().numpy(), cache.values("k", kept), cache.values("v", kept), scale=0.125
            )
            assert oracle.relative(out[i : i + 1].cpu(), right) <= BOUND

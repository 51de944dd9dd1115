from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor

from kvhal.errors import AddressError, SpecMismatch
from kvhal.kernels import operators, reference
from kvhal.modes import ENCODINGS
from tests.kernels import oracle
from tests.kernels.oracle import MODES, Cache, make

assert operators.SCHEMAS
KINDS = ("tiled", "inline")
SCATTERED = [60, 0, 1, 2, 3, 17, 16, -1, 18, 4, 5, 7, 8, 9, 10, 11, -1, 63, 32, 33, 34, 35, 36]


def store(cache: Cache, k: Tensor, v: Tensor, slots: Tensor, *, checked: bool = True) -> None:
    torch.ops.kvhal.store(cache.data, k, v, slots, cache.packed, checked)


def gather(
    cache: Cache, slots: Tensor, *, dtype: torch.dtype = torch.float32, checked: bool = True
) -> tuple[Tensor, Tensor]:
    g = cache.geometry
    k, v = (torch.full((slots.numel(), g.num_kv_heads, s.head_dim), 7.0, dtype=dtype) for s in (g.k, g.v))
    torch.ops.kvhal.gather(cache.data, slots, k, v, cache.packed, checked)
    return k, v


def rows(cache: Cache, count: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    g = cache.geometry
    return torch.randn(count, g.num_kv_heads, g.k.head_dim).to(dtype), torch.randn(
        count, g.num_kv_heads, g.v.head_dim
    ).to(dtype)


def right_bytes(cache: Cache, name: str, x: Tensor) -> tuple[oracle.Array, oracle.Array | None]:
    """Code bytes [n, heads, bytes] and word bytes that `x` must be stored as."""
    group = cache.layout.group_of(cache.layer).group
    of = group.scaled(name)
    assert of is not None
    wide = x.float().numpy()
    if of.mode.endswith("per_token_head"):
        codes, words = oracle.quantize_rows(wide, of.encoding)
        return codes, np.ascontiguousarray(words)[..., None].view(np.uint8)
    if of.mode.startswith("fp8"):
        scales = cache.layout.spec.static_scales
        assert scales is not None
        inv = np.float32(1.0) / np.float32(scales.of(name)[cache.layer])
        return oracle.cast((wide * inv).astype(np.float32), of.encoding, ENCODINGS[of.encoding].qmax), None
    return np.ascontiguousarray(wide.astype(oracle.TYPES[of.encoding])).view(np.uint8), None


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("mode", "encoding"), MODES)
def test_store_writes_the_right_bytes_and_no_others(mode: str, encoding: str | None, kind: str) -> None:
    cache = make(mode, encoding, kind=kind, heads=3, dim=24, dim_v=40, layers=2, layer=1, page_align=256)
    k, v = rows(cache, len(SCATTERED), torch.bfloat16)
    before = cache.data.clone()
    store(cache, k, v, torch.tensor(SCATTERED))
    kept = [i for i, slot in enumerate(SCATTERED) if slot >= 0]
    slots = [SCATTERED[i] for i in kept]
    for name, x in (("k", k[kept]), ("v", v[kept])):
        codes, words = right_bytes(cache, name, x)
        assert np.array_equal(cache.raw(name, slots), codes)
        if words is not None:
            assert np.array_equal(cache.raw(f"{name}_word", slots), words)
    untouched = torch.from_numpy(~cache.written(slots))
    assert torch.equal(cache.data[untouched], before[untouched])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("order", ["layer_major", "block_major"])
@pytest.mark.parametrize(("mode", "encoding"), MODES)
def test_gather_reads_what_the_bytes_say(mode: str, encoding: str | None, order: str, kind: str) -> None:
    cache = make(mode, encoding, kind=kind, order=order, heads=3, dim=40, dim_v=24, layers=3, layer=2)
    k, v = rows(cache, len(SCATTERED))
    store(cache, k, v, torch.tensor(SCATTERED))
    for slots in (torch.tensor(SCATTERED), torch.arange(32, 36), torch.tensor([3, 1, 0, 2]), torch.arange(1, 5)):
        found = gather(cache, slots)
        good = [i for i, slot in enumerate(slots.tolist()) if slot >= 0]
        padding = [i for i, slot in enumerate(slots.tolist()) if slot < 0]
        for name, values in zip(("k", "v"), found, strict=True):
            right = torch.from_numpy(cache.values(name, slots[good].tolist()))
            # Code times scale is one fp32 rounding of the exact product.
            assert torch.equal(values[good], right.float())
            assert not values[padding].any()


@pytest.mark.parametrize("kind", KINDS)
def test_gather_rounds_once_to_the_asked_dtype(kind: str) -> None:
    cache = make("int8_per_token_head", kind=kind)
    store(cache, *rows(cache, 20), torch.arange(5, 25))
    wide = gather(cache, torch.arange(5, 25))
    for dtype in (torch.bfloat16, torch.float16):
        narrow = gather(cache, torch.arange(5, 25), dtype=dtype)
        assert all(torch.equal(n, w.to(dtype)) for n, w in zip(narrow, wide, strict=True))


def test_k_and_v_may_differ_in_mode() -> None:
    for kind in KINDS:
        from kvhal.layout import Layout
        from kvhal.spec import CacheSpec

        spec = CacheSpec.uniform(
            mode=("int8_per_token_head", "int4_per_token_head"), num_layers=1, num_kv_heads=2, head_dim=24
        )
        cache = Cache(Layout.of(spec, 4, kind=kind))
        k, v = rows(cache, len(SCATTERED))
        store(cache, k, v, torch.tensor(SCATTERED))
        kept = [i for i, slot in enumerate(SCATTERED) if slot >= 0]
        for name, x in (("k", k[kept]), ("v", v[kept])):
            assert np.array_equal(cache.raw(name, [SCATTERED[i] for i in kept]), right_bytes(cache, name, x)[0])


@pytest.mark.parametrize("slot_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("slots", [[-1, 0, -1, 5], [-1, -1], []])
@pytest.mark.parametrize("kind", KINDS)
def test_padding_is_skipped_between_canaries(kind: str, slots: list[int], slot_dtype: torch.dtype) -> None:
    cache = make("int8_per_token_head", kind=kind)
    size = cache.layout.nbytes
    memory = torch.full((64 + size + 64,), 0xC7, dtype=torch.uint8)
    memory[64 : 64 + size] = cache.data
    before = memory.clone()
    inside = memory[64 : 64 + size]
    k, v = rows(cache, len(slots))
    torch.ops.kvhal.store(inside, k, v, torch.tensor(slots, dtype=slot_dtype), cache.packed, True)
    changed = np.zeros(memory.numel(), dtype=bool)
    changed[64 : 64 + size] = cache.written([s for s in slots if s >= 0])
    assert torch.equal(memory[torch.from_numpy(~changed)], before[torch.from_numpy(~changed)])
    cache.data = inside
    codes, _ = right_bytes(cache, "k", k[[i for i, s in enumerate(slots) if s >= 0]])
    assert np.array_equal(cache.raw("k", [s for s in slots if s >= 0]), codes)


def test_scales_sit_where_padded_pages_say() -> None:
    cache = make("int8_per_token_head", blocks=6, heads=4, dim=64, page_align=256, kind="inline")
    count = 96
    amplitude = torch.arange(1, count * 4 + 1, dtype=torch.float32).view(count, 4, 1)
    x = torch.ones(count, 4, 64) * amplitude * 127
    store(cache, x, x * 2, torch.arange(count))
    scale = cache.raw("k_word", list(range(count))).copy().view(np.float32)[..., 0]
    assert np.array_equal(scale, (x[..., 0].numpy() * np.float32(1 / 127)).astype(np.float32))
    assert not np.array_equal(scale, cache.raw("v_word", list(range(count))).copy().view(np.float32)[..., 0])


def test_layers_of_one_buffer_keep_apart() -> None:
    first = make("fp8_per_token_head", order="block_major", layers=3)
    layers = [Cache(first.layout, layer) for layer in range(3)]
    for index, cache in enumerate(layers):
        cache.data = first.data
        x = torch.full((64, 2, 32), float(index + 1))
        store(cache, x, x * 10, torch.arange(64))
    for index, cache in enumerate(layers):
        k, v = gather(cache, torch.arange(64))
        assert torch.allclose(k, torch.tensor(float(index + 1)))
        assert torch.allclose(v, torch.tensor(10.0 * (index + 1)))


@pytest.mark.parametrize(("scales", "code_k", "code_v"), [((0.25, 0.5), 4.0, 2.0), ((1.0, 1.0), 1.0, 1.0)])
def test_static_scales_are_used(scales: tuple[float, float], code_k: float, code_v: float) -> None:
    cache = make("fp8_e4m3", k_scale=scales[0], v_scale=scales[1])
    ones = torch.ones(1, 2, 32)
    store(cache, ones, ones, torch.tensor([9]))
    for name, code in (("k", code_k), ("v", code_v)):
        right = np.array(code, ml_dtypes.float8_e4m3fn).view(np.uint8)
        assert bool((cache.raw(name, [9]) == right).all())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [64, -2, 2**31 + 5, -(2**40)])
def test_a_bad_slot_is_named_before_any_byte_is_written(bad: int, kind: str) -> None:
    cache = make(kind=kind)
    before = cache.data.clone()
    with pytest.raises(AddressError, match=rf"slot {bad} at position 2.*nothing was touched"):
        store(cache, *rows(cache, 4), torch.tensor([0, 1, bad, 3]))
    with pytest.raises(AddressError, match=rf"slot {bad} at position 1"):
        gather(cache, torch.tensor([0, bad]))
    assert torch.equal(cache.data, before)


def test_many_bad_slots_are_named_briefly() -> None:
    cache = make()
    with pytest.raises(AddressError, match="slot 104 at position 4 and 5 more"):
        store(cache, *rows(cache, 10), torch.arange(100, 110))


@pytest.mark.parametrize("slots", [[5, 6, 5, 7], [1, 2, 3, 3]])
def test_a_slot_named_twice_is_refused(slots: list[int]) -> None:
    cache = make()
    before = cache.data.clone()
    with pytest.raises(AddressError, match=r"once a call.*slot (5 at position 2|3 at position 3)"):
        store(cache, *rows(cache, 4), torch.tensor(slots))
    assert torch.equal(cache.data, before)


@pytest.mark.parametrize("kind", KINDS)
def test_counted_mode_skips_and_counts_bad_slots(kind: str) -> None:
    cache = make(kind=kind)
    right = make(kind=kind)
    k, v = rows(cache, 6)
    store(cache, k, v, torch.tensor([0, -7, 64, 3, -1, 9]), checked=False)
    keep = [0, 3, 5]
    store(right, k[keep], v[keep], torch.tensor([0, 3, 9]))
    end = cache.layout.counters_offset
    assert torch.equal(cache.data[:end], right.data[:end])
    assert cache.counters == (0, 2)
    found_k, found_v = gather(cache, torch.tensor([0, 64, -1, -9]), checked=False)
    assert bool(found_k[[1, 3]].isnan().all() & found_v[[1, 3]].isnan().all())
    assert not found_k[2].any()
    assert bool(found_k[0].isfinite().all())
    assert cache.counters == (0, 4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("mode", "encoding"), MODES)
def test_nonfinite_rows_are_counted_and_harm_nobody(mode: str, encoding: str | None, kind: str) -> None:
    cache = make(mode, encoding, kind=kind)
    k, v = rows(cache, 8)
    k[1, 0, 3], k[1, 1, 3], v[2, 0, 0], v[7, 1, 31] = math.nan, math.inf, -math.inf, math.nan
    k[5, 0, 0] = math.nan
    slots = torch.tensor([0, 1, 2, 3, 20, -1, 21, 22])
    store(cache, k, v, slots)
    assert cache.counters == (4, 0)
    found_k, found_v = gather(cache, slots)
    assert bool(found_k[1, :, 3].isfinite().logical_not().all())
    assert bool(found_v[2, 0, 0].isfinite().logical_not())
    whole = mode.endswith("per_token_head")
    assert bool(found_k[1].isfinite().any()) is not whole
    assert bool(found_k[[0, 2, 3, 4, 6, 7]].isfinite().all())
    assert bool(found_v[[0, 1, 3, 4, 6]].isfinite().all())


def test_float16_overflow_is_counted() -> None:
    cache = make("float16")
    k, v = rows(cache, 2)
    k[0, 0, 0] = 1e5
    store(cache, k, v, torch.tensor([0, 1]))
    assert cache.counters == (1, 0)


@pytest.mark.parametrize("kind", KINDS)
def test_inputs_may_be_strided_and_outputs_too(kind: str) -> None:
    cache, right = make(kind=kind), make(kind=kind)
    both = torch.randn(12, 4, 32, dtype=torch.float16)
    k, v = both[:, :2], both[:, 2:]
    store(cache, k, v, torch.arange(3, 15))
    store(right, k.contiguous(), v.contiguous(), torch.arange(3, 15))
    assert torch.equal(cache.data, right.data)
    out = torch.empty(12, 4, 32)
    torch.ops.kvhal.gather(cache.data, torch.arange(3, 15), out[:, :2], out[:, 2:], cache.packed, True)
    wanted = gather(right, torch.arange(3, 15))
    assert torch.equal(out[:, :2], wanted[0])
    assert torch.equal(out[:, 2:], wanted[1])


@pytest.mark.parametrize("kind", KINDS)
def test_work_in_pieces_equals_work_at_once(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, right = make(kind=kind, blocks=16), make(kind=kind, blocks=16)
    slots = torch.cat([torch.arange(3, 130), torch.arange(200, 256), torch.tensor([-1, 131, 140])])
    k, v = rows(cache, slots.numel())
    store(right, k, v, slots)
    values = gather(right, slots)
    monkeypatch.setattr(reference, "PIECE_ELEMENTS", 1)
    store(cache, k, v, slots)
    assert torch.equal(cache.data, right.data)
    assert all(torch.equal(a, b) for a, b in zip(gather(cache, slots), values, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_threads_storing_beside_each_other_do_not_disturb(kind: str) -> None:
    cache, right = make(kind=kind, blocks=64), make(kind=kind, blocks=64)
    k, v = rows(cache, 1024)
    k[:, 0, 0] = math.nan
    order = torch.arange(1024)
    store(right, k, v, order)

    def work(thread: int) -> None:
        for start in range(0, 1024, 256):
            mine = order[start + thread : start + 256 : 4]
            store(cache, k[mine], v[mine], mine)

    for _ in range(5):
        cache.data.fill_(oracle.POISON)
        cache.reset_tail()
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(work, range(4)))
        assert torch.equal(cache.data, right.data)
        assert cache.counters == (1024, 0)


@pytest.mark.parametrize("slot_dtype", [torch.int32, torch.int64])
def test_blocks_beyond_two_gibibytes(slot_dtype: torch.dtype) -> None:
    from kvhal.kernels.geometry import LayerGeometry
    from kvhal.layout import Layout
    from kvhal.spec import CacheSpec

    blocks = 63_560
    spec = CacheSpec.uniform(mode="int8_per_token_head", num_layers=1, num_kv_heads=8, head_dim=128)
    layout = Layout.of(spec, blocks)
    assert layout.groups[0].page_stride == 33_792
    data = torch.empty(layout.nbytes, dtype=torch.uint8)
    data[layout.counters_offset :] = 0
    g = LayerGeometry.of(layout, 0)
    ids = torch.tensor([0, 63_549, 63_550, blocks - 1])
    slots = (ids[:, None] * 16 + torch.arange(16)).flatten()
    k, v = torch.randn(64, 8, 128), torch.randn(64, 8, 128)
    torch.ops.kvhal.store(data, k, v, slots.to(slot_dtype), g.pack(), True)
    small = make(blocks=4, heads=8, dim=128)
    store(small, k, v, torch.arange(64))
    for index, block in enumerate(ids.tolist()):
        here = data[block * 33_792 : (block + 1) * 33_792]
        assert torch.equal(here, small.data[index * 33_792 : (index + 1) * 33_792])
    found = torch.empty(64, 8, 128), torch.empty(64, 8, 128)
    torch.ops.kvhal.gather(data, slots.to(slot_dtype), *found, g.pack(), True)
    assert all(torch.equal(a, b) for a, b in zip(found, gather(small, torch.arange(64)), strict=True))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": torch.zeros(4, 3, 32)}, r"k must have shape \(4, 2, 32\); found \(4, 3, 32\)"),
        ({"v": torch.zeros(4, 2, 16)}, r"v must have shape \(4, 2, 32\); found \(4, 2, 16\)"),
        ({"v": torch.zeros(5, 2, 32)}, r"v must have shape"),
        ({"k": torch.zeros(4, 2, 32, dtype=torch.int8)}, "k must be float32, bfloat16 or float16; found torch.int8"),
        ({"k": torch.zeros(4, 2, 32, dtype=torch.float64)}, "k must be float32"),
        ({"v": torch.zeros(4, 2, 32, dtype=torch.bfloat16)}, "one dtype; found k torch.float32 and v torch.bfloat16"),
        ({"k": torch.zeros(4, 32, 2).transpose(1, 2)}, "k must have a contiguous last dimension"),
        ({"slots": torch.zeros(4)}, "slots must be torch.int32 or torch.int64"),
        ({"slots": torch.zeros(2, 2, dtype=torch.int64)}, "slots must be"),
        ({"cache": torch.zeros(64, dtype=torch.uint8)}, "the cache must be .* contiguous bytes"),
        ({"cache": torch.zeros(1 << 16)}, "the cache must be .* contiguous bytes"),
        ({"cache": torch.zeros(1 << 16, dtype=torch.uint8)[8:]}, "65528 bytes, 8 bytes into its storage"),
    ],
)
def test_tensors_that_do_not_fit_are_named(change: dict[str, Tensor], message: str) -> None:
    cache = make()
    k, v = rows(cache, 4)
    given = {"cache": cache.data, "k": k, "v": v, "slots": torch.arange(4)} | change
    before = given["cache"].clone()
    with pytest.raises(SpecMismatch, match=message):
        torch.ops.kvhal.store(given["cache"], given["k"], given["v"], given["slots"], cache.packed, True)
    assert torch.equal(given["cache"], before)


def test_gather_outputs_that_do_not_fit_are_named() -> None:
    cache = make(dim_v=16)
    slots, good = torch.arange(4), torch.empty(4, 2, 32)
    with pytest.raises(SpecMismatch, match=r"v_out must have shape \(4, 2, 16\)"):
        torch.ops.kvhal.gather(cache.data, slots, good, torch.empty(4, 2, 32), cache.packed, True)
    with pytest.raises(SpecMismatch, match="k_out must be float32"):
        torch.ops.kvhal.gather(cache.data, slots, good.long(), torch.empty(4, 2, 16), cache.packed, True)

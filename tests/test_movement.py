"""Blocks leave and enter caches whole, and only caches that read them the same way."""

from __future__ import annotations

import json
import struct
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import kvhal
from kvhal import AddressError, Blocks, CacheSpec, SpecMismatch, convert
from kvhal.hal import Hal
from kvhal.lease import CacheLease

ROW_MODES = ("bfloat16", "float16", "int8_per_token_head", "fp8_per_token_head", "int4_per_token_head")


def spec_of(mode: str | tuple[str, str] = "int8_per_token_head", **changes: Any) -> CacheSpec:
    base: dict[str, Any] = {"mode": mode, "num_layers": 2, "num_kv_heads": 2, "head_dim": 32, "num_q_heads": 4}
    return CacheSpec.uniform(**{**base, **changes})


def open_cache(hal: Hal, spec: CacheSpec, blocks: int = 8, **options: Any) -> CacheLease:
    lease = hal.allocate(hal.plan(spec, num_blocks=blocks, **options))
    lease.poison()
    return lease


def fill(lease: CacheLease) -> None:
    generator = torch.Generator().manual_seed(3)
    group = lease.layout.groups[0].group
    assert group.k is not None
    assert group.v is not None
    tokens = lease.layout.groups[0].num_slots
    for layer in group.layers:
        k = torch.randn(tokens, group.k.num_kv_heads, group.k.head_dim, generator=generator) * 3
        v = torch.randn(tokens, group.v.num_kv_heads, group.v.head_dim, generator=generator) + 5
        lease.layer(layer).store(k, v, torch.arange(tokens))


@pytest.mark.parametrize("mode", ROW_MODES)
@pytest.mark.parametrize("layout", ["tiled", "inline"])
def test_blocks_arrive_bit_for_bit_in_a_fresh_poisoned_cache(hal: Hal, mode: str, layout: str) -> None:
    """PUB-17: blocks {3, 7} to {0, 1}; the target's order and size differ, its meaning does not."""
    with (
        open_cache(hal, spec_of(mode), layout=layout) as source,
        open_cache(hal, spec_of(mode), 3, layout=layout, order="block_major", page_align=512) as target,
    ):
        fill(source)
        blob = source.export_blocks([3, 7]).to_bytes()
        target.import_blocks(blob, [0, 1])
        q = torch.randn(1, 4, 32)
        length = torch.tensor([32], dtype=torch.int32)
        for layer in range(2):
            there = source.layer(layer).gather(torch.cat([torch.arange(48, 64), torch.arange(112, 128)]))
            here = target.layer(layer).gather(torch.arange(32))
            assert all(torch.equal(a, b) for a, b in zip(there, here, strict=True))
            first = source.layer(layer).attend(q, torch.tensor([[3, 7]], dtype=torch.int32), length)
            second = target.layer(layer).attend(q, torch.tensor([[0, 1]], dtype=torch.int32), length)
            assert torch.equal(first, second)
        untouched = target.export_blocks([2]).payload
        assert untouched.unique().tolist() == [0xFF]


@pytest.mark.parametrize(
    ("other", "options", "field"),
    [
        ({"mode": "fp8_per_token_head"}, {}, "group.stores[k].mode"),
        ({"mode": "bfloat16"}, {}, "group.page_bytes"),
        ({"mode": ("int8_per_token_head", "fp8_per_token_head")}, {}, "group.stores[v].encoding"),
        ({"head_dim": 64}, {}, "group.stores[k].head_dim"),
        ({"num_kv_heads": 4}, {}, "group.stores[k].num_kv_heads"),
        ({"block_size": 32}, {}, "group.block_size"),
        ({"num_layers": 3}, {}, "group.layers"),
        ({}, {"layout": "inline"}, "layout is 'tiled' there and 'inline' here"),
    ],
)
def test_blocks_of_another_kind_are_refused_by_name(
    hal: Hal, other: dict[str, Any], options: dict[str, Any], field: str
) -> None:
    with (
        open_cache(hal, spec_of()) as source,
        open_cache(hal, spec_of(**{"mode": "int8_per_token_head", **other}), **options) as target,
    ):
        fill(source)
        blocks = source.export_blocks([0])
        with pytest.raises(SpecMismatch) as caught:
            target.import_blocks(blocks, [0])
        assert field in str(caught.value)
        assert target.export_blocks([0]).payload.unique().tolist() == [0xFF]


def mutations(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths of every leaf of a JSON value."""
    if isinstance(value, dict):
        return [p for k, v in value.items() for p in mutations(v, (*path, k))]
    if isinstance(value, list):
        return [p for i, v in enumerate(value) for p in mutations(v, (*path, i))]
    return [path]


def test_every_field_of_the_header_is_compared(hal: Hal) -> None:
    with open_cache(hal, spec_of("fp8_e4m3", k_scale=0.5, v_scale=0.25)) as lease:
        fill(lease)
        blocks = lease.export_blocks([1])
        paths = mutations(blocks.header["cache"])
        assert len(paths) > 40
        for path in paths:
            header = json.loads(json.dumps(blocks.header))
            place = header["cache"]
            for key in path[:-1]:
                place = place[key]
            old = place[path[-1]]
            place[path[-1]] = f"{old}x" if isinstance(old, str) else old + 1
            with pytest.raises(SpecMismatch, match="not of this cache's kind"):
                lease.import_blocks(Blocks(header, blocks.payload), [1])
        lease.import_blocks(blocks, [1])


def test_static_scales_travel_in_the_header(hal: Hal) -> None:
    with (
        open_cache(hal, spec_of("fp8_e4m3", k_scale=0.5, v_scale=0.25)) as source,
        open_cache(hal, spec_of("fp8_e4m3", k_scale=0.5, v_scale=0.125)) as target,
    ):
        fill(source)
        with pytest.raises(SpecMismatch, match=r"static_scales\[0\]\[1\] is 0.25 there and 0.125 here"):
            target.import_blocks(source.export_blocks([0]), [0])


def test_target_blocks_are_checked(hal: Hal) -> None:
    with open_cache(hal, spec_of()) as lease:
        fill(lease)
        blocks = lease.export_blocks([0, 1])
        for wrong in ([0, 8], [-1, 0], [2, 2]):
            with pytest.raises(AddressError):
                lease.import_blocks(blocks, wrong)
        with pytest.raises(SpecMismatch, match="2 blocks were exported and 1 targets named"):
            lease.import_blocks(blocks, [0])
        with pytest.raises(AddressError, match=r"blocks \[8\] are outside group 'default'"):
            lease.export_blocks([8])


def test_bytes_that_were_cut_or_changed_are_refused(hal: Hal) -> None:
    with open_cache(hal, spec_of()) as lease:
        fill(lease)
        blob = lease.export_blocks([0]).to_bytes()
        assert torch.equal(Blocks.from_bytes(blob).payload, lease.export_blocks([0]).payload)
        (size,) = struct.unpack("<I", blob[8:12])
        flipped = bytearray(blob)
        flipped[-1] ^= 1
        newer = blob.replace(b'"kvhal_blocks": 1', b'"kvhal_blocks": 9')
        for bad, words in (
            (b"", "do not start with"),
            (b"KVHALBLK", "do not start with"),
            (b"x" * 100, "do not start with"),
            (blob[:-1], "cut or changed"),
            (bytes(flipped), "cut or changed"),
            (blob[: 12 + size // 2], "cannot be read"),
            (b"KVHALBLK\x02\x00\x00\x00{}", "cannot be read"),
            (newer, "have version 9"),
        ):
            with pytest.raises(SpecMismatch, match=words):
                Blocks.from_bytes(bad)


@pytest.mark.parametrize("layout", ["tiled", "inline"])
def test_rows_cross_vendors_exactly_and_back(hal: Hal, layout: str) -> None:
    """e4m3fn with amax/448 and e4m3fnuz with amax/224: same codes but for -0, scales exactly doubled."""
    ocp = spec_of("fp8_per_token_head", encoding="e4m3fn")
    fnuz = spec_of("fp8_per_token_head", encoding="e4m3fnuz")
    with open_cache(hal, ocp, layout=layout) as a, open_cache(hal, fnuz, layout=layout) as b:
        fill(a)
        fill(b)
        k = torch.zeros(3, 2, 32)
        k[0, 0, 3], k[1, 1, 2], k[2, 0, 0] = float("nan"), -1e-30, -0.0
        for lease in (a, b):
            lease.layer(0).store(k, k, torch.tensor([5, 6, 7]))
        moved = a.export_blocks([0, 2])
        crossed = convert(moved, "fnuz")
        assert torch.equal(crossed.payload, b.export_blocks([0, 2]).payload)
        assert crossed.header == b.export_blocks([0, 2]).header
        back = convert(crossed, "ocp")
        differs = (back.payload != moved.payload).nonzero()
        assert {int(moved.payload[tuple(i)]) for i in differs} <= {0x80}
        assert {int(back.payload[tuple(i)]) for i in differs} <= {0x00}
        before = [t.clone() for t in a.layer(0).gather(torch.arange(16))]
        a.import_blocks(back, [0, 2])
        after = a.layer(0).gather(torch.arange(16))
        for x, y in zip(before, after, strict=True):
            torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True)
        b.import_blocks(crossed, [1, 3])
        for x, y in zip(before, b.layer(0).gather(torch.arange(16, 32)), strict=True):
            torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("source", "target", "to"),
    [
        ("e4m3fn", "e4m3fnuz", "fnuz"), ("e4m3fnuz", "e4m3fn", "ocp"),
        ("e5m2", "e5m2fnuz", "fnuz"), ("e5m2fnuz", "e5m2", "ocp"),
    ],
)  # fmt: skip
def test_all_256_codes_mean_the_same_after_conversion(hal: Hal, source: str, target: str, to: str) -> None:
    """Against ml_dtypes: target value * new scale = source value, or NaN where the target has no such code."""
    mode = "fp8_e4m3" if "e4m3" in source else "fp8_e5m2"
    spec = spec_of(
        mode, encoding=source, head_dim=16, num_layers=1, num_kv_heads=1, num_q_heads=1, k_scale=0.5, v_scale=0.25
    )
    with open_cache(hal, spec, 1) as lease:
        lease.view("k", 0).tensor().copy_(torch.arange(256, dtype=torch.uint8).view(1, 1, 1, 16, 16, 1))
        moved = convert(lease.export_blocks([0]), to)
    codes = moved.payload[0, 0, :256].numpy()
    factor = 2.0 if to == "fnuz" else 0.5
    assert moved.header["cache"]["static_scales"] == [[0.5 * factor, 0.25 * factor]]
    old = np.arange(256, dtype=np.uint8).view(vars(ml_dtypes)[f"float8_{source}"]).astype(np.float64)
    new = codes.view(vars(ml_dtypes)[f"float8_{target}"]).astype(np.float64) * factor
    lost = np.isnan(new) & ~np.isnan(old)
    assert np.array_equal(new[~lost], old[~lost], equal_nan=True)
    # What lies above our clamp has no code on the other side; only foreign bytes can hold it.
    expected = {"e4m3fn": [], "e4m3fnuz": [240.0], "e5m2": [np.inf], "e5m2fnuz": [32768.0, 40960.0, 49152.0, 57344.0]}[
        source
    ]
    assert sorted(set(np.abs(old[lost]).tolist())) == expected
    assert 0x80 not in codes[np.flatnonzero(old == 0)]


def test_stores_that_are_not_fp8_stay_as_they_are(hal: Hal) -> None:
    with open_cache(hal, spec_of(("fp8_per_token_head", "int4_per_token_head"))) as lease:
        fill(lease)
        moved = convert(lease.export_blocks([0]), "fnuz")
        stores = {s["name"]: s["encoding"] for s in moved.header["cache"]["group"]["stores"]}
        assert stores == {"k": "e4m3fnuz", "v": "int4"}
        assert torch.equal(convert(moved, "fnuz").payload, moved.payload)
        with pytest.raises(SpecMismatch, match=r"stores\[k\].encoding is 'e4m3fnuz' there and 'e4m3fn' here"):
            lease.import_blocks(moved, [0])


def test_a_reader_with_another_encoding_is_a_cache_of_its_own(hal: Hal) -> None:
    """PUB-02 and kin: two encodings in one process; 1.0 is stored by the cache's own rule and reads back as 1.0."""
    ocp = spec_of("fp8_per_token_head", encoding="e4m3fn")
    fnuz = spec_of("fp8_per_token_head", encoding="e4m3fnuz")
    with open_cache(hal, ocp) as a, open_cache(hal, fnuz) as b:
        one = torch.ones(1, 2, 32)
        for lease, scale in ((a, 1 / 448), (b, 1 / 224)):
            lease.layer(0).store(one, one, torch.tensor([0]))
            word = float(lease.layer(0).k_scale.tensor()[0, 0, 0, 0, 0, 0])
            assert word == float(np.float32(1.0) * np.float32(scale))
            assert int(lease.layer(0).k.tensor()[0, 0, 0, 0, 0, 0]) == 0x7E
        with pytest.raises(SpecMismatch, match="e4m3fn.*e4m3fnuz"):
            b.import_blocks(a.export_blocks([0]), [0])


def test_opaque_stores_travel_with_their_block(hal: Hal) -> None:
    state = kvhal.OpaqueStore("state", "float32", (7,), per="block")
    stores = tuple(kvhal.ScaledStore.of(n, "int8_per_token_head", 1, 16) for n in ("k", "v"))
    spec = CacheSpec((kvhal.CacheGroup("g", (0,), 16, (*stores, state), 1),))
    with open_cache(hal, spec) as a, open_cache(hal, spec) as b:
        a.view("state", 0).tensor()[4] = 1.25
        b.import_blocks(a.export_blocks([4]), [2])
        assert b.view("state", 0).tensor()[2].unique().tolist() == [1.25]

"""Every byte of a cache has one place. Right values are computed here by hand or by brute force."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvhal import CacheGroup, CacheSpec, ConfigError, Layout, OpaqueStore, ScaledStore, SpecMismatch
from kvhal.kernels.geometry import LayerGeometry, PageGeometry
from kvhal.layout import ForeignView, GroupLayout
from kvhal.page import Field

ROW_MODES = ("bfloat16", "float16", "int8_per_token_head", "fp8_per_token_head", "int4_per_token_head", "fp8_e5m2")


@dataclass
class Memory:
    """Foreign memory for `bind`: a size and an address."""

    size: int
    address: int = 4096

    def nbytes(self) -> int:
        return self.size

    def data_ptr(self) -> int:
        return self.address


def spec_of(mode: str | tuple[str, str] = "int8_per_token_head", **changes: object) -> CacheSpec:
    base: dict[str, object] = {"mode": mode, "num_layers": 2, "num_kv_heads": 8, "head_dim": 128, "num_q_heads": 32}
    needs = {m for m in ([mode] if isinstance(mode, str) else mode) if m == "fp8_e5m2"}
    if needs:
        base |= {"k_scale": 1.0 if mode == "fp8_e5m2" or mode[0] == "fp8_e5m2" else None}
        base |= {"v_scale": 1.0 if mode == "fp8_e5m2" or mode[1] == "fp8_e5m2" else None}
    return CacheSpec.uniform(**{**base, **changes})  # type: ignore[arg-type]  # a test's shorthand


def items(field: Field, block_size: int) -> list[tuple[int, int]]:
    """(start, end) of every item of a field in its page, through `address`."""
    heads, tiles, hi, channels, lo = field.shape
    tokens = tiles * hi * lo
    assert tokens in (block_size, 1)
    starts = (field.address(h, t, c) for h, t, c in product(range(heads), range(tokens), range(channels)))
    return [(s, s + field.itemsize) for s in starts]


def check_disjoint(spans: list[tuple[int, int]], end: int) -> None:
    spans.sort()
    assert spans[0][0] >= 0
    assert spans[-1][1] <= end
    for (_, before), (after, _) in pairwise(spans):
        assert before <= after


specs = st.builds(
    spec_of,
    st.one_of(st.sampled_from(ROW_MODES), st.tuples(st.sampled_from(ROW_MODES), st.sampled_from(ROW_MODES))),
    num_layers=st.integers(1, 3),
    num_kv_heads=st.sampled_from([1, 3, 5, 8]),
    num_q_heads=st.just(120),
    head_dim=st.sampled_from([16, 24, 80, 96, 112, 192]),
    head_dim_v=st.sampled_from([None, 16, 40, 128]),
    block_size=st.sampled_from([16, 32, 64]),
)


@settings(max_examples=120, deadline=None)
@given(
    specs,
    st.sampled_from(["tiled", "inline"]),
    st.sampled_from(["layer_major", "block_major"]),
    st.sampled_from([16, 256, 4096]),
    st.integers(1, 4),
)
def test_every_item_has_its_own_place(spec: CacheSpec, kind: str, order: str, align: int, blocks: int) -> None:
    layout = Layout.of(spec, blocks, kind=kind, order=order, page_align=align)
    placed = layout.groups[0]
    check_disjoint([s for f in placed.fields for s in items(f, placed.group.block_size)], placed.page_bytes)
    assert placed.page_stride >= placed.page_bytes
    assert placed.page_stride % align == 0
    pages = [(r.offset, r.offset + r.nbytes) for b in range(blocks) for r in layout.ranges(b)]
    assert len(pages) == blocks * len(placed.group.layers)
    end = layout.counters_offset if layout.scales_offset is None else layout.scales_offset
    check_disjoint(pages, end)
    assert layout.nbytes == layout.counters_offset + 16
    for field in placed.fields:
        assert all(s % field.itemsize == 0 for s in (field.offset, *field.strides, placed.block_stride))


@settings(max_examples=60, deadline=None)
@given(specs, st.sampled_from(["tiled", "inline"]), st.sampled_from(["layer_major", "block_major"]), st.integers(1, 9))
def test_resizing_is_laying_out_anew(spec: CacheSpec, kind: str, order: str, blocks: int) -> None:
    assert Layout.of(spec, 4, kind=kind, order=order).with_blocks(blocks) == Layout.of(
        spec, blocks, kind=kind, order=order
    )


@settings(max_examples=60, deadline=None)
@given(specs, st.sampled_from(["tiled", "inline"]))
def test_geometry_survives_the_operator_argument(spec: CacheSpec, kind: str) -> None:
    layout = Layout.of(spec, 3, kind=kind)
    for layer in range(spec.num_layers):
        geometry = LayerGeometry.of(layout, layer)
        assert LayerGeometry.unpack(geometry.pack()) == geometry


def test_every_head_dim_of_the_field_can_be_laid_out() -> None:
    for head_dim, heads, mode in product(range(16, 513, 8), (1, 3, 5, 8), ROW_MODES):
        for kind in ("tiled", "inline"):
            placed = Layout.of(
                spec_of(mode, head_dim=head_dim, num_kv_heads=heads, num_q_heads=heads), 1, kind=kind
            ).groups[0]
            bits = {"bfloat16": 16, "float16": 16, "int4_per_token_head": 4}.get(mode, 8)
            word = 4 if mode.endswith("_per_token_head") else 0
            assert placed.page_bytes == 16 * heads * 2 * (head_dim * bits // 8 + word)


def test_inline_is_the_row_of_the_peer() -> None:
    """page[token][head]{K | k scale | V | v scale}: at head_dim 128, rows of 264 bytes."""
    placed = Layout.of(spec_of(), 1, kind="inline").groups[0]
    assert placed.field("k").address(3, 5, 7) == (5 * 8 + 3) * 264 + 7
    assert placed.field("k_word").address(3, 5, 0) == (5 * 8 + 3) * 264 + 128
    assert placed.field("v").address(3, 5, 7) == (5 * 8 + 3) * 264 + 132 + 7
    assert placed.field("v_word").address(3, 5, 0) == (5 * 8 + 3) * 264 + 260


def test_tiled_keeps_four_tokens_of_a_value_channel_together() -> None:
    """page[head][tile]{K[16][C] | V[4][C][4] | k words[16] | v words[16]}: at head_dim 128, tiles of 4224 bytes."""
    placed = Layout.of(spec_of(block_size=32), 1).groups[0]
    tile = (3 * 2 + 1) * 4224
    assert placed.field("k").address(3, 16 + 5, 7) == tile + 5 * 128 + 7
    assert placed.field("v").address(3, 16 + 5, 7) == tile + 2048 + (1 * 128 + 7) * 4 + 1
    assert placed.field("k_word").address(3, 16 + 5, 0) == tile + 4096 + 20
    assert placed.field("v_word").address(3, 16 + 5, 0) == tile + 4160 + 20


def test_int4_rows_are_half_and_sixteen_bit_rows_double() -> None:
    assert Layout.of(spec_of("int4_per_token_head"), 1).groups[0].page_bytes == 8 * (16 * 2 * 64 + 128)
    assert Layout.of(spec_of("bfloat16"), 1).groups[0].page_bytes == 8 * 16 * 2 * 256


def test_scales_are_in_the_byte_formula() -> None:
    """PUB-21: 60 GiB over 64 layers hold 29,789 blocks, not the 30,720 that forgetting the scales promises."""
    spec = spec_of(num_layers=64)
    layout = Layout.of(spec, 1)
    assert layout.groups[0].page_bytes == 33_792
    assert (60 * 2**30 - layout.fixed_bytes) // layout.block_bytes == 29_789
    assert (60 * 2**30) // (64 * 16 * 8 * 2 * 128) == 30_720
    assert layout.with_blocks(29_789).nbytes <= 60 * 2**30 < layout.with_blocks(29_790).nbytes


def test_padded_pages_keep_their_stride() -> None:
    """PUB-12: a page of 4 sub-blocks of 16 tokens, padded from 4,096 to 4,608 bytes, three pages."""
    spec = spec_of("bfloat16", num_layers=1, num_kv_heads=1, num_q_heads=1, head_dim=16, block_size=64)
    layout = Layout.of(spec, 3, page_stride=4608)
    placed = layout.groups[0]
    assert (placed.page_bytes, placed.page_stride) == (4096, 4608)
    last = placed.field("v").address(0, 63, 15) + 2
    assert 2 * placed.block_stride + last <= layout.nbytes
    assert layout.nbytes == 3 * 4608 + 16


def test_a_page_stride_that_does_not_hold_a_page_is_refused() -> None:
    with pytest.raises(ConfigError, match="4080 does not hold a page of 33792 bytes"):
        Layout.of(spec_of(), 1, page_stride=4080)
    with pytest.raises(ConfigError, match="page_align is 24"):
        Layout.of(spec_of(), 1, page_align=24)


def test_tiled_says_what_it_cannot_hold() -> None:
    with pytest.raises(ConfigError, match=r"block_size 8 does not fit the tiled layout.*inline"):
        Layout.of(spec_of(block_size=8), 1)
    assert Layout.of(spec_of(block_size=1), 1, kind="inline").groups[0].page_bytes == 2112


def test_block_counts_are_checked() -> None:
    with pytest.raises(ConfigError, match="num_blocks is 0"):
        Layout.of(spec_of(), 0)
    with pytest.raises(ConfigError, match="not group 'default'"):
        Layout.of(spec_of(), {"other": 3})
    with pytest.raises(ConfigError, match="num_blocks is -1"):
        Layout.of(spec_of(), 1).with_blocks(-1)


def hybrid() -> CacheSpec:
    def stores(dim: int) -> tuple[ScaledStore, ScaledStore]:
        return (
            ScaledStore.of("k", "int8_per_token_head", 4, dim),
            ScaledStore.of("v", "int8_per_token_head", 4, dim),
        )

    full = CacheGroup("full", (0, 2), 16, (*stores(64), OpaqueStore("index", "float16", (8,))), 8)
    sliding = CacheGroup("sliding", (1, 3), 32, stores(32), 8, window=128)
    state = CacheGroup("state", (4,), 1, (OpaqueStore("state", "float32", (5, 3), per="block"),))
    return CacheSpec((full, sliding, state), shares=((5, 0),))


@pytest.mark.parametrize("kind", ["tiled", "inline"])
@pytest.mark.parametrize("order", ["layer_major", "block_major"])
def test_groups_have_their_own_pages_and_blocks(kind: str, order: str) -> None:
    layout = Layout.of(hybrid(), {"full": 3, "sliding": 5, "state": 2}, kind=kind, order=order)
    spans: list[tuple[int, int]] = []
    for placed in layout.groups:
        spans += [
            (r.offset, r.offset + r.nbytes)
            for b in range(placed.num_blocks)
            for r in layout.ranges(b, placed.group.name)
        ]
    assert len(spans) == 3 * 2 + 5 * 2 + 2
    check_disjoint(spans, layout.counters_offset)
    check_disjoint([s for f in layout.group("full").fields for s in items(f, 16)], layout.group("full").page_bytes)
    assert layout.group("state").field("state").shape == (1, 1, 1, 15, 1)
    assert layout.group_of(5) is layout.group("full")
    assert layout.block_bytes == sum(g.block_bytes for g in layout.groups)


def test_ranges_are_the_pages_of_a_block() -> None:
    layout = Layout.of(spec_of(num_layers=3), 4, order="block_major", page_align=4096)
    stride = layout.groups[0].page_stride
    assert [(r.layer, r.offset, r.nbytes) for r in layout.ranges(2)] == [
        (i, (2 * 3 + i) * stride, 33_792) for i in range(3)
    ]
    with pytest.raises(SpecMismatch, match="block 4 is outside group 'default', which has 4 blocks"):
        layout.ranges(4)


def test_fingerprint_tells_meaning_and_not_placement() -> None:
    base = Layout.of(spec_of(), 4)
    assert base.fingerprint == base.with_blocks(9).fingerprint
    assert base.fingerprint == Layout.of(spec_of(), 4, order="block_major", page_align=4096).fingerprint
    others = [
        Layout.of(spec_of("fp8_per_token_head"), 4),
        Layout.of(spec_of("fp8_per_token_head", encoding="e4m3fnuz"), 4),
        Layout.of(spec_of("bfloat16"), 4),
        Layout.of(spec_of("float16"), 4),
        Layout.of(spec_of(), 4, kind="inline"),
        Layout.of(spec_of(block_size=32), 4),
        Layout.of(spec_of(head_dim=64), 4),
        Layout.of(spec_of(num_layers=3), 4),
        Layout.of(spec_of(num_layers=3, shares={2: 0}), 4),
    ]
    assert len({base.fingerprint, *(o.fingerprint for o in others)}) == 1 + len(others)


def test_bind_accepts_what_fits() -> None:
    layout = Layout.of(spec_of(), 4)
    assert layout.bind(Memory(layout.nbytes)) == layout.nbytes
    assert layout.bind(Memory(layout.nbytes + 160), 160) == layout.nbytes


@pytest.mark.parametrize(
    ("memory", "offset", "nbytes", "words"),
    [
        (Memory(1000), 0, None, "needs .* bytes and the memory given has 1000"),
        (Memory(10**7), 8, None, "past a multiple of 16"),
        (Memory(10**7, address=4100), 0, None, "past a multiple of 16"),
        (Memory(10**7), -16, None, "inside it"),
        (Memory(10**7), 16, 10**7, "inside it"),
        (Memory(10**7), 10**7 + 16, None, "inside it"),
    ],
)
def test_bind_refuses_memory_that_does_not_fit(memory: Memory, offset: int, nbytes: int | None, words: str) -> None:
    with pytest.raises(SpecMismatch, match=words):
        Layout.of(spec_of(), 4).bind(memory, offset, nbytes)


def view(placed: GroupLayout, **changes: tuple[int, ...]) -> ForeignView:
    base = ForeignView((placed.num_blocks, 16, 8, 264), (placed.block_stride, 8 * 264, 264, 1))
    return ForeignView(changes.get("shape", base.shape), changes.get("strides", base.strides))


def test_bind_compares_an_engines_view_with_the_layout() -> None:
    """PUB-11: the block size comes from the spec only; a view that says 4 tokens, or heads first, is refused."""
    layout = Layout.of(spec_of(), 4, kind="inline")
    placed = layout.groups[0]
    memory = Memory(layout.nbytes)
    assert layout.bind(memory, view=view(placed)) == layout.nbytes
    with pytest.raises(SpecMismatch, match=r"dimension 1 \(block_size\) is 4"):
        layout.bind(memory, view=view(placed, shape=(16, 4, 8, 264)))
    with pytest.raises(SpecMismatch, match=r"dimension 1 \(block_size\) is 8.*dimension 2 \(heads\) is 16"):
        layout.bind(memory, view=view(placed, shape=(4, 8, 16, 264), strides=(33792, 16 * 264, 264, 1)))
    with pytest.raises(SpecMismatch, match=r"dimension 0 \(blocks\) is 4 with stride 67584"):
        layout.bind(memory, view=view(placed, strides=(67584, 8 * 264, 264, 1)))
    with pytest.raises(SpecMismatch, match="2 dimensions"):
        layout.bind(memory, view=ForeignView((4, 33792), (33792, 1)))


def test_pages_for_movers_are_the_ranges() -> None:
    layout = Layout.of(hybrid(), 3)
    for placed in layout.groups:
        pages = PageGeometry.all_of(layout, placed.group.name)
        for block in range(3):
            ranges = layout.ranges(block, placed.group.name)
            assert [(p.base + block * p.block_stride, p.nbytes) for p in pages] == [
                (r.offset, r.nbytes) for r in ranges
            ]


def test_an_opaque_layer_cannot_be_stored_to() -> None:
    with pytest.raises(SpecMismatch, match="only opaque stores"):
        LayerGeometry.of(Layout.of(hybrid(), 1), 4)

"""The workspace a plan reserves holds every call it allows, by every shipped tuning."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kvhal.errors import ConfigError
from kvhal.kernels.geometry import LayerGeometry
from kvhal.kernels.triton.staging import Staging
from kvhal.kernels.triton.tuning import DEFAULT, FAMILIES, Tile, Tuning, load_tunings
from kvhal.kernels.triton.workspace import AttendCut, AttendWorkspace, triton_workspace_bytes
from kvhal.layout import Layout
from kvhal.spec import CacheSpec

PLATFORMS = Path(__file__).parents[1] / "platforms"
TUNINGS = {"default": DEFAULT} | {
    f"{name}-{arch}": tuning
    for name in ("cuda", "rocm")
    for arch, tuning in load_tunings(PLATFORMS / f"kvhal_{name}/tuning.yaml").items()
}
MODES = ("int8_per_token_head", "fp8_per_token_head", "int4_per_token_head", "bfloat16", "fp8_e4m3")
SHAPES = ((1, 64), (3, 80), (4, 128), (8, 128), (16, 256))
MAX_TOKENS, MAX_SEQS = 150, 5


@pytest.mark.parametrize("tuning", TUNINGS.values(), ids=list(TUNINGS))
@pytest.mark.parametrize("mode", MODES)
def test_no_call_within_the_plan_needs_more(mode: str, tuning: Tuning) -> None:
    scale = 1.0 if mode == "fp8_e4m3" else None
    for group, dim in SHAPES:
        spec = CacheSpec.uniform(
            mode=mode, num_layers=1, num_kv_heads=2, head_dim=dim, num_q_heads=2 * group, k_scale=scale, v_scale=scale
        )
        g = LayerGeometry.of(Layout.of(spec, 4), 0)
        reserved = triton_workspace_bytes(g, 2 * group, MAX_TOKENS, MAX_SEQS, tuning)
        for dtype in ("float32", "bfloat16", "float16"):
            for tokens in range(1, MAX_TOKENS + 1):
                for seqs in range(1, MAX_SEQS + 1):
                    cut = AttendCut.of(g, 2 * group, tokens, seqs, dtype, tuning)
                    assert AttendWorkspace.of(cut, dim, tokens, seqs).nbytes <= reserved, (group, dim, tokens, seqs)


def geometry(mode: str, kind: str = "tiled", dim: int = 128) -> LayerGeometry:
    scale = 1.0 if mode == "fp8_e4m3" else None
    spec = CacheSpec.uniform(
        mode=mode, num_layers=1, num_kv_heads=8, head_dim=dim, num_q_heads=32, k_scale=scale, v_scale=scale
    )
    return LayerGeometry.of(Layout.of(spec, 4, kind=kind), 0)


def tiles(**of: Tile) -> tuple[tuple[str, Tile], ...]:
    return tuple((family, of.get(family, Tile(32))) for family in FAMILIES)


@pytest.mark.parametrize("mode", MODES)
def test_warps_that_share_a_tile_of_inline_pages_have_keys_for_a_matrix_instruction(mode: str) -> None:
    """Eight keys each at least, where rows of V as they lie have a tile of their own; more where few warps share it."""
    tuning = TUNINGS["cuda-sm_90"]
    for dim in (64, 128, 256):
        for group in (1, 4, 7, 16):
            for queries in range(1, 9):
                g = geometry(mode, "inline", dim)
                cut = AttendCut.of(g, 8 * group, queries, 1, "bfloat16", tuning)
                least = min(8 * cut.num_warps, 8192 // dim) if mode != "fp8_e4m3" and cut.rows > 8 else 16
                assert cut.keys >= least, (dim, group, queries)
    cut = AttendCut.of(geometry(mode, "inline"), 32, 8, 1, "bfloat16", tuning)
    assert (cut.rows, cut.num_warps, cut.keys) == ((32, 4, 32) if mode != "fp8_e4m3" else (32, 4, 16))


def test_padding_to_a_matrix_instruction_makes_no_verification_of_a_decode_step() -> None:
    """Four rows of fp8 take 16 columns on AMD; the tile is still decode's."""
    tuning = replace(DEFAULT, columns=16, warp_holds=2, decode=tiles(float8=Tile(64)), verify=tiles(float8=Tile(16)))
    g = geometry("fp8_per_token_head")
    decode, verify = (AttendCut.of(g, 32, each, 1, "bfloat16", tuning) for each in (1, 4))
    assert (decode.rows, decode.keys) == (16, 64)
    assert (verify.rows, verify.keys) == (16, 16)


def test_a_warp_that_holds_more_is_joined_by_fewer() -> None:
    g = geometry("fp8_per_token_head")
    wide = replace(DEFAULT, columns=32, decode=tiles())
    assert AttendCut.of(g, 32, 1, 1, "bfloat16", wide).num_warps == 2
    assert AttendCut.of(g, 32, 1, 1, "bfloat16", replace(wide, warp_holds=2)).num_warps == 1


def test_inline_pages_have_their_own_tile_where_one_is_given() -> None:
    own = Tile(32, num_warps=4, rows=16, many=False)
    tuning = replace(DEFAULT, columns=16, prefill=tiles(int8=Tile(64, num_warps=8, inline=own)), prefill_rows=64)
    tiled, inline = (
        AttendCut.of(geometry("int8_per_token_head", kind), 32, 64, 1, "bfloat16", tuning)
        for kind in ("tiled", "inline")
    )
    assert (tiled.many, tiled.keys, tiled.num_warps, tiled.rows) == (True, 64, 8, 64)
    assert (inline.many, inline.keys, inline.num_warps, inline.rows) == (False, 32, 4, 16)


def test_long_heads_have_their_own_tile_where_one_is_given() -> None:
    own = Tile(16, num_warps=4, inline=Tile(32, num_warps=8))
    tuning = replace(DEFAULT, columns=16, decode=tiles(int8=Tile(64, long=own)))
    cuts = {
        (dim, kind): AttendCut.of(geometry("int8_per_token_head", kind, dim), 32, 1, 1, "bfloat16", tuning)
        for dim, kind in ((128, "tiled"), (136, "tiled"), (256, "tiled"), (256, "inline"))
    }
    assert {key: (cut.keys, cut.num_warps) for key, cut in cuts.items()} == {
        (128, "tiled"): (64, 1),
        (136, "tiled"): (16, 4),
        (256, "tiled"): (16, 4),
        (256, "inline"): (32, 8),
    }


@pytest.mark.parametrize(
    ("mode", "dim", "slices"),
    [
        ("bfloat16", 256, 8),
        ("bfloat16", 64, 2),
        ("bfloat16", 8, 1),
        ("fp8_e4m3", 136, 8),
        ("int8_per_token_head", 64, 2),
        ("int4_per_token_head", 128, 2),
        ("int4_per_token_head", 32, 1),
    ],
)
def test_queries_are_cut_in_slices_that_a_matrix_product_takes(mode: str, dim: int, slices: int) -> None:
    tuning = replace(DEFAULT, decode=tuple((family, Tile(32, slices=8)) for family in FAMILIES))
    assert AttendCut.of(geometry(mode, dim=dim), 32, 1, 1, "bfloat16", tuning).slices == slices


@pytest.mark.parametrize("slices", [0, 3, -2])
def test_slices_are_a_power_of_two(slices: int) -> None:
    with pytest.raises(ConfigError, match=f"{slices} slices"):
        Tile.parse({"slices": slices})


def test_many_rows_are_padded_to_the_rows_of_the_tile() -> None:
    """So that the shape which was compiled and read is the only one."""
    tuning = replace(DEFAULT, verify=tiles(int8=Tile(16, num_warps=8, rows=32, many=True)))
    cut = AttendCut.of(geometry("int8_per_token_head"), 32, 4, 1, "bfloat16", tuning)
    assert (cut.prefill, cut.many, cut.pairs, cut.tokens, cut.rows) == (False, True, False, 4, 32)


@pytest.mark.parametrize(("queries", "rows", "wide"), [(1, 4, 8), (2, 8, 8), (4, 16, 16), (8, 32, 32)])
def test_query_parts_stand_side_by_side_only_where_columns_are_left(queries: int, rows: int, wide: int) -> None:
    """CUDA's matrix instructions have 8 columns; more rows than that take a product for each part."""
    g = geometry("int8_per_token_head")
    cuda = AttendCut.of(g, 32, queries, 1, "bfloat16", TUNINGS["cuda-sm_90"])
    amd = AttendCut.of(g, 32, queries, 1, "bfloat16", replace(DEFAULT, columns=16))
    assert (cuda.pairs, cuda.rows, cuda.columns) == (True, rows, wide)
    assert (amd.pairs, amd.columns) == (True, 2 * amd.rows)


def test_one_warp_holds_32_rows_beside_short_tiles() -> None:
    g = geometry("int8_per_token_head")
    few, many = (AttendCut.of(g, 32, queries, 1, "bfloat16", TUNINGS["cuda-sm_90"]) for queries in (4, 8))
    assert (few.rows, few.keys, few.num_warps) == (16, 32, 1)
    assert (many.rows, many.keys, many.num_warps) == (32, 16, 1)
    # As many as a multiprocessor's registers hold: 4 x 16384 / (32 x 256).
    assert many.at_once == 8
    assert many.parts(8, 132)[0] == 132
    two = replace(TUNINGS["cuda-sm_90"], verify=tiles(int8=Tile(32, num_warps=2)))
    shared = AttendCut.of(g, 32, 8, 1, "bfloat16", two)
    assert (shared.keys, shared.num_warps) == (32, 2)


def test_a_tile_is_read_with_its_inline_one_and_refuses_what_it_does_not_know() -> None:
    row = {family: {"keys": 32, "inline": {"keys": 16, "num_warps": 4}} for family in FAMILIES}
    assert Tuning.parse({"decode": row}).tile("int8", "decode") == Tile(32, inline=Tile(16, num_warps=4))
    with pytest.raises(ConfigError, match="'wraps'"):
        Tuning.parse({"decode": row | {"int8": {"inline": {"wraps": 4}}}})


@pytest.mark.parametrize("tuning", TUNINGS.values(), ids=list(TUNINGS))
@pytest.mark.parametrize(("dim", "dim_v", "heads", "group"), [(128, 128, 8, 4), (80, 96, 3, 1), (24, 64, 1, 7)])
def test_a_planned_workspace_holds_whole_staged_tiles(
    dim: int, dim_v: int, heads: int, group: int, tuning: Tuning
) -> None:
    """For every call of the plan: three regions in order, aligned, none past the end, and as many tiles as planned."""
    spec = CacheSpec.uniform(
        mode="int8_per_token_head", num_layers=1, num_kv_heads=heads, head_dim=dim, head_dim_v=dim_v,
        num_q_heads=heads * group,
    )  # fmt: skip
    g, q_heads, most = LayerGeometry.of(Layout.of(spec, 4, kind="inline"), 0), heads * group, 20_000
    reserved = triton_workspace_bytes(g, q_heads, most, 300, tuning)
    keys = tuning.staged.keys
    each = heads * (8 + 2 * keys * sum(max(16, 1 << (n - 1).bit_length()) for n in (dim, dim_v)))
    planned = tuning.staged_bytes // each
    assert planned * keys >= 1024
    calls = 0
    for tokens, seqs in ((1, 1), (500, 1), (5000, 1), (most, 1), (most, 300), (6000, 300), (700, 300)):
        cut = AttendCut.of(g, q_heads, tokens, seqs, "bfloat16", tuning)
        begin = AttendWorkspace.of(cut, dim_v, tokens, seqs).nbytes
        found = Staging.of(g, q_heads, tokens, seqs, begin, reserved, tuning)
        has_prompt = tokens >= seqs - 1 + tuning.staged_queries
        assert (found is not None) is (has_prompt and tokens * q_heads >= tuning.staged_rows), (tokens, seqs)
        if found is None:
            continue
        calls += 1
        half = 2 * heads * found.tiles * keys
        ends = (
            (begin, found.exponents),
            (found.exponents + 8 * heads * found.tiles, found.keys),
            (found.keys + half * max(16, 1 << (dim - 1).bit_length()), found.values),
            (found.values + half * max(16, 1 << (dim_v - 1).bit_length()), reserved),
        )
        assert all(before <= after for before, after in ends), ends
        assert all(at % 64 == 0 for at in (found.exponents, found.keys, found.values))
        assert found.tiles >= planned
        assert found.tokens * group <= found.tile.rows
    assert calls >= 2
    # A workspace without room is used as it is.
    assert Staging.of(g, q_heads, most, 1, begin, begin + each, tuning) is None


def test_a_group_that_no_staged_tile_holds_sets_nothing_aside() -> None:
    """71 query heads over one kv head, as Falcon 7B has: the tile of 64 rows holds none, the one of 128 does."""
    spec = CacheSpec.uniform(mode="int8_per_token_head", num_layers=1, num_kv_heads=1, head_dim=64, num_q_heads=71)
    g = LayerGeometry.of(Layout.of(spec, 4), 0)
    for rows, planned in ((64, False), (128, True)):
        tuning = replace(DEFAULT, staged=replace(DEFAULT.staged, rows=rows))
        without = triton_workspace_bytes(g, 71, 4096, 4, replace(tuning, staged_bytes=0))
        assert (triton_workspace_bytes(g, 71, 4096, 4, tuning) > without) is planned


def test_small_plans_and_large_heads_set_nothing_aside() -> None:
    for dim, tokens, planned in ((128, 511, False), (128, 512, True), (136, 4096, False), (256, 4096, False)):
        spec = CacheSpec.uniform(mode="int8_per_token_head", num_layers=1, num_kv_heads=8, head_dim=dim, num_q_heads=32)
        g = LayerGeometry.of(Layout.of(spec, 4), 0)
        without = triton_workspace_bytes(g, 32, tokens, 4, replace(DEFAULT, staged_bytes=0))
        found = triton_workspace_bytes(g, 32, tokens, 4, DEFAULT)
        assert (found > without) is planned
        assert found - without <= DEFAULT.staged_bytes + 128


@pytest.mark.parametrize("tuning", TUNINGS.values(), ids=list(TUNINGS))
@pytest.mark.parametrize(("heads", "group", "dim"), [(1, 8, 128), (8, 4, 128), (5, 7, 64), (40, 1, 256), (128, 1, 512)])
def test_parts_of_all_heads_have_their_slots(heads: int, group: int, dim: int, tuning: Tuning) -> None:
    """A part that is the whole line needs none: nothing is shared then."""
    spec = CacheSpec.uniform(
        mode="int8_per_token_head", num_layers=1, num_kv_heads=heads, head_dim=dim, num_q_heads=heads * group
    )
    g = LayerGeometry.of(Layout.of(spec, 4), 0)
    for queries in (1, 4, 64):
        cut = AttendCut.of(g, heads * group, queries, 1, "bfloat16", tuning)
        for processors in (3, 64, 132, 304):
            parts, steps = cut.parts(heads, processors)
            assert parts == 1 or 2 * parts * heads <= cut.slots
            assert [most for _, most in steps] == sorted(most for _, most in steps)
            assert min(most for _, most in steps) >= 1
            assert cut.parts(heads, processors, most_tiles=1)[0] == steps[0][1]


def test_a_tile_may_have_steps_of_its_own() -> None:
    own = Tile.parse({"keys": 32, "programs": [[10, 1], [20, 2], [1 << 62, 3]]})
    tuning = replace(DEFAULT, decode=tiles(int4=own), programs=((10, 4), (20, 6), (1 << 62, 8)))
    assert Tuning.parse(tuning.plain()) == tuning
    each = {
        mode: AttendCut.of(geometry(mode), 32, 1, 1, "bfloat16", tuning).parts(8, 80)
        for mode in ("int4_per_token_head", "int8_per_token_head")
    }
    assert each["int4_per_token_head"] == (30, ((10, 10), (20, 20), (1 << 62, 30)))
    assert each["int8_per_token_head"] == (80, ((10, 40), (20, 60), (1 << 62, 80)))


def test_small_heads_have_more_on_their_way() -> None:
    """Longer tiles where those of usual length are below 4 KiB, else one more of them."""
    tuning = TUNINGS["cuda-sm_90"]
    cuts = {
        (mode, dim): AttendCut.of(geometry(mode, dim=dim), 32, 1, 1, "bfloat16", tuning)
        for mode in ("int8_per_token_head", "int4_per_token_head")
        for dim in (32, 64, 128)
    }
    assert {key: (cut.keys, cut.num_stages) for key, cut in cuts.items()} == {
        ("int8_per_token_head", 32): (64, 3),
        ("int8_per_token_head", 64): (32, 4),
        ("int8_per_token_head", 128): (32, 3),
        ("int4_per_token_head", 32): (64, 3),
        ("int4_per_token_head", 64): (64, 3),
        ("int4_per_token_head", 128): (32, 3),
    }

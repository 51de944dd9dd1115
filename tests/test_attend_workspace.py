"""The workspace a plan reserves holds every call it allows, by every shipped tuning."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kvhal.errors import ConfigError
from kvhal.kernels.geometry import LayerGeometry
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


def geometry(mode: str, kind: str = "tiled") -> LayerGeometry:
    spec = CacheSpec.uniform(mode=mode, num_layers=1, num_kv_heads=8, head_dim=128, num_q_heads=32)
    return LayerGeometry.of(Layout.of(spec, 4, kind=kind), 0)


def tiles(**of: Tile) -> tuple[tuple[str, Tile], ...]:
    return tuple((family, of.get(family, Tile(32))) for family in FAMILIES)


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


def test_many_rows_are_padded_to_the_rows_of_the_tile() -> None:
    """So that the shape which was compiled and read is the only one."""
    tuning = replace(DEFAULT, verify=tiles(int8=Tile(16, num_warps=8, rows=32, many=True)))
    cut = AttendCut.of(geometry("int8_per_token_head"), 32, 4, 1, "bfloat16", tuning)
    assert (cut.prefill, cut.many, cut.pairs, cut.tokens, cut.rows) == (False, True, False, 4, 32)


def test_a_tile_is_read_with_its_inline_one_and_refuses_what_it_does_not_know() -> None:
    row = {family: {"keys": 32, "inline": {"keys": 16, "num_warps": 4}} for family in FAMILIES}
    assert Tuning.parse({"decode": row}).tile("int8", "decode") == Tile(32, inline=Tile(16, num_warps=4))
    with pytest.raises(ConfigError, match="'wraps'"):
        Tuning.parse({"decode": row | {"int8": {"inline": {"wraps": 4}}}})

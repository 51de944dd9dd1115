"""A representative part of the ahead-of-time check; `kvhal verify --compile-only` runs all of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvhal.kernels.aot import ARCHES, Compiled, Job, compile_all, shared_limit
from kvhal.kernels.triton.tuning import load_tunings

ROOT = Path(__file__).parents[2] / "platforms"
TUNINGS = load_tunings(ROOT / "kvhal_cuda/tuning.yaml") | load_tunings(ROOT / "kvhal_rocm/tuning.yaml")
INT8 = ("int8_per_token_head", "int8")
# The encodings that the hardware converts itself.
NATIVE = {"sm_89": "e4m3fn", "sm_90": "e4m3fn", "gfx942": "e4m3fnuz", "gfx950": "e4m3fn"}


def sound(found: Compiled) -> None:
    assert found.ok, (found.job, found.error)
    assert found.scratch == 0, found
    assert found.shared <= shared_limit(found.job.arch), found


def test_every_arch_has_a_tuning() -> None:
    assert set(TUNINGS) == set(ARCHES)


def test_decode_on_every_arch_reads_wide_and_multiplies_in_matrix_units() -> None:
    for found in compile_all([Job("attend", *INT8, arch) for arch in ARCHES], TUNINGS):
        sound(found)
        assert found.wide_loads >= 4, found
        assert found.matrix >= 4, found


# The tightest of registers: no other tile of these was found that spills nothing.
TIGHT = (
    Job("attend", "fp8_e4m3", "e4m3fn", "gfx1100", "tiled", "verify"),
    Job("attend", "fp8_e4m3", "e4m3fnuz", "gfx1100", "inline", "prefill"),
    Job("attend", "fp8_per_token_head", "e4m3fn", "gfx1100", "inline", "verify"),
    Job("attend", "bfloat16", "bfloat16", "gfx1100", "tiled", "prefill"),
    Job("attend", *INT8, "gfx1201", "inline"),
    Job("attend", "fp8_e5m2", "e5m2", "gfx1201", "tiled"),
    Job("attend", "fp8_e4m3", "e4m3fn", "sm_80", "tiled", "prefill"),
    Job("attend", "fp8_e5m2", "e5m2fnuz", "sm_89", "inline"),
    Job("attend", "bfloat16", "bfloat16", "gfx1100", "inline", head_dim=256),
    Job("attend", *INT8, "gfx1100", "inline", head_dim=256),
    Job("attend", "fp8_e4m3", "e4m3fnuz", "gfx1100", "tiled", "verify", head_dim=256),
    Job("attend", "fp8_e4m3", "e4m3fnuz", "sm_100", "tiled", "verify", head_dim=256),
    Job("attend", "int4_per_token_head", "int4", "sm_120", head_dim=256),
)


def test_the_tightest_tiles_spill_nothing() -> None:
    for found in compile_all(TIGHT, TUNINGS):
        sound(found)
        assert found.matrix >= 4, found


def test_the_loop_of_a_tile_holds_its_products() -> None:
    """Keys x channels of K and V by 16 columns, in products of 16 x 16 x 32 int8 and 16 x 16 x 16 fp16."""
    for arch, matrix8 in (("gfx90a", 32), ("gfx942", 16)):
        tile = TUNINGS[arch].tile("int8", "decode")
        (found,) = compile_all([Job("attend", *INT8, arch)], TUNINGS)
        assert tile.num_warps == 1
        assert (found.loop.matrix, found.loop.matrix8) == (tile.keys // 2, matrix8 * tile.keys // 64), found
        assert 0 < found.loop_instructions < found.instructions


def test_native_conversions_are_there() -> None:
    jobs = [Job("attend", "fp8_per_token_head", encoding, arch) for arch, encoding in NATIVE.items()]
    for found in compile_all(jobs, TUNINGS):
        sound(found)
        assert found.conversions >= 8, found


@pytest.mark.parametrize("arch", ["sm_90", "gfx942"])
def test_the_other_kernels(arch: str) -> None:
    jobs = [Job(kernel, *INT8, arch) for kernel in ("gather", "reduce", "sequences", "schedule", "move")]
    jobs += [Job("store", "int4_per_token_head", "int4", arch, phase="prefill")]
    jobs += [Job("attend", *INT8, arch, phase="prefill"), Job("attend", *INT8, arch, "inline")]
    for found in compile_all(jobs, TUNINGS):
        sound(found)


def test_long_rows_are_stored_without_spilling() -> None:
    for found in compile_all(
        [Job("store", "fp8_e5m2", "e5m2", arch, phase="prefill", head_dim=256) for arch in ("sm_89", "sm_90")], TUNINGS
    ):
        sound(found)


def test_keys_are_converted_once_for_all_warps() -> None:
    """48 instructions a key in all four warps; 101 where each of them converts every key (docs/kernels.md)."""
    tile = TUNINGS["gfx1100"].tile("float8", "decode")
    (found,) = compile_all([Job("attend", "fp8_per_token_head", "e4m3fn", "gfx1100")], TUNINGS)
    sound(found)
    assert tile.num_warps == 4
    assert found.loop.vector * tile.num_warps / tile.keys < 60, found


@pytest.mark.parametrize("arch", ["sm_90", "gfx942", "gfx1201"])
def test_short_heads_compile(arch: str) -> None:
    """A product of integers sums over 32 channels at least, however few a row has."""
    modes = {("int4_per_token_head", "int4"): 24, INT8: 8, ("fp8_per_token_head", "e4m3fn"): 8}
    jobs = [Job("attend", *mode, arch, head_dim=dim) for mode, dim in modes.items()]
    for found in compile_all(jobs, TUNINGS):
        sound(found)


def test_a_compiler_that_dies_fails_its_own_job_only() -> None:
    jobs = [Job("move", *INT8, "sm_90"), Job("move", *INT8, "gfx000"), Job("move", *INT8, "sm_90")]
    assert [found.ok for found in compile_all(jobs)] == [True, False, True]

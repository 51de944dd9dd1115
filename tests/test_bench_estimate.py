"""The estimate of whether instructions or memory bound decode: its arithmetic, and the command."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from bench.cli import main
from bench.estimate import CHIPS, Chip, chips_of, document, estimate, jobs_for, markdown
from kvhal.capability.tables import TUNING_FILE, table_file
from kvhal.errors import ConfigError
from kvhal.kernels.aot import Compiled, Job, cut_of
from kvhal.kernels.listing import LoopCount
from kvhal.kernels.triton.tuning import DEFAULT, Tile, load_tunings

# One unit at 1 GHz that reads 10 bytes a clock and issues 2 slots.
SMALL = Chip("small", "gfx942", units=1, ghz=1.0, tb_s=0.01, issue=2, matrix=4, matrix8=1)
TILES = tuple((family, Tile(32, num_warps=2)) for family in ("int8", "float8", "int4", "static", "wide"))
TUNING = replace(DEFAULT, decode=TILES, conversion="cast", hardware=("e4m3fnuz",))
JOB = Job("attend", "int8_per_token_head", "int8", "gfx942")
LOOP = LoopCount(vector=200, slow=20, matrix=10, matrix8=8, memory=30, shared=40, scalar=50, other=60)


def test_the_arithmetic() -> None:
    found = estimate(SMALL, Compiled(JOB, ok=True, loop=LOOP), TUNING)
    assert (found.keys, found.num_warps, cut_of(JOB, TUNING).keys) == (32, 2, 32)
    # 264 bytes a token and head at 10 a clock, 2 slots a clock.
    assert found.budget == pytest.approx(52.8)
    # (200 + 3 x 20 + 4 x 10 + 8) slots in each of two warps for 32 tokens.
    assert found.slots == pytest.approx(308 * 2 / 32)
    assert (found.vector, found.matrix, found.scalar) == (200 * 2 / 32, 18 * 2 / 32, 50 * 2 / 32)
    assert (found.bound, found.conversion, round(found.share, 3)) == ("memory", "cast", 0.365)


def test_one_scheduler_issues_everything() -> None:
    chip = replace(SMALL, matrix=1, slow=0, rest=1)
    assert chip.slots(LOOP) == LOOP.instructions == 398


def test_more_slots_than_the_budget_bind() -> None:
    found = estimate(SMALL, Compiled(JOB, ok=True, loop=replace(LOOP, vector=2000)), TUNING)
    assert (found.bound, found.share > 1) == ("issue", True)


def test_without_a_loop_there_is_no_estimate() -> None:
    with pytest.raises(ConfigError, match="does not compile here"):
        estimate(SMALL, Compiled(JOB, ok=False, error="does not compile here"), TUNING)
    with pytest.raises(ConfigError, match="no loop of its listing"):
        estimate(SMALL, Compiled(JOB, ok=True), TUNING)


def test_the_arch_s_own_format_is_estimated_beside_ocp() -> None:
    formats = [job.encoding for job in jobs_for("gfx942", TUNING) if job.mode == "fp8_per_token_head"]
    assert formats == ["e4m3fn", "e4m3fnuz"]
    assert [job.encoding for job in jobs_for("gfx90a", DEFAULT)] == ["int8", "e4m3fn", "int4", "bfloat16"]


def test_every_amd_tuning_has_a_chip() -> None:
    assert set(load_tunings(table_file("rocm").with_name(TUNING_FILE))) <= {chip.arch for chip in CHIPS}
    assert [chip.name for chip in chips_of(["gfx950"])] == ["MI355X"]


def test_pages() -> None:
    found = [estimate(SMALL, Compiled(JOB, ok=True, loop=LOOP, scratch=8), TUNING)]
    assert "| small (gfx942) | int8_per_token_head (int8) | cast | 32 x 2 | 12.5 (1.25) |" in markdown(found)
    assert "spills 8 bytes" in markdown(found)
    rows = document(found)["rows"]
    assert isinstance(rows, list)
    assert rows[0]["bound"] == "memory"


def test_the_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["estimate", "--arch", "gfx942", "--json", "--out", str(tmp_path / "e.json")]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told == json.loads((tmp_path / "e.json").read_text())
    assert [row["encoding"] for row in told["rows"]] == ["int8", "e4m3fn", "e4m3fnuz", "int4", "bfloat16"]
    # A tile of 64 x 128 takes 16 integer and 32 fp16 products (16 x 16 x 32 and 16 x 16 x 16).
    int8 = told["rows"][0]
    assert int8["matrix"] == 48 / 64
    assert all(row["spilled"] == 0 for row in told["rows"])


def test_an_arch_that_no_chip_has(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", "--arch", "gfx000"]) == 2
    assert "gfx000" in capsys.readouterr().err

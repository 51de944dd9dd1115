"""What a result becomes: the terminal's table, Markdown, and a picture."""

import builtins
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from bench.cases import AttendCase
from bench.cli import main
from bench.plot import panels
from bench.results import COPY, READ, Case, Ceiling, Failure, PeerTime, Result
from bench.tables import markdown, result_table

WHERE: dict[str, str | int] = {"machine": "a GPU", "arch": "sm_90", "torch": "2.11.0", "date": "2026-11-30T00:00:00"}
MODES = ("int8_per_token_head", "bfloat16")


def decode(mode: str, seqs: int, us: float, **given: Any) -> Case:
    of = AttendCase("decode", mode, seqs, 1024, **given)
    return Case(of.name, us, 1.0, of.labels, nbytes=1_000_000 * seqs, floor_us=us / 2, error=1e-3)


def result() -> Result:
    cases = [decode(mode, seqs, 10.0 * seqs) for mode in MODES for seqs in (1, 8)]
    cases[0] = replace(cases[0], peers=(PeerTime("torch SDPA", 15.0, 0.1, 2e-3),))
    cases.append(decode(MODES[0], 8, 33.0, layout="inline"))
    return Result(
        "decode",
        WHERE,
        (Ceiling(READ, 1_000_000, 0.25, 0.0), Ceiling(READ, 4_000_000, 0.8, 0.0), Ceiling(COPY, 1_000_000, 0.1, 0.0)),
        {"torch SDPA": "", "FlashInfer": "absent: no module named flashinfer"},
        tuple(cases),
        (Failure("decode broken", "ValueError: no"),),
    )


def test_markdown_has_a_grid_of_shapes_and_modes() -> None:
    lines = markdown(result()).splitlines()
    assert "| shape | int8_per_token_head | bfloat16 |" in lines
    assert "| 1x1024 | 10.0 (2.00) | 10.0 (2.00) |" in lines
    assert "| 8x1024 | 80.0 (2.00) | 80.0 (2.00) |" in lines


def test_markdown_says_the_rest_too() -> None:
    text = markdown(result())
    assert "`python -m bench decode`, a GPU, sm_90, torch 2.11.0, 2026-11-30T00:00:00." in text
    assert "| read | 1 | 0.2 | 4000 |" in text
    assert "| decode int8_per_token_head 8x1024 q32 inline | 33.0 us |" in text
    assert "| decode int8_per_token_head 1x1024 q32 | 10.0 | 15.0 (1.50) |" in text
    assert "FlashInfer (absent: no module named flashinfer)" in text
    assert "Failed: decode broken: ValueError: no" in text
    assert "Largest relative L2 error against float64: 1.0e-03." in text
    assert "cut off" not in text
    assert "cut off" in markdown(replace(result(), is_complete=False))


def test_a_wrong_case_shows_as_wrong() -> None:
    wrong = replace(result().cases[0], error=0.5)
    text = markdown(replace(result(), cases=(wrong, *result().cases[1:])))
    assert "| 1x1024 | 10.0 (2.00) WRONG |" in text


def test_every_table_has_as_many_cells_in_each_row() -> None:
    for block in markdown(result()).split("\n\n"):
        rows = [line.count("|") for line in block.splitlines() if line.startswith("|")]
        assert len(set(rows)) <= 1


def test_the_report_command_prints_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result().save(tmp_path / "r.json")
    assert main(["report", str(tmp_path / "r.json")]) == 0
    assert capsys.readouterr().out == markdown(result())


def test_the_table_names_cases_peers_and_absences() -> None:
    console = Console(width=200)
    with console.capture() as captured:
        console.print(result_table(result()))
    text = captured.get()
    assert "torch SDPA 15.0 (1.50)" in text
    assert "absent: no module named flashinfer" in text
    assert "failed: ValueError: no" in text
    assert "read ceiling, 4 MB: 0.8 us, 5000 GB/s" in text


def test_a_panel_holds_cases_that_differ_in_mode_and_shape_only() -> None:
    found = panels(result())
    assert list(found) == ["32 query heads, 8 kv heads, D 128"]
    assert [case.name for case in found["32 query heads, 8 kv heads, D 128"]] == [c.name for c in result().cases[:4]]


def test_the_plot_is_a_picture_with_modes_shapes_and_the_ceiling(tmp_path: Path) -> None:
    result().save(tmp_path / "r.json")
    assert main(["plot", str(tmp_path / "r.json"), str(tmp_path / "out.svg")]) == 0
    text = (tmp_path / "out.svg").read_text()
    ET.fromstring(text)
    # matplotlib writes each text as a comment beside its glyphs.
    for said in (*MODES, "1x1024", "8x1024", "read ceiling, 5,000 GB/s", "decode on a GPU (sm_90), 2026-11-30"):
        assert f"<!-- {said} -->" in text
    assert "inline" not in text


def test_a_plot_of_nothing_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Result("plan", WHERE, cases=(Case("plan", 1.0, 0.0),)).save(tmp_path / "r.json")
    assert main(["plot", str(tmp_path / "r.json"), str(tmp_path / "out.svg")]) == 2
    assert "plan" in capsys.readouterr().err


def test_a_plot_without_matplotlib_says_what_to_install(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(f"No module named {name!r}")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    result().save(tmp_path / "r.json")
    assert main(["plot", str(tmp_path / "r.json"), str(tmp_path / "out.svg")]) == 2
    assert "kvhal[bench]" in capsys.readouterr().err

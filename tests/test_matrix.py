"""`kvhal matrix`: the whole table for people, programs and CI, and what CI finds compared with it."""

import io
import json
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvhal.answers.ci_jobs import jobs
from kvhal.answers.drift import check_drift
from kvhal.answers.matrix import PlatformMatrix, counts, declared, known_here, platforms, reasons
from kvhal.answers.runners import Container, Runner, Runners
from kvhal.capability.cells import Cell
from kvhal.capability.evidence import EvidenceFile, read_file, write_file
from kvhal.capability.proof import Level
from kvhal.capability.tables import capability_table, current_keys
from kvhal.capability.versions import Versions
from kvhal.cli.app import main
from kvhal.errors import ConfigError
from kvhal.modes import MODES, Scaling
from kvhal.report.matrix_markdown import matrix_markdown
from kvhal.report.matrix_marks import mark

ROOT = Path(__file__).parents[1]
NAMES = ("cpu", "cuda", "rocm")
SHIPPED = ROOT / "platforms/kvhal_cpu/evidence/x86_64.json"
RUNNERS = """
kvhal_runners: 1
table: {runs_on: [ubuntu-24.04]}
platforms:
  cpu:
    x86_64: {runs_on: [ubuntu-24.04], torch: torch}
  cuda:
    sm_90:
      runs_on: [self-hosted, h200]
      container: {image: "some/image:1", options: --gpus all}
  rocm:
    gfx942: {runs_on: [self-hosted, mi300x], container: {image: "rocm/pytorch"}}
"""


@pytest.fixture(autouse=True)
def no_evidence_of_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return tmp_path / "config/kvhal/evidence"


def expected(platform: str, at: Versions | None = None) -> dict[str, int]:
    """How many cells of each support there must be, by the rows as written and the files shipped with them."""
    table, at = capability_table(platform), at or Versions()
    key = current_keys(table, at)
    files = [read_file(path) for path in (ROOT / f"platforms/kvhal_{platform}/evidence").glob("*.json")]

    def found(cell: Cell, level: Level, *, passed: bool, current: bool) -> bool:
        """Whether a file answers so for every encoding of the cell, made at versions that its row is about."""
        return any(
            (result.mode, result.passed, file.arch, file.level) == (cell.mode, passed, cell.arch, level)
            and set(cell.encodings) <= set(result.encodings)
            and set(cell.when.dimensions) <= set(file.versions.conditions.releases)
            and cell.when.hold(file.versions.conditions.releases)
            and (not current or result.key == key(cell.mode, cell.arch))
            for file in files
            for result in file.cells
        )

    def stands(cell: Cell) -> str:
        failed = found(cell, Level.HARDWARE, passed=False, current=True)
        ran = found(cell, Level.HARDWARE, passed=True, current=False) and not failed
        compiled = found(cell, Level.ISA, passed=True, current=True) and not failed
        match cell.support.value:
            case "run":
                return "run" if ran or MODES[cell.mode].scaling is Scaling.NONE else "experimental"
            case "broken" if cell.until is Level.ISA:
                return "run" if ran else "experimental" if compiled else "broken"
            case support:
                return support

    every = [stands(table.cell(mode, arch, at)) for mode in MODES for arch in table.archs]
    return {support: every.count(support) for support in set(every)}


def test_every_installed_platform_is_shown_the_reference_first() -> None:
    assert platforms(None)[:3] == NAMES
    assert platforms("rocm") == ("rocm",)


def test_the_page_shows_every_arch_and_mode_within_100_columns(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["matrix"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert max(map(len, out.splitlines())) <= 100
    words = out.split()
    for name in NAMES:
        for arch in capability_table(name).archs:
            assert arch in words
    assert all(words.count(mode) >= len(NAMES) for mode in MODES)


def test_the_signs_on_the_page_are_those_of_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["matrix", "--platform", "rocm"]) == 0
    rows: dict[str, dict[str, str]] = {}
    archs: list[str] = []
    for line in capsys.readouterr().out.splitlines():
        words = line.split()
        if words and words[0].startswith("gfx"):
            archs = words
        elif words and words[0] in MODES and len(words) == len(archs) + 1:
            rows.setdefault(words[0], {}).update(zip(archs, words[1:], strict=True))
    matrix = known_here("rocm")
    assert rows == {mode: {arch: mark(matrix.cells[mode, arch]) for arch in matrix.archs} for mode in MODES}
    # Compiled for the arch, and nothing more; nothing was compiled for gfx908.
    assert rows["fp8_per_token_head"]["gfx942"] == "~n*"
    assert rows["fp8_per_token_head"]["gfx90a"] == "~s"
    assert rows["int8_per_token_head"]["gfx90a"] == "~n"
    assert rows["fp8_per_token_head"]["gfx908"] == "✗s"
    assert rows["int8_per_token_head"]["gfx908"] == "✗n"


@pytest.mark.parametrize("width", [40, 60, 80, 200])
def test_the_page_fits_other_widths(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], width: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    assert main(["matrix", "--platform", "rocm"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= width
    assert {a for line in lines for a in line.split() if a.startswith("gfx")} >= set(capability_table("rocm").archs)
    assert "…" not in "".join(lines)


def test_counts_are_those_of_the_cells(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["matrix", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["kvhal_report"], found["kind"]) == (1, "matrix")
    by_name = {p["platform"]: p for p in found["platforms"]}
    for name, archs in (("cpu", 2), ("cuda", 12), ("rocm", 17)):
        one = by_name[name]
        assert len(one["cells"]) == len(MODES) * archs == sum(one["counts"]["modes"].values())
        assert len(one["operations"]) == 9 * archs == sum(one["counts"]["operations"].values())
        for support, count in one["counts"]["modes"].items():
            assert count == sum(cell["support"] == support for cell in one["cells"])
        assert one["counts"]["modes"] == (expected(name) if name != "cpu" else {"run": 9, "experimental": 5})
    # CUDA 13 has no Volta: one arch, every mode.
    assert by_name["cuda"]["counts"]["modes"]["refused"] == len(MODES)
    assert by_name["cuda"]["assumed"] == {"torch": "2.13.0", "triton": "3.7.1", "cuda": "13.2"}


def test_versions_that_are_given_change_the_matrix(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["matrix", "--platform", "cuda", "--cuda", "12.6", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["platforms"]
    # Volta is no longer refused, and nothing was compiled for it; no other row asks for the version of CUDA.
    assumed = expected("cuda")
    assumed["broken"] += assumed.pop("refused")
    assert found["counts"]["modes"] == assumed == expected("cuda", Versions(cuda="12.6"))
    assert found["versions"]["cuda"] == "12.6"


def test_the_capabilities_document_is_what_the_tables_say_now() -> None:
    written = (ROOT / "docs/CAPABILITIES.md").read_text(encoding="utf-8")
    now = matrix_markdown(tuple(declared(name) for name in NAMES))
    assert written == now, "run: kvhal matrix --markdown > docs/CAPABILITIES.md"


def test_the_document_depends_on_nothing_of_this_machine(
    no_evidence_of_the_users: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from kvhal.detection import installed

    assert main(["matrix", "--platform", "cpu", "--markdown"]) == 0
    before = capsys.readouterr().out
    other = replace(
        read_file(SHIPPED), arch="aarch64", cells=tuple(_for_arch(c, "aarch64") for c in read_file(SHIPPED).cells)
    )
    write_file(other, no_evidence_of_the_users / "mine.json")
    monkeypatch.setattr(installed, "installed_triton", lambda: "3.1.0")
    monkeypatch.setattr(installed.TorchBuild, "read", classmethod(lambda cls: cls("2.1.0", None, "6.0")))
    assert main(["matrix", "--platform", "cpu", "--markdown"]) == 0
    assert capsys.readouterr().out == before
    assert known_here("cpu").cells["int8_per_token_head", "aarch64"].support.value == "run"
    assert declared("cpu").cells["int8_per_token_head", "aarch64"].support.value == "experimental"


def _for_arch(cell: Any, arch: str) -> Any:
    return replace(cell, key=replace(cell.key, arch=arch))


def test_every_reason_appears_once_with_its_links() -> None:
    matrices = tuple(declared(name) for name in NAMES)
    text = matrix_markdown(matrices)
    every = reasons(matrices)
    assert [r.number for r in every] == list(range(1, len(every) + 1))
    assert len({r.text for r in every}) == len(every)
    for number in range(1, len(every) + 1):
        assert text.count(f'<a id="reason-{number}"></a>') == 1
    asked = {int(n) for n in re.findall(r"\(#reason-(\d+)\)", text)}
    assert asked <= set(range(1, len(every) + 1))
    rows = [a for m in matrices for of in (m.table.mode_rows, m.table.operation_rows) for r in of.values() for a in r]
    assert {a.reason for a in rows if a.reason} == {r.text for r in every}
    for answer in rows:
        (reason,) = (r for r in every if r.text == answer.reason) if answer.reason else (None,)
        assert reason is None or set(answer.links) <= set(reason.links)
        assert all(f"- {link}\n" in text for link in answer.links)


def test_every_cell_of_the_document_leads_to_its_own_reason() -> None:
    matrix = declared("rocm")
    text = matrix_markdown((matrix,))
    numbers = {r.text: r.number for r in reasons((matrix,))}
    # The table of the modes comes first, then that of the operations.
    line, _ = (row for row in text.splitlines() if row.startswith("| `gfx942` | "))
    cells = line.strip("| ").split(" | ")[1:]
    for mode, cell in zip(MODES, cells, strict=True):
        answer = matrix.cells[mode, "gfx942"]
        assert cell == f"{mark(answer)} [{numbers[answer.reason]}](#reason-{numbers[answer.reason]})"


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--markdown", "--github"], "given together"),
        (["--markdown", "--json"], "given together"),
        (["--markdown", "--triton", "3.8"], "assumed versions"),
        (["--github", "--evidence", "."], "assumed versions"),
        (["--runners", "x.yaml"], "--github or --check-drift"),
        (["--check-drift", "no/such/folder"], "there is none"),
        (["--github", "--runners", "no/such.yaml"], "does not exist"),
    ],
    ids=" ".join,
)
def test_matrix_usage_errors_exit_2(capsys: pytest.CaptureFixture[str], args: Any, words: str) -> None:
    assert main(["matrix", *args]) == 2
    assert words in capsys.readouterr().err


def test_an_unknown_platform_exits_4(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["matrix", "--platform", "quantum"]) == 4
    assert "installed: " in capsys.readouterr().err


def test_one_job_an_arch_on_its_runner_and_the_table_for_the_rest() -> None:
    found = {(j["platform"], j["arch"]): j for j in jobs(Runners.from_text(RUNNERS, "r.yaml"))}
    assert set(found) == {(name, arch) for name in NAMES for arch in capability_table(name).archs}
    with_device = {key for key, job in found.items() if job["tier"] == "device"}
    assert with_device == {("cpu", "x86_64"), ("cuda", "sm_90"), ("rocm", "gfx942")}
    sm_90, gfx942, table = found["cuda", "sm_90"], found["rocm", "gfx942"], found["cuda", "sm_80"]
    assert (sm_90["runs_on"], sm_90["container"]) == (
        ["self-hosted", "h200"],
        {"image": "some/image:1", "options": "--gpus all"},
    )
    assert gfx942["container"] == {"image": "rocm/pytorch"}
    assert (table["tier"], table["runs_on"], table["container"]) == ("table", ["ubuntu-24.04"], "")
    compiled = {arch for (_, arch), job in found.items() if job["compile"]}
    assert compiled == {"sm_80", "sm_86", "sm_89", "sm_100", "sm_120", "gfx90a", "gfx950", "gfx1100", "gfx1201"}
    assert found["cpu", "x86_64"]["run"] == list(MODES)
    assert found["cpu", "x86_64"]["torch"] == "torch"
    for (name, arch), job in found.items():
        accepted = [m for m in MODES if declared(name).cells[m, arch].support.is_accepted]
        assert (job["run"], [m for m in MODES if m not in accepted]) == (accepted, job["refused"])


def test_the_jobs_of_one_platform() -> None:
    assert {j["platform"] for j in jobs(Runners.from_text(RUNNERS, "r.yaml"), "cuda")} == {"cuda"}


def test_github_gets_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(RUNNERS))
    assert main(["matrix", "--github", "--runners", "-"]) == 0
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    assert json.loads(out) == {"include": jobs(Runners.from_text(RUNNERS, "r"))}
    # GitHub refuses a matrix of more jobs, and an output above 1 MiB.
    assert len(json.loads(out)["include"]) <= 256
    assert len(out) < 1 << 20


@pytest.mark.parametrize("text", [None, "", "  \n", "kvhal_runners: 1\n"])
def test_without_runners_the_matrix_is_empty(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, text: str | None
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(text or ""))
    assert main(["matrix", "--github", *([] if text is None else ["--runners", "-"])]) == 0
    # The workflow compares it letter for letter.
    assert capsys.readouterr().out == '{"include":[]}\n'


def test_runners_are_read_in_full() -> None:
    found = Runners.from_text(RUNNERS, "r.yaml")
    assert found.table == Runner(("ubuntu-24.04",))
    assert found.of["cuda", "sm_90"] == Runner(("self-hosted", "h200"), "", Container("some/image:1", "--gpus all"))


@pytest.mark.parametrize(
    ("text", "where", "words"),
    [
        ("kvhal_runners: 2\n", "r.yaml:1:16", "must be 1"),
        ("table: {runs_on: [a]}\n", "r.yaml:1:1", "'kvhal_runners' is missing"),
        ("kvhal_runners: 1\nplatforms: {tpu: {}}\n", "r.yaml:2:13", "'tpu' is unknown"),
        ("kvhal_runners: 1\nplatforms:\n  cuda:\n    sm_91: {runs_on: [a]}\n", "r.yaml:4:5", "sm_90"),
        ("kvhal_runners: 1\nplatforms: {cuda: {sm_90: {runs_on: []}}}\n", "r.yaml:2:37", "names no label"),
        ("kvhal_runners: 1\nplatforms: {cuda: {sm_90: {torch: torch}}}\n", "r.yaml:2:20", "'runs_on' is missing"),
        ("kvhal_runners: 1\ntable: {runs_on: [a], gpu: h200}\n", "r.yaml:2:23", "'gpu' is unknown"),
        ("kvhal_runners: 1\ntable: {runs_on: [a], container: {options: x}}\n", "r.yaml:2:23", "'image' is missing"),
    ],
    ids=lambda value: value.split("\n")[-2] if isinstance(value, str) and "\n" in value else "",
)  # fmt: skip
def test_wrong_runners_are_refused_with_their_place(text: str, where: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Runners.from_text(text, "r.yaml")
    assert any(p.where == where and words in p.message for p in caught.value.problems), caught.value


@pytest.fixture
def evidence(tmp_path: Path) -> Callable[..., Path]:
    """Write the CPU's shipped evidence, for the kernels of now and changed as asked, into a folder of its own."""

    def made(change: Callable[[EvidenceFile], EvidenceFile] = lambda file: file) -> Path:
        key = current_keys(capability_table("cpu"))
        shipped = read_file(SHIPPED)
        now = replace(shipped, cells=tuple(replace(c, key=key(c.mode, shipped.arch)) for c in shipped.cells))
        folder = tmp_path / "found"
        write_file(change(now), folder / "evidence-cpu-x86_64" / "cpu.json")
        return folder

    return made


def _changed(mode: str, **changes: Any) -> Callable[[EvidenceFile], EvidenceFile]:
    def change(file: EvidenceFile) -> EvidenceFile:
        return replace(file, cells=tuple(replace(c, **changes) if c.mode == mode else c for c in file.cells))

    return change


def _on(arch: str, *modes: str) -> Callable[[EvidenceFile], EvidenceFile]:
    """The same results for some modes, as a machine with an NVIDIA GPU of this arch would write them."""

    def change(file: EvidenceFile) -> EvidenceFile:
        at = replace(file.versions, torch="2.14.1", triton="3.8.0", cuda="13.2")
        key = current_keys(capability_table("cuda"), at.conditions)
        cells = tuple(replace(c, key=key(c.mode, arch)) for c in file.cells if c.mode in modes)
        return replace(file, platform="cuda", arch=arch, versions=at, cells=cells)

    return change


def test_evidence_that_agrees_is_no_drift(evidence: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    folder = evidence()
    (cpus,) = folder.rglob("*.json")
    write_file(_on("sm_90", *MODES)(read_file(cpus)), folder / "evidence-cuda-sm_90" / "cuda.json")
    found = check_drift(folder, Runners.from_text(RUNNERS, "r.yaml"))
    assert found.is_ok
    claims = {("cpu", "x86_64", mode) for mode in MODES} | {("cuda", "sm_90", mode) for mode in MODES}
    assert {(f.platform, f.arch, f.mode) for f in found.agreed} == claims
    assert main(["matrix", "--check-drift", str(folder)]) == 0
    assert "ok: 14 claim(s) hold" in capsys.readouterr().out


def test_a_claim_that_fails_is_drift(evidence: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    folder = evidence(_changed("fp8_e4m3", passed=False, failed=("test_store",)))
    (denied,) = check_drift(folder).denied
    assert (denied.mode, denied.rule) == ("fp8_e4m3", "kvhal_cpu/capabilities.yaml:12")
    assert "declared run and failed: test_store" in denied.text
    assert main(["matrix", "--check-drift", str(folder), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["denied"][0]["mode"] == "fp8_e4m3"
    assert main(["matrix", "--check-drift", str(folder)]) == 1
    assert "FAILED: 1 claim(s)" in capsys.readouterr().out


def test_a_claim_that_was_not_tested_is_drift(evidence: Callable[..., Path]) -> None:
    folder = evidence(lambda file: replace(file, cells=file.cells[1:]))
    (denied,) = check_drift(folder).denied
    assert (denied.mode, denied.text[:31]) == ("bfloat16", "declared run and not tested (ev")


def test_an_encoding_that_was_not_tested_is_drift(evidence: Callable[..., Path]) -> None:
    (denied,) = check_drift(evidence(_changed("fp8_e4m3", encodings=("e4m3fn",)))).denied
    assert "stored as e4m3fnuz too" in denied.text


def test_what_works_and_is_not_claimed_is_drift(evidence: Callable[..., Path]) -> None:
    (denied,) = check_drift(evidence(_on("sm_80", "int8_per_token_head"))).denied
    assert (denied.platform, denied.arch, denied.mode) == ("cuda", "sm_80", "int8_per_token_head")
    shipped = json.loads(SHIPPED.read_text(encoding="utf-8"))["cells"]
    (tests,) = (cell["tests"] for cell in shipped if cell["mode"] == "int8_per_token_head")
    assert f"declared broken and passed {tests} tests; delete the debt" in denied.text


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda f: replace(f, masquerade=True), "masquerade"),
        (lambda f: replace(f, level=Level.ISA), "level isa"),
        (lambda f: replace(f, cells=tuple(replace(c, key=replace(c.key, kernel="0" * 64)) for c in f.cells)),
         "other kernel sources"),
    ],
    ids=["masquerade", "isa", "other kernels"],
)  # fmt: skip
def test_what_says_nothing_of_these_tables_is_set_aside_and_named(
    evidence: Callable[..., Path], change: Callable[[EvidenceFile], EvidenceFile], words: str
) -> None:
    found = check_drift(evidence(change))
    assert (found.agreed, found.denied) == ((), ())
    assert all(words in f.text for f in found.set_aside)
    assert found.set_aside


def test_an_arch_that_has_a_runner_and_claims_owes_evidence(tmp_path: Path) -> None:
    runners = Runners.from_text(RUNNERS, "r.yaml")
    found = check_drift(tmp_path, runners)
    # No AMD GPU is claimed to run a mode yet, so gfx942 owes nothing.
    assert [(f.platform, f.arch) for f in found.denied] == [("cpu", "x86_64"), ("cuda", "sm_90")]
    assert all(mode in f.text for f in found.denied for mode in MODES)
    assert check_drift(tmp_path).is_ok
    assert check_drift(tmp_path, runners, "rocm").is_ok


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_evidence_of_an_unknown_platform_or_arch_is_drift(evidence: Callable[..., Path], platform: str) -> None:
    found = check_drift(evidence(lambda file: replace(file, platform=platform)))
    assert found.denied
    assert all("not installed" in f.text or "does not list" in f.text for f in found.denied)


def test_a_damaged_evidence_file_exits_2(evidence: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    folder = evidence()
    (folder / "broken.json").write_text("{", encoding="utf-8")
    assert main(["matrix", "--check-drift", str(folder)]) == 2
    assert "broken.json" in capsys.readouterr().err


def test_counts_leave_out_what_there_is_none_of() -> None:
    matrix: PlatformMatrix = declared("rocm")
    found = {s.value: n for s, n in counts(matrix.cells.values()).items()}
    assert found == expected("rocm")
    assert list(found) == ["experimental", "broken", "refused"]

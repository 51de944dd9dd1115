"""`kvhal verify` proves what the table claims on this machine, and the table then reads the proof."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

import kvhal
from kvhal import ConfigError, DeviceError, PlatformError
from kvhal.capability.cells import Support
from kvhal.capability.evidence import read_file, write_file
from kvhal.capability.proof import Level, Origin, Status
from kvhal.capability.tables import capability_table, proved
from kvhal.cli.output import Session
from kvhal.cli.verify import verify as command
from kvhal.hal import Hal
from kvhal.modes import MODES
from kvhal.report.verification import verify_document, verify_lines
from kvhal.testing import child
from kvhal.testing.child import Done
from kvhal.verify import Verification, verify


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Verification:
    """The real thing, quick: the whole suite on this machine's CPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("config")))
        return verify("cpu", quick=True)


def test_every_claim_of_this_cpu_is_proved(found: Verification, hal: Hal) -> None:
    assert found.is_ok, found.output
    assert found.path is not None
    assert found.path.name == f"cpu-{hal.device.arch}.json"
    assert found.path.parent.parts[-2:] == ("kvhal", "evidence")
    evidence = read_file(found.path)
    assert evidence == found.evidence
    assert (evidence.platform, evidence.arch, evidence.level) == ("cpu", hal.device.arch, Level.HARDWARE)
    assert (evidence.quick, evidence.masquerade) == (True, False)
    assert evidence.versions.kvhal == kvhal.__version__
    assert [c.mode for c in evidence.cells] == list(MODES)
    for cell in evidence.cells:
        assert (cell.passed, cell.failed) == (True, ())
        assert cell.tests > 90 * len(cell.encodings)
        assert cell.encodings == MODES[cell.mode].encodings
        exact = {name: worst for name, worst in cell.worst.items() if "differ" in name}
        assert len(exact) >= 5
        assert set(exact.values()) == {0.0}
        assert 0 < (cell.worst["attend: relative L2"] or 1) < 3e-3


def test_the_table_reads_the_proof(found: Verification, hal: Hal) -> None:
    assert found.path is not None
    for mode in MODES:
        cell = proved(capability_table("cpu"), [found.path.parent]).cell(mode, hal.device.arch)
        assert cell.support is Support.RUN
        assert (cell.proof.status, cell.proof.origin) == (Status.CURRENT, Origin.SITE)
        assert cell.proof.source == str(found.path)


def test_what_was_proved_is_printed_and_a_document(found: Verification) -> None:
    lines = verify_lines(found)
    assert lines[0].startswith("cpu:0 ")
    passed = [line for line in lines if line.startswith("passed")]
    assert len(passed) == len(MODES)
    assert any(line.startswith("passed  fp8_per_token_head as e4m3fn, e4m3fnuz: ") for line in passed)
    assert lines[-1].endswith(f"s): {found.path}")
    document = json.loads(json.dumps(verify_document(found), allow_nan=False))
    assert (document["kvhal_report"], document["kind"], document["ok"]) == (1, "verify", True)
    assert document["path"] == str(found.path)
    assert [cell["mode"] for cell in document["evidence"]["cells"]] == list(MODES)


class Fake:
    """Stands in for the child process: answers as told and writes what a run would have written."""

    def __init__(
        self, code: int, found: Verification, only: Sequence[str] | None = None, *, passed: bool = True
    ) -> None:
        self.code, self.options = code, list[str]()
        cells = tuple(c for c in found.evidence.cells if only is None or c.mode in only)
        spoiled = tuple(replace(c, passed=False, failed=("a", "b", "c", "d")) for c in cells)
        self.evidence = replace(found.evidence, cells=cells if passed else spoiled)

    def __call__(self, platform: str, device: int, options: Sequence[str], timeout_s: float) -> Done:
        self.options = [f"{platform}:{device}", *options]
        for option in options:
            if option.startswith("--kvhal-evidence=") and self.code in (0, 1):
                write_file(self.evidence, Path(option.partition("=")[2]))
        return Done(self.code, "\n".join(f"line {i}" for i in range(200)))


def cli(monkeypatch: pytest.MonkeyPatch, fake: Fake, *arguments: str) -> Any:
    monkeypatch.setattr(child, "run_suite", fake)
    app = typer.Typer()
    app.command()(command)
    return CliRunner().invoke(app, arguments, obj=Session(as_json=False), standalone_mode=False)


def test_modes_and_quick_are_passed_on_and_named_in_the_file(
    found: Verification, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, hal: Hal
) -> None:
    fake = Fake(0, found, ["fp8_e4m3", "bfloat16"])
    done = cli(
        monkeypatch, fake, "--platform", "cpu", "--mode", "fp8", "--mode", "bf16", "--mode", "fp8_e4m3", "--quick",
        "--evidence", str(tmp_path / "new"),
    )  # fmt: skip
    assert done.return_value == 0, done.output
    assert fake.options[:3] == ["cpu:0", "--kvhal-mode=fp8_e4m3", "--kvhal-mode=bfloat16"]
    assert "--kvhal-quick" in fake.options
    assert "--kvhal-require=cpu" in fake.options
    assert [p.name for p in (tmp_path / "new").iterdir()] == [f"cpu-{hal.device.arch}-bfloat16+fp8_e4m3.json"]
    assert "refused" not in done.output


def test_a_test_that_fails_exits_1_and_is_kept(
    found: Verification, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    done = cli(monkeypatch, Fake(1, found, passed=False), "--platform", "cpu", "--evidence", str(tmp_path), "--json")
    assert done.return_value == 1
    document = json.loads(done.stdout)
    assert document["ok"] is False
    assert document["output"].endswith("line 199")
    assert not any(cell.passed for cell in read_file(Path(document["path"])).cells)
    page = cli(monkeypatch, Fake(1, found, passed=False), "--platform", "cpu", "--evidence", str(tmp_path))
    assert page.return_value == 1
    assert "FAILED  int8_per_token_head: a, b, c and 1 more" in page.stdout


def test_modes_that_are_refused_leave_no_file(
    found: Verification, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    done = cli(monkeypatch, Fake(0, found, []), "--platform", "cpu", "--mode", "fp8", "--evidence", str(tmp_path))
    assert done.return_value == 0
    assert "refused fp8_e4m3: not accepted here" in done.stdout
    assert "there is no evidence to keep" in done.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("code", [-11, 134, 139])
def test_a_crash_is_a_device_error_and_writes_nothing(
    found: Verification, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: int
) -> None:
    monkeypatch.setattr(child, "run_suite", Fake(code, found))
    with pytest.raises(DeviceError, match=f"its process ended with code {code}; nothing was proved") as caught:
        verify("cpu", folder=tmp_path)
    assert (caught.value.kind, caught.value.exit_code) == ("crash", 4)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("code", [2, 3, 4, 5])
def test_a_suite_that_cannot_run_is_a_bug_of_ours(
    found: Verification, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: int
) -> None:
    monkeypatch.setattr(child, "run_suite", Fake(code, found))
    with pytest.raises(RuntimeError, match=f"pytest exit code {code}"):
        verify("cpu", folder=tmp_path)


def test_without_pytest_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pytest", None)
    monkeypatch.setattr("kvhal.verify.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r'pip install "kvhal\[verify\]"'):
        verify("cpu")


def test_an_unknown_mode_and_an_absent_platform_are_errors() -> None:
    with pytest.raises(ConfigError, match="mode 'fp9' is unknown"):
        verify("cpu", only=["fp9"])
    with pytest.raises(PlatformError):
        verify("no_such_platform")


def test_a_child_that_takes_too_long_counts_as_a_crash() -> None:
    done = child.run_suite("cpu", 0, ("--kvhal-quick",), 0.05)
    assert done.is_crash
    assert "not finished after 0.05 s" in done.output

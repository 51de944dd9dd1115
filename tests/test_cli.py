"""The command line: exit codes, where results and errors go, and documents that programs can read."""

import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kvhal import __version__
from kvhal.capability.tables import capability_table
from kvhal.cli.app import main
from kvhal.run import check
from kvhal.run import flow as runs

ROOT = Path(__file__).parents[1]
DEMO = str(ROOT / "configs/cpu-demo.yaml")
SMALL = ("-c", DEMO, "--set", "platform=cpu", "--set", "memory.bytes=2MiB")
# A platform that this torch is certainly not built for.
OTHER = "cuda" if torch.version.cuda is None else "rocm"
GOOD = "kvhal: 1\nmodel: {num_layers: 1, num_kv_heads: 1, num_q_heads: 1, head_dim: 16}\ncache: {mode: bfloat16}\n"


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("KVHAL_")]:
        monkeypatch.delenv(name)


def document(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """The one JSON document on stdout."""
    found = json.loads(capsys.readouterr().out)
    assert isinstance(found, dict)
    assert found["kvhal_report"] == 1
    return found


def kvhal(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kvhal.cli.app", *args],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error"} | env,
        capture_output=True,
        text=True,
        check=False,
    )


def test_run_prints_one_page_and_exits_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", *SMALL]) == 0
    out, err = capsys.readouterr()
    steps = ("platform", "decision", "profile", "budget", "plan", "allocate", "use", "checks", "release", "ok:")
    starts = [line.split(" ")[0] for line in out.splitlines() if line[:1].isalpha()]
    assert starts[0] == "kvhal"
    assert tuple(starts[1:]) == steps
    assert max(map(len, out.splitlines())) <= 100
    assert err == ""


def test_run_as_a_program_gives_one_document_on_stdout_and_nothing_on_stderr() -> None:
    done = kvhal("run", *SMALL, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    assert found["ok"] is True
    release = found["release"]
    assert release["bytes_asked"] == release["bytes_returned"] == found["plan"]["total_bytes"]
    assert release["holders"] == []
    assert 0 <= release["seconds"] < 10
    assert found["platform"]["name"] == "cpu"


def test_report_format_json_in_the_file_acts_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", *SMALL, "--set", "report.format=json"]) == 0
    assert document(capsys)["kind"] == "run"
    assert main(["run", *SMALL, "--set", "report.format=json", "--set", "profile.blocks=1000000000"]) == 2
    assert document(capsys)["error"]["type"] == "BudgetError"


@pytest.mark.parametrize(
    ("sets", "words"),
    [
        (["cache.mode=int9_per_token_head"], "int8_per_token_head"),
        (["cache.block_size=0"], "block_size"),
        (["cache.block_size=8"], "tiled"),
        (["memory.bytes=null", "memory.blocks=1000000000"], "largest number that fits"),
        (["memory.bytes=100TiB"], "109951162777600 bytes"),
        (["memory.bytes=lots"], "memory"),
        (["nothing.like.it=1"], "nothing"),
        (["cache.mode=fp8_e4m3"], "scale"),
    ],
)
def test_bad_values_exit_2_and_say_what_is_wrong(
    capsys: pytest.CaptureFixture[str], sets: list[str], words: str
) -> None:
    options = [part for value in sets for part in ("--set", value)]
    assert main(["run", *SMALL, *options]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert words in err
    assert "Traceback" not in err


@pytest.mark.parametrize("command", ["run", "plan", "explain"])
@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("binary.yaml", bytes(range(256))),
        ("empty.yaml", b""),
        ("large.yaml", b"#" * (50 << 20)),
        ("deep.yaml", b"kvhal: " + b"[" * 20000),
        ("words.yaml", b"just words"),
        ("missing.yaml", None),
        ("folder.yaml", "folder"),
    ],
)
def test_a_file_that_is_no_deployment_exits_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str, name: str, content: bytes | str | None
) -> None:
    path = tmp_path / name
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        path.mkdir()
    assert main([command, "-c", str(path)]) == 2
    err = capsys.readouterr().err
    assert name in err
    assert "Traceback" not in err
    assert len(err) < 4000


def test_a_model_config_with_missing_fields_exits_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}', encoding="utf-8")
    (tmp_path / "d.yaml").write_text(
        "kvhal: 1\nmodel: {config: config.json}\ncache: {mode: bfloat16}\n", encoding="utf-8"
    )
    assert main(["run", "-c", str(tmp_path / "d.yaml"), "--json"]) == 2
    error = document(capsys)["error"]
    assert error["type"] == "ConfigError"
    assert "num_hidden_layers" in error["message"]
    assert error["problems"]


@pytest.mark.parametrize(
    "args",
    [
        ["nonsense"],
        ["run"],
        ["run", "--no-such-option"],
        ["plan", "-c", DEMO, "--blocks", "0"],
        ["plan", "-c", DEMO, "--blocks", "many"],
        ["explain", "int8_per_token_head", "--head-dim", "0"],
        ["explain", "int9"],
        ["explain", "--set", "cache.mode=bfloat16"],
        ["plan", "-c", DEMO, "--blocks", "3856"],
        ["config", "check", "no/such/file.yaml"],
    ],
    ids=lambda args: " ".join(args).replace(DEMO, "DEMO"),
)
def test_usage_errors_exit_2(capsys: pytest.CaptureFixture[str], args: list[str]) -> None:
    assert main(args) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err
    assert "Traceback" not in err


def test_no_command_prints_the_help_and_exits_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    out, err = capsys.readouterr()
    assert "explain" in out + err


def test_a_usage_error_is_a_document_as_well(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--json"]) == 2
    assert document(capsys)["error"]["exit_code"] == 2


@pytest.mark.parametrize("command", ["run", "plan"])
def test_a_refused_mode_exits_3_with_reason_and_ways_out(capsys: pytest.CaptureFixture[str], command: str) -> None:
    assert main([command, *SMALL, "--set", "policy.deny=[int8_per_token_head]", "--json"]) == 3
    error = document(capsys)["error"]
    assert error["type"] == "UnsupportedMode"
    assert "policy.deny" in error["message"]
    assert "what to do" in error["message"]


def test_explain_exits_3_for_a_refused_mode_and_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    args = ["explain", "int8", *SMALL, "--set", "policy.require.path=native"]
    args[1] = "int8_per_token_head"
    assert main(args) == 3
    out = capsys.readouterr().out
    assert "refused" in out
    assert "policy.require.path" in out
    assert main([*args, "--json"]) == 3
    found = document(capsys)
    assert found["ok"] is False
    assert found["decisions"][0]["alternatives"][0] == "bfloat16"


def test_explain_gives_verdict_path_encoding_and_rule(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "fp8", "--platform", "cpu", "--arch", "x86_64", "--head-dim", "128", "--json"]) == 0
    found = document(capsys)
    (decision,) = found["decisions"]
    assert found["arch"] == "x86_64"
    assert (decision["requested"], decision["effective"]) == ("fp8_e4m3", "fp8_e4m3")
    assert (decision["path"], decision["encoding"]) == ("emulated", "e4m3fn")
    file, line = decision["rule"].split(":")
    text = (ROOT / "platforms" / file).read_text(encoding="utf-8").splitlines()
    # The row begins at the line that the rule names.
    assert text[int(line) - 1].startswith("  - archs")


def test_explain_without_a_mode_lists_all_of_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--json"]) == 0
    found = document(capsys)
    assert len(found["decisions"]) == 7
    assert {o["name"] for o in found["operations"]} >= {"release_visibly", "attend_opaque"}
    assert main(["explain"]) == 0
    assert "attend_opaque" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (["--platform", "quantum"], 4, "installed: "),
        (["--arch", "x86-64"], 3, "x86_64"),
    ],
)
def test_explain_refuses_unknown_platforms_and_archs(
    capsys: pytest.CaptureFixture[str], options: list[str], code: int, words: str
) -> None:
    assert main(["explain", "bfloat16", *options]) == code
    out, err = capsys.readouterr()
    # An arch without a row is an answer; a platform without adapter is an error.
    assert words in (out if code == 3 else err)


def test_a_platform_this_torch_is_not_built_for_exits_4(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", *SMALL, "--set", f"platform={OTHER}", "--json"]) == 4
    assert document(capsys)["error"]["type"] == "PlatformError"


def test_plan_says_the_bytes_a_person_would_compute(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "-c", DEMO, "--blocks", "10", "--json"]) == 0
    found = document(capsys)
    page = 2 * 16 * (64 + 64 + 4 + 4)
    assert found["plan"]["block_bytes"] == 4 * page
    assert found["plan"]["nbytes"] == 10 * 4 * page + 16
    assert found["plan"]["payload_bytes"] == 10 * 4 * 2 * 16 * 128
    assert found["plan"]["word_bytes"] == 10 * 4 * 2 * 16 * 8
    assert found["held_by_memory_bytes"] == (64 * 2**20 - 16) // (4 * page)
    assert found["blocks_from"] == "--blocks"


@pytest.mark.parametrize(
    ("sets", "source", "blocks"),
    [
        ([], "memory.bytes", 3855),
        (["memory.bytes=null", "memory.blocks=7"], "memory.blocks", 7),
        # Four sequences of 256 tokens in blocks of 16.
        (["memory.bytes=null"], "a full batch", 64),
    ],
)
def test_plan_says_what_set_the_number_of_blocks(
    capsys: pytest.CaptureFixture[str], sets: list[str], source: str, blocks: int
) -> None:
    assert main(["plan", "-c", DEMO, "--json", *(p for s in sets for p in ("--set", s))]) == 0
    found = document(capsys)
    assert source in found["blocks_from"]
    assert found["plan"]["num_blocks"] == blocks


@pytest.mark.parametrize("config", ["cpu-demo", "hybrid", "mixed-kv", "fp8-static", "deepseek-v3", "gemma-2-9b"])
def test_plan_prints_a_page_for_every_deployment(capsys: pytest.CaptureFixture[str], config: str) -> None:
    assert main(["plan", "-c", str(ROOT / f"configs/{config}.yaml")]) == 0
    out = capsys.readouterr().out
    assert "= cache" in out
    assert "stride" in out


def test_the_environment_overrides_the_file(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KVHAL__CACHE__MODE", "bfloat16")
    assert main(["plan", "-c", DEMO, "--blocks", "1", "--json"]) == 0
    assert document(capsys)["plan"]["word_bytes"] == 0


def test_a_failed_check_exits_1_and_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(check, "KERNEL_BOUND", 0.0)
    assert main(["run", *SMALL]) == 1
    out = capsys.readouterr().out
    assert "FAILED: 1 of 11 checks: attend (default)" in out
    assert main(["run", *SMALL, "--json"]) == 1
    found = document(capsys)
    assert found["ok"] is False
    assert [c["name"] for c in found["checks"] if not c["ok"]] == ["attend"]
    assert found["release"]["complete"] is True


def test_a_bug_exits_70_and_says_how_to_report_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(_lease: object) -> None:
        raise ZeroDivisionError("nobody foresaw this")

    monkeypatch.setattr(runs, "exercise", broken)
    assert main(["run", *SMALL, "--json"]) == 70
    out, err = capsys.readouterr()
    assert json.loads(out)["error"] == {
        "type": "ZeroDivisionError",
        "message": "nobody foresaw this",
        "exit_code": 70,
        "problems": [],
    }
    assert "Traceback" in err
    assert "this is a bug of kvhal" in err.splitlines()[-1]
    assert "kvhal probe" in err.splitlines()[-1]


@pytest.mark.parametrize("command", [["run", "-c", DEMO], ["probe"]], ids=["run", "probe"])
def test_a_torch_that_cannot_be_imported_exits_4(tmp_path: Path, command: list[str]) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text("raise OSError('libtorch.so is not here')", encoding="utf-8")
    done = kvhal(*command, PYTHONPATH=str(tmp_path))
    assert done.returncode == 4
    assert "libtorch.so is not here" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_interrupt_exits_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(_lease: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(runs, "exercise", interrupted)
    assert main(["run", *SMALL, "--json"]) == 130
    out, err = capsys.readouterr()
    assert json.loads(out)["error"]["type"] == "KeyboardInterrupt"
    assert err == "interrupted\n"


def test_a_reader_that_goes_away_is_no_traceback() -> None:
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "kvhal.cli.app", "explain", "--json"]
    done = subprocess.run(command, cwd=ROOT, stdout=write, stderr=subprocess.PIPE, text=True, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


def test_probe_says_what_a_bug_report_needs_and_no_secret(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SOME_TOKEN", "hunter2")
    monkeypatch.setenv("HSA_OVERRIDE_GFX_VERSION", "9.4.2")
    assert main(["probe"]) == 0
    page = capsys.readouterr().out
    assert main(["probe", "--json"]) == 0
    found = document(capsys)
    assert found["kvhal"] == __version__
    assert found["packages"]["torch"] in found["torch_build"]
    assert found["env"]["HSA_OVERRIDE_GFX_VERSION"] == "9.4.2"
    assert set(found["witnesses"]) >= {"nvml", "kfd", "toolkit_cuda"}
    assert found["devices"][0]["memory"]["total"]["bytes"] > 0
    assert found["platform"] in page
    assert found["reason"].split(";")[0][:40] in page
    assert "hunter2" not in page + json.dumps(found)


def test_probe_still_answers_when_no_platform_can_be_chosen(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KVHAL_PLATFORM", OTHER)
    assert main(["probe", "--json"]) == 4
    found = document(capsys)
    assert found["platform"] is None
    assert "PlatformError" in found["reason"]
    assert "cpu" in [a["name"] for a in found["adapters"]]
    assert main(["probe"]) == 4


def test_logs_go_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    sets = ("policy.deny=[int8_per_token_head]", "policy.on_unsupported=fallback", "policy.fallback=[bfloat16]")
    assert main(["plan", *SMALL, "--json", *(p for s in sets for p in ("--set", s))]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["decision"][0]["action"] == "fallback"
    assert "WARNING: " in err
    assert [type(h) for h in logging.getLogger("kvhal").handlers] == [logging.NullHandler]


@pytest.mark.parametrize("args", [["--version"], ["--help"], ["run", "--help"], ["config", "--help"]])
def test_help_and_version_exit_0(capsys: pytest.CaptureFixture[str], args: list[str]) -> None:
    assert main(args) == 0
    assert capsys.readouterr().out.strip()


def test_the_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"kvhal {__version__}\n"


def test_a_table_is_found_without_its_adapter() -> None:
    assert capability_table("cpu").platform == "cpu"

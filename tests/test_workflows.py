"""The CI workflows and the guide: valid by GitHub's schema, and every kvhal command in them does what it says."""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvhal.answers.ci_jobs import jobs
from kvhal.answers.outline import policy_of
from kvhal.answers.runners import Runners
from kvhal.cli.app import main
from kvhal.config.deployment import load
from kvhal.decision import OnUnsupported, Policy, RequiredEvidence

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
GPU_MATRIX = ROOT / ".github/workflows/gpu-matrix.yml"


def loaded(path: Path) -> dict[str, Any]:
    found = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert isinstance(found, dict)
    return found


def steps(path: Path) -> Iterator[dict[str, Any]]:
    for job in loaded(path)["jobs"].values():
        yield from job["steps"]


def kvhal_commands() -> list[tuple[str, tuple[str, ...]]]:
    """(workflow, words) of every line of every `run:` that calls kvhal."""
    return [
        (path.name, tuple(shlex.split(line.split(">")[0])[1:]))
        for path in WORKFLOWS
        for step in steps(path)
        for line in map(str.strip, step.get("run", "").splitlines())
        if line.startswith("kvhal ")
    ]


def test_there_are_two_workflows() -> None:
    assert [path.name for path in WORKFLOWS] == ["ci.yml", "gpu-matrix.yml"]


def test_the_workflows_are_valid_by_the_published_schema(tmp_path: Path) -> None:
    check = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows"]
    done = subprocess.run([*check, *map(str, WORKFLOWS)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    wrong = tmp_path / "wrong.yml"
    wrong.write_text(WORKFLOWS[0].read_text(encoding="utf-8").replace("runs-on:", "runs_on:"), encoding="utf-8")
    assert subprocess.run([*check, str(wrong)], capture_output=True, check=False).returncode == 1


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_actions_are_pinned_by_major_version_and_may_only_read(path: Path) -> None:
    uses = [step["uses"] for step in steps(path) if "uses" in step]
    assert uses
    assert all(re.fullmatch(r"actions/[a-z-]+@v\d+", name) for name in uses)
    assert loaded(path)["permissions"] == {"contents": "read"}
    # Code of strangers does not belong on machines of one's own. YAML 1.1 reads `on` as true.
    triggers = loaded(path)[True]  # type: ignore[index]
    assert ("pull_request" in triggers) == (path.name == "ci.yml")


@pytest.mark.parametrize(
    ("workflow", "words"), kvhal_commands(), ids=lambda value: " ".join(value) if isinstance(value, tuple) else value
)
def test_every_kvhal_command_of_a_workflow_exists(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, workflow: str, words: tuple[str, ...]
) -> None:
    assert workflow
    monkeypatch.setenv("COLUMNS", "200")
    assert main([words[0], "--help"]) == 0
    shown = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
    for option in (word for word in words if word.startswith("--")):
        assert re.search(rf"(?<![\w-]){option}(?![\w-])", shown), option


def test_the_workflows_call_the_commands_they_are_about() -> None:
    called = {words[0] for _, words in kvhal_commands()}
    assert called == {"matrix", "explain", "verify"}


def test_the_options_of_the_suite_exist() -> None:
    (run,) = (step["run"] for step in steps(GPU_MATRIX) if "kvhal.testing.suite" in step.get("run", ""))
    plugin = (ROOT / "kvhal/testing/plugin.py").read_text(encoding="utf-8")
    for option in re.findall(r"--kvhal-[a-z]+", run):
        assert f'"{option}"' in plugin


def planned(tmp_path: Path, runners: str) -> tuple[str, Path]:
    """What the plan job writes to its output, by running its own script in a copy of what it reads."""
    (step,) = (s for s in steps(GPU_MATRIX) if s.get("id") == "plan")
    (tmp_path / ".github").mkdir()
    (tmp_path / ".github/runners.yaml").write_bytes((ROOT / ".github/runners.yaml").read_bytes())
    output = tmp_path / "output"
    # The command of this environment, wherever it is installed.
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/kvhal").write_text(f'#!/bin/sh\nexec {sys.executable} -m kvhal.cli.app "$@"\n', encoding="utf-8")
    (tmp_path / "bin/kvhal").chmod(0o755)
    env = os.environ | {
        "GITHUB_OUTPUT": str(output),
        "RUNNERS": runners,
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": f"{ROOT}:{ROOT / 'platforms'}",
    }
    subprocess.run(["bash", "-e", "-o", "pipefail", "-c", step["run"]], cwd=tmp_path, env=env, check=True)
    (line,) = output.read_text(encoding="utf-8").splitlines()
    assert line.startswith("matrix=")
    return line.removeprefix("matrix="), tmp_path / "plan/runners.yaml"


def test_the_plan_takes_the_file_of_the_repository(tmp_path: Path) -> None:
    matrix, kept = planned(tmp_path, "")
    found = json.loads(matrix)["include"]
    assert found == jobs(Runners.load(ROOT / ".github/runners.yaml"))
    assert {(j["platform"], j["arch"]) for j in found if j["tier"] == "device"} == {
        ("cpu", "x86_64"),
        ("cpu", "aarch64"),
    }
    assert len(found) == 31
    assert kept.read_bytes() == (ROOT / ".github/runners.yaml").read_bytes()


def test_the_plan_prefers_the_repositorys_variable(tmp_path: Path) -> None:
    text = "kvhal_runners: 1\nplatforms: {rocm: {gfx942: {runs_on: [self-hosted, mi300x]}}}"
    matrix, kept = planned(tmp_path, text)
    (job,) = json.loads(matrix)["include"]
    assert (job["arch"], job["runs_on"], job["tier"]) == ("gfx942", ["self-hosted", "mi300x"], "device")
    assert Runners.load(kept) == Runners.from_text(text, "t")


def test_an_empty_plan_is_what_the_next_job_looks_for(tmp_path: Path) -> None:
    matrix, _ = planned(tmp_path, "kvhal_runners: 1")
    arch = loaded(GPU_MATRIX)["jobs"]["arch"]
    assert arch["if"] == f"needs.plan.outputs.matrix != '{matrix}'"
    assert arch["strategy"]["matrix"] == "${{ fromJSON(needs.plan.outputs.matrix) }}"


def test_the_matrix_has_every_key_that_the_workflow_reads() -> None:
    read = set(re.findall(r"matrix\.([a-z_]+)", json.dumps(loaded(GPU_MATRIX)["jobs"]["arch"])))
    (first, *_) = jobs(Runners.load(ROOT / ".github/runners.yaml"))
    assert read == set(first)


def test_the_example_in_the_runners_file_is_right() -> None:
    text = (ROOT / ".github/runners.yaml").read_text(encoding="utf-8")
    lines = [line.removeprefix("#   ") for line in text.splitlines() if line.startswith("#   ")]
    found = Runners.from_text("kvhal_runners: 1\nplatforms:\n" + "\n".join(f"  {line}" for line in lines), "example")
    assert set(found.of) == {("cuda", "sm_90"), ("rocm", "gfx942")}
    assert found.of["rocm", "gfx942"].container is not None


def test_the_lint_job_runs_the_script_on_both_pythons() -> None:
    job = loaded(ROOT / ".github/workflows/ci.yml")["jobs"]["check"]
    assert job["strategy"]["matrix"]["python"] == ["3.11", "3.12"]
    assert [step["run"] for step in job["steps"] if "run" in step] == ["bash .ci/run"]
    assert "constraints-cpu.txt" in (ROOT / ".ci/run").read_text(encoding="utf-8")


def guide() -> list[tuple[list[str], int]]:
    """The commands of docs/policy.md and the exit code that each line states."""
    text = (ROOT / "docs/policy.md").read_text(encoding="utf-8")
    found = re.findall(r"^kvhal (.*?) +# exit (\d+)$", text, re.MULTILINE)
    return [(shlex.split(words), int(code)) for words, code in found]


def test_every_command_of_the_guide_does_what_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (ROOT / "docs/policy.md").read_text(encoding="utf-8")
    assert len(guide()) == len(re.findall(r"^kvhal ", text, re.MULTILINE)) == 8
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'platforms'}")
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    monkeypatch.chdir(tmp_path)
    for words, code in guide():
        assert (words, main(words)) == (words, code), capsys.readouterr()


def test_the_policy_of_the_guide_is_one(tmp_path: Path) -> None:
    text = (ROOT / "docs/policy.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    model = "model: {num_layers: 1, num_kv_heads: 1, num_q_heads: 1, head_dim: 16}\n"
    (tmp_path / "d.yaml").write_text(f"kvhal: 1\n{model}cache: {{mode: bfloat16}}\n{block}", encoding="utf-8")
    expected = Policy(
        experimental=True,
        deny=("int4_per_token_head",),
        require_native=True,
        require_evidence=RequiredEvidence.HARDWARE,
        on_unsupported=OnUnsupported.FALLBACK,
        fallback=("int8_per_token_head", "bfloat16"),
    )
    assert policy_of(load(tmp_path / "d.yaml")) == expected

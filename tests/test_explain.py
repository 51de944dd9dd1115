"""`kvhal explain`: the same answer as the table gives, for any GPU from a laptop, with everything it rests on."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from kvhal.answers.matrix import known_here, platforms
from kvhal.capability.cells import Path as Way
from kvhal.capability.cells import Shapes
from kvhal.capability.table import CapabilityTable
from kvhal.capability.versions import Versions
from kvhal.cli.app import main
from kvhal.decision import Action, Policy
from kvhal.detection import installed
from kvhal.detection.host import HostFacts
from kvhal.detection.installed import TorchBuild, installed_versions, versions_for
from kvhal.hal import Hal
from kvhal.modes import MODES
from kvhal.policy import decide, decide_spec
from kvhal.spec import CacheSpec

FP8 = "fp8_per_token_head"


def said(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, dict[str, Any]]:
    """Exit code and document."""
    code = main(["explain", *args, "--json"])
    found = json.loads(capsys.readouterr().out)
    assert isinstance(found, dict)
    return code, found


def page(capsys: pytest.CaptureFixture[str], *args: str) -> dict[str, str]:
    """The facts on the page, by name, each on one line."""
    main(["explain", *args])
    facts: dict[str, str] = {}
    name = ""
    for line in capsys.readouterr().out.splitlines()[1:]:
        width = max(len(n) for n in ("row rests on", "what to do"))
        key = line[:width].split("  ")[0].strip() if not line.startswith("  ") else ""
        name = key or name
        rest = line[len(key) :].strip()
        facts[name] = f"{facts[name]} {rest}" if name in facts else rest
    return facts


@pytest.fixture(autouse=True)
def a_wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that breaks no link; pytest-xdist tells its workers of one with 80 columns."""
    monkeypatch.setenv("COLUMNS", "120")


@pytest.fixture(autouse=True)
def no_evidence_of_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


@pytest.fixture
def a_cpu_build(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with torch for the CPU and no triton."""
    monkeypatch.setattr(TorchBuild, "read", classmethod(lambda cls: cls("2.13.0+cpu")))
    monkeypatch.setattr(installed, "installed_triton", lambda: None)


@pytest.mark.usefixtures("a_cpu_build")
def test_gfx942_keeps_fnuz_natively_and_waits_for_hardware(capsys: pytest.CaptureFixture[str]) -> None:
    for arch in ("gfx942", "gfx942:sramecc+:xnack-"):
        code, found = said(capsys, FP8, "--platform", "rocm", "--arch", arch)
        (decision,), (cell,) = found["decisions"], found["cells"]
        assert code == 3
        assert (found["arch"], decision["encoding"], decision["path"]) == ("gfx942", "e4m3fnuz", "native")
        assert (decision["support"], decision["action"]) == ("experimental", "refuse")
        assert (decision["proof"]["level"], decision["proof"]["status"]) == ("isa", "current")
        assert cell["encodings"] == ["e4m3fnuz", "e4m3fn"]
        assert decision["assumed"] == ["torch 2.13.0", "triton 3.7.1"]
        assert found["versions"] == {}


@pytest.mark.usefixtures("a_cpu_build")
def test_the_page_has_everything_a_decision_rests_on(capsys: pytest.CaptureFixture[str]) -> None:
    facts = page(capsys, FP8, "--platform", "rocm", "--arch", "gfx942")
    assert facts["mode"] == FP8
    assert facts["verdict"] == "refused (experimental: it needs an opt-in, or proof)"
    assert facts["path"] == "native"
    assert facts["encoding"] == "e4m3fnuz; also e4m3fn (emulated)"
    assert facts["holds for"] == "torch >=2.2 and triton >=3.2"
    assert facts["versions"] == "torch 2.13.0 (assumed by the table), triton 3.7.1 (assumed by the table)"
    assert facts["reason"].startswith("it needs an opt-in (kvhal_rocm/capabilities.yaml:")
    assert "experimental: There is isa evidence and no more; `kvhal verify" in facts["reason"]
    assert "gfx942 converts and multiplies only the FNUZ format (e4m3fnuz) in hardware." in facts["reason"]
    assert facts["reason"].endswith("Triton's own cast took 7186.)")
    assert facts["evidence"].startswith("isa, shipped ")
    assert "(kvhal_rocm/evidence/isa-gfx942.json)" in facts["evidence"]
    assert facts["what to do"].startswith("opt in with policy.experimental: allow, or prove it with `kvhal verify")
    assert "instruction-level emulator" in facts["row rests on"]
    assert facts["links"].split() == [
        "https://rocm.docs.amd.com/en/latest/_sources/reference/precision-support.rst",
        "https://github.com/triton-lang/triton/pull/7186",
    ]
    policy, _, row = facts["rule"].partition(", over ")
    assert policy == "policy.experimental"
    file, line = row.split(":")
    text = (Path(__file__).parents[1] / "platforms" / file).read_text(encoding="utf-8").splitlines()
    assert text[int(line) - 1].startswith("  - archs: [gfx942]")


def test_sm_80_emulates_fp8_in_software_at_a_cost(capsys: pytest.CaptureFixture[str]) -> None:
    code, found = said(capsys, FP8, "--platform", "cuda", "--arch", "sm_80")
    (decision,) = found["decisions"]
    assert code == 3
    assert (decision["path"], decision["encoding"]) == ("emulated_slow", "e4m3fn")
    assert "302 us for 16-bit values, 484 us for fp8" in decision["reason"]


@pytest.mark.parametrize(
    ("args", "support", "path"),
    [
        (("fp8", "--platform", "rocm", "--arch", "gfx950", "--triton", "3.6"), "broken", "emulated"),
        (("fp8", "--platform", "rocm", "--arch", "gfx950", "--triton", "3.7.0.dev1"), "experimental", "native"),
        (("fp8", "--platform", "rocm", "--arch", "gfx942", "--torch", "2.1.2"), "refused", None),
        (("float16", "--platform", "cuda", "--arch", "sm_70", "--cuda", "12.6"), "broken", "native"),
        (("float16", "--platform", "cuda", "--arch", "sm_70", "--cuda", "13.0"), "refused", None),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else str(value),
)
def test_a_version_that_is_given_changes_the_answer(
    capsys: pytest.CaptureFixture[str], args: tuple[str, ...], support: str, path: str | None
) -> None:
    code, found = said(capsys, *args)
    (decision,) = found["decisions"]
    assert (code, decision["support"], decision["path"]) == (3, support, path)
    dimension, version = args[-2].removeprefix("--"), args[-1]
    assert (found["versions"][dimension], found["sources"][dimension]) == (version, "given")


def test_operations_are_answered_at_the_versions_given(capsys: pytest.CaptureFixture[str]) -> None:
    reasons = {}
    for rocm in ("6.4", "7.1"):
        code, found = said(capsys, "--platform", "rocm", "--arch", "gfx942", "--rocm", rocm)
        assert code == 0
        (one,) = (o for o in found["operations"] if o["name"] == "graph_memory_profiling")
        reasons[rocm] = one["reason"]
    assert "TORCH_NCCL_BLOCKING_WAIT=1" in reasons["7.1"]
    assert "TORCH_NCCL_BLOCKING_WAIT=1" not in reasons["6.4"]


@pytest.mark.parametrize("option", ["--torch", "--triton", "--cuda", "--rocm", "--driver"])
def test_a_version_that_is_none_exits_2(capsys: pytest.CaptureFixture[str], option: str) -> None:
    assert main(["explain", "bfloat16", option, "newest"]) == 2
    err = capsys.readouterr().err
    assert f"{option.removeprefix('--')}: 'newest' is not a version" in err


def test_shapes_are_checked_against_the_row() -> None:
    file = Path(__file__).parents[1] / "platforms/kvhal_cpu/capabilities.yaml"
    text = file.read_text(encoding="utf-8").replace(
        "modes: [bfloat16, float16]\n    support: run",
        "modes: [bfloat16, float16]\n    head_dim: {max: 256}\n    block_size: {multiple_of: 16}\n    support: run",
    )
    table = CapabilityTable.from_text(text, "cpu.yaml")
    assert not decide(table, "x86_64", "bfloat16", Policy(), shapes=Shapes((256,), (16,))).refused
    assert "above 256" in decide(table, "x86_64", "bfloat16", Policy(), shapes=Shapes((64, 512))).reason
    assert "multiple of 16" in decide(table, "x86_64", "bfloat16", Policy(), shapes=Shapes((), (16, 24))).reason


def test_head_dim_and_block_size_replace_those_of_the_deployment(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Shapes] = []

    def noted(*args: Any, shapes: Shapes, **kwargs: Any) -> Any:
        asked.append(shapes)
        return decide(*args, shapes=shapes, **kwargs)

    monkeypatch.setattr("kvhal.policy.decide", noted)
    config = str(Path(__file__).parents[1] / "configs/cpu-demo.yaml")
    at = ("--platform", "cpu", "--arch", "x86_64")
    for options in ((), ("--head-dim", "64", "--head-dim", "96"), ("--block-size", "32")):
        assert said(capsys, "bfloat16", "-c", config, *at, *options)[0] == 0
    assert asked == [Shapes((64,), (16,)), Shapes((64, 96), (16,)), Shapes((64,), (32,))]


@pytest.mark.usefixtures("a_cpu_build")
def test_the_versions_of_this_machine_are_used_for_its_own_platform_alone() -> None:
    assert versions_for("cpu").versions == Versions(torch="2.13.0+cpu")
    assert versions_for("cpu").sources == {"torch": "installed here"}
    assert versions_for("cuda").versions == Versions()
    assert versions_for("rocm", Versions(rocm="6.4")).sources == {"rocm": "given"}


def test_a_torch_for_rocm_is_read_without_importing_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # As torch's own setup.py writes it.
    build = (
        "from typing import Optional\n__version__ = '2.14.1+rocm7.2'\ncuda: Optional[str] = None\n"
        "hip: Optional[str] = '7.2.26015-fc0010cf6a'\n"
    )
    for name, file, text in (
        ("torch", "__init__.py", "raise OSError('must not be imported')"),
        ("torch", "version.py", build),
        ("triton", "__init__.py", "__version__ = '3.8.0+rocm'\nraise OSError\n"),
    ):
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / file).write_text(text, encoding="utf-8")
    specs = {name: _spec(tmp_path / name / "__init__.py") for name in ("torch", "triton")}
    monkeypatch.setattr(installed, "find_spec", lambda name: specs[name])
    (tmp_path / "sys/module/amdgpu").mkdir(parents=True)
    (tmp_path / "sys/module/amdgpu/version").write_text("6.14.14\n", encoding="ascii")
    expected = Versions("2.14.1+rocm7.2", "3.8.0+rocm", None, "7.2.26015-fc0010cf6a", "6.14.14")
    assert installed_versions(root=tmp_path) == expected
    assert versions_for("cuda").versions == Versions()
    assert set(versions_for("rocm").sources) >= {"torch", "triton", "rocm"}


def _spec(origin: Path) -> Any:
    from importlib.machinery import ModuleSpec

    return ModuleSpec(origin.parent.name, None, origin=str(origin))


@pytest.mark.parametrize("text", ["", "def (", "__version__ = 1\n", "__version__ = 'built by hand'\n"])
def test_a_version_that_cannot_be_read_is_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    for file in ("__init__.py", "version.py"):
        (tmp_path / file).write_text(text, encoding="utf-8")
    monkeypatch.setattr(installed, "find_spec", lambda _name: _spec(tmp_path / "__init__.py"))
    assert installed_versions(root=tmp_path) == Versions()


def test_what_is_read_from_files_is_what_torch_says() -> None:
    import torch

    build = TorchBuild.read()
    assert (build.version, build.cuda, build.hip) == (torch.__version__, torch.version.cuda, torch.version.hip)
    assert installed_versions(HostFacts.read()) == installed_versions()


def test_hal_decides_by_what_is_installed(hal: Hal) -> None:
    import torch

    assert hal.versions.torch == torch.__version__
    assert hal.versions == installed_versions()


def test_hal_passes_its_versions_to_the_decision(hal: Hal, monkeypatch: pytest.MonkeyPatch) -> None:
    passed: list[Versions] = []

    def noted(*args: Any, versions: Versions, **kwargs: Any) -> Any:
        passed.append(versions)
        return decide_spec(*args, versions=versions, **kwargs)

    monkeypatch.setattr("kvhal.policy.decide_spec", noted)
    hal.decide(CacheSpec.uniform(mode="bfloat16", num_layers=1, num_kv_heads=1, head_dim=64))
    assert passed == [hal.versions]


def test_every_alternative_that_explain_prints_is_accepted(capsys: pytest.CaptureFixture[str]) -> None:
    """All cells of all tables; what a way out names, the same command accepts."""
    printed = 0
    for platform in platforms(None):
        for arch in known_here(platform).archs:
            at = ("--platform", platform, "--arch", arch)
            code, listed = said(capsys, *at)
            assert code == 0
            assert [d["requested"] for d in listed["decisions"]] == list(MODES)
            for decision in listed["decisions"]:
                assert decision["ways_out"] or not decision["refused"]
                for other in decision["alternatives"]:
                    printed += 1
                    code, found = said(capsys, other, *at)
                    assert (code, found["decisions"][0]["action"]) == (0, Action.RUN.value)
    assert printed


def test_the_list_and_the_single_answer_agree(capsys: pytest.CaptureFixture[str]) -> None:
    at = ("--platform", "rocm", "--arch", "gfx90a")
    _, listed = said(capsys, *at)
    for decision in listed["decisions"]:
        assert said(capsys, decision["requested"], *at)[1]["decisions"] == [decision]


def test_an_unknown_arch_is_answered_with_the_nearest_and_how_to_add_it(capsys: pytest.CaptureFixture[str]) -> None:
    code, found = said(capsys, FP8, "--platform", "rocm", "--arch", "gfx1153")
    assert (code, found["ok"], found["decisions"]) == (3, False, [])
    assert found["unknown_arch"]["near"] == "gfx1152"
    assert "gfx1152" in found["unknown_arch"]["known"]
    assert Path(found["unknown_arch"]["file"]).is_file()
    facts = page(capsys, FP8, "--platform", "rocm", "--arch", "gfx1153")
    assert facts["nearest"].startswith("gfx1152; `kvhal explain --platform rocm --arch gfx1152`")
    assert "put 'gfx1153' into `archs`" in facts["to add it"]
    assert "kvhal verify --platform rocm" in facts["to add it"]


def test_an_arch_is_matched_by_its_exact_token(capsys: pytest.CaptureFixture[str]) -> None:
    for arch in ("gfx94", "gfx9420", "GFX942", "sm_942"):
        code, found = said(capsys, FP8, "--platform", "rocm", "--arch", arch)
        assert (code, found["unknown_arch"]["arch"]) == (3, arch)


def test_a_gpu_platform_without_an_arch_exits_2_and_names_the_archs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", FP8, "--platform", "cuda"]) == 2
    err = capsys.readouterr().err
    assert "sm_90" in err
    assert "kvhal matrix --platform cuda" in err


def test_evidence_of_a_folder_settles_a_cell(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Evidence for aarch64 as a machine there would write it: the CPU's own, for the other arch."""
    mode, at = "int8_per_token_head", ("--platform", "cpu", "--arch", "aarch64")
    code, before = said(capsys, mode, *at)
    assert (code, before["decisions"][0]["support"]) == (3, "experimental")
    settle = before["decisions"][0]["proof"]["settle"]
    assert settle == f"`kvhal verify --mode {mode}` on a device of arch aarch64"
    shipped = Path(__file__).parents[1] / "platforms/kvhal_cpu/evidence/x86_64.json"
    text = shipped.read_text(encoding="utf-8").replace('"x86_64"', '"aarch64"')
    (tmp_path / "mine.json").write_text(text, encoding="utf-8")
    code, after = said(capsys, mode, *at, "--evidence", str(tmp_path))
    (decision,) = after["decisions"]
    assert (code, decision["support"], decision["proof"]["origin"]) == (0, "run", "site")
    assert page(capsys, mode, *at, "--evidence", str(tmp_path))["verdict"] == "runs"


def test_a_folder_of_evidence_that_is_not_there_exits_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "bfloat16", "--evidence", str(tmp_path / "none")]) == 2
    assert "there is none" in capsys.readouterr().err


def test_the_path_of_every_encoding_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    cell = known_here("cuda").table.cell("fp8_e4m3", "sm_90")
    assert cell.path_of(("e4m3fnuz",)) is Way.EMULATED
    facts = page(capsys, "fp8", "--platform", "cuda", "--arch", "sm_90")
    assert facts["encoding"] == "e4m3fn; also e4m3fnuz (emulated)"


@pytest.mark.parametrize(
    ("sets", "verdict", "rule"),
    [
        (["policy.deny=[int8_per_token_head]"], "refused (by the policy; the table lets it run)", "policy.deny"),
        (["policy.require.path=native"], "refused (by the policy; the table lets it run)", "policy.require.path"),
        (["policy.require.evidence=hardware"], "runs", ""),
        (["policy.deny=[int8_per_token_head]", "policy.on_unsupported=fallback", "policy.fallback=[bfloat16]"],
         "falls back to bfloat16", "policy.deny"),
    ],
    ids=["deny", "native", "hardware", "fallback"],
)  # fmt: skip
def test_what_the_policy_does_is_told_from_what_the_table_says(
    capsys: pytest.CaptureFixture[str], sets: list[str], verdict: str, rule: str
) -> None:
    config = str(Path(__file__).parents[1] / "configs/cpu-demo.yaml")
    options = [part for value in sets for part in ("--set", value)]
    facts = page(capsys, "-c", config, "--platform", "cpu", "--arch", "x86_64", *options)
    assert facts["verdict"] == verdict
    row = re.fullmatch(rf"(?:{re.escape(rule)}, over )?kvhal_cpu/capabilities\.yaml:\d+", facts["rule"])
    assert row
    assert facts["rule"].startswith(rule)

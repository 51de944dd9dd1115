"""`kvhal verify --compile-only` reads machine code for arches that are not here, and tables read what it wrote."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvhal.capability.cells import Support
from kvhal.capability.evidence import Evidence, apply_evidence, read_file
from kvhal.capability.proof import Level, Origin, Status
from kvhal.capability.table import CapabilityTable
from kvhal.capability.tables import capability_table, current_keys
from kvhal.cli.app import main
from kvhal.compile_only import ArchResult, compile_only
from kvhal.errors import ConfigError
from kvhal.kernels import aot
from kvhal.kernels.aot import Compiled, Job, jobs_of
from kvhal.kernels.isa import covers, problems
from kvhal.kernels.triton.tuning import DEFAULT, FAMILIES, Tile, Tuning
from kvhal.modes import MODES

MODE = "int8_per_token_head"
HARDWARE = replace(DEFAULT, hardware=("e4m3fn",))


def sound(job: Job) -> Compiled:
    return Compiled(job, ok=True, registers=200, shared=9768, wide_loads=40, matrix=8, conversions=8)


class Fake:
    """Stands in for the compiler; kernels in `spoiled` get other figures."""

    def __init__(self, **spoiled: Mapping[str, Any]) -> None:
        self.spoiled = spoiled
        self.jobs: list[Job] = []

    def __call__(self, jobs: Iterable[Job], tunings: Mapping[str, Tuning]) -> Iterator[Compiled]:
        for job in jobs:
            self.jobs.append(job)
            wide = 40 if job.layout == "tiled" else 2
            yield replace(sound(job), wide_loads=wide, **self.spoiled.get(job.kernel, {}))


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Fake:
    made = Fake()
    monkeypatch.setattr(aot, "compile_all", made)
    monkeypatch.setattr("kvhal.compile_only.find_spec", lambda name: object())
    return made


def one(folder: Path, **options: Any) -> ArchResult:
    (found,) = compile_only(folder=folder, **options)
    return found


def test_the_real_thing_on_one_arch(tmp_path: Path) -> None:
    said: list[str] = []
    found = one(tmp_path, arches=["sm_90"], only=[MODE], quick=True, progress=said.append)
    assert found.is_ok, found.evidence.cells
    assert said[0].startswith("sm_90 (1 of 1): 9 kernels on ")
    assert found.path == tmp_path / f"isa-sm_90-{MODE}.json"
    evidence = read_file(found.path)
    assert evidence == found.evidence
    assert (evidence.platform, evidence.arch, evidence.level) == ("cuda", "sm_90", Level.ISA)
    assert (evidence.quick, evidence.masquerade) == (True, False)
    (cell,) = evidence.cells
    assert (cell.mode, cell.encodings, cell.passed, cell.tests) == (MODE, ("int8",), True, 9)
    assert cell.worst["bytes of scratch a thread"] == 0
    assert 0 < (cell.worst["registers"] or 0) <= 255
    assert "attend decode int8 (q bfloat16, 4 query heads a kv head): tiled head_dim 128" in cell.covers
    attend = next(c for c, _ in found.compiled if c.job.kernel == "attend")
    assert attend.wide_loads >= 4
    assert attend.instructions > 100


def test_a_kernel_that_spills_exits_1_and_is_kept(
    fake: Fake, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.spoiled = {"attend": {"scratch": 96}}
    asked = ["verify", "--compile-only", "--arch", "gfx942", "--mode", MODE, "--evidence", str(tmp_path)]
    assert main([*asked, "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert (document["kvhal_report"], document["kind"], document["ok"]) == (1, "compile_only", False)
    (arch,) = document["arches"]
    assert (arch["platform"], arch["arch"], arch["ok"], arch["refused"]) == ("rocm", "gfx942", False, [])
    # 2 of store, 1 of gather, 3 of attend, 1 of stage, for both layouts and three head sizes; 3 of reduce for three
    # head sizes; four more that read no codes.
    assert len(arch["kernels"]) == 7 * 6 + 3 * 3 + 4
    bad = [k for k in arch["kernels"] if k["problems"]]
    assert {k["job"]["kernel"] for k in bad} == {"attend"}
    assert bad[0]["problems"] == ["it spills 96 bytes a thread to memory"]
    assert arch["evidence"]["level"] == "isa"
    (cell,) = read_file(Path(arch["path"])).cells
    assert not cell.passed
    assert cell.failed[0] == "attend decode int8 tiled head_dim 64: it spills 96 bytes a thread to memory"
    assert main(asked) == 1
    page = capsys.readouterr()
    assert "FAILED" in page.out
    assert "and 13 more; --json has all" in page.out
    assert "gfx942 (1 of 1): 55 kernels on" in page.err


def test_all_arches_are_compiled_for_unless_some_are_named(fake: Fake, tmp_path: Path) -> None:
    found = list(compile_only(quick=True, folder=tmp_path))
    assert [each.evidence.arch for each in found] == list(aot.ARCHES)
    assert all(each.is_ok for each in found)
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(f"isa-{arch}.json" for arch in aot.ARCHES)
    assert {job.mode for job in fake.jobs} == set(MODES)
    shapes = {(job.layout, job.phase, job.head_dim) for job in fake.jobs if job.kernel != "stage"}
    assert shapes == {("tiled", "decode", 128)}
    assert {job.kernel for job in fake.jobs} == set(aot.KERNELS)
    rocm = [each.evidence.arch for each in compile_only("rocm", quick=True, folder=tmp_path)]
    assert rocm == list(aot.AMD)


def test_a_failure_of_a_shared_kernel_fails_every_mode(fake: Fake, tmp_path: Path) -> None:
    fake.spoiled = {"reduce": {"ok": False, "error": "AssertionError: no"}}
    found = one(tmp_path, arches=["sm_80"], quick=True)
    assert not any(cell.passed for cell in found.evidence.cells)
    assert {cell.failed for cell in found.evidence.cells} == {
        ("reduce decode head_dim 128: it does not compile: AssertionError: no",)
    }


@pytest.mark.parametrize(
    ("job", "changes", "problem"),
    [
        (Job("attend", MODE, "int8", "sm_90"), {"ok": False, "error": "E"}, "it does not compile: E"),
        (Job("attend", MODE, "int8", "sm_86"), {"shared": 101 << 10}, "it needs 103424 bytes of shared memory and "),
        (Job("attend", MODE, "int8", "sm_90"), {"wide_loads": 4}, "4 loads of 16 bytes were found; with"),
        (Job("gather", MODE, "int8", "sm_90"), {"wide_loads": 0}, "0 loads of 16 bytes were found; with"),
        (Job("attend", MODE, "int8", "sm_90"), {"matrix": 0}, "no matrix instruction was found"),
        (Job("store", "fp8_e4m3", "e4m3fn", "sm_90"), {"conversions": 0}, "no conversion instruction of e4m3fn"),
    ],
)
def test_what_is_wrong_is_named(job: Job, changes: dict[str, Any], problem: str) -> None:
    assert problems(sound(job), HARDWARE) == ()
    (said,) = problems(replace(sound(job), **changes), HARDWARE)
    assert said.startswith(problem)


@pytest.mark.parametrize(
    ("job", "changes"),
    [
        (Job("gather", "int4_per_token_head", "int4", "sm_90"), {"wide_loads": 0}),
        (Job("gather", MODE, "int8", "gfx942"), {"wide_loads": 0}),
        (Job("attend", MODE, "int8", "sm_90", layout="inline"), {"wide_loads": 0}),
        (Job("attend", "int4_per_token_head", "int4", "gfx942", phase="prefill"), {"wide_loads": 0}),
        (Job("attend", "fp8_e4m3", "e4m3fnuz", "sm_90"), {"conversions": 0}),
    ],
)
def test_what_cannot_be_is_not_asked(job: Job, changes: dict[str, Any]) -> None:
    assert problems(replace(sound(job), **changes), HARDWARE) == ()


def test_codes_are_read_wide_only_if_tiled_pages_have_more_such_loads_than_inline_ones() -> None:
    tiled = sound(Job("attend", MODE, "int8", "sm_90"))
    inline = sound(replace(tiled.job, layout="inline"))
    assert problems(tiled, DEFAULT, replace(inline, wide_loads=4)) == ()
    assert problems(tiled, DEFAULT, inline) == (
        "40 loads of 16 bytes were found; with those of codes there are at least 41",
    )
    own = Tile(32, inline=Tile(32, num_warps=4))
    other = replace(DEFAULT, decode=tuple((family, own) for family in FAMILIES))
    assert len(problems(tiled, other, inline)) == 1, "whatever the warps of the two"


def test_loads_are_those_of_the_tile_that_is_launched() -> None:
    """128 tokens x 256 bytes by 32 lanes are 64 loads of 16 bytes; the tile of long heads has 16 tokens, so 8."""
    job = Job("attend", MODE, "int8", "gfx1100", head_dim=256)
    tuning = replace(DEFAULT, decode=tuple((family, Tile(128, long=Tile(16))) for family in FAMILIES))
    assert problems(replace(sound(job), wide_loads=8), tuning) == ()
    (said,) = problems(replace(sound(job), wide_loads=7), tuning)
    assert said.endswith("at least 8")


def test_coverage_names_every_job_once() -> None:
    jobs = jobs_of(["sm_90"], [(MODE, "int8")], kernels=("store", "move"), phases=("decode",), head_dims=(64, 256))
    assert covers(jobs) == (
        "store decode int8 (q bfloat16, 4 query heads a kv head): tiled head_dim 64 256; inline head_dim 64 256",
        "move",
    )


def test_isa_evidence_lifts_a_broken_cell_to_experimental(
    fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = ", ".join(mode for mode in MODES if mode != MODE)
    table = CapabilityTable.from_text(
        f"""
platform: cuda
archs: [sm_90]
assume: {{triton: "3.7.1"}}
kernels: [kvhal.kernels.triton.launch.attend]
modes:
  - {{archs: all, modes: [{MODE}], support: broken, until: isa, path: native, reason: Nothing proves it.}}
  - {{archs: all, modes: [{others}], support: refused, reason: It is a test.}}
operations:
  - archs: all
    operations: [release_visibly, graph_memory_profiling, expandable_segments, virtual_memory_remap, peer_copy,
                 attend_opaque, alibi, tree_mask, cross_attention]
    support: refused
    reason: It is a test.
""",
        "cuda/capabilities.yaml",
    )
    monkeypatch.setattr("kvhal.compile_only.capability_table", lambda name: table)
    found = one(tmp_path, platform="cuda", arches=["sm_90"], quick=True)
    assert found.refused == tuple(mode for mode in MODES if mode != MODE)

    def judged(result: ArchResult) -> Any:
        files = Evidence("cuda").with_files([("isa.json", result.evidence)], Origin.SHIPPED)
        return apply_evidence(table, files, current_keys(table)).cell(MODE, "sm_90")

    cell = judged(found)
    assert cell.support is Support.EXPERIMENTAL
    assert (cell.proof.status, cell.proof.level) == (Status.CURRENT, Level.ISA)
    assert f"`kvhal verify --mode {MODE}` on a device of arch sm_90 settles it" in cell.reason
    fake.spoiled = {"store": {"scratch": 4}}
    assert judged(one(tmp_path, platform="cuda", arches=["sm_90"], quick=True)).support is Support.BROKEN


def test_a_native_claim_that_the_code_does_not_show_is_noted(fake: Fake, tmp_path: Path) -> None:
    cell = capability_table("cuda").cell("fp8_e4m3", "sm_90")
    assert "e4m3fn" in cell.native_encodings
    fake.spoiled = {"attend": {"conversions": 0}}
    found = one(tmp_path, arches=["sm_90"], only=["fp8"], quick=True)
    assert any("calls e4m3fn native on sm_90" in note for note in found.notes)


def test_bad_requests_say_what_to_do(
    fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError, match="arch 'sm_9' was asked for and no table lists it; known: sm_70"):
        one(tmp_path, arches=["sm_9"])
    with pytest.raises(ConfigError, match="mode 'fp9' is unknown"):
        one(tmp_path, only=["fp9"])
    with pytest.raises(ConfigError, match="platform 'cpu' was asked for and has no kernels"):
        one(tmp_path, platform="cpu")
    assert main(["verify", "--arch", "sm_90"]) == 2
    assert "only --compile-only reads them" in capsys.readouterr().err
    monkeypatch.setattr("kvhal.compile_only.find_spec", lambda name: None)
    assert main(["verify", "--compile-only"]) == 2
    assert 'pip install "kvhal[compile]"' in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_compiler_that_fails_in_its_thread_is_raised_here(
    fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(jobs: Iterable[Job], tunings: Mapping[str, Tuning]) -> Iterator[Compiled]:
        raise OSError("no more processes")

    monkeypatch.setattr(aot, "compile_all", fails)
    with pytest.raises(OSError, match="no more processes"):
        one(tmp_path, arches=["sm_90"], quick=True)

"""The overlay of `kvhal tune`: what is written and read, which row is in use, and what evidence says of it."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvhal.capability.evidence import site_folder, write_file
from kvhal.capability.proof import Origin, Status
from kvhal.capability.tables import as_shipped, capability_table, current_keys, proved, site_keys
from kvhal.errors import ConfigError, SpecMismatch
from kvhal.hal import Hal
from kvhal.kernels.fingerprint import fingerprint
from kvhal.kernels.triton.kernel_set import TRITON
from kvhal.kernels.triton.tuning import DEFAULT, FAMILIES, PHASES, Tile, Tuning, load_tunings
from kvhal.plan import Plan
from kvhal.spec import CacheSpec
from kvhal.tune import overlay
from kvhal.tune.overlay import (
    Measured,
    Overlay,
    Provenance,
    differences,
    overlay_path,
    own_row,
    read_overlay,
    tuning_in_use,
    write_overlay,
)
from kvhal.tune.space import explicit
from kvhal_cuda import CudaPlatform
from tests.fakes import FakeNvml, FakeRuntime, Gpu, host, seams
from tests.test_cuda_adapter import DEVICE, HOPPER, A
from tests.test_evidence import MODE, file, result

ROOT = Path(__file__).parents[1]
CUDA = ROOT / "platforms/kvhal_cuda/tuning.yaml"
HERE = fingerprint(TRITON).sha256
TUNED = Provenance("2026-01-02T03:04:05+00:00", "a GPU", "0.1.0", "2.13.0", "3.7.1", HERE)
SMALL = "version: 1\nrows:\n  - arches: [sm_90]\n    store_warps: 8\n"


def new_process() -> None:
    """Forget what was read, as a new process has read nothing."""
    for remembered in (tuning_in_use, overlay._own):
        remembered.cache_clear()


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A process that has read no row yet, with a folder of the user's own."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.delenv("KVHAL_TUNING", raising=False)
    new_process()
    yield tmp_path / "kvhal"
    new_process()


def put(text: str, arch: str = "sm_90") -> Path:
    path = overlay_path(arch)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def shipped(arch: str = "sm_90") -> Tuning:
    return load_tunings(CUDA)[arch]


def test_it_lies_beside_the_evidence_of_the_user(own_folder: Path) -> None:
    assert overlay_path("sm_90") == own_folder / "tuning-sm_90.yaml"
    assert site_folder() == own_folder / "evidence"


def test_a_file_says_what_differs_and_the_shipped_row_the_rest(own_folder: Path) -> None:
    put(
        "version: 1\n"
        "rows:\n"
        "  - arches: [sm_90]\n"
        "    decode: {int8: {keys: 64, num_warps: 2}}\n"
        "    programs: [[100, 1], [200, 2], [300, 3]]\n"
        "    prefill_programs: 5\n"
        "    store_small: 0\n"
    )
    row, before = tuning_in_use(CUDA, "sm_90"), shipped()
    old = before.tile("int8", "decode")
    assert row.tile("int8", "decode") == replace(old, keys=64, num_warps=2)
    assert row.programs == ((100, 1), (200, 2), (300, 3))
    assert (row.prefill_programs, row.store_small, row.store_warps) == (5, 0, before.store_warps)
    for phase in PHASES:
        for family in FAMILIES:
            if (phase, family) != ("decode", "int8"):
                assert row.tile(family, phase) == before.tile(family, phase)
    assert (row.hardware, row.conversion, row.verify_rows) == (before.hardware, before.conversion, before.verify_rows)
    assert tuning_in_use(CUDA, "sm_80") == shipped("sm_80")


def test_a_tile_that_another_phase_falls_back_to_changes_in_its_own_phase_alone() -> None:
    """A row without a phase runs another's tiles; an overlay of that other phase does not reach it."""
    row = replace(DEFAULT, verify=tuple((f, Tile(32)) for f in FAMILIES))
    found = Overlay({"chip": {"verify": {"int8": {"keys": 64}}}}).over(row, "chip")
    assert found.tile("int8", "verify") == Tile(64)
    for phase in PHASES:
        if phase != "verify":
            assert found.tile("int8", phase) == row.tile("int8", phase)


def numbers(tile: Tile) -> dict[str, Any]:
    """What an overlay says of a tile."""
    own = {"programs": [list(step) for step in tile.programs]} if tile.programs else {}
    return own | {name: getattr(tile, name) for name in ("keys", "num_warps", "num_stages", "maxnreg")}


def tuned(tile: Tile) -> Tile:
    steps = ((4, 5), (6, 7), (8, 9)) if tile.programs else ()
    return replace(tile, keys=16, num_warps=8, num_stages=1, maxnreg=24, programs=steps)


@pytest.mark.parametrize("arch", sorted(load_tunings(CUDA)))
def test_differences_make_the_row_again(arch: str, tmp_path: Path) -> None:
    before = explicit(shipped(arch))
    change: dict[str, Any] = {"decode": tuple((f, tuned(before.tile(f, "decode"))) for f in FAMILIES)}
    row = replace(
        before, **change, programs=((1, 1), (2, 2), (3, 3)), store_warps=16, prefill_programs=7,
        staged=replace(before.staged, keys=32, num_warps=2, num_stages=1, maxnreg=0),
    )  # fmt: skip
    said = differences(row, shipped(arch))
    for family in FAMILIES:
        assert said["decode"][family] == numbers(tuned(before.tile(family, "decode")))
    assert said["programs"] == [[1, 1], [2, 2], [3, 3]]
    assert said["staged"] == {"keys": 32, "num_warps": 2, "num_stages": 1, "maxnreg": 0}
    assert set(said) == {"decode", "staged", "programs", "store_warps", "prefill_programs"}
    write_overlay(Overlay({arch: said}), tmp_path / "a.yaml")
    assert read_overlay(tmp_path / "a.yaml").over(shipped(arch), arch) == row
    assert differences(before, shipped(arch)) == {}


def test_the_file_holds_rows_provenance_and_times(tmp_path: Path) -> None:
    measured = (Measured("decode", "int8", "int8 64x8192", 300.5, 271.25), Measured("store", "", "wide 8", 3.0, 2.5))
    written = Overlay({"sm_90": {"decode": {"int8": numbers(Tile(64, 1, 3, 168))}}}, TUNED, measured)
    path = tmp_path / "folder/that/is/new/tuning.yaml"
    write_overlay(written, path)
    assert [p.name for p in path.parent.iterdir()] == ["tuning.yaml"]
    document = yaml.safe_load(path.read_text())
    assert document["version"] == 1
    assert document["rows"] == [{"arches": ["sm_90"], "decode": {"int8": numbers(Tile(64, 1, 3, 168))}}]
    assert document["tuned"]["device"] == "a GPU"
    assert document["measured"][0]["after_us"] == 271.25
    assert read_overlay(path) == written


BAD = {
    "rows: []\n": "key 'version' is missing",
    "version: 2\nrows: []\n": "version 2 was found and this kvhal reads 1",
    "version: 1\n": "key 'rows' is missing",
    "version: 1\nrows: {}\n": "rows must be a list",
    "version: 1\nrows: [{store_warps: 2}]\n": "key 'arches' is missing",
    "version: 1\nrows:\n  - {arches: [sm_90], hardware: [e4m3fn]}\n": "key 'hardware' is unknown",
    "version: 1\nrows:\n  - {arches: [sm_90], decode: {int9: {keys: 32}}}\n": "decode: key 'int9' is unknown",
    "version: 1\nrows:\n  - {arches: [sm_90], decode: {int8: {warps: 2}}}\n": "decode int8: key 'warps' is unknown",
    "version: 1\nrows:\n  - {arches: [sm_90], decode: {int8: {keys: 48}}}\n": "keys must be 16, 32, 64, 128 or 256;",
    "version: 1\nrows:\n  - {arches: [sm_90], decode: {int8: {keys: true}}}\n": "found true",
    "version: 1\nrows:\n  - {arches: [sm_90], decode: {int8: {num_warps: 3}}}\n": "num_warps must be 1, 2, 4, 8 or 16",
    "version: 1\nrows:\n  - {arches: [sm_90], decode: {int8: {num_stages: 0}}}\n": "num_stages must be a whole number",
    "version: 1\nrows:\n  - {arches: [sm_90], decode: {int8: {maxnreg: 300}}}\n": "maxnreg must be 0",
    "version: 1\nrows:\n  - {arches: [sm_90], staged: {keys: 16}}\n": "staged: keys must be 32, 64 or 128; found 16",
    "version: 1\nrows:\n  - {arches: [sm_90], staged: {keys: 256}}\n": "staged: keys must be 32, 64 or 128; found 256",
    "version: 1\nrows:\n  - {arches: [sm_90], staged: {rows: 64}}\n": "staged: key 'rows' is unknown",
    "version: 1\nrows:\n  - {arches: [sm_90], store_small: -1}\n": "store_small must be a whole number; found -1",
    "version: 1\nrows:\n  - {arches: [sm_90], programs: [[1, 2], [3]]}\n": "a step of programs is a pair",
    "version: 1\nrows:\n  - {arches: [sm_90], programs: [[9, 2], [3, 4], [5, 6]]}\n": "must ascend in tiles",
    "version: 1\nrows:\n  - {arches: [sm_90], programs: [[1, 8], [3, 4], [5, 6]]}\n": "the last must ask for the most",
    "version: 1\nrows:\n  - {arches: [sm_90], programs: [[1, 2]]}\n": "programs has 1 steps and the kernels take 3",
    "version: 1\nrows:\n  - {arches: [sm_90], decode: {int4: {programs: [[1, 2]]}}}\n": "programs has 1 steps",
    "version: 1\nrows:\n  - {arches: [sm_90], decode: {int4: {programs: 3}}}\n": "programs",
    "version: 1\nrows:\n  - {arches: [sm_90]}\n  - {arches: [sm_90]}\n": "arch 'sm_90' has two rows",
    "version: 1\nrows:\n  - {arches: [sm_80]}\n": "named for arch 'sm_90' and its rows are for sm_80",
    "version: 1\nrows: [{arches: [sm_90]}]\ntuned: {date: x}\n": "tuned: key 'device' is missing",
    "version: 1\nrows: [{arches: [sm_90]}]\nmeasured: [{phase: x}]\n": "an entry of measured: key 'family' is missing",
    "version: 1\nrows: [\n": "this is not valid YAML",
    "": "the file is empty",
}


@pytest.mark.parametrize("text", BAD, ids=range(len(BAD)))
def test_an_overlay_that_is_wrong_is_named_and_said_how_to_leave_out(text: str) -> None:
    path = put(text)
    with pytest.raises(ConfigError) as caught:
        tuning_in_use(CUDA, "sm_90")
    said = str(caught.value)
    assert BAD[text] in said
    assert said.startswith(str(path))
    hints = [p.hint for p in caught.value.problems]
    assert all("KVHAL_TUNING=shipped" in hint or "write" in hint for hint in hints)
    # What is mended is read again.
    path.write_text(SMALL)
    assert tuning_in_use(CUDA, "sm_90").store_warps == 8


def test_every_problem_of_a_file_is_told_at_once() -> None:
    put("version: 3\nrows:\n  - arches: [sm_90]\n    store_warps: 3\n    decode: {int8: {keys: 1}}\n")
    with pytest.raises(ConfigError) as caught:
        tuning_in_use(CUDA, "sm_90")
    assert len(caught.value.problems) == 3


def test_the_environment_leaves_it_out_or_names_another(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    put("this is no overlay")
    monkeypatch.setenv("KVHAL_TUNING", "shipped")
    assert tuning_in_use(CUDA, "sm_90") == shipped()
    other = tmp_path / "other.yaml"
    other.write_text(SMALL)
    monkeypatch.setenv("KVHAL_TUNING", str(other))
    new_process()
    assert tuning_in_use(CUDA, "sm_90").store_warps == 8
    # A file for several machines need not have a row for this one.
    assert tuning_in_use(CUDA, "sm_80") == shipped("sm_80")
    monkeypatch.setenv("KVHAL_TUNING", str(tmp_path / "nowhere.yaml"))
    new_process()
    with pytest.raises(ConfigError, match=r"nowhere\.yaml: the file does not exist"):
        tuning_in_use(CUDA, "sm_90")


def test_an_arch_without_a_shipped_row_may_have_an_overlay() -> None:
    put(SMALL.replace("sm_90", "sm_103"), "sm_103")
    row = tuning_in_use(CUDA, "sm_103")
    assert (row.store_warps, row.programs) == (8, DEFAULT.programs)


@pytest.mark.parametrize(
    ("kernels", "triton", "said"),
    [(HERE, "3.7.0", ""), ("f" * 64, "3.7.1", "other kernel sources"), (HERE, "3.2.0", "Triton 3.2.0 (now 3.7.1)")],
)
def test_numbers_for_other_kernels_are_used_with_a_warning(
    kernels: str, triton: str, said: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overlay, "installed_triton", lambda: "3.7.1")
    write_overlay(
        Overlay({"sm_90": {"store_warps": 8}}, replace(TUNED, kernels=kernels, triton=triton)), overlay_path("sm_90")
    )
    with caplog.at_level(logging.WARNING, "kvhal"):
        for _ in range(3):
            assert tuning_in_use(CUDA, "sm_90").store_warps == 8
    assert len(caplog.records) == bool(said)
    assert said in caplog.text


def adapter() -> CudaPlatform:
    return CudaPlatform(seams(host("cuda"), runtime=FakeRuntime(HOPPER)), FakeNvml([Gpu(A)]))


def plan_on(platform: CudaPlatform, hal: Hal) -> Plan:
    """A plan that the CPU's table accepts, with the workspace of the GPU's kernels."""
    spec = CacheSpec.uniform(mode=MODE, num_layers=2, num_kv_heads=2, head_dim=64, num_q_heads=4)
    made = hal.plan(spec, num_blocks=8, max_seqs=2)
    return replace(made, workspaces=(platform.kernels(MODE, "sm_90").workspace_bytes,))


def test_a_plan_and_its_launches_go_by_one_row_whatever_happens_to_the_file(hal: Hal) -> None:
    from kvhal.kernels.triton import launch

    put(SMALL)
    platform = adapter()
    plan = plan_on(platform, hal)
    put(SMALL.replace("8", "4"))
    with adapter().allocate(plan, DEVICE):
        (formula,) = plan.workspaces
        assert launch._TUNINGS[0] is formula.tuning  # type: ignore[attr-defined]  # of the Triton kernels
        assert launch._TUNINGS[0].store_warps == 8


def test_a_plan_of_another_row_is_refused_before_a_byte_is_taken(hal: Hal) -> None:
    plan = plan_on(adapter(), hal)
    put(SMALL)
    # As in another process, which reads its own row.
    new_process()
    runtime = FakeRuntime(HOPPER)
    other = CudaPlatform(seams(host("cuda"), runtime=runtime), FakeNvml([Gpu(A)]))
    with pytest.raises(SpecMismatch, match="sized for another tuning row.*plan anew"):
        other.allocate(plan, DEVICE)
    assert "storage" not in runtime.calls
    with other.allocate(plan_on(other, hal), DEVICE):
        pass


def test_an_overlay_that_cannot_be_used_stops_the_plan_and_never_the_kernels_silently() -> None:
    put("version: 1\nrows: 7\n")
    with pytest.raises(ConfigError, match="rows must be a list"):
        adapter().kernels(MODE, "sm_90")


def test_the_key_of_evidence_names_a_row_of_the_users_and_none_for_the_shipped() -> None:
    table = capability_table("cuda")
    assert site_keys(table)(MODE, "sm_90") == current_keys(table)(MODE, "sm_90")
    said: list[str | None] = []
    for text in (
        f"store_warps: {shipped().store_warps}",
        "store_warps: 8",
        "store_warps: 16",
        "decode: {}, store_warps: 8",
    ):
        put(f"version: 1\nrows:\n  - {{arches: [sm_90], {text}}}\n")
        new_process()
        key = site_keys(table)(MODE, "sm_90")
        assert replace(key, tuning=None) == current_keys(table)(MODE, "sm_90")
        said.append(key.tuning)
    assert said[0] is None
    assert said[1] == said[3] != said[2]
    assert all(text is None or re.fullmatch("[0-9a-f]{12}", text) for text in said)
    assert site_keys(table)(MODE, "sm_80").tuning is None
    assert site_keys(capability_table("cpu"))(MODE, "x86_64").tuning is None


def test_evidence_of_the_shipped_row_is_stale_under_an_overlay_and_still_runs(own_folder: Path) -> None:
    """int8 on sm_90, proved by a file of the user's for the shipped row."""
    table = capability_table("cuda")
    made = file(result(MODE, current_keys(table)(MODE, "sm_90")), platform="cuda", arch="sm_90", days=10_000)
    write_file(made, own_folder / "evidence/mine.json")
    before = proved(table).cell(MODE, "sm_90")
    assert (before.proof.status, before.proof.origin) == (Status.CURRENT, Origin.SITE)
    put(SMALL)
    new_process()
    cell = proved(table).cell(MODE, "sm_90")
    assert (cell.support, cell.proof.status, cell.proof.has_passed) == (before.support, Status.STALE, True)
    assert cell.proof.why == f"made for tuning row shipped (now {own_row(CUDA, 'sm_90')})"
    # A run of the suite under the overlay proves that row.
    tuned = replace(made.cells[0], key=site_keys(table)(MODE, "sm_90"))
    write_file(replace(made, cells=(tuned,)), own_folder / "evidence/mine.json")
    assert proved(table).cell(MODE, "sm_90").proof.status is Status.CURRENT


def test_what_is_shipped_answers_alike_on_every_machine() -> None:
    table = capability_table("cuda")
    before = as_shipped(table).cells
    put(SMALL)
    new_process()
    assert as_shipped(table).cells == before

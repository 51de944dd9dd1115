"""The shipped tables: total over their vendor's archs, right where a fact is known, and every way out holds."""

from __future__ import annotations

import time
from pathlib import Path as FilePath

import pytest

from kvhal.capability.proof import Level
from kvhal.capability.table import OPERATIONS, CapabilityTable, Cell, Operation, Path, Support, Versions
from kvhal.capability.tables import tuning_file
from kvhal.capability.versions import Conditions, samples
from kvhal.errors import UnsupportedMode
from kvhal.kernels.triton.tuning import load_tunings
from kvhal.modes import MODES
from kvhal.policy import Action, Policy, decide, decide_spec
from kvhal.spec import CacheSpec

FOLDER = FilePath(__file__).parent.parent / "platforms"
TABLES = {
    name: CapabilityTable.load(FOLDER / f"kvhal_{name}" / "capabilities.yaml", platform=name)
    for name in ("cpu", "cuda", "rocm")
}
CUDA, ROCM = TABLES["cuda"], TABLES["rocm"]
# The arches of the vendors: developer.nvidia.com/cuda-gpus, and the targets of AMD's compiler that have a product.
ARCHS = {
    "cpu": "x86_64 aarch64",
    "cuda": "sm_70 sm_75 sm_80 sm_86 sm_87 sm_89 sm_90 sm_100 sm_103 sm_110 sm_120 sm_121",
    "rocm": "gfx906 gfx908 gfx90a gfx942 gfx950 gfx1030 gfx1100 gfx1101 gfx1102 gfx1103 gfx1150 gfx1151 gfx1152 "
    "gfx1170 gfx1200 gfx1201 gfx1250",
}
NO_BF16 = {"sm_70", "sm_75", "gfx906", "gfx1030"}
# Those whose tuning row leaves the conversion to the hardware.
NATIVE_E4M3 = {"sm_89", "sm_90", "sm_100", "sm_120", "gfx942", "gfx950"}
SLOW_E4M3 = {"sm_80", "gfx906", "gfx908", "gfx90a", "gfx1030"} | {
    f"gfx{n}" for n in (1100, 1101, 1102, 1103, 1150, 1151, 1152)
}
GPU_CELLS = [(name, mode, arch) for name in ("cuda", "rocm") for mode in MODES for arch in TABLES[name].archs]
# Versions at which every arch compiles.
EVERYWHERE = Versions(torch="2.14.1", triton="3.8.0", cuda="12.6", rocm="7.2", driver="6.14")
# Archs on which the suite has run.
TRIED = ("sm_90",)


def answers(table: CapabilityTable) -> list[tuple[Cell, ...] | tuple[Operation, ...]]:
    return [*table.mode_rows.values(), *table.operation_rows.values()]


def points(rows: tuple[Cell, ...]) -> list[Versions]:
    """Versions at, just below and just above every boundary that the rows of one cell name, and the assumed ones."""
    whens: list[Conditions] = [row.when for row in rows]
    return [Versions(), *(Versions(**{d: str(v) for d, v in at.items()}) for at in samples(whens))]


@pytest.mark.parametrize("name", TABLES)
def test_a_table_lists_its_vendors_archs_and_answers_everything(name: str) -> None:
    table = TABLES[name]
    assert table.archs == tuple(ARCHS[name].split())
    assert set(table.cells) == {(mode, arch) for mode in MODES for arch in table.archs}
    assert set(table.operations) == {(op, arch) for op in OPERATIONS for arch in table.archs}


def test_there_are_29_gpu_archs() -> None:
    assert len(set(CUDA.archs) | set(ROCM.archs)) == 29


@pytest.mark.parametrize("name", TABLES)
def test_exactly_one_row_answers_at_every_boundary(name: str) -> None:
    for rows in answers(TABLES[name]):
        for at in samples(row.when for row in rows):
            assert sum(row.when.hold(at) for row in rows) == 1, (rows[0], at)


@pytest.mark.parametrize("name", TABLES)
def test_every_cell_at_every_boundary_runs_or_is_refused_with_ways_out_that_hold(name: str) -> None:
    table, strict, opted = TABLES[name], Policy(), Policy(experimental=True)
    for (mode, arch), rows in table.mode_rows.items():
        for versions in points(rows):
            for policy in (strict, opted):
                found = decide(table, arch, mode, policy, versions=versions)
                cell = table.cell(mode, arch, versions)
                needs_opt_in = cell.support is Support.EXPERIMENTAL and not policy.experimental
                assert found.rule == ("policy.experimental" if needs_opt_in else cell.rule)
                assert found.when == (str(cell.when) if cell.when.texts else "")
                if found.action is Action.RUN:
                    continue
                assert found.action is Action.REFUSE
                assert cell.reason in found.reason
                assert found.links
                assert found.ways_out
                for other in found.alternatives:
                    assert decide(table, arch, other, policy, versions=versions).action is Action.RUN


@pytest.mark.parametrize("name", TABLES)
def test_rows_are_cited_by_their_line(name: str) -> None:
    lines = (FOLDER / f"kvhal_{name}" / "capabilities.yaml").read_text(encoding="utf-8").splitlines()
    for row in (row for rows in answers(TABLES[name]) for row in rows):
        file, _, line = row.rule.rpartition(":")
        assert file == f"kvhal_{name}/capabilities.yaml"
        assert lines[int(line) - 1].startswith("  - archs: ")


@pytest.mark.parametrize("name", ["cuda", "rocm"])
def test_a_gpu_mode_is_claimed_to_run_only_where_hardware_was_tried(name: str) -> None:
    """Elsewhere machine code may make a cell experimental, and nothing else does."""
    for cell in (cell for rows in TABLES[name].mode_rows.values() for cell in rows):
        assert cell.support is not (Support.BROKEN if cell.arch in TRIED else Support.RUN)
        assert (cell.until is Level.ISA) == (cell.support is Support.BROKEN)
        assert cell.instead == ()
        assert cell.links


@pytest.mark.parametrize("name", ["cuda", "rocm"])
def test_every_no_about_an_operation_has_a_reason_and_every_gpu_fact_a_source(name: str) -> None:
    not_written = {"attend_opaque", "alibi", "tree_mask", "cross_attention"}
    for operation in (row for rows in TABLES[name].operation_rows.values() for row in rows):
        assert operation.reason
        assert operation.links or operation.name in not_written
        assert operation.support is not Support.RUN


@pytest.mark.parametrize(("name", "mode", "arch"), GPU_CELLS)
def test_paths_and_encodings_where_every_arch_compiles(name: str, mode: str, arch: str) -> None:
    cell = TABLES[name].cell(mode, arch, EVERYWHERE)
    assert (cell.support, cell.assumed) == (Support.RUN if arch in TRIED else Support.BROKEN, ())
    if mode == "bfloat16":
        assert cell.path is (Path.EMULATED if arch in NO_BF16 else Path.NATIVE)
    elif MODES[mode].encodings[0].startswith("int") or mode == "float16":
        assert cell.path is Path.NATIVE
        assert cell.encodings == MODES[mode].encodings
    elif mode == "fp8_e5m2":
        assert cell.encoding == ("e5m2fnuz" if arch == "gfx942" else "e5m2")
        assert cell.path in (Path.EMULATED, Path.EMULATED_SLOW)
    else:
        assert cell.encoding == ("e4m3fnuz" if arch == "gfx942" else "e4m3fn")
        assert set(cell.encodings) == {"e4m3fn", "e4m3fnuz"}
        expected = Path.EMULATED_SLOW if arch in SLOW_E4M3 else Path.EMULATED
        assert cell.path is (Path.NATIVE if arch in NATIVE_E4M3 else expected)
        assert cell.native_encodings == ((cell.encoding,) if arch in NATIVE_E4M3 else ())


@pytest.mark.parametrize("name", ["cuda", "rocm"])
def test_what_a_table_calls_native_the_kernels_leave_to_the_hardware(name: str) -> None:
    """A path is about kvhal's own kernels, so `require: {path: native}` keeps what it promises."""
    file = tuning_file(name)
    assert file is not None
    tunings = load_tunings(file)
    found = {
        (arch, encoding)
        for (_, arch), cells in TABLES[name].mode_rows.items()
        for cell in cells
        for encoding in cell.encodings
        if encoding.startswith("e") and cell.path_of((encoding,)) is Path.NATIVE
    }
    assert found == {(arch, encoding) for arch, row in tunings.items() for encoding in row.hardware}


def test_gfx942_keeps_fnuz_natively_and_waits_for_proof() -> None:
    found = decide(ROCM, "gfx942:sramecc+:xnack-", "fp8_per_token_head", Policy())
    assert (found.arch, found.encoding, found.path, found.refused) == ("gfx942", "e4m3fnuz", Path.NATIVE, True)
    assert found.reason.startswith("broken: gfx942 converts and multiplies only the FNUZ format")
    assert found.assumed == ("torch 2.13.0", "triton 3.7.1")
    cell = ROCM.cell("fp8_per_token_head", "gfx942")
    assert (cell.encodings, cell.path_of(("e4m3fn",))) == (("e4m3fnuz", "e4m3fn"), Path.EMULATED)


def test_a_cache_that_is_kept_in_the_other_format_is_emulated() -> None:
    for encoding, path in (("e4m3fnuz", Path.NATIVE), ("e4m3fn", Path.EMULATED)):
        spec = CacheSpec.uniform(
            mode="fp8_per_token_head", num_layers=1, num_kv_heads=1, head_dim=64, encoding=encoding
        )
        (found,) = decide_spec(ROCM, "gfx942", spec, Policy()).decisions
        assert (found.path, found.encoding) == (path, encoding)


def test_sm_80_emulates_fp8_at_a_measured_cost() -> None:
    found = decide(CUDA, "sm_80", "fp8_per_token_head", Policy())
    assert (found.path, found.encoding, found.support) == (Path.EMULATED_SLOW, "e4m3fn", Support.BROKEN)
    assert "302 us for 16-bit values, 484 us for fp8" in found.reason
    assert "https://github.com/vllm-project/vllm/pull/49077" in found.links


@pytest.mark.parametrize(
    ("table", "mode", "arch", "versions", "support", "path"),
    [
        (ROCM, "float16", "gfx906", Versions(triton="3.7.1"), Support.REFUSED, None),
        (ROCM, "float16", "gfx906", Versions(triton="3.8.0"), Support.BROKEN, Path.NATIVE),
        (ROCM, "fp8_e4m3", "gfx906", Versions(triton="3.7.1"), Support.REFUSED, None),
        (ROCM, "float16", "gfx1030", Versions(triton="3.8.1"), Support.BROKEN, Path.NATIVE),
        (ROCM, "float16", "gfx1030", Versions(triton="3.9.0"), Support.REFUSED, None),
        (ROCM, "fp8_e5m2", "gfx1250", Versions(triton="3.5.1"), Support.REFUSED, None),
        (ROCM, "fp8_e5m2", "gfx1250", Versions(triton="3.7.1"), Support.BROKEN, Path.EMULATED),
        (ROCM, "fp8_e4m3", "gfx1250", Versions(triton="3.8.0"), Support.BROKEN, Path.EMULATED),
        (ROCM, "fp8_e4m3", "gfx950", Versions(triton="3.6.0"), Support.BROKEN, Path.EMULATED),
        (ROCM, "fp8_e4m3", "gfx950", Versions(triton="3.7.0.dev1"), Support.BROKEN, Path.NATIVE),
        (ROCM, "fp8_e4m3", "gfx942", Versions(triton="3.1.0"), Support.BROKEN, Path.EMULATED),
        (ROCM, "fp8_e4m3", "gfx942", Versions(torch="2.1.2"), Support.REFUSED, None),
        (CUDA, "fp8_e5m2", "sm_90", Versions(triton="3.6.0"), Support.RUN, Path.EMULATED),
        (CUDA, "fp8_e5m2", "sm_90", Versions(triton="3.7.1"), Support.RUN, Path.EMULATED),
        (CUDA, "float16", "sm_70", Versions(cuda="12.6"), Support.BROKEN, Path.NATIVE),
        (CUDA, "float16", "sm_70", Versions(cuda="13.0"), Support.REFUSED, None),
        (CUDA, "float16", "sm_75", Versions(cuda="13.0"), Support.BROKEN, Path.NATIVE),
        (CUDA, "fp8_e4m3", "sm_75", Versions(torch="2.1.2"), Support.REFUSED, None),
    ],
)
def test_versions_that_change_an_answer(
    table: CapabilityTable, mode: str, arch: str, versions: Versions, support: Support, path: Path | None
) -> None:
    found = table.cell(mode, arch, versions)
    assert (found.support, found.path) == (support, path)


@pytest.mark.parametrize("arch", ["sm_70", "sm_75"])
def test_a_store_of_e5m2_does_not_compile_with_triton_3_9_below_sm_80(arch: str) -> None:
    for triton, fails in (("3.8.0", False), ("3.9.0", True), ("3.9.1", True), ("3.10.0", False)):
        found = CUDA.cell("fp8_e5m2", arch, Versions(triton=triton, cuda="12.6"))
        assert ("requires sm_80" in found.reason) == fails
    assert "requires sm_80" not in CUDA.cell("fp8_e5m2", "sm_80", Versions(triton="3.9.0")).reason


@pytest.mark.parametrize(
    ("name", "versions", "support", "says"),
    [
        ("graph_memory_profiling", Versions(rocm="6.4"), Support.EXPERIMENTAL, "synchronised"),
        ("graph_memory_profiling", Versions(rocm="7.1"), Support.EXPERIMENTAL, "TORCH_NCCL_BLOCKING_WAIT=1"),
        ("graph_memory_profiling", Versions(rocm="7.2"), Support.EXPERIMENTAL, "vllm#36720"),
        ("graph_memory_profiling", Versions(rocm="7.14.60850"), Support.EXPERIMENTAL, "hipMallocAsync"),
        ("graph_memory_profiling", Versions(rocm="7.15.26333"), Support.EXPERIMENTAL, "rocm-systems#11212"),
        ("expandable_segments", Versions(torch="2.11.0"), Support.REFUSED, "Update torch"),
        ("expandable_segments", Versions(torch="2.12.0", rocm="6.4"), Support.REFUSED, "Update ROCm"),
        ("expandable_segments", Versions(torch="2.13.0", rocm="7.2"), Support.EXPERIMENTAL, "not tried"),
        ("expandable_segments", Versions(torch="2.14.0.dev20260802", rocm="7.2"), Support.BROKEN, "hang"),
        ("virtual_memory_remap", Versions(driver="6.12.12"), Support.BROKEN, "old data"),
        ("virtual_memory_remap", Versions(driver="6.14.14"), Support.BROKEN, "stays reserved"),
    ],
)
def test_what_rocm_lacks_depends_on_its_version(name: str, versions: Versions, support: Support, says: str) -> None:
    found = ROCM.operation(name, "gfx942", versions)
    assert found.support is support
    assert says in found.reason


def test_the_whole_history_of_the_skipped_profile_step_is_in_the_rows() -> None:
    links = {link for row in ROCM.operation_rows["graph_memory_profiling", "gfx950"] for link in row.links}
    for number in (30515, 36720, 47366, 48440, 48526, 48764, 57229, 53712, 55099, 53591):
        assert f"https://github.com/vllm-project/vllm/pull/{number}" in links


@pytest.mark.parametrize(
    ("name", "arch", "support"),
    [
        ("cuda", "sm_90", Support.EXPERIMENTAL),
        ("cuda", "sm_121", Support.BROKEN),
        ("rocm", "gfx942", Support.EXPERIMENTAL),
        ("rocm", "gfx1151", Support.BROKEN),
    ],
)
def test_readings_of_shared_memory_are_not_trusted(name: str, arch: str, support: Support) -> None:
    for operation in ("release_visibly", "graph_memory_profiling"):
        assert TABLES[name].operation(operation, arch).support is support


@pytest.mark.parametrize(
    ("name", "arch", "nearest"),
    [
        ("cuda", "sm_107", "sm_110"),
        ("rocm", "gfx1153", "gfx1152"),
        ("rocm", "gfx940", "gfx942"),
        ("cuda", "sm_60", "sm_70"),
    ],
)
def test_a_new_gpu_is_never_guessed(name: str, arch: str, nearest: str) -> None:
    with pytest.raises(UnsupportedMode, match=f"nearest in number: '{nearest}'"):
        decide(TABLES[name], arch, "int8_per_token_head", Policy())


def test_nothing_is_suggested_where_nothing_is_proved() -> None:
    """The tables as they are written, without evidence: an opt-in opens what was tried on hardware and no more."""
    for name, mode, arch in GPU_CELLS:
        found = decide(TABLES[name], arch, mode, Policy(experimental=True))
        assert found.action is (Action.RUN if arch in TRIED else Action.REFUSE)
        assert found.alternatives == ()


@pytest.mark.parametrize("name", TABLES)
def test_a_table_loads_in_60_ms_of_processor_time(name: str) -> None:
    """`kvhal explain` must stay below 0.3 s in all; measured 5 to 12 ms, so the bound holds on a slow machine too."""

    def seconds() -> float:
        started = time.process_time()
        CapabilityTable.load(FOLDER / f"kvhal_{name}" / "capabilities.yaml")
        return time.process_time() - started

    assert min(seconds() for _ in range(3)) < 0.06

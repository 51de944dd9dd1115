"""`kvhal tune` as a whole on an invented device: what is on disk when, what the command prints, its exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import pytest

from kvhal.cli.app import main
from kvhal.errors import DeviceError
from kvhal.hal import Hal
from kvhal.kernels.fingerprint import fingerprint
from kvhal.kernels.triton.kernel_set import TRITON
from kvhal.kernels.triton.tuning import Tile, Tuning, load_tunings
from kvhal.tune import flow, gpu_bench, overlay
from kvhal.tune.flow import Campaign, tune
from kvhal.tune.overlay import Measured, Overlay, Provenance, overlay_path, read_overlay, tuning_in_use, write_overlay
from kvhal.tune.search import End, Verdict
from kvhal.tune.space import Target, explicit, numbers
from kvhal_cuda import CudaPlatform
from tests.fakes import GIB, FakeNvml, FakeRuntime, Gpu, host, seams
from tests.test_cuda_adapter import DEVICE, HOPPER, A

ROOT = Path(__file__).parents[1]
SHIPPED = load_tunings(ROOT / "platforms/kvhal_cuda/tuning.yaml")["sm_90"]
TUNED = Provenance("2026-01-02T03:04:05+00:00", "a GPU", "0.1.0", "2.13.0", "3.7.1", "0" * 64)
DECODE = [Target("decode", family) for family in ("int8", "int4")]


def half(values: dict[str, int], target: Target) -> float:
    """One warp more or less than two is slower; everything else costs the same."""
    return {1: 120.0, 2: 60.0, 4: 100.0, 8: 100.0}.get(values.get("num_warps", 0), 100.0)


@dataclass
class Bench:
    """Every call takes `time` of the target's numbers and a second of the clock passes; results are right."""

    time: Callable[[dict[str, int], Target], float] = half
    error: float = 0.0
    clock: list[float] = field(default_factory=lambda: [0.0])
    caps_registers: bool = True
    tried: list[Target] = field(default_factory=list)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.tried.append(Target("closed"))

    def workloads(self, target: Target) -> Sequence[str]:
        return ("int8 8x8192",)

    def key(self, row: Tuning, target: Target) -> Hashable:
        return tuple(numbers(row, target).items())

    def check(self, row: Tuning, target: Target) -> float:
        self.tried.append(target)
        self.clock[0] += 1.0
        return self.error

    def measure(self, row: Tuning, target: Target, workload: str) -> float:
        return self.time(numbers(row, target), target)


def new_process() -> None:
    """Forget what was read, as a new process has read nothing."""
    for remembered in (tuning_in_use, overlay._own):
        remembered.cache_clear()


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.delenv("KVHAL_TUNING", raising=False)
    new_process()
    yield tmp_path / "kvhal"
    new_process()


def campaign(bench: Bench, path: Path | None, old: Overlay | None = None) -> Campaign:
    return Campaign(bench, "sm_90", SHIPPED, old or Overlay({}), TUNED, path, now=lambda: bench.clock[0])


def two_warps(row: Tuning, family: str) -> bool:
    return row.tile(family, "decode").num_warps == 2


def test_what_is_faster_is_on_disk_before_the_next_search_begins(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    there: list[list[str]] = []

    def time(values: dict[str, int], target: Target) -> float:
        rows = read_overlay(path).rows["sm_90"]["decode"] if path.exists() else {}
        there.append([str(target), *rows])
        return half(values, target)

    found = campaign(Bench(time), path).run(DECODE, 1e9)
    assert [f.verdict for f in found] == [Verdict.FASTER] * 2
    assert [str(DECODE[0])] in there
    assert all(rows == ["int8"] for target, *rows in there if target == str(DECODE[1]))
    written = read_overlay(path)
    row = written.over(SHIPPED, "sm_90")
    assert [two_warps(row, f) for f in ("int8", "int4", "float8")] == [True, True, False]
    assert written.tuned == TUNED
    before = {1: 120.0, 2: 60.0, 4: 100.0}[SHIPPED.tile("int8", "decode").num_warps]
    assert written.measured[0] == Measured("decode", "int8", "int8 8x8192", before, 60.0)
    assert [m.family for m in written.measured] == ["int8", "int4"]


def test_each_search_has_its_share_of_the_time_and_what_one_leaves_is_the_others(tmp_path: Path) -> None:
    """One second a candidate, 20 seconds for two: ten candidates each (the shipped row is the first)."""
    bench = Bench(lambda values, target: 100.0)
    found = campaign(bench, None).run(DECODE, 20.0)
    assert [(f.tried, f.end) for f in found] == [(9, End.TIME), (9, End.TIME)]
    bench = Bench(lambda values, target: 100.0)
    short = [Target("prefill"), DECODE[0]]
    first, second = campaign(bench, None).run(short, 20.0)
    # Five sizes of the grid are known; the rest of the 20 seconds is for the tile, whose values are 13 more.
    assert (first.tried, first.end) == (4, End.DONE)
    assert second.end is End.DONE
    assert second.tried == 13


def test_no_time_leaves_everything_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    bench = Bench()
    found = campaign(bench, path).run(DECODE, -1.0)
    assert [f.verdict for f in found] == [Verdict.UNREACHED] * 2
    assert bench.tried == []
    assert not path.exists()


def old_overlay() -> Overlay:
    """What an earlier run found: int8 at 128 keys, wide at 8 warps, and the same of another arch."""
    tiles = {"int8": {"keys": 128}, "wide": {"num_warps": 8}}
    measured = tuple(Measured("decode", family, "old", 2.0, 1.0) for family in ("int8", "wide"))
    return Overlay({"sm_90": {"decode": tiles}, "sm_80": {"store_warps": 8}}, TUNED, measured)


def test_an_older_overlay_stays_where_this_run_says_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    campaign(Bench(), path, old_overlay()).run(DECODE[:1], 1e9)
    written = read_overlay(path)
    row = written.over(SHIPPED, "sm_90")
    assert row.tile("int8", "decode") == replace(SHIPPED.tile("int8", "decode"), num_warps=2)
    assert row.tile("wide", "decode").num_warps == 8
    assert written.rows["sm_80"] == {"store_warps": 8}
    assert [(m.family, m.workload) for m in written.measured] == [("wide", "old"), ("int8", "int8 8x8192")]


def test_an_older_number_that_is_still_the_fastest_stays(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    bench = Bench(lambda values, target: 50.0 if values["keys"] == 128 else 100.0)
    (found,) = campaign(bench, path, old_overlay()).run(DECODE[:1], 2.5)
    # In two seconds there is time for the shipped row and the older one.
    assert (found.verdict, found.tried) == (Verdict.FASTER, 2)
    assert found.row.tile("int8", "decode").keys == 128


def test_an_older_number_that_is_no_longer_faster_goes(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    campaign(Bench(lambda values, target: 100.0), path, old_overlay()).run(DECODE[:1], 1e9)
    written = read_overlay(path)
    assert written.over(SHIPPED, "sm_90").tile("int8", "decode") == SHIPPED.tile("int8", "decode")
    assert [m.family for m in written.measured] == ["wide"]


@pytest.mark.parametrize("end", [End.INTERRUPTED, End.LOST])
def test_a_search_cut_short_keeps_what_is_found_and_starts_no_other(end: End, tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"

    def time(values: dict[str, int], target: Target) -> float:
        if target.family == "int4" and values["keys"] == 128:
            raise KeyboardInterrupt if end is End.INTERRUPTED else DeviceError("gone", kind="x", context_lost=True)
        return half(values, target)

    todo = [*DECODE, Target("decode", "wide")]
    found = campaign(Bench(time), path, old_overlay()).run(todo, 1e9)
    assert [f.end for f in found] == [End.DONE, end]
    row = read_overlay(path).over(SHIPPED, "sm_90")
    assert two_warps(row, "int8")
    assert row.tile("wide", "decode").num_warps == 8


def test_an_interrupt_before_anything_is_known_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"

    def time(values: dict[str, int], target: Target) -> float:
        raise KeyboardInterrupt

    (found,) = campaign(Bench(time), path, old_overlay()).run(DECODE, 1e9)
    assert (found.end, found.verdict) == (End.INTERRUPTED, Verdict.UNREACHED)
    assert not path.exists()


def test_a_dry_run_writes_nothing() -> None:
    found = campaign(Bench(), None).run(DECODE, 1e9)
    assert found[0].verdict is Verdict.FASTER


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Bench:
    """A machine with an H200, whose kernels take the times of a `Bench`."""
    bench = Bench()
    platform = CudaPlatform(seams(host("cuda"), runtime=FakeRuntime(HOPPER)), FakeNvml([Gpu(A)]))
    asked: list[Any] = []

    def found(device: int = 0, *, platform: str | None = None) -> Hal:
        asked.append((device, platform))
        return Hal(adapter, DEVICE)

    adapter = platform
    monkeypatch.setattr(flow, "detect", found)
    # An eighth of what is free (40 GiB) is for the pages of one family.
    monkeypatch.setattr(gpu_bench, "GpuBench", lambda device, row, families, nbytes: _given(bench, nbytes))
    return bench


def _given(bench: Bench, nbytes: int) -> Bench:
    assert nbytes == 5 * GIB
    return bench


def test_the_command_writes_the_overlay_that_new_processes_use(
    machine: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tune", "--family", "int8", "--phase", "decode", "--seconds", "60"]) == 0
    out, err = capsys.readouterr()
    path = overlay_path("sm_90")
    assert err == ""
    assert out.startswith("cuda:0 NVIDIA H200 (sm_90), torch ")
    assert f"overlay: {path}" in out.replace("\n", "")
    assert "decode int8" in out
    assert "faster" in out
    assert max(map(len, out.splitlines())) <= 100
    assert machine.tried[-1] == Target("closed")
    # This process keeps the row it has read; a new one has the new row.
    cuda = ROOT / "platforms/kvhal_cuda/tuning.yaml"
    assert not two_warps(tuning_in_use(cuda, "sm_90"), "int8")
    new_process()
    assert two_warps(tuning_in_use(cuda, "sm_90"), "int8")
    assert read_overlay(path).tuned is not None
    assert read_overlay(path).tuned == replace(
        read_overlay(path).tuned or TUNED, device="NVIDIA H200", kernels=fingerprint(TRITON).sha256
    )


def test_the_document_has_every_number_and_every_refusal(
    machine: Bench, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def time(values: dict[str, int], target: Target) -> float:
        if values.get("num_warps") == 8:
            raise RuntimeError("too many")
        return half(values, target)

    machine.time = time
    out = tmp_path / "mine.yaml"
    assert main(["tune", "--family", "int8", "--phase", "decode", "--out", str(out), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["kvhal_report"], document["kind"], document["ok"]) == (1, "tune", True)
    assert (document["path"], document["end"], document["dry_run"]) == (str(out), "done", False)
    tile, launch = document["targets"]
    assert (tile["phase"], tile["family"], tile["result"]) == ("decode", "int8", "faster")
    assert tile["numbers"]["num_warps"] == 2
    assert Tile(**tile["shipped"]) == replace(SHIPPED.tile("int8", "decode"), inline=None)
    assert {r["reason"] for r in tile["refused"]} == {"RuntimeError: too many"}
    assert (launch["family"], launch["result"]) == (None, "shipped")
    assert out.is_file()
    assert not overlay_path("sm_90").exists()


def test_a_dry_run_says_so(machine: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", "--phase", "verify", "--dry-run"]) == 0
    assert "nothing was written: this was a dry run" in capsys.readouterr().out
    assert not overlay_path("sm_90").exists()


def test_nothing_faster_writes_nothing(machine: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    machine.time = lambda values, target: 100.0
    assert main(["tune", "--phase", "prefill"]) == 0
    assert "nothing was written: no other numbers are faster" in capsys.readouterr().out
    assert not overlay_path("sm_90").exists()


def test_an_interrupt_exits_130_with_what_was_found(machine: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    def time(values: dict[str, int], target: Target) -> float:
        if target.family == "float8":
            raise KeyboardInterrupt
        return half(values, target)

    machine.time = time
    assert main(["tune", "--phase", "decode", "--json"]) == 130
    out, err = capsys.readouterr()
    assert json.loads(out)["end"] == "interrupted"
    assert f"interrupted: what was found so far is in {overlay_path('sm_90')}" in err
    assert two_warps(read_overlay(overlay_path("sm_90")).over(SHIPPED, "sm_90"), "int8")


def test_a_lost_device_exits_4(machine: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    def time(values: dict[str, int], target: Target) -> float:
        raise DeviceError("an illegal memory access", kind="illegal_access", context_lost=True)

    machine.time = time
    assert main(["tune", "--phase", "decode"]) == 4
    assert "an illegal memory access" in capsys.readouterr().out


def test_a_shipped_row_that_is_wrong_exits_1(machine: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    machine.error = 0.5
    assert main(["tune", "--phase", "decode", "--family", "int8"]) == 1
    assert "decode int8: wrong: its error is 0.5, and 0.003 is allowed" in capsys.readouterr().out


def test_an_overlay_that_cannot_be_read_is_told_before_the_search(
    machine: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    path = overlay_path("sm_90")
    path.parent.mkdir(parents=True)
    path.write_text("version: 9\nrows: []\n")
    assert main(["tune"]) == 2
    assert f"{path}:1:10: version 9 was found" in capsys.readouterr().err
    assert machine.tried == []


def test_an_overlay_is_made_better_and_not_made_anew(machine: Bench) -> None:
    write_overlay(old_overlay(), overlay_path("sm_90"))
    report = tune(families=["int8"], phases=["decode"], seconds=60)
    assert report.path == overlay_path("sm_90")
    row = read_overlay(overlay_path("sm_90")).over(SHIPPED, "sm_90")
    assert two_warps(row, "int8")
    assert row.tile("wide", "decode").num_warps == 8
    assert report.shipped == SHIPPED
    assert explicit(report.found[0].row).tile("wide", "decode").num_warps == 8


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--family", "int9"], "family 'int9' is unknown; known: int8, float8, int4, static, wide"),
        (["--phase", "encode"], "phase 'encode' is unknown"),
        (["--seconds", "0"], "0 seconds were asked for"),
    ],
)
def test_bad_arguments_exit_2(args: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", *args]) == 2
    assert said in capsys.readouterr().err


def test_a_machine_without_a_gpu_is_told_and_exits_4(
    hal: Hal, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(flow, "detect", lambda device, *, platform: hal)
    assert main(["tune", "--json"]) == 4
    out, err = capsys.readouterr()
    assert json.loads(out)["error"]["type"] == "DeviceError"
    assert "the platform here is 'cpu'" in err
    assert "run this on the machine with the GPU" in err


@pytest.mark.parametrize("args", [["tune", "--help"], ["tune", "--phase", "nothing"]])
def test_asking_for_help_or_for_nonsense_needs_no_torch(args: list[str]) -> None:
    code = f"from kvhal.cli.app import main\nmain({args!r})\nimport sys\nsys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=False)
    assert done.returncode == 0

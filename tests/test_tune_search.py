"""The search of `kvhal tune` on an invented device whose times are formulas: what is kept and when it ends."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from kvhal.errors import ConfigError, DeviceError
from kvhal.kernels.triton.tuning import DEFAULT, FAMILIES, PHASES, Tile, Tuning, load_tunings
from kvhal.tune.search import BOUND, End, Found, Refusal, Verdict, search
from kvhal.tune.space import STAGED, STORE, Target, asked_for, axes, explicit, moved, numbers, taken_from, targets

ROOT = Path(__file__).parents[1]
INT8 = Target("decode", "int8")
ROW = explicit(replace(DEFAULT, decode=tuple((f, Tile(32, 2, 3, 168)) for f in FAMILIES)))
Rule = Callable[[dict[str, int], str], float]


def flat(values: dict[str, int], workload: str) -> float:
    return 100.0


@dataclass
class FakeBench:
    """A device where a call takes `time` and errs by `error`, functions of a target's numbers. log: rows measured."""

    time: Rule = flat
    error: Callable[[dict[str, int]], float] = lambda values: 1e-3
    names: Sequence[str] = ("one", "two")
    caps_registers: bool = True
    same: Callable[[dict[str, int]], Hashable] = lambda values: tuple(values.items())
    log: list[dict[str, int]] = field(default_factory=list)

    def workloads(self, target: Target) -> Sequence[str]:
        return self.names

    def key(self, row: Tuning, target: Target) -> Hashable:
        return self.same(numbers(row, target))

    def check(self, row: Tuning, target: Target) -> float:
        self.log.append(numbers(row, target))
        return self.error(self.log[-1])

    def measure(self, row: Tuning, target: Target, workload: str) -> float:
        return self.time(numbers(row, target), workload)


def run(bench: FakeBench, target: Target = INT8, row: Tuning = ROW, budget: int = 1000, **given: object) -> Found:
    """A search in which time is up after `budget` candidates; -1: before the shipped row."""
    asked = iter(range(budget + 1))
    seeds = given.get("seeds", ())
    assert isinstance(seeds, tuple)
    return search(bench, target, row, seeds=seeds, is_time_up=lambda: next(asked, None) is None, say=lambda text: None)


def valley(values: dict[str, int], workload: str) -> float:
    """Best at keys 64, 4 warps, 2 stages, 200 registers; each step away from one of them costs a tenth."""
    best = {"keys": 64, "num_warps": 4, "num_stages": 2, "maxnreg": 200}
    lists: dict[str, tuple[int, ...]] = {
        "keys": (16, 32, 64, 128),
        "num_warps": (1, 2, 4, 8),
        "num_stages": (1, 2, 3, 4),
        "maxnreg": (0, 128, 168, 200, 255),
    }
    off = sum(abs(lists[n].index(values[n]) - lists[n].index(best[n])) for n in best)
    return (50.0 if workload == "one" else 200.0) * (1 + off / 10)


def test_every_number_is_brought_to_its_best() -> None:
    found = run(FakeBench(valley))
    assert found.verdict is Verdict.FASTER
    assert found.row.tile("int8", "decode") == Tile(64, 4, 2, 200)
    # One step away in each of four numbers: 1.4 times the best.
    assert [(t.workload, t.after_us) for t in found.timings] == [("one", 50.0), ("two", 200.0)]
    assert [t.before_us for t in found.timings] == pytest.approx([70.0, 280.0])
    assert found.ratio == pytest.approx(1 / 1.4)
    assert (found.end, found.refused, found.why) == (End.DONE, (), "")


def test_nothing_but_the_target_changes() -> None:
    found = run(FakeBench(valley))
    assert replace(found.row, decode=ROW.decode) == ROW
    changed = [f for f in FAMILIES if found.row.tile(f, "decode") != ROW.tile(f, "decode")]
    assert changed == ["int8"]


def test_what_is_best_already_stays_and_nothing_is_tried_twice() -> None:
    row = moved(ROW, INT8, "maxnreg", 200)
    for name, value in (("keys", 64), ("num_warps", 4), ("num_stages", 2)):
        row = moved(row or ROW, INT8, name, value)
    bench = FakeBench(valley)
    found = run(bench, row=row or ROW)
    assert (found.verdict, found.row) == (Verdict.SHIPPED, row)
    # The shipped row, and every other value of every number once: 3 + 3 + 3 + 4.
    assert found.tried == 13
    assert len(bench.log) == 14
    assert len({tuple(values.items()) for values in bench.log}) == 14


def test_rows_that_launch_alike_are_measured_once() -> None:
    bench = FakeBench(valley, same=lambda values: values["keys"])
    assert run(bench).tried == 3


def test_the_backend_without_a_cap_is_never_given_one() -> None:
    bench = FakeBench(valley, caps_registers=False)
    found = run(bench)
    assert {values["maxnreg"] for values in bench.log} == {168}
    assert found.row.tile("int8", "decode") == Tile(64, 4, 2, 168)


@pytest.mark.parametrize(("gain", "verdict"), [(0.985, Verdict.FASTER), (0.995, Verdict.SHIPPED)])
def test_a_gain_within_the_noise_is_none(gain: float, verdict: Verdict) -> None:
    found = run(FakeBench(lambda values, name: 100 * (gain if values["keys"] == 64 else 1)))
    assert found.verdict is verdict


def test_the_geometric_mean_of_all_workloads_decides() -> None:
    """Twice as fast here and 1.24 times as slow there: sqrt(0.62) wins. 0.9 and 1.2: sqrt(1.08) loses."""
    times = {64: {"one": 50.0, "two": 124.0}, 128: {"one": 90.0, "two": 120.0}}
    bench = FakeBench(lambda values, name: times.get(values["keys"], {}).get(name, 100.0))
    found = run(bench)
    assert found.row.tile("int8", "decode").keys == 64
    assert found.ratio == pytest.approx(math.sqrt(0.62))
    del times[64]
    assert run(bench).verdict is Verdict.SHIPPED


def test_a_hopeless_candidate_costs_one_measurement() -> None:
    measured: list[tuple[int, str]] = []

    def time(values: dict[str, int], workload: str) -> float:
        measured.append((values["keys"], workload))
        return 126.0 if values["keys"] == 128 else 100.0

    run(FakeBench(time))
    assert (128, "one") in measured
    assert (128, "two") not in measured


@pytest.mark.parametrize("error", [2 * BOUND, math.nan, math.inf])
def test_what_is_fast_and_wrong_is_never_kept(error: float) -> None:
    bench = FakeBench(valley, error=lambda values: error if values["keys"] == 64 else BOUND)
    found = run(bench)
    assert found.row.tile("int8", "decode").keys == 32
    assert found.row.tile("int8", "decode").num_warps == 4
    wrong = [r for r in found.refused if r.numbers["keys"] == 64]
    assert wrong
    assert all(r.reason.startswith("wrong: its error is") for r in wrong)


def test_store_must_give_the_very_bytes() -> None:
    store = Target(STORE)

    def time(values: dict[str, int], workload: str) -> float:
        return 100.0 / values["store_warps"]

    def error(values: dict[str, int]) -> float:
        return float(values["store_warps"] == 8)

    found = run(FakeBench(time, error=error), store)
    assert (found.row.store_warps, found.row.store_small) == (4, ROW.store_small)
    assert [r.numbers["store_warps"] for r in found.refused] == [8] * len(found.refused)


class CompilationError(Exception):
    """As triton has it."""


def test_a_candidate_that_cannot_run_is_refused_and_the_search_goes_on() -> None:
    def time(values: dict[str, int], workload: str) -> float:
        if values["num_warps"] == 8:
            raise CompilationError("at 12:4\n  a page of source") from ValueError("num_warps 8 is too many\nmore")
        if values["keys"] == 128:
            raise RuntimeError("Triton Error [CUDA]: invalid argument")
        return valley(values, workload)

    found = run(FakeBench(time))
    assert found.row.tile("int8", "decode") == Tile(64, 4, 2, 200)
    reasons = {r.reason for r in found.refused}
    assert reasons == {"ValueError: num_warps 8 is too many", "RuntimeError: Triton Error [CUDA]: invalid argument"}
    assert found.end is End.DONE


@pytest.mark.parametrize("why", ["wrong", "cannot run"])
def test_a_shipped_row_that_fails_is_said_and_nothing_is_tuned_on_it(why: str) -> None:
    def time(values: dict[str, int], workload: str) -> float:
        raise RuntimeError("no")

    bench = FakeBench(error=lambda values: 1.0) if why == "wrong" else FakeBench(time)
    found = run(bench)
    assert (found.verdict, found.row, found.tried, len(bench.log)) == (Verdict.FAILED, ROW, 0, 1)
    assert found.why == ("wrong: its error is 1, and 0.003 is allowed" if why == "wrong" else "RuntimeError: no")


def test_time_that_is_up_starts_nothing_and_keeps_what_is_there() -> None:
    bench = FakeBench(valley)
    # The first candidates have 16 and 64 keys.
    found = run(bench, budget=2)
    assert (found.verdict, found.end, found.tried) == (Verdict.FASTER, End.TIME, 2)
    assert found.row.tile("int8", "decode") == Tile(64, 2, 3, 168)
    none = run(FakeBench(valley), budget=-1)
    assert (none.verdict, none.end, none.tried, none.timings) == (Verdict.UNREACHED, End.TIME, 0, ())


def test_an_interrupt_keeps_what_was_found() -> None:
    def time(values: dict[str, int], workload: str) -> float:
        if values["num_warps"] == 4:
            raise KeyboardInterrupt
        return valley(values, workload)

    found = run(FakeBench(time))
    assert (found.verdict, found.end) == (Verdict.FASTER, End.INTERRUPTED)
    assert found.row.tile("int8", "decode") == Tile(64, 2, 3, 168)
    assert found.ratio == pytest.approx(1.3 / 1.4)


def test_a_lost_device_ends_the_search_and_names_the_candidate() -> None:
    def time(values: dict[str, int], workload: str) -> float:
        if values["num_warps"] == 4:
            raise DeviceError("an illegal memory access", kind="illegal_access", context_lost=True)
        return valley(values, workload)

    bench = FakeBench(time)
    found = run(bench)
    assert (found.verdict, found.end, found.why) == (Verdict.FASTER, End.LOST, "an illegal memory access")
    lost = {"keys": 64, "num_warps": 4, "num_stages": 3, "maxnreg": 168}
    assert found.refused[-1] == Refusal(lost, "DeviceError: an illegal memory access")
    assert bench.log[-1] == lost


def test_an_error_of_the_device_that_passes_refuses_one_candidate() -> None:
    def time(values: dict[str, int], workload: str) -> float:
        if values["keys"] == 128:
            raise DeviceError("out of memory", kind="out_of_memory")
        return valley(values, workload)

    found = run(FakeBench(time))
    assert (found.verdict, found.end) == (Verdict.FASTER, End.DONE)


def test_a_gain_that_does_not_repeat_is_none() -> None:
    seen: dict[tuple[int, str], int] = {}

    def time(values: dict[str, int], workload: str) -> float:
        at = (values["keys"], workload)
        seen[at] = seen.get(at, 0) + 1
        return 60.0 if values["keys"] == 64 and seen[at] == 1 else 100.0

    found = run(FakeBench(time))
    assert (found.verdict, found.row) == (Verdict.SHIPPED, ROW)
    assert "keys 64" in found.why
    assert "not when measured again" in found.why
    assert found.ratio == 1.0


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_best_that_breaks_when_measured_again_is_not_kept(is_lost: bool) -> None:
    seen: list[tuple[object, str]] = []

    def time(values: dict[str, int], workload: str) -> float:
        at = (tuple(values.items()), workload)
        if values["keys"] == 64 and at in seen:
            raise DeviceError("now and then", kind="unknown", context_lost=is_lost)
        seen.append(at)
        return 50.0 if values["keys"] == 64 else 100.0

    found = run(FakeBench(time))
    assert (found.verdict, found.row, found.end) == (Verdict.SHIPPED, ROW, End.LOST if is_lost else End.DONE)
    assert [r.reason for r in found.refused] == ["DeviceError: now and then"]


def test_a_seed_is_tried_first_and_searched_from() -> None:
    seed = taken_from(ROW, replace(ROW, decode=tuple((f, Tile(64, 4, 2, 200)) for f in FAMILIES)), INT8)
    bench = FakeBench(valley)
    found = run(bench, seeds=(seed,), budget=2)
    assert bench.log[1] == {"keys": 64, "num_warps": 4, "num_stages": 2, "maxnreg": 200}
    assert found.row.tile("int8", "decode") == Tile(64, 4, 2, 200)


def test_the_last_step_of_programs_is_the_most() -> None:
    """Three steps; the best are 2, 6 and 8 programs, the shipped 4, 8 and 12."""
    launch = Target("decode")
    best = {"programs.0": 2, "programs.1": 6, "programs.2": 8}

    def time(values: dict[str, int], workload: str) -> float:
        return 100.0 + sum(abs(values[name] - best[name]) for name in best)

    bench = FakeBench(time)
    found = run(bench, launch)
    assert [each for _, each in found.row.programs] == [2, 6, 8]
    assert [tiles for tiles, _ in found.row.programs] == [tiles for tiles, _ in ROW.programs]
    assert all(values["programs.2"] == max(values.values()) for values in bench.log)
    assert moved(ROW, launch, "programs.2", 6) is None
    assert moved(ROW, launch, "programs.0", 16) is None


def test_families_and_phases_are_named_as_the_tuning_names_them() -> None:
    assert asked_for((), ()) == (FAMILIES, (*PHASES, STAGED, STORE))
    assert asked_for(("wide", "int8"), ("store", "decode")) == (("int8", "wide"), ("decode", "store"))
    for families, phases, said in ((["int9"], [], "family 'int9'"), ([], ["encode"], "phase 'encode'")):
        with pytest.raises(ConfigError, match=said):
            asked_for(families, phases)


def test_tiles_come_before_the_launch_sizes_that_depend_on_them() -> None:
    found = [str(target) for target in targets(("int8", "wide"), ("decode", "verify", "staged", "store"))]
    assert found == [
        "decode int8", "decode wide", "verify int8", "verify wide", "decode launch", "staged tile", "store launch"
    ]  # fmt: skip


@pytest.mark.parametrize("platform", ["cuda", "rocm"])
def test_every_shipped_row_can_be_searched(platform: str) -> None:
    """Every number has another value to try, and taking a target from the row itself changes nothing."""
    for row in load_tunings(ROOT / f"platforms/kvhal_{platform}/tuning.yaml").values():
        whole = explicit(row)
        assert all(whole.tile(f, p) == row.tile(f, p) for f in FAMILIES for p in PHASES)
        for target in targets(FAMILIES, (*PHASES, STAGED, STORE)):
            assert taken_from(whole, row, target) == whole
            for axis in axes(target, whole, caps_registers=True):
                others = [moved(whole, target, axis.name, value) for value in axis.values]
                assert any(other is not None and other != whole for other in others)


def test_a_tile_with_steps_of_its_own_is_tuned_with_them() -> None:
    """The row's steps, which other tiles follow, stay."""
    own = replace(ROW.tile("int8", "decode"), programs=((10, 4), (20, 8), (30, 12)))
    row = replace(ROW, decode=tuple((f, own if f == "int8" else ROW.tile(f, "decode")) for f in FAMILIES))
    best = {"programs.0": 2, "programs.1": 6, "programs.2": 8}

    def time(values: dict[str, int], workload: str) -> float:
        return valley(values, workload) * (1 + sum(abs(values[name] - best[name]) for name in best) / 20)

    found = run(FakeBench(time), row=row)
    assert found.row.tile("int8", "decode") == Tile(64, 4, 2, 200, programs=((10, 2), (20, 6), (30, 8)))
    assert found.row.programs == ROW.programs
    assert moved(row, INT8, "programs.2", 6) is None

"""The workloads of `kvhal tune` in the interpreter: what is right passes their checks, and what is wrong does not."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kvhal.errors import DeviceError
from kvhal.kernels.triton import launch
from kvhal.kernels.triton.tuning import DEFAULT, FAMILIES, PHASES
from kvhal.tune import gpu_bench
from kvhal.tune.gpu_bench import GpuBench, Sizes
from kvhal.tune.pool import Heads, Pool, layout_of
from kvhal.tune.search import BOUND
from kvhal.tune.space import STAGED, STORE, Target, explicit, moved
from kvhal.tune.workload import Attend, Shape

HEADS = Heads(kv=1, group=2, dim=16)
CPU = torch.device("cpu")
QUERIES = {"decode": 1, "verify": 4, "prefill": 10, STAGED: 33}
ROW = explicit(DEFAULT)


def shapes(phase: str) -> tuple[Shape, ...]:
    return (Shape.even(2, 40, QUERIES[phase]),)


def ragged(phase: str) -> Shape:
    n = QUERIES[phase]
    return Shape("ragged", (max(n, 1), 0, 33), (n, 0, n))


SIZES = Sizes(HEADS, 1 << 14, shapes, ragged, launch=(), stores=(3, 17), store_blocks=64)


def bench(families: tuple[str, ...] = FAMILIES) -> GpuBench:
    return GpuBench(CPU, DEFAULT, families, 1 << 20, SIZES)


@pytest.mark.parametrize(("family", "phase"), [*((f, "decode") for f in FAMILIES), *(("int8", p) for p in PHASES[1:])])
def test_the_shipped_tile_and_another_are_right(family: str, phase: str) -> None:
    target = Target(phase, family)
    other = moved(ROW, target, "keys", 16 if ROW.tile(family, phase).keys != 16 else 32)
    assert other is not None
    with bench() as b:
        for row in (ROW, other):
            assert 0 < b.check(row, target) <= BOUND


def test_tiles_of_prefill_are_tried_without_staging(monkeypatch: pytest.MonkeyPatch) -> None:
    """They serve what is not staged; a row that stages every prompt would make any of them look alike."""

    def staged(*_: object) -> None:
        raise AssertionError("a prompt was staged")

    monkeypatch.setattr(launch, "_staged", staged)
    monkeypatch.setattr(gpu_bench, "microseconds", lambda calls: float(calls[0]() is None))
    row, target = replace(ROW, staged_rows=1, staged_queries=1), Target("prefill", "int8")
    with bench(("int8",)) as b:
        assert 0 < b.check(row, target) <= BOUND
        assert b.measure(row, target, b.workloads(target)[0]) == 1.0


def test_staged_tiles_are_right_and_told_apart() -> None:
    target = Target(STAGED)
    row = replace(ROW, staged_rows=1, staged_queries=9, staged=replace(ROW.staged, rows=32, keys=32))
    other = moved(row, target, "keys", 64)
    assert other is not None
    with bench(("int8", "static")) as b:
        assert b.workloads(target) == ["int8 2x40 q33", "static 2x40 q33"]
        assert b.key(row, target) != b.key(other, target)
        for tried in (row, other):
            assert 0 < b.check(tried, target) <= BOUND


def test_launch_sizes_and_stores_are_right() -> None:
    with bench(("int8", "static")) as b:
        assert b.workloads(Target("decode")) == ["int8 2x40", "static 2x40"]
        assert b.workloads(Target(STORE)) == ["int8 3", "int8 17", "static 3", "static 17"]
        assert 0 < b.check(replace(ROW, programs=((4096, 1), (12288, 1), (1 << 62, 2))), Target("decode")) <= BOUND
        for small in (0, 16):
            assert b.check(replace(ROW, store_small=small), Target(STORE)) == 0.0


def test_what_is_timed_goes_through_different_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two sequences of 40 tokens take 3 pages each: 6 pages of 16 rows of 2 * (16 + 4) bytes are 3840 bytes a set."""
    timed: list[int] = []

    def microseconds(calls: list[Any]) -> float:
        timed.append(len(calls))
        calls[0]()
        calls[-1]()
        return 1.0

    monkeypatch.setattr(gpu_bench, "microseconds", microseconds)
    with bench(("int8",)) as b:
        for target in (Target("decode", "int8"), Target("prefill"), Target(STORE)):
            assert [b.measure(ROW, target, name) for name in b.workloads(target)] == [1.0] * len(b.workloads(target))
        # 2^14 bytes of pages; stores of 3 and 17 tokens bring 192 and 1088 bytes of rows.
        assert timed == [5, 5, 64, 15]
        tables = b._attends["int8", "decode 2x40"].tables
        assert len(set(tables.flatten().tolist())) == tables.numel() == 5 * 6


def test_batches_that_the_device_cannot_hold_are_left_out_and_none_is_an_error() -> None:
    """A page of bfloat16 has 1024 bytes; pools come in 64 of them."""
    target = Target("decode", "wide")
    large = replace(SIZES, shapes=lambda phase: (Shape.even(2, 40), Shape.even(40, 40)))
    assert GpuBench(CPU, DEFAULT, FAMILIES, 1 << 20, large).workloads(target) == ["wide 2x40", "wide 40x40"]
    assert GpuBench(CPU, DEFAULT, FAMILIES, 70 << 10, large).workloads(target) == ["wide 2x40"]
    with pytest.raises(DeviceError, match="hold none of its batches; free memory"):
        GpuBench(CPU, DEFAULT, FAMILIES, 63 << 10, large).workloads(target)


def test_a_result_that_is_a_little_off_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = launch.attend

    def off(*given: Any, **named: Any) -> None:
        right(*given, **named)
        given[7][...] = given[7] * 1.01

    monkeypatch.setattr(launch, "attend", off)
    with bench() as b:
        assert b.check(ROW, Target("decode", "int8")) == pytest.approx(0.01, rel=0.3)


def test_a_row_that_is_not_written_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "attend", lambda *given, **named: None)
    with bench() as b:
        assert math.isnan(b.check(ROW, Target("decode", "wide")))


def test_one_wrong_byte_of_a_store_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    right = launch.store

    def off(cache: Tensor, k: Tensor, *given: Any, **named: Any) -> None:
        right(cache, k, *given, **named)
        if k.shape[0] == 17:
            cache[5] += 1

    monkeypatch.setattr(launch, "store", off)
    with bench() as b:
        assert b.check(ROW, Target(STORE)) >= len(FAMILIES)


def test_rows_of_one_cut_are_one_candidate() -> None:
    target = Target("decode", "int8")
    with bench() as b:
        # Two warps where one was asked for make another cut; a step of a grid that the shape never meets does not.
        assert b.key(moved(ROW, target, "num_warps", 2) or ROW, target) != b.key(ROW, target)
        assert b.key(moved(ROW, Target("prefill", "int8"), "keys", 64) or ROW, target) == b.key(ROW, target)
        assert b.key(replace(ROW, store_small=4), Target(STORE)) != b.key(ROW, Target(STORE))
        assert b.key(replace(ROW, store_small=2048), Target(STORE)) == b.key(ROW, Target(STORE))


def test_the_row_in_use_comes_back() -> None:
    mine = replace(DEFAULT, store_small=7)
    launch.set_tuning(0, DEFAULT)
    with GpuBench(CPU, mine, FAMILIES, 1 << 20, SIZES) as b:
        b.check(ROW, Target("decode", "wide"))
        assert launch.tuning_of(CPU) == ROW
    assert launch.tuning_of(CPU) == mine


def test_the_reference_is_the_mean_of_what_a_query_sees() -> None:
    """With keys of zero every position weighs the same, so the result is a mean that any hand can compute."""
    pool = Pool.empty(layout_of("wide", HEADS, 8), CPU)
    v = torch.arange(64.0).view(64, 1, 1).expand(64, 1, 16).bfloat16().contiguous()
    launch.store(pool.data, torch.zeros_like(v), v, torch.arange(64), pool.g, checked=False)
    one = Attend.of(pool, Shape("a", (20, 7), (3, 1)), HEADS, 1)
    # Set 0 has two pages a sequence; any two pages of the pool may be chosen.
    for b, (length, queries) in enumerate(((20, 3), (7, 1))):
        table = one.tables[0, b]
        seen = torch.cat([torch.arange(16.0) + 16 * (int(page) % 4) for page in table])
        inside = [int(page) < 4 for page in table]
        rows, right = one._right(b)
        assert rows == [[0, 1, 2], [3]][b]
        for row, i in enumerate(range(queries)):
            n = length - queries + i + 1
            values = torch.cat([seen[16 * p : 16 * p + 16] * inside[p] for p in range(len(inside))])[:n]
            assert torch.allclose(right[row], values.double().mean().expand(2, 16))
    assert one.error(DEFAULT) <= BOUND


def test_a_static_scale_is_written_and_read() -> None:
    pool = Pool.empty(layout_of("static", HEADS, 4), CPU)
    k = torch.full((16, 1, 16), 0.32).bfloat16()
    launch.store(pool.data, k, 2 * k, torch.arange(16), pool.g, checked=False)
    found_k, found_v = pool.rows_of(torch.tensor([0]), 16)
    # 0.32 / 0.02 is 16, a code of e4m3fn; bfloat16 holds 0.32 to 2^-9.
    assert torch.allclose(found_k, torch.full_like(found_k, 16 * 0.02), rtol=1e-6)
    assert torch.allclose(found_v, torch.full_like(found_v, 32 * 0.02), rtol=1e-6)

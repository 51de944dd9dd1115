"""The decode and store cases on CPU tensors: the kernels' own source in Triton's interpreter, tiny shapes."""

from __future__ import annotations

import json
import math
import os
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from bench import cases, cli, decode, host, store
from bench.cases import AttendCase, HostCase, StoreCase
from bench.ceilings import ReadVariant, launch_read
from bench.decode import Attend
from bench.peers import PeerRun, Sdpa
from bench.report import machine
from bench.results import COPY, ERROR_BOUND, READ, Case, Ceiling, Failure, Result
from bench.timing import Call, Timing
from kvhal.kernels import operators
from kvhal.kernels.triton import launch
from kvhal.kernels.workspace import attend_workspace_bytes

assert os.environ.get("TRITON_INTERPRET") == "1", "run through tests/test_bench_commands.py"
assert operators.SCHEMAS
CPU = torch.device("cpu")
TINY = AttendCase("decode", "int8_per_token_head", 2, 20, q_heads=2, kv_heads=1, head_dim=16)
CEILINGS = (Ceiling(READ, 1000, 1.0, 0.0), Ceiling(COPY, 1000, 2.0, 0.0))


@pytest.fixture(autouse=True)
def quiet_numpy() -> Iterator[None]:
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "All-NaN", RuntimeWarning)
        yield


@pytest.fixture(autouse=True)
def one_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.timing.ROTATE_BYTES", 1)


def timer(calls: Sequence[Call]) -> Timing:
    samples = []
    for _ in range(2):
        start = time.perf_counter()
        for call in calls:
            call()
        samples.append((time.perf_counter() - start) / len(calls) * 1e6)
    return Timing.of(samples)


def test_the_read_kernel_reads_every_word() -> None:
    # Small enough that the interpreter, which does not wrap, can hold the sums.
    words = torch.randint(-(1 << 20), 1 << 20, (10 * 64,), dtype=torch.int32)
    sums = torch.full((4,), -1, dtype=torch.int32)
    launch_read(words, sums, ReadVariant(block=64, num_warps=1, programs=1))
    rows = words.numpy().astype(np.int64).reshape(10, 64).sum(1)
    assert sums.tolist() == [rows[p::4].sum() for p in range(4)]


@pytest.mark.parametrize(
    "case",
    [
        TINY,
        replace(TINY, mode="bfloat16"),
        replace(TINY, mode="fp8_per_token_head", layout="inline"),
        replace(TINY, mode="int4_per_token_head", kind="verify", queries=4),
        replace(TINY, kind="window", window=10, length=40, queries=2),
        replace(TINY, kind="ragged", seqs=9, length=12, is_ragged=True),
        replace(TINY, kind="prefill", seqs=1, queries=70, length=75),
    ],
    ids=lambda case: case.name,
)
def test_a_case_is_right(case: AttendCase) -> None:
    setup = Attend.of(case, CPU, sets=2)
    assert setup.checked_error() <= ERROR_BOUND
    assert setup.tables.unique().numel() == setup.tables.numel()
    assert len(setup.calls()) == 2
    # The reference of the CPU, which shares neither the kernels nor the float64 check, is as near.
    nbytes = attend_workspace_bytes(setup.geometry, case.q_heads, setup.q.shape[0])
    out = torch.empty_like(setup.q)
    torch.ops.kvhal.attend(
        setup.pool.data, setup.q, setup.tables[0], setup.lengths, setup.starts, None,
        torch.empty(nbytes, dtype=torch.uint8), out, None, setup.geometry.pack(), setup.scale, 0.0, True,
    )  # fmt: skip
    assert setup.error_of(out) <= ERROR_BOUND


def test_the_check_sees_what_is_wrong() -> None:
    setup = Attend.of(TINY, CPU)
    setup.checked_error()
    right = setup.out.float()
    # A hundredth more in one of two sequences.
    right[1] *= 1.01
    assert setup.error_of(right) == pytest.approx(0.01, rel=0.3)
    right[0, 0, 0] = math.nan
    with pytest.raises(ArithmeticError, match="NaN"):
        setup.error_of(right)


def test_large_batches_are_checked_at_three_sequences() -> None:
    assert Attend.of(replace(TINY, seqs=8, length=1), CPU).checked_sequences() == list(range(8))
    assert Attend.of(replace(TINY, seqs=9, length=1), CPU).checked_sequences() == [0, 4, 8]


def test_bytes_of_a_call() -> None:
    """int8, K and V of one head: 16 codes and a 4-byte word, 40 bytes a token. Two queries with window 10 see 11."""
    assert Attend.of(TINY, CPU).nbytes == 2 * 20 * 40
    assert Attend.of(replace(TINY, window=10, queries=2), CPU).nbytes == 2 * 11 * 40


def test_decode_runs_every_case_and_says_which_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    prefill = replace(TINY, kind="prefill", seqs=1, queries=12)
    broken = replace(TINY, mode="bfloat16")
    real = Attend.checked_error

    def checked(self: Attend) -> float:
        if self.case.mode == "bfloat16":
            raise RuntimeError("out of something")
        return real(self)

    monkeypatch.setattr(Attend, "checked_error", checked)
    peers = PeerRun(timer, peers=(Sdpa(),))
    schedule = replace(TINY, kind="schedule")
    found = list(decode.run([TINY, broken, prefill, schedule], CPU, timer, CEILINGS, peers))
    assert found[1] == Failure(broken.name, "RuntimeError: out of something")
    first, third, fourth = (each for each in found if isinstance(each, Case))
    assert first.is_right
    assert first.nbytes == 2 * 20 * 40
    assert first.floor_us == pytest.approx(2 * 20 * 40 / 1000)
    assert (third.nbytes, third.floor_us, fourth.nbytes, fourth.peers) == (None, None, None, ())
    for case in (first, third):
        (peer,) = case.peers
        assert peer.note == ""
        # Values rounded to bfloat16 once more, and bfloat16 weights.
        assert peer.error is not None
        assert peer.error < 1e-2


@pytest.mark.parametrize("mode", [cases.INT8, cases.FP8, cases.INT4])
@pytest.mark.parametrize("tokens", [3, 258])
def test_store_is_exact(mode: str, tokens: int) -> None:
    assert store.equals_reference(StoreCase(mode, tokens, kv_heads=1, head_dim=16), CPU)


def test_store_that_loses_a_token_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    real = launch.store

    def lossy(data: Tensor, k: Tensor, v: Tensor, slots: Tensor, *args: Any, **given: Any) -> None:
        real(data, k[1:], v[1:], slots[1:], *args, **given)

    monkeypatch.setattr(launch, "store", lossy)
    assert not store.equals_reference(StoreCase(cases.INT8, 3, kv_heads=1, head_dim=16), CPU)


def test_store_measures_bytes_read_and_written() -> None:
    """3 tokens of one head: K and V in bfloat16, 16 codes and a word each: 64 + 40 bytes a token."""
    (found,) = store.run([StoreCase(cases.INT8, 3, kv_heads=1, head_dim=16)], CPU, timer, CEILINGS)
    assert isinstance(found, Case)
    assert found.exact
    assert found.nbytes == 3 * 104
    assert found.floor_us == pytest.approx(3 * 104 * 2 / 1000)


@pytest.mark.parametrize("operator", ["store", "attend", "attend-prepared"])
def test_the_hosts_calls_are_calls(operator: str) -> None:
    """Here the operators are the CPU's, whose workspace is larger; the arguments are what is tried."""
    call: Any = host.call_of(HostCase(operator, 1, 20), CPU)
    args = list(call.args)
    if operator != "store":
        args[6] = torch.empty(64 << 20, dtype=torch.uint8)
        args[7].fill_(math.nan)
    call.func(*args)
    if operator != "store":
        assert bool(args[7].isfinite().all())


def test_the_command_measures_writes_and_prints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    start = Result("decode", machine(), is_complete=False)
    monkeypatch.setattr(cli, "_on_gpu", lambda _: (start, CPU))
    monkeypatch.setattr(cli, "_with_ceilings", lambda result, _: replace(result, ceilings=CEILINGS))
    monkeypatch.setattr("bench.timing.graph_timing", timer)
    monkeypatch.setattr(cases, "ATTEND_CASES", (TINY, replace(TINY, mode="bfloat16")))
    out = tmp_path / "r.json"
    assert cli.main(["decode", "--cases", "decode", "--json", "--out", str(out)]) == 0
    told = capsys.readouterr()
    document = json.loads(told.out)
    assert json.loads(out.read_text()) == document
    assert document["is_complete"]
    assert [case["name"] for case in document["cases"]] == [TINY.name, replace(TINY, mode="bfloat16").name]
    assert {"torch SDPA", "FlashInfer", "vLLM Triton"} <= set(document["peers"])
    assert {peer["name"] for peer in document["cases"][0]["peers"]} == set(document["peers"])
    assert f"[1/2] {TINY.name}:" in told.err

"""The benchmarks that run without a GPU, and those that say that they need one."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import kvhal
from bench import ceilings
from bench.cases import ATTEND_CASES, HOST_CASES, STORE_CASES, choose
from bench.cli import main
from bench.results import Result
from bench.timing import Timing, host_timing, rotations
from kvhal.errors import ConfigError
from tests.fakes import host

ROOT = Path(__file__).parents[1]
HERE = Path(__file__).parent / "test_bench_interpreted"


def document(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    found = json.loads(capsys.readouterr().out)
    assert isinstance(found, dict)
    return found


def one_good_exit(code: int, found: dict[str, Any]) -> None:
    """The exit code is what the targets say; this machine may be too busy to keep them."""
    kept = all(case["limit_us"] is None or case["us"] <= case["limit_us"] for case in found["cases"])
    assert code == (0 if kept else 1)


def test_plan(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code = main(["plan", "--json", "--rounds", "2", "--out", str(tmp_path / "r.json")])
    found = document(capsys)
    one_good_exit(code, found)
    assert [(case["name"], case["limit_us"]) for case in found["cases"]] == [
        ("plan of 126 layers", 5e3),
        ("import kvhal", 50e3),
    ]
    assert all(case["us"] > 0 for case in found["cases"])
    assert {"machine", "arch", "torch", "triton", "python", "date"} <= set(found["where"])
    assert json.loads((tmp_path / "r.json").read_text()) == found
    assert [case.us for case in Result.load(tmp_path / "r.json").cases] == [case["us"] for case in found["cases"]]


def test_lifecycle_on_the_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["lifecycle", "--platform", "cpu", "--gib", "0.0625", "--rounds", "2", "--json"])
    found = document(capsys)
    one_good_exit(code, found)
    allocate, again, close, held = found["cases"]
    assert [case["name"] for case in found["cases"]] == ["allocate", "allocate, again", "close", "close, held"]
    # A block of 16 tokens x 8 heads x 128 x (K and V in 2 bytes) x 80 layers, and two int64 counters.
    block = 16 * 8 * 128 * 4 * 80
    assert allocate["nbytes"] == (1 << 26) // block * block + 16
    facts = found["facts"]
    assert facts["asked_bytes"] == facts["returned_bytes"] == facts["returned_bytes_held"] == allocate["nbytes"]
    assert facts["revoked"] == 1
    assert (close["exact"], held["exact"]) == (True, True)
    assert (allocate["limit_us"], again["limit_us"], close["limit_us"]) == (250e3, 250e3, 150e3)
    # Times are kept in six digits; beside a whole test run the scan takes more than a second.
    assert held["limit_us"] == pytest.approx(150e3 + facts["gc_us"], rel=5e-6)
    assert facts["gc_us"] > 0


def test_a_lease_smaller_than_a_block_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lifecycle", "--platform", "cpu", "--gib", "0.000001"]) == 2
    assert "block" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["decode", "store"])
def test_without_a_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str) -> None:
    found = kvhal.detect(host=host("cpu"))
    monkeypatch.setattr(kvhal, "detect", lambda: found)
    assert main([name, "--quick", "--json"]) == 4
    told = capsys.readouterr()
    assert told.out == ""
    assert "GPU" in told.err


@pytest.mark.parametrize("args", [["decode", "--cases", "nonsense"], ["nonsense"], ["compare", "one"], []])
def test_usage_errors(capsys: pytest.CaptureFixture[str], args: list[str]) -> None:
    assert main(args) == (2 if args else 0)
    capsys.readouterr()


def test_the_module_answers_with_the_exit_code() -> None:
    command = [sys.executable, "-m", "bench", "compare", "nothing.json", "nothing.json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "nothing.json" in done.stderr


def test_reading_results_needs_no_torch() -> None:
    code = "import sys; import bench.cli, bench.tables, bench.plot; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_names_are_unique_and_quick_ones_few() -> None:
    decodes = [(case.name, case.is_quick) for case in ATTEND_CASES]
    decodes += [(case.name, case.is_quick) for case in HOST_CASES]
    stores = [(case.name, case.is_quick) for case in STORE_CASES]
    for cases in (decodes, stores):
        assert len({name for name, _ in cases}) == len(cases)
        assert 0 < sum(is_quick for _, is_quick in cases) <= len(cases) / 2


def test_cases_are_chosen_by_substring() -> None:
    found = choose(STORE_CASES, quick=False, substring="int4_per_token_head 2")
    assert [case.tokens for case in found] == [256, 2048]
    assert {case.tokens for case in choose(STORE_CASES, quick=True, substring="")} == {1, 256, 8192}
    with pytest.raises(ConfigError, match="nonsense"):
        choose(STORE_CASES, quick=False, substring="nonsense")


def test_a_timing_is_the_median_and_the_distance_of_the_quartiles() -> None:
    assert Timing.of([5.0, 1.0, 2.0, 4.0, 3.0]) == Timing(3.0, 2.0)


def test_inputs_are_rotated_past_the_cache() -> None:
    """600 MiB a turn: 1 MiB needs 600 inputs, 400 MiB two, more than that one."""
    assert [rotations(n << 20) for n in (1, 400, 600, 4000)] == [600, 2, 1, 1]


def test_the_hosts_time_is_that_of_a_call() -> None:
    waits = 0

    def synchronize() -> None:
        nonlocal waits
        waits += 1

    def call() -> None:
        sum(range(2000))

    found = host_timing([call], synchronize)
    assert 1 < found.us < 1e5
    assert waits == 10


def test_ceilings_are_read_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    for variant in ceilings.VARIANTS:
        assert all(nbytes % (4 * variant.block) == 0 for nbytes in ceilings.SIZES)

    def timer(calls: Sequence[object]) -> Timing:
        return Timing(float(len(calls)), 0.0)

    monkeypatch.setattr("bench.timing.ROTATE_BYTES", 3 * 65536)
    found = list(ceilings.measure(timer, torch.device("cpu"), (65536,)))
    assert [(c.kind, c.nbytes, c.us) for c in found] == [("read", 65536, 3.0), ("copy", 65536, 3.0)]


def test_the_read_kernel_loads_16_bytes_at_a_time_on_sm_90() -> None:
    """In a child, since a compiler may abort: the machine code has wide loads only, and no scratch."""
    code = """
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from bench.ceilings import VARIANTS
from bench.read_kernel import read_kernel
from kvhal.kernels.triton.compile import _read_nvidia
signature = {"words": "*i32", "sums": "*i32", "blocks": "i32", "BLOCK": "constexpr"}
aligned = {(i,): [["tt.divisibility", 16]] for i in (0, 1)}
for block, warps in {(v.block, v.num_warps) for v in VARIANTS}:
    source = ASTSource(read_kernel, signature, {(3,): block}, aligned)
    found = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})
    seen = _read_nvidia(found.asm["cubin"])
    assert seen["scratch"] == 0, seen
    assert seen["wide_loads"] == block * 4 // (16 * 32 * warps), seen
"""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("name", sorted(path.name for path in HERE.glob("check_*.py")))
def test_interpreted(name: str) -> None:
    """The cases' own code on CPU tensors, with Triton's interpreter, which must be chosen before triton is imported."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "python_files=check_*.py"]
    done = subprocess.run(
        [*command, str(HERE / name)],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]

"""Values of 8 bits reach the matrix instructions without two threads in one bank of shared memory."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from kvhal.kernels.aot import Job

pytest.importorskip("triton")

TUNING = Path(__file__).parents[2] / "platforms/kvhal_cuda/tuning.yaml"
JOBS = [
    Job("attend", mode, encoding, "sm_90", phase=phase, head_dim=dim)
    for mode, encoding in (("int8_per_token_head", "int8"), ("int4_per_token_head", "int4"))
    for phase, dim in (("decode", 128), ("verify", 128), ("decode", 64))
]


def test_no_two_threads_meet_in_a_bank() -> None:
    """Read as they lie in pages, four times as many cycles would go by (counted on an H200)."""
    asked = "".join(json.dumps(asdict(job)) + "\n" for job in JOBS)
    command = [sys.executable, "-m", "tests.triton.shared_memory", str(TUNING)]
    done = subprocess.run(command, input=asked, capture_output=True, text=True, check=True, cwd=TUNING.parents[2])
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(answers) == len(JOBS)
    for job, loads in zip(JOBS, answers, strict=True):
        assert loads, job
        assert all(cycles == 1 for _, cycles in loads), (job, loads)

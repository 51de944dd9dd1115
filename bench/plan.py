"""What must be quick before any device is touched: a plan of a large model, and importing kvhal without torch."""

from __future__ import annotations

import subprocess
import sys
import time

import kvhal
from bench.results import Case, Label
from bench.timing import Timing
from kvhal.spec import CacheSpec

__all__ = ["IMPORT_LIMIT_US", "PLAN_LIMIT_US", "measure"]

PLAN_LIMIT_US, IMPORT_LIMIT_US = 5e3, 50e3
LAYERS, BLOCKS = 126, 20000
_IMPORT = """
import sys, time
start = time.perf_counter()
import kvhal
print(time.perf_counter() - start)
sys.exit("torch" in sys.modules)
"""


def measure(rounds: int) -> list[Case]:
    """Both cases, medians of `rounds`."""
    return [_plan(rounds), _import(rounds)]


def _plan(rounds: int) -> Case:
    hal = kvhal.get("cpu")
    spec = CacheSpec.uniform(
        mode="int8_per_token_head", num_layers=LAYERS, num_kv_heads=8, head_dim=128, num_q_heads=128
    )
    samples = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        hal.plan(spec, num_blocks=BLOCKS)
        samples.append((time.perf_counter() - start) * 1e6)
    # The first plan of a process reads the tables.
    timing = Timing.of(samples[1:])
    labels: dict[str, Label] = {"kind": "plan", "layers": LAYERS, "first_us": round(samples[0])}
    return Case(f"plan of {LAYERS} layers", timing.us, timing.spread_us, labels, limit_us=PLAN_LIMIT_US)


def _import(rounds: int) -> Case:
    timing = Timing.of([_import_us() for _ in range(rounds)])
    return Case("import kvhal", timing.us, timing.spread_us, {"kind": "import"}, limit_us=IMPORT_LIMIT_US)


def _import_us() -> float:
    """Microseconds of the import alone in a fresh process. Raises CalledProcessError if it loads torch."""
    done = subprocess.run([sys.executable, "-c", _IMPORT], check=True, capture_output=True, text=True)
    return float(done.stdout) * 1e6

"""What a benchmark prints: which machine, when, and every figure with what it was compared to."""

from __future__ import annotations

import datetime as dt
import json
import platform
import re
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from kvhal.detection.installed import installed_triton, installed_versions
from kvhal.hal import Hal

__all__ = ["Figure", "gpu_machine", "machine", "paired", "show"]


@dataclass(frozen=True, slots=True)
class Figure:
    """One measurement beside its yardstick, medians in milliseconds.

    ratio: ours over the yardstick's rate or time, as `limit` states it. holds: whether the limit is kept.
    """

    name: str
    ours_ms: float
    yardstick: str
    yardstick_ms: float
    ratio: float
    limit: str
    holds: bool


def paired(ours: Callable[[], object], yardstick: Callable[[], object], rounds: int) -> tuple[float, float]:
    """Median milliseconds of both, measured in turns so that other load on the machine falls on both."""
    times: tuple[list[float], list[float]] = ([], [])
    for step in range(rounds + 1):
        for work, found in zip((ours, yardstick), times, strict=True):
            start = time.perf_counter()
            work()
            if step:
                found.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times[0]), statistics.median(times[1])


def machine() -> dict[str, str | int]:
    """What the figures depend on besides the code."""
    found = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text(encoding="utf-8"))
    return {
        "machine": found[1] if found else platform.processor(),
        "arch": platform.machine(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "triton": installed_triton() or "absent",
        "python": platform.python_version(),
        "date": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
    }


def gpu_machine(found: Hal) -> dict[str, str | int]:
    """As `machine`, for a benchmark of a GPU: `machine` and `arch` are the device's, `host` is the processor."""
    host = machine()
    return host | {
        "machine": torch.cuda.get_device_name(found.device.index),
        "arch": found.device.arch,
        "driver": installed_versions().driver or "unknown",
        "host": host["machine"],
    }


def show(name: str, figures: Sequence[Figure], *, as_json: bool) -> None:
    """Print the figures of benchmark `name`."""
    where = machine()
    if as_json:
        print(json.dumps({"benchmark": name, "version": 1, **where, "figures": [asdict(f) for f in figures]}, indent=1))
        return
    table = Table(title=" · ".join(str(value) for value in where.values()))
    for column in ("figure", "ms", "yardstick", "ms", "ratio", "limit", "holds"):
        table.add_column(column, justify="right" if column in ("ms", "ratio") else "left")
    for f in figures:
        cells = (f"{f.ours_ms:.2f}", f.yardstick, f"{f.yardstick_ms:.2f}", f"{f.ratio:.3f}", f.limit)
        table.add_row(f.name, *cells, "yes" if f.holds else "no")
    Console().print(table)

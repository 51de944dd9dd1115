"""The jobs of a CI matrix: every arch on its own machine where there is one, and its table everywhere else."""

from __future__ import annotations

from typing import Any

from kvhal.answers.matrix import PlatformMatrix, declared, platforms
from kvhal.answers.runners import Runner, Runners
from kvhal.kernels.aot import ARCHES
from kvhal.modes import MODES

__all__ = ["DEVICE_TIER", "TABLE_TIER", "jobs"]

# device: the suite runs on the arch. table: no machine has the arch, so a CPU shows its table and, where the compiler
# knows the arch, compiles the kernels for it.
DEVICE_TIER, TABLE_TIER = "device", "table"


def jobs(runners: Runners, platform: str | None = None) -> list[dict[str, Any]]:
    """One job an arch, as JSON, by what is shipped at assumed versions; none where the runners name no machine for it.

    run: the modes whose tests must pass there. refused: those that must be refused. container: "" for none. compile:
    whether kernels are compiled for the arch there.
    """
    found: list[dict[str, Any]] = []
    for name in platforms(platform):
        matrix = declared(name)
        for arch in matrix.archs:
            own = runners.of.get((name, arch))
            runner, tier = (own, DEVICE_TIER) if own is not None else (runners.table, TABLE_TIER)
            if runner is not None:
                found.append(_job(matrix, arch, runner, tier))
    return found


def _job(matrix: PlatformMatrix, arch: str, runner: Runner, tier: str) -> dict[str, Any]:
    accepted = {mode: matrix.cells[mode, arch].support.is_accepted for mode in MODES}
    container = runner.container
    options = {} if container is None or not container.options else {"options": container.options}
    return {
        "platform": matrix.platform,
        "arch": arch,
        "tier": tier,
        "runs_on": list(runner.runs_on),
        "torch": runner.torch,
        "container": "" if container is None else {"image": container.image} | options,
        "run": [mode for mode in MODES if accepted[mode]],
        "refused": [mode for mode in MODES if not accepted[mode]],
        "compile": tier == TABLE_TIER and arch in ARCHES,
    }

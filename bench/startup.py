"""CPU seconds of each command that must answer at once: user + system time of a fresh process, the best of several."""

from __future__ import annotations

import resource
import subprocess
import sys

__all__ = ["COMMANDS", "run"]

GOAL_SECONDS = 0.3
COMMANDS = (
    ("--version",),
    ("--help",),
    ("config", "check", "configs/cpu-demo.yaml"),
    ("config", "check", "configs/gemma-2-9b.yaml"),
    ("plan", "-c", "configs/cpu-demo.yaml"),
    ("plan", "-c", "configs/cpu-demo.yaml", "--json"),
    ("explain",),
    ("explain", "int8_per_token_head", "--json"),
)


def run(repeat: int) -> int:
    """Print a line a command; 1 if one takes longer than the goal."""
    print(f"{'CPU s':>7}  command (goal: {GOAL_SECONDS} s, best of {repeat})")
    slow = 0
    for command in (None, *COMMANDS):
        best = min(_cpu_seconds(command) for _ in range(repeat))
        slow += command is not None and best > GOAL_SECONDS
        print(f"{best:7.3f}  {'python alone' if command is None else 'kvhal ' + ' '.join(command)}")
    return 1 if slow else 0


def _cpu_seconds(command: tuple[str, ...] | None) -> float:
    """User and system time of one process."""
    what = ("-c", "pass") if command is None else ("-m", "kvhal.cli.app", *command)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *what], check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

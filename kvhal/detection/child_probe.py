"""Ask a child process what the GPU runtime sees. The child opens a context and dies; this process stays clean.

The last source of a probe, for machines whose management library or files cannot answer. It takes the seconds of a
torch import. The environment is inherited, so the child's devices are already the visible ones, in logical order.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kvhal.errors import DeviceError

__all__ = ["AskChild", "ChildAnswer", "ChildDevice", "ask_child"]

TIMEOUT_S = 120.0
_MARK = "KVHAL-DEVICES "
_SCRIPT = f"""
import json, torch
def look():
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as exc:
        return {{"error": str(exc)}}
    found = []
    for i in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(i)
        found.append({{"name": p.name, "major": p.major, "minor": p.minor, "gcn_arch": p.gcnArchName,
                      "uuid": str(getattr(p, "uuid", "")), "nbytes": p.total_memory}})
    return {{"devices": found}}
print({_MARK!r} + json.dumps(look()))
"""
# What torch says where there is no device or no driver at all; every other error is a driver that fails.
_ABSENT = ("found no nvidia driver", "no cuda gpus", "no hip gpus", "no cuda-capable device", "not compiled with cuda")


@dataclass(frozen=True, slots=True)
class ChildDevice:
    """A device as the runtime describes it. uuid: as torch prints it. nbytes: its memory."""

    name: str
    major: int
    minor: int
    gcn_arch: str
    uuid: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class ChildAnswer:
    """The runtime's devices in logical order, or the runtime's reason for none."""

    devices: tuple[ChildDevice, ...]
    absent: str = ""


AskChild = Callable[[], ChildAnswer]


def ask_child(script: str = _SCRIPT, timeout_s: float = TIMEOUT_S) -> ChildAnswer:
    """What a child process sees. Raises DeviceError if it cannot start, does not answer, or its driver fails."""
    try:
        done = subprocess.run(  # noqa: S603  # our own interpreter and script
            # -P: the current folder is no place to import torch from.
            [sys.executable, "-P", "-c", script],
            env=_environment(), capture_output=True, text=True, timeout=timeout_s, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired as exc:
        raise DeviceError(
            f"a child process was asked for the devices and gave no answer in {timeout_s} s; the driver may hang: "
            "look at its log",
            kind="timeout",
        ) from exc
    except (OSError, ValueError) as exc:
        raise _failed(f"cannot be started ({sys.executable!r}): {exc}") from exc
    lines = [line for line in done.stdout.splitlines() if line.startswith(_MARK)]
    if done.returncode or not lines:
        last = (done.stderr.strip().splitlines() or ["it printed nothing"])[-1]
        raise _failed(f"ended with status {done.returncode}: {last}")
    try:
        return _answer(json.loads(lines[-1].removeprefix(_MARK)))
    except (ValueError, TypeError, KeyError) as exc:
        raise _failed(f"gave an answer that cannot be read: {type(exc).__name__}: {exc}") from exc


def _environment() -> Mapping[str, str]:
    # The child must find the same torch, wherever this process found it.
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def _answer(said: Mapping[str, Any]) -> ChildAnswer:
    if "error" in said:
        error = str(said["error"]).strip().splitlines()[0]
        if any(words in error.lower() for words in _ABSENT):
            return ChildAnswer((), absent=f"the runtime lists no device: {error}")
        raise _failed(f"could not start the runtime: {error}")
    devices = tuple(ChildDevice(**device) for device in said["devices"])
    return ChildAnswer(devices, absent="" if devices else "the runtime lists no device")


def _failed(what: str) -> DeviceError:
    return DeviceError(
        f"a child process was asked for the devices and {what}; run `{sys.executable} -c 'import torch; "
        "torch.cuda.init()'` to see the driver's own words",
        kind="driver",
    )

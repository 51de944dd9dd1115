"""The CPU's device memory: what this process may really use, not what the machine has.

The smallest of physical memory and every control-group limit is the total; free is the smallest of what each of them
still leaves. A figure that the system does not tell is Unknown with the reason.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

import psutil

from kvhal.readings import Figure, Known, MemoryReading, Unknown
from kvhal_cpu.cgroup import limits

__all__ = ["HostMemory", "read_memory", "reset_peak", "trim"]

# "5" resets the peak resident set size (proc(5), clear_refs, since Linux 4.0).
RESET_PEAK = "5"
KIB = 1024


class HostMemory:
    """Reads this process's memory. It remembers whether the last reset of the peak was allowed.

    root: where /proc and /sys are read; where there is no /proc (macOS, Windows) psutil answers.
    """

    __slots__ = ("_reset_refused", "_root")

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._reset_refused = ""

    def read(self) -> MemoryReading:
        """One reading, all in bytes, in well under a millisecond."""
        total, free = self._machine()
        own, peak = self._process()
        for limit in limits(self._root):
            total = min(total, Known(limit.limit, limit.source), key=_value)
            free = min(free, Known(limit.free, limit.source), key=_value)
        return MemoryReading(total=total, free=free, own=own, peak=peak)

    def reset_peak(self) -> Figure:
        """Start a new peak at what is used now; the new peak, or Unknown with the reason where that is not allowed."""
        try:
            (self._root / "proc/self/clear_refs").write_text(RESET_PEAK, encoding="ascii")
        except OSError as exc:
            self._reset_refused = f"the peak cannot be reset: {exc.strerror} (/proc/self/clear_refs)"
        else:
            self._reset_refused = ""
        return self._process()[1]

    def _machine(self) -> tuple[Known, Known]:
        fields = _kib_fields(self._root / "proc/meminfo")
        if "MemTotal" in fields and "MemAvailable" in fields:
            return (
                Known(fields["MemTotal"], "/proc/meminfo MemTotal"),
                Known(fields["MemAvailable"], "/proc/meminfo MemAvailable"),
            )
        memory = psutil.virtual_memory()
        return Known(memory.total, "psutil total"), Known(memory.available, "psutil available")

    def _process(self) -> tuple[Figure, Figure]:
        fields = _kib_fields(self._root / "proc/self/status")
        own: Figure
        if "VmRSS" in fields:
            own = Known(fields["VmRSS"], "/proc/self/status VmRSS")
        else:
            own = Known(psutil.Process().memory_info().rss, "psutil rss")
        if "VmHWM" not in fields:
            return own, Unknown("this system keeps no peak that can be reset (no VmHWM in /proc/self/status)")
        if self._reset_refused:
            return own, Unknown(self._reset_refused)
        return own, Known(fields["VmHWM"], "/proc/self/status VmHWM")


# The peak belongs to the process, so its one reset state does too.
_PROCESS = HostMemory()


def read_memory() -> MemoryReading:
    """This process's memory now."""
    return _PROCESS.read()


def reset_peak() -> Figure:
    """Start a new peak for this process; see `HostMemory.reset_peak`."""
    return _PROCESS.reset_peak()


def trim() -> None:
    """Hand the C library's free heap pages back to the system, where it is glibc; elsewhere there is no such call."""
    if not sys.platform.startswith("linux"):
        return
    try:
        malloc_trim = ctypes.CDLL(None).malloc_trim
    except AttributeError:  # musl has no malloc_trim
        return
    malloc_trim(0)


def _value(figure: Known) -> int:
    return figure.value


def _kib_fields(path: Path) -> dict[str, int]:
    """The `Name:  123 kB` lines of a /proc file, in bytes; empty where there is no such file."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return {}
    fields = {}
    for line in lines:
        name, _, value = line.partition(":")
        number, _, unit = value.strip().partition(" ")
        if unit == "kB" and number.isdecimal():
            fields[name] = int(number) * KIB
    return fields

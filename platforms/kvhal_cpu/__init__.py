"""The CPU adapter: the reference kernels on ordinary memory. Any torch build can run it."""

from __future__ import annotations

import ctypes
import sys
import time
from functools import cache
from pathlib import Path

import torch

from kvhal.capability.table import CapabilityTable
from kvhal.contract import Confirmation
from kvhal.detection.host import HostFacts
from kvhal.detection.probe import DeviceFacts, Probe
from kvhal.errors import DeviceError
from kvhal.readings import Known, MemoryReading, Unknown
from kvhal.torch_platform import TorchPlatform
from kvhal_cpu.cpu_probe import probe_cpu
from kvhal_cpu.host_memory import read_memory, reset_peak, trim

__all__ = ["CpuPlatform"]

_MADV_HUGEPAGE = 14
_PAGE = 4096
# Other allocations of the process move its resident set by about this much between two readings.
_RESOLUTION_BYTES = 8 << 20


class CpuPlatform(TorchPlatform):
    """Device memory is what this process may really use; a release is confirmed by the process's resident set."""

    name = "cpu"
    device_type = "cpu"

    def probe(self) -> Probe:
        return probe_cpu(HostFacts.read())

    def capabilities(self) -> CapabilityTable:
        return _table()

    def torch_device(self, device: DeviceFacts) -> torch.device:
        # torch gives CPU tensors no index.
        return torch.device("cpu")

    def reserve(self, nbytes: int, device: DeviceFacts) -> torch.UntypedStorage:
        """`nbytes`, zero-filled: Linux promises memory it does not have, so only touched pages are an allocation."""
        free = self.memory(device).free
        if isinstance(free, Known) and nbytes > free.value:
            raise DeviceError(
                f"{nbytes} bytes were asked of the CPU's memory and {free.value} are free ({free.source}); "
                "plan fewer blocks",
                kind="out_of_memory",
            )
        storage = super().reserve(nbytes, device)
        _advise_huge_pages(storage)
        torch.empty(0, dtype=torch.uint8).set_(storage, 0, (nbytes,), (1,)).zero_()
        return storage

    def memory(self, device: DeviceFacts) -> MemoryReading:
        return read_memory()

    def reset_peak(self, device: DeviceFacts) -> None:
        reset_peak()

    def trim(self, device: DeviceFacts) -> None:
        trim()

    def confirm_released(self, before: MemoryReading, expected: int, device: DeviceFacts) -> Confirmation:
        started = time.perf_counter()
        after = self.memory(device).own
        method = "resident set of this process"
        if isinstance(before.own, Unknown) or isinstance(after, Unknown):
            return Confirmation(Unknown("the resident set cannot be read here"), method, time.perf_counter() - started)
        if expected < _RESOLUTION_BYTES:
            why = f"{expected} bytes are below what the resident set resolves ({_RESOLUTION_BYTES} bytes)"
            return Confirmation(Unknown(why), method, time.perf_counter() - started)
        fell = before.own.value - after.value
        return Confirmation(Known(fell, f"fall of {after.source}"), method, time.perf_counter() - started)


@cache
def _table() -> CapabilityTable:
    return CapabilityTable.load(Path(__file__).with_name("capabilities.yaml"), platform="cpu")


def _advise_huge_pages(storage: torch.UntypedStorage) -> None:
    """Ask for 2 MiB pages: 1 GiB then fills in 50 instead of 180 ms and frees in 3 instead of 75 (EPYC, 2 cores)."""
    if not sys.platform.startswith("linux"):
        return
    start = -(-storage.data_ptr() // _PAGE) * _PAGE
    length = (storage.data_ptr() + storage.nbytes() - start) // _PAGE * _PAGE
    if length > 0:
        # Advice only: a kernel without huge pages answers with an error and nothing changes.
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), _MADV_HUGEPAGE)

"""A toy device in the host's memory, to show how small an adapter is. Prove it:

pytest -p kvhal.testing.plugin --pyargs kvhal.testing.suite --kvhal-platform toy
"""

from __future__ import annotations

import time
from functools import cache
from pathlib import Path

import psutil
import torch

from kvhal.capability.table import CapabilityTable
from kvhal.contract import Confirmation, KernelSet
from kvhal.detection.probe import DeviceFacts, Probe
from kvhal.errors import DeviceError
from kvhal.readings import Known, MemoryReading, Unknown
from kvhal.torch_platform import TorchPlatform

__all__ = ["ToyPlatform"]


class ToyPlatform(TorchPlatform):
    """One device of one arch, which runs the reference kernels and has none for int4."""

    name = "toy"
    device_type = "cpu"

    def probe(self) -> Probe:
        memory = Known(psutil.virtual_memory().total, "psutil total")
        return Probe("toy", (DeviceFacts("toy", 0, "toy1", "a toy", "", memory),))

    def capabilities(self) -> CapabilityTable:
        return _table()

    def torch_device(self, device: DeviceFacts) -> torch.device:
        return torch.device("cpu")

    def memory(self, device: DeviceFacts) -> MemoryReading:
        machine = psutil.virtual_memory()
        return MemoryReading(
            total=Known(machine.total, "psutil total"),
            free=Known(machine.available, "psutil available"),
            own=Unknown("the toy keeps no account of its own use"),
            peak=Unknown("the toy measures no peak"),
        )

    def confirm_released(self, before: MemoryReading, expected: int, device: DeviceFacts) -> Confirmation:
        started = time.perf_counter()
        return Confirmation(Unknown("the toy cannot see its own memory"), "none", time.perf_counter() - started)

    def kernels(self, mode: str, arch: str) -> KernelSet:
        if mode == "int4_per_token_head":
            raise DeviceError(f"a kernel for {mode!r} was asked for and the toy has none", kind="no_kernel")
        return super().kernels(mode, arch)


@cache
def _table() -> CapabilityTable:
    return CapabilityTable.load(Path(__file__).with_name("capabilities.yaml"), platform="toy")

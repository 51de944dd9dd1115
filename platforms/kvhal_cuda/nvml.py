"""NVML through the optional package nvidia-ml-py (module `pynvml`): devices and memory without a CUDA context.

A session starts and ends NVML around each question, so nothing of it outlives a call or crosses a fork.
"""

from __future__ import annotations

import importlib
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from kvhal.detection.probe import DeviceFacts
from kvhal.detection.visible import PhysicalDevice, Slice
from kvhal.errors import DeviceError
from kvhal.readings import Figure, Known, Unknown
from kvhal.torch_cuda import DriverReading

__all__ = ["LoadNvml", "NvmlAbsent", "NvmlDevice", "list_devices", "load_pynvml", "read_memory"]

LoadNvml = Callable[[], Any]
_ABSENT = ("NVMLError_LibraryNotFound", "NVMLError_DriverNotLoaded")
_NO_SUCH = ("NVMLError_NotSupported", "NVMLError_NotFound", "NVMLError_FunctionNotFound", "NVMLError_InvalidArgument")


class NvmlAbsent(Exception):
    """NVML cannot be asked on this machine: not installed, or no driver. Its text is the reason."""


@dataclass(frozen=True, slots=True)
class NvmlDevice:
    """A GPU in NVML's order. is_hollow: in MIG mode with no slice, where CUDA lists no device."""

    physical: PhysicalDevice
    arch: str
    name: str
    is_hollow: bool = False


def load_pynvml() -> Any:
    """The module. Raises NvmlAbsent if it is not installed or does not import."""
    try:
        with warnings.catch_warnings():
            # The retired package of the same module name warns on import.
            warnings.simplefilter("ignore")
            return importlib.import_module("pynvml")
    except (ImportError, OSError) as exc:
        raise NvmlAbsent(f"NVML cannot be asked: {exc} (pip install nvidia-ml-py)") from exc


@contextmanager
def _session(load: LoadNvml) -> Iterator[Any]:
    """NVML started. Raises NvmlAbsent without a driver, DeviceError(kind="driver") if the driver fails."""
    nvml = load()
    try:
        nvml.nvmlInit()
        try:
            yield nvml
        finally:
            nvml.nvmlShutdown()
    except nvml.NVMLError as exc:
        if type(exc).__name__ in _ABSENT:
            raise NvmlAbsent(f"NVML finds no driver: {exc}") from exc
        raise DeviceError(
            f"NVML was asked for the devices and failed: {type(exc).__name__}: {exc}; look at `nvidia-smi`",
            kind="driver",
        ) from exc


def list_devices(load: LoadNvml) -> tuple[NvmlDevice, ...]:
    """Every GPU, in NVML's order (by PCI bus)."""
    with _session(load) as nvml:
        return tuple(_device(nvml, index) for index in range(nvml.nvmlDeviceGetCount()))


def read_memory(load: LoadNvml, device: DeviceFacts, pid: int | None = None) -> DriverReading:
    """Total, free and this process's own bytes of a device or slice, found by its uuid. Never raises."""
    try:
        if not device.uuid:
            raise NvmlAbsent("NVML cannot find a device whose uuid is unknown")
        with _session(load) as nvml:
            handle = nvml.nvmlDeviceGetHandleByUUID(device.uuid)
            total, free = _memory(nvml, handle)
            return DriverReading(total, free, _own(nvml, handle, os.getpid() if pid is None else pid))
    except (NvmlAbsent, DeviceError) as exc:
        reason = Unknown(str(exc))
        return DriverReading(reason, reason, reason)


def _device(nvml: Any, index: int) -> NvmlDevice:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
    slices, is_mig = _slices(nvml, handle)
    physical = PhysicalDevice(index, _text(nvml.nvmlDeviceGetUUID(handle)), _memory(nvml, handle)[0], slices)
    return NvmlDevice(
        physical, f"sm_{major}{minor}", _text(nvml.nvmlDeviceGetName(handle)), is_hollow=is_mig and not slices
    )


def _slices(nvml: Any, handle: Any) -> tuple[tuple[Slice, ...], bool]:
    """The MIG slices, and whether MIG is on. A GPU without MIG answers NotSupported."""
    try:
        current, _ = nvml.nvmlDeviceGetMigMode(handle)
    except nvml.NVMLError as exc:
        if type(exc).__name__ in _NO_SUCH:
            return (), False
        raise
    if not current:
        return (), False
    found = []
    for index in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        try:
            mig = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)
        except nvml.NVMLError as exc:
            if type(exc).__name__ in _NO_SUCH:
                continue
            raise
        instance = (int(nvml.nvmlDeviceGetGpuInstanceId(mig)), int(nvml.nvmlDeviceGetComputeInstanceId(mig)))
        found.append(Slice(_text(nvml.nvmlDeviceGetUUID(mig)), _memory(nvml, mig)[0], instance))
    return tuple(found), True


def _memory(nvml: Any, handle: Any) -> tuple[Figure, Figure]:
    try:
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    except nvml.NVMLError as exc:
        # Devices that share the host's memory (GB10, Jetson) have none of their own to report.
        why = Unknown(f"NVML reports no memory for this device: {exc}")
        return why, why
    return Known(int(memory.total), "NVML total"), Known(int(memory.free), "NVML free")


def _own(nvml: Any, handle: Any, pid: int) -> Figure:
    try:
        listed = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
    except nvml.NVMLError as exc:
        return Unknown(f"NVML lists no processes: {exc}")
    used = [process.usedGpuMemory for process in listed if process.pid == pid]
    if not used:
        return Unknown(
            f"NVML lists {len(listed)} process(es) and not this one ({pid}): it has no context yet, or NVML counts "
            "by the host's process numbers"
        )
    if None in used:
        return Unknown("this driver does not tell memory by process (WDDM)")
    return Known(sum(used), f"NVML use of process {pid}")


def _text(said: str | bytes) -> str:
    # Releases before 12 answer in bytes.
    return said.decode() if isinstance(said, bytes) else said

"""The CUDA adapter: NVML before a context exists, torch.cuda after."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from kvhal.capability.table import CapabilityTable
from kvhal.cuda_runtime import OpenDevice
from kvhal.detection.probe import DeviceFacts, Probe
from kvhal.torch_cuda import DriverReading, Seams, TorchCudaPlatform
from kvhal_cuda.cuda_probe import child_uuid, probe_cuda
from kvhal_cuda.nvml import LoadNvml, load_pynvml, read_memory

__all__ = ["CudaPlatform"]


class CudaPlatform(TorchCudaPlatform):
    """The driver frees at once, so a release is confirmed by free memory within a fraction of a second."""

    name = "cuda"
    tuning_file = Path(__file__).with_name("tuning.yaml")
    # cudaFree returns when the memory is back; the retries are for neighbours that allocate in between.
    settle_s = 0.3
    settle_step_s = 0.05

    def __init__(self, seams: Seams | None = None, nvml: LoadNvml = load_pynvml) -> None:
        super().__init__(seams)
        self._nvml = nvml

    def probe(self) -> Probe:
        return probe_cuda(self.read_host(), self._nvml, self.ask_child_once)

    def capabilities(self) -> CapabilityTable:
        return _table()

    def arch_of(self, opened: OpenDevice) -> str:
        return f"sm_{opened.major}{opened.minor}"

    def uuid_of(self, opened: OpenDevice) -> str:
        return child_uuid(opened.uuid)

    def mismatch_hint(self) -> str:
        return "set CUDA_DEVICE_ORDER=PCI_BUS_ID, so that driver and runtime number the devices alike"

    def driver_reading(self, device: DeviceFacts) -> DriverReading:
        return read_memory(self._nvml, device)


@cache
def _table() -> CapabilityTable:
    return CapabilityTable.load(Path(__file__).with_name("capabilities.yaml"), platform="cuda")

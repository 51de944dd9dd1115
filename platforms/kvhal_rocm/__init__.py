"""The ROCm adapter: KFD's files before a context exists, torch.cuda (HIP) and those files after."""

from __future__ import annotations

import gc
import os
from functools import cache
from pathlib import Path

from kvhal.capability.table import CapabilityTable, arch_token
from kvhal.cuda_runtime import OpenDevice
from kvhal.detection.probe import DeviceFacts, Probe
from kvhal.lease import CacheLease
from kvhal.readings import Figure, Known, Unknown
from kvhal.torch_cuda import DriverReading, TorchCudaPlatform
from kvhal_rocm.kfd import read_memory, read_topology
from kvhal_rocm.rocm_probe import is_masquerade, masquerade_arch, probe_rocm, visible_nodes

__all__ = ["RocmPlatform"]


class RocmPlatform(TorchCudaPlatform):
    """Graphs go before memory, and memory shows late, so a release is confirmed by polling the device's reading."""

    name = "rocm"
    tuning_file = Path(__file__).with_name("tuning.yaml")
    # VRAM comes back some time after hipFree (vllm PR 47366 waits up to 5 s in its tests, and so does its 0.33 worker).
    settle_s = 5.0
    settle_step_s = 0.05

    def probe(self) -> Probe:
        return probe_rocm(self.read_host(), self.seams.root, self.ask_child_once)

    def capabilities(self) -> CapabilityTable:
        return _table()

    def arch_of(self, opened: OpenDevice) -> str:
        """From gcnArchName alone: gfx90a has the capability number 9.0 and is no sm_90."""
        if is_masquerade(self.known_host):
            return masquerade_arch(opened.major, opened.minor)
        return arch_token(opened.gcn_arch)

    def mismatch_hint(self) -> str:
        return "unset HSA_OVERRIDE_GFX_VERSION if it is set: a device runs and is judged under its own arch"

    def driver_reading(self, device: DeviceFacts) -> DriverReading:
        host = self.known_host
        topology = read_topology(self.seams.root)
        nodes = () if is_masquerade(host) or not topology.exists else visible_nodes(host, topology)
        if device.index >= len(nodes):
            none = Unknown("KFD lists no such device here")
            return DriverReading(none, none, none)
        return read_memory(self.seams.root, nodes[device.index], os.getpid())

    def free_of(self, said: Known, outside: DriverReading) -> Figure:
        """The smaller: hipMemGetInfo ignores what is not HIP's (rocm-systems 7993), amdgpu's file lags a free."""
        if isinstance(outside.free, Known) and outside.free.value < said.value:
            return outside.free
        return said

    def drop_captures(self, lease: CacheLease) -> None:
        """Destroy what was captured, then wait: a graph's memory is freed only by a later synchronise
        (ROCm/pytorch 1455), and freeing a cache under a live graph faults.
        """
        try:
            lease.run_drops()
        finally:
            # A graph that only a cycle keeps is still alive.
            gc.collect()
            self.synchronize(lease.device)


@cache
def _table() -> CapabilityTable:
    return CapabilityTable.load(Path(__file__).with_name("capabilities.yaml"), platform="rocm")

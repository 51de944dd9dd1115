"""CUDA's answer to a probe: NVML where it can tell, else a child process. Nothing is started in this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvhal.detection.child_probe import ChildAnswer, ChildDevice
from kvhal.detection.host import Absent, HostFacts
from kvhal.detection.probe import DeviceFacts, Probe
from kvhal.detection.visible import VisibleDevice, describe, visible_cuda
from kvhal.readings import Known
from kvhal_cuda.nvml import LoadNvml, NvmlAbsent, NvmlDevice, list_devices

__all__ = ["child_uuid", "probe_cuda"]

_ORDER = "CUDA_DEVICE_ORDER"
_PCI = "PCI_BUS_ID"
_VISIBLE = "CUDA_VISIBLE_DEVICES"


def probe_cuda(host: HostFacts, load: LoadNvml, ask: Callable[[HostFacts], ChildAnswer]) -> Probe:
    """The visible devices in CUDA's order, or why there is none. DeviceError if a driver fails."""
    if host.torch_cuda is None:
        return Probe("cuda", (), absent=f"this torch ({host.torch_version}) has no CUDA")
    try:
        devices = list_devices(load)
    except NvmlAbsent as exc:
        return _without_nvml(host, str(exc), ask)
    usable = [d for d in devices if not d.is_hollow]
    notes = [f"NVML lists {len(devices)} GPU(s)"]
    notes += [f"GPU {d.physical.index} is in MIG mode and has no slice" for d in devices if d.is_hollow]
    if not usable:
        return Probe("cuda", (), absent=notes[-1] if devices else "NVML lists no device", notes=tuple(notes))
    if not _order_is_known(host, usable):
        why = f"the GPUs differ and {_ORDER} is not {_PCI}, so only the runtime knows their order"
        return _from_child(ask(host), (*notes, why))
    notes.append(
        f"NVML's order is taken as CUDA's ({describe(host.env, (_ORDER,))}); the uuid is confirmed at allocate"
    )
    seen = visible_cuda(host.env, [d.physical for d in usable])
    absent = "" if seen else f"{describe(host.env, (_VISIBLE,))} hides all {len(usable)} devices"
    by_index = {d.physical.index: d for d in usable}
    found = tuple(_facts(v, by_index[v.physical.index]) for v in seen)
    return Probe("cuda", found, absent=absent, notes=tuple(notes))


def child_uuid(printed: str) -> str:
    """torch prints a uuid without the vendor's prefix."""
    return printed if not printed or printed.startswith(("GPU-", "MIG-")) else f"GPU-{printed}"


def _order_is_known(host: HostFacts, devices: Sequence[NvmlDevice]) -> bool:
    """CUDA's default order is fastest first, which differs from NVML's only where devices differ."""
    return host.env.get(_ORDER) == _PCI or len({(d.name, d.arch) for d in devices}) == 1


def _facts(seen: VisibleDevice, device: NvmlDevice) -> DeviceFacts:
    name = f"{device.name} (MIG slice)" if seen.slice else device.name
    return DeviceFacts("cuda", seen.index, device.arch, name, seen.uuid, seen.memory)


def _without_nvml(host: HostFacts, why: str, ask: Callable[[HostFacts], ChildAnswer]) -> Probe:
    nodes = [host.witnesses["nvidia_node"], host.witnesses["dxg"]]
    # Tegra (aarch64) has CUDA behind other nodes; elsewhere no node means no device, and no child need look.
    if host.machine == "x86_64" and all(isinstance(node, Absent) for node in nodes):
        return Probe("cuda", (), absent=f"there is no NVIDIA device node; {why}")
    return _from_child(ask(host), (why,))


def _from_child(answer: ChildAnswer, notes: tuple[str, ...]) -> Probe:
    found = tuple(_child_facts(i, d) for i, d in enumerate(answer.devices))
    return Probe("cuda", found, absent=answer.absent, notes=(*notes, "a child process asked the runtime"))


def _child_facts(index: int, device: ChildDevice) -> DeviceFacts:
    memory = Known(device.nbytes, "torch.cuda.get_device_properties")
    arch = f"sm_{device.major}{device.minor}"
    return DeviceFacts("cuda", index, arch, device.name, child_uuid(device.uuid), memory)

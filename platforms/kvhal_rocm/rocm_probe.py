"""ROCm's answer to a probe: KFD's files where they can tell, else a child process. Nothing is started in this process.

A masquerade (KVHAL_MASQUERADE=rocm on a CUDA build, test only) lists the CUDA devices under an arch that is in no
table, so that nothing it does can pass for evidence of an AMD GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from kvhal.capability.table import arch_token
from kvhal.detection.child_probe import ChildAnswer
from kvhal.detection.host import Absent, Failed, HostFacts, Present
from kvhal.detection.probe import DeviceFacts, Probe
from kvhal.detection.visible import PhysicalDevice, describe, visible_hip
from kvhal.readings import Known
from kvhal_rocm.kfd import GpuNode, Topology, read_topology

__all__ = ["MASQUERADE", "is_masquerade", "masquerade_arch", "probe_rocm", "visible_nodes"]

MASQUERADE = "KVHAL_MASQUERADE"
_TEST_ONLY = "masquerade: test only, never evidence"
_VISIBLE = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
_OVERRIDE = "HSA_OVERRIDE_GFX_VERSION"


def probe_rocm(host: HostFacts, root: Path, ask: Callable[[HostFacts], ChildAnswer]) -> Probe:
    """The visible devices in HIP's order, or why there is none. DeviceError if a driver fails."""
    if is_masquerade(host):
        return _masquerade(host, ask(host))
    if host.torch_hip is None:
        return Probe("rocm", (), absent=f"this torch ({host.torch_version}) has no HIP (ROCm)")
    topology = read_topology(root)
    notes = _notes(host, topology)
    if not topology.exists:
        return _without_kfd(host, ask, notes)
    if not topology.nodes:
        return Probe("rocm", (), absent="KFD lists no GPU", notes=notes)
    node = host.witnesses["kfd"]
    if not isinstance(node, Present):
        return Probe("rocm", (), absent=f"KFD lists {len(topology.nodes)} GPU(s), but {node.reason}", notes=notes)
    if any(not n.arch for n in topology.nodes):
        return _from_child(ask(host), (*notes, "this kernel's KFD tells no gfx_target_version"))
    seen = visible_nodes(host, topology)
    absent = "" if seen else f"{describe(host.env, _VISIBLE)} hides all {len(topology.nodes)} devices"
    found = tuple(DeviceFacts("rocm", i, n.arch, n.name, n.uuid, n.memory) for i, n in enumerate(seen))
    return Probe("rocm", found, absent=absent, notes=notes)


def is_masquerade(host: HostFacts) -> bool:
    """Whether this is a CUDA build that was told to play ROCm."""
    return host.env.get(MASQUERADE) == "rocm" and host.torch_hip is None and host.torch_cuda is not None


def masquerade_arch(major: int, minor: int) -> str:
    """An arch token that no table lists."""
    return f"masquerade-sm_{major}{minor}"


def visible_nodes(host: HostFacts, topology: Topology) -> tuple[GpuNode, ...]:
    """The nodes the visible-devices variables leave, in logical order."""
    physical = [PhysicalDevice(i, n.uuid, n.memory) for i, n in enumerate(topology.nodes)]
    return tuple(topology.nodes[v.physical.index] for v in visible_hip(host.env, physical))


def _notes(host: HostFacts, topology: Topology) -> tuple[str, ...]:
    notes = [f"KFD lists {len(topology.nodes)} GPU(s)" if topology.exists else "there is no KFD in sysfs"]
    if topology.refused:
        notes.append(f"the kernel keeps {topology.refused} KFD node(s) from this container")
    if _OVERRIDE in host.env:
        notes.append(
            f"{describe(host.env, (_OVERRIDE,))}: the runtime will call these devices by another arch, "
            "which allocate refuses"
        )
    return (*notes, f"amdsmi {host.witnesses['amdsmi']}")


def _without_kfd(host: HostFacts, ask: Callable[[HostFacts], ChildAnswer], notes: tuple[str, ...]) -> Probe:
    dxg, kfd = host.witnesses["dxg"], host.witnesses["kfd"]
    if isinstance(dxg, Absent) and not isinstance(kfd, Present):
        why = f"; {kfd.reason}" if isinstance(kfd, Failed) else ""
        return Probe("rocm", (), absent=f"there is no amdgpu driver: no KFD in sysfs and no /dev/dxg{why}", notes=notes)
    # WSL has no KFD, and some containers mount /dev/kfd without sysfs: only the runtime can tell.
    return _from_child(ask(host), notes)


def _from_child(answer: ChildAnswer, notes: tuple[str, ...]) -> Probe:
    found = tuple(
        DeviceFacts("rocm", i, arch_token(d.gcn_arch), d.name, "", Known(d.nbytes, "torch.cuda.get_device_properties"))
        for i, d in enumerate(answer.devices)
    )
    return Probe("rocm", found, absent=answer.absent, notes=(*notes, "a child process asked the runtime"))


def _masquerade(host: HostFacts, answer: ChildAnswer) -> Probe:
    found = tuple(
        DeviceFacts(
            "rocm",
            i,
            masquerade_arch(d.major, d.minor),
            f"{d.name} ({_TEST_ONLY})",
            "",
            Known(d.nbytes, "torch.cuda.get_device_properties"),
        )
        for i, d in enumerate(answer.devices)
    )
    note = f"{describe(host.env, (MASQUERADE,))} on torch {host.torch_version}: {_TEST_ONLY}"
    return Probe("rocm", found, absent=answer.absent, notes=(note,))

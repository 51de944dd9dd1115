"""The amdgpu driver's own files (KFD topology in sysfs): devices and memory without opening /dev/kfd.

Formats: kernel Documentation/gpu/amdgpu and kfd_topology.c. A node of another container is refused by the kernel and
is no device here; ROCr leaves it out of its numbering too.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvhal.errors import DeviceError
from kvhal.readings import Figure, Known, Unknown
from kvhal.torch_cuda import DriverReading

__all__ = ["GpuNode", "Topology", "gfx_arch", "read_memory", "read_topology"]

_NODES = "sys/class/kfd/kfd/topology/nodes"
_PROCESSES = "sys/class/kfd/kfd/proc"
# HSA_HEAPTYPE_FRAME_BUFFER_PUBLIC and _PRIVATE; the other heaps are the host's memory, LDS and scratch.
_VRAM_HEAPS = (1, 2)
# A node with less than this share of its card's memory is one partition of it, and the card's reading is not its own.
_WHOLE_CARD = 0.9


@dataclass(frozen=True, slots=True)
class GpuNode:
    """One GPU (or partition). arch: "" where this kernel does not tell it. render_minor: its DRM device, 0 if none."""

    number: int
    gpu_id: int
    arch: str
    name: str
    uuid: str
    memory: Figure
    render_minor: int


@dataclass(frozen=True, slots=True)
class Topology:
    """The GPU nodes in KFD's order, and how many the kernel keeps from this container. exists: False without KFD."""

    exists: bool
    nodes: tuple[GpuNode, ...] = ()
    refused: int = 0


def gfx_arch(version: int) -> str:
    """The arch token of a gfx_target_version: major, minor and step, the last in hex (90010 is gfx90a); 0 is ""."""
    if version <= 0:
        return ""
    return f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}"


def read_topology(root: Path) -> Topology:
    """The GPUs that KFD lists. Raises DeviceError for files that cannot mean anything."""
    folder = root / _NODES
    if not folder.is_dir():
        return Topology(exists=False)
    nodes, refused = [], 0
    for place in sorted((p for p in folder.iterdir() if p.name.isdecimal()), key=lambda p: int(p.name)):
        try:
            node = _node(root, place)
        except OSError:
            refused += 1
            continue
        if node is not None:
            nodes.append(node)
    return Topology(True, tuple(nodes), refused)


def read_memory(root: Path, node: GpuNode, pid: int) -> DriverReading:
    """Total, free and the bytes of process `pid` on one GPU."""
    return DriverReading(node.memory, _free(root, node), _own(root, node, pid))


def _node(root: Path, place: Path) -> GpuNode | None:
    """The GPU at one topology folder; None for a CPU. OSError if the kernel refuses it to this container."""
    fields = _fields(place / "properties")
    if not fields:
        raise PermissionError(f"{place}/properties is empty")
    if fields.get("simd_count", 0) == 0:
        return None
    gpu_id = _number(place / "gpu_id")
    arch, unique = gfx_arch(fields.get("gfx_target_version", 0)), fields.get("unique_id", 0)
    minor = fields.get("drm_render_minor", 0)
    # As ROCr spells it; cards without a serial number have 0.
    uuid = f"GPU-{unique:016x}" if unique else ""
    name = _line(_card(root, minor) / "product_name") or _line(place / "name") or arch
    return GpuNode(int(place.name), gpu_id, arch, name, uuid, _vram(place), minor)


def _vram(place: Path) -> Figure:
    banks = [_fields(bank / "properties") for bank in sorted((place / "mem_banks").glob("[0-9]*"))]
    sizes = [bank["size_in_bytes"] for bank in banks if bank.get("heap_type") in _VRAM_HEAPS]
    return Known(sum(sizes), "KFD mem_banks") if sizes else Unknown("KFD lists no memory bank of this GPU")


def _free(root: Path, node: GpuNode) -> Figure:
    card = _card(root, node.render_minor)
    total, used = _line(card / "mem_info_vram_total"), _line(card / "mem_info_vram_used")
    if not (total.isdecimal() and used.isdecimal()):
        return Unknown("amdgpu shows no mem_info_vram_used for this GPU")
    if isinstance(node.memory, Known) and node.memory.value < _WHOLE_CARD * int(total):
        return Unknown("this device is a partition, and amdgpu's mem_info_vram_used is its whole card's")
    return Known(max(0, int(total) - int(used)), "amdgpu mem_info_vram_total - mem_info_vram_used")


def _own(root: Path, node: GpuNode, pid: int) -> Figure:
    used = _line(root / _PROCESSES / str(pid) / f"vram_{node.gpu_id}")
    if used.isdecimal():
        return Known(int(used), f"KFD vram of process {pid}")
    return Unknown(
        f"KFD lists no process {pid}: it has not opened the GPU yet, or KFD counts by the host's process numbers"
    )


def _card(root: Path, minor: int) -> Path:
    return root / f"sys/class/drm/renderD{minor}/device"


def _fields(path: Path) -> dict[str, int]:
    """The `name number` lines of a properties file."""
    fields = {}
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        name, _, value = line.partition(" ")
        if not value.strip().isdecimal():
            raise _unreadable(path, line)
        fields[name] = int(value)
    return fields


def _number(path: Path) -> int:
    text = path.read_text(encoding="utf-8", errors="replace").strip()
    if not text.isdecimal():
        raise _unreadable(path, text)
    return int(text)


def _line(path: Path) -> str:
    """The text of an optional one-line file; "" where there is none or it is refused."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _unreadable(path: Path, text: str) -> DeviceError:
    return DeviceError(
        f"{path} was asked for this GPU's properties and holds {text!r}; the amdgpu driver may have failed: "
        "look at `dmesg`",
        kind="driver",
    )

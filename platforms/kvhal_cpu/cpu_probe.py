"""The CPU's answer to a probe: one device, whose memory is what this process may use."""

from __future__ import annotations

import platform
from pathlib import Path

from kvhal.detection.host import HostFacts
from kvhal.detection.probe import DeviceFacts, Probe
from kvhal_cpu.host_memory import HostMemory

__all__ = ["machine_arch", "probe_cpu"]

# Windows and macOS have their own words for the same two instruction sets.
_ARCH_TOKENS = {"amd64": "x86_64", "x64": "x86_64", "x86_64": "x86_64", "arm64": "aarch64", "aarch64": "aarch64"}


def machine_arch(machine: str) -> str:
    """The exact arch token of `platform.machine()`; a machine the table does not know keeps its own name."""
    return _ARCH_TOKENS.get(machine.lower(), machine)


def probe_cpu(host: HostFacts, root: Path = Path("/")) -> Probe:
    """One device. root: where /proc and /sys are read."""
    memory = HostMemory(root).read().total
    arch = machine_arch(host.machine)
    device = DeviceFacts(platform="cpu", index=0, arch=arch, name=_model(root) or arch, uuid="", memory=memory)
    return Probe(platform="cpu", devices=(device,))


def _model(root: Path) -> str:
    try:
        lines = (root / "proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor()
    names = (value.strip() for key, _, value in (line.partition(":") for line in lines) if key.strip() == "model name")
    return next(names, platform.processor())

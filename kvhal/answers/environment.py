"""What a bug report needs: versions, the platform chosen and why, every witness, devices, memory, relevant environment.

Only the variables of `host.ENV_NAMES` are read, so that a report holds no secret.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from kvhal import __version__
from kvhal.detection import registry
from kvhal.detection.host import HostFacts
from kvhal.detection.probe import DeviceFacts
from kvhal.errors import KvhalError
from kvhal.readings import MemoryReading

__all__ = ["Adapter", "DeviceMemory", "Environment", "look_around"]

PACKAGES = ("torch", "triton", "numpy", "pydantic", "typer", "rich", "psutil")


@dataclass(frozen=True, slots=True)
class Adapter:
    """One installed adapter. found: its devices, or why none can be used."""

    name: str
    enters_at: str
    distribution: str
    found: str


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """A device of the chosen platform and its memory now."""

    device: DeviceFacts
    memory: MemoryReading


@dataclass(frozen=True, slots=True)
class Environment:
    """Everything a probe says. platform: None if no platform can be chosen; `reason` then holds the error."""

    kvhal: str
    python: str
    system: str
    machine: str
    cpus: int
    packages: Mapping[str, str]
    torch_build: str
    platform: str | None
    reason: str
    adapters: tuple[Adapter, ...]
    witnesses: Mapping[str, str]
    devices: tuple[DeviceMemory, ...]
    env: Mapping[str, str]

    @property
    def is_usable(self) -> bool:
        return self.platform is not None


def look_around() -> Environment:
    """Look at this machine. That no platform can be chosen is part of the answer; PlatformError only without torch."""
    host = HostFacts.read()
    name, reason, devices = _choose(host)
    return Environment(
        kvhal=__version__,
        python=f"{platform.python_implementation()} {platform.python_version()} ({sys.executable})",
        system=platform.platform(),
        machine=host.machine,
        cpus=os.cpu_count() or 0,
        packages={package: _version(package) for package in PACKAGES},
        torch_build=f"{host.torch_version}, CUDA {host.torch_cuda or 'none'}, HIP {host.torch_hip or 'none'}",
        platform=name,
        reason=reason,
        adapters=tuple(_adapter(name) for name in registry.names()),
        witnesses={name: str(witness) for name, witness in host.witnesses.items()},
        devices=devices,
        env=dict(host.env),
    )


def _choose(host: HostFacts) -> tuple[str | None, str, tuple[DeviceMemory, ...]]:
    try:
        choice = registry.choose(host, registry.requested_platform(host.env), registry.adapters())
        adapter = registry.load(choice.name)
        devices = tuple(DeviceMemory(device, adapter.memory(device)) for device in choice.probe.devices)
    except KvhalError as exc:
        return None, f"{type(exc).__name__}: {exc}", ()
    return choice.name, choice.reason, devices


def _adapter(name: str) -> Adapter:
    try:
        entry = registry.installed().entry(name)
        probe = registry.load(name).probe()
    except KvhalError as exc:
        return Adapter(name, "", "", f"{type(exc).__name__}: {exc}")
    devices = ", ".join(f"{d.index}: {d.name} ({d.arch})" for d in probe.devices)
    distribution = f"{entry.dist.name} {entry.dist.version}" if entry.dist is not None else "unknown"
    return Adapter(name, entry.value, distribution, devices or probe.absent)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"

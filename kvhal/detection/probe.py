"""What a probe answers: the devices that are here, or why there is none. Pure values; no torch, nothing is started."""

from __future__ import annotations

from dataclasses import dataclass

from kvhal.readings import Figure

__all__ = ["DeviceFacts", "Probe"]


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """One device as a process sees it.

    index: logical index in this process. arch: exact token ("sm_90", "gfx942", "x86_64"), never a prefix or a number.
    uuid: the vendor's identifier, "" where there is none. memory: bytes this device (or slice of one) holds.
    """

    platform: str
    index: int
    arch: str
    name: str
    uuid: str
    memory: Figure


@dataclass(frozen=True, slots=True)
class Probe:
    """An adapter's answer. devices: what is usable. absent: why there is none. notes: what corroborating sources said.

    Absent is an answer, failed is another: a driver that breaks raises DeviceError instead.
    """

    platform: str
    devices: tuple[DeviceFacts, ...]
    absent: str = ""
    notes: tuple[str, ...] = ()

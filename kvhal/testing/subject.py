"""Finding what is to be tested: a platform with a device, or why there is none. Absent is an answer, failed another."""

from __future__ import annotations

from dataclasses import dataclass

import kvhal
from kvhal.detection import registry
from kvhal.errors import KvhalError
from kvhal.testing.cases import Subject

__all__ = ["Presence", "find"]


@dataclass(frozen=True, slots=True)
class Presence:
    """What was found. absent: why there is no device. error: what failed. unmet: a requirement that does not hold."""

    subject: Subject | None = None
    absent: str = ""
    error: KvhalError | None = None
    required: str = ""
    unmet: str = ""

    @property
    def is_required(self) -> bool:
        return bool(self.required)

    def __str__(self) -> str:
        if self.subject is None:
            return f"no device: {self.absent or self.error}"
        device = self.subject.hal.device
        return f"{device.platform}:{device.index} {device.name} ({device.arch})"


def find(platform: str | None, device: int, required: str | None) -> Presence:
    """The platform called `platform`, else the required one, else the detected one; and its device."""
    name, needs = platform or required, required or ""
    try:
        if name is not None:
            probe = registry.load(name).probe()
            if not probe.devices:
                reason = probe.absent or "its probe lists no device and gives no reason"
                return Presence(absent=f"platform {name!r} has no device here: {reason}", required=needs)
        hal = kvhal.detect(device, platform=name)
    except KvhalError as exc:
        return Presence(error=exc, required=needs)
    found = hal.device.platform
    unmet = f"--kvhal-require {needs} was given and the platform is {found!r}" if needs not in ("", found) else ""
    return Presence(Subject.of(hal), required=needs, unmet=unmet)

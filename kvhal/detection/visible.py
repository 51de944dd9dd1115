"""Which devices the visible-devices variables leave, and in which order. Pure; the only reader of those variables.

The drivers stop at the first name they do not know and say nothing. Here such a name is a PlatformError that quotes the
variable, its value and the devices found; a negative number ends the list, as the drivers document.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvhal.errors import PlatformError
from kvhal.readings import Figure

__all__ = ["PhysicalDevice", "Slice", "VisibleDevice", "describe", "visible_cuda", "visible_hip"]

CUDA = "CUDA_VISIBLE_DEVICES"
HIP = "HIP_VISIBLE_DEVICES"
ROCR = "ROCR_VISIBLE_DEVICES"
# Slurm writes this word into CUDA_VISIBLE_DEVICES for a job without devices.
NO_DEVICES = "NoDevFiles"


@dataclass(frozen=True, slots=True)
class Slice:
    """A MIG slice. instance: its (GPU instance, compute instance) numbers, for the older way to name it."""

    uuid: str
    memory: Figure
    instance: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class PhysicalDevice:
    """A device as the driver numbers it. slices: its MIG slices, in the driver's order; empty where MIG is off."""

    index: int
    uuid: str
    memory: Figure
    slices: tuple[Slice, ...] = ()


@dataclass(frozen=True, slots=True)
class VisibleDevice:
    """A device by its logical index in this process; `slice` is set where the process sees only a part of it."""

    index: int
    physical: PhysicalDevice
    slice: Slice | None = None

    @property
    def uuid(self) -> str:
        return self.slice.uuid if self.slice else self.physical.uuid

    @property
    def memory(self) -> Figure:
        """What the process can reach: the slice's memory, never its parent's."""
        return self.slice.memory if self.slice else self.physical.memory


def visible_cuda(env: Mapping[str, str], physical: Sequence[PhysicalDevice]) -> tuple[VisibleDevice, ...]:
    """What CUDA_VISIBLE_DEVICES leaves of `physical`, in logical order.

    Numbers count along `physical`, so it must stand in the runtime's order: NVML's is that only where the devices are
    alike or CUDA_DEVICE_ORDER=PCI_BUS_ID. A device with MIG slices stands for its first slice, and a process that sees
    a slice sees that one device only (MIG User Guide, "CUDA Device Enumeration").
    """
    chosen = [VisibleDevice(i, d, s) for i, (d, s) in enumerate(_select(CUDA, env.get(CUDA), physical))]
    slices = [VisibleDevice(0, v.physical, v.slice) for v in chosen if v.slice]
    return tuple(slices[:1] or chosen)


def visible_hip(env: Mapping[str, str], physical: Sequence[PhysicalDevice]) -> tuple[VisibleDevice, ...]:
    """What the HIP variables leave of `physical`, in logical order.

    ROCR_VISIBLE_DEVICES filters the physical devices; HIP_VISIBLE_DEVICES, or CUDA_VISIBLE_DEVICES where that is
    unset, indexes what is left. Any of them set to "" leaves none (for ROCR's, torch counts one and ROCr none).
    """
    hip, cuda = env.get(HIP), env.get(CUDA)
    if hip is not None and cuda is not None and _tokens(hip) != _tokens(cuda):
        raise PlatformError(
            f"{HIP}={hip!r} and {CUDA}={cuda!r} are both set and differ; HIP reads the first, other software the "
            "second; unset one or make them equal"
        )
    left = [device for device, _ in _select(ROCR, env.get(ROCR), physical)]
    name = HIP if hip is not None or cuda is None else CUDA
    chosen = _select(name, env.get(name), left, after=describe(env, (ROCR,)) if ROCR in env else "")
    return tuple(VisibleDevice(i, device) for i, (device, _) in enumerate(chosen))


def describe(env: Mapping[str, str], names: Sequence[str]) -> str:
    """The variables of `names` that are set, quoted, for a reason a user reads."""
    said = ", ".join(f"{name}={env[name]!r}" for name in names if name in env)
    return said or f"none of {', '.join(names)} is set"


Chosen = tuple[PhysicalDevice, Slice | None]


def _tokens(value: str) -> list[str]:
    tokens = [token.strip() for token in value.split(",")]
    return tokens[:-1] if tokens[-1] == "" else tokens


def _select(name: str, value: str | None, devices: Sequence[PhysicalDevice], after: str = "") -> list[Chosen]:
    if value is None:
        return [(device, _first_slice(device)) for device in devices]
    if value.strip() == NO_DEVICES:
        return []
    chosen: list[Chosen] = []
    kinds: set[bool] = set()
    for token in _tokens(value):
        if token.startswith("-") and token[1:].isascii() and token[1:].isdecimal():
            break
        found = _resolve(name, value, token, devices, after)
        kinds.add(token.isdecimal())
        if len(kinds) > 1:
            raise _refusal(
                name, value, f"mixes numbers and UUIDs at {token!r}, where torch stops reading", devices, after
            )
        if found in chosen:
            raise _refusal(
                name, value, f"names device {token!r} twice, which the driver reads as no device", devices, after
            )
        chosen.append(found)
    return chosen


def _first_slice(device: PhysicalDevice) -> Slice | None:
    return device.slices[0] if device.slices else None


def _resolve(name: str, value: str, token: str, devices: Sequence[PhysicalDevice], after: str) -> Chosen:
    if token.isascii() and token.isdecimal():
        if int(token) < len(devices):
            device = devices[int(token)]
            return device, _first_slice(device)
        raise _refusal(name, value, f"names device {token}, which is not here", devices, after)
    if token.startswith("MIG-"):
        slices = [(d, s) for d in devices for s in d.slices if token in _slice_names(d, s)]
        if len(slices) == 1:
            return slices[0]
        raise _refusal(name, value, f"names MIG slice {token!r}, which is not here", devices, after)
    if token.upper().startswith("GPU-") and len(token) > len("GPU-"):
        # The vendors abbreviate UUIDs to any unique beginning; ROCr compares them without regard to case.
        matches = [d for d in devices if d.uuid.upper().startswith(token.upper())]
        if len(matches) == 1:
            return matches[0], _first_slice(matches[0])
        what = f"fits {len(matches)} devices" if matches else "is not here"
        raise _refusal(name, value, f"names {token!r}, which {what}", devices, after)
    raise _refusal(name, value, f"has {token!r}, which is no number, GPU- or MIG- name", devices, after)


def _slice_names(device: PhysicalDevice, part: Slice) -> tuple[str, ...]:
    if part.instance is None:
        return (part.uuid,)
    return part.uuid, f"MIG-{device.uuid}/{part.instance[0]}/{part.instance[1]}"


def _refusal(name: str, value: str, what: str, devices: Sequence[PhysicalDevice], after: str) -> PlatformError:
    lines = [f"{i}: {d.uuid or 'no uuid'}" + "".join(f" [{s.uuid}]" for s in d.slices) for i, d in enumerate(devices)]
    left = f" after {after}" if after else ""
    return PlatformError(
        f"{name}={value!r} {what}; found {len(devices)} device(s){left}: {', '.join(lines) or 'none'}; "
        f"correct {name} or unset it"
    )

"""The Platform protocol: what an adapter implements, and the values that pass through it.

`allocate`, `profile` and `cleanup` are the public verbs; their order of steps is written once, in `torch_platform.py`,
and is final there, so that no adapter can hand back an unmeasured result. An adapter states its own truth in the steps
below them. This module imports no torch at run time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from kvhal.capability.table import CapabilityTable
from kvhal.detection.probe import DeviceFacts, Probe
from kvhal.kernels.fingerprint import REFERENCE
from kvhal.layout import ForeignView
from kvhal.plan import Plan
from kvhal.readings import Figure, MemoryReading

if TYPE_CHECKING:
    import torch

    from kvhal.lease import CacheLease
    from kvhal.profile import MemoryProfile, Profiling

__all__ = ["CONTRACT_VERSION", "Adopted", "Confirmation", "Holder", "KernelSet", "Platform", "Release"]

CONTRACT_VERSION = 1


@dataclass(frozen=True, slots=True)
class Adopted:
    """A range of an engine's memory to build a lease on. kvhal writes only inside it and never frees it.

    storage: the engine's storage. offset, nbytes: the range in bytes. owner: who frees it, for reports.
    view: the engine's own byte view of layer 0, if it has one; it is checked against the layout.
    """

    storage: torch.UntypedStorage
    offset: int
    nbytes: int
    owner: str
    view: ForeignView | None = None

    @classmethod
    def tensor(cls, tensor: torch.Tensor, owner: str) -> Adopted:
        """The memory under `tensor`, its shape and strides taken as the engine's view unless it is one-dimensional."""
        size = tensor.element_size()
        span = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) + 1 if tensor.numel() else 0
        offset = int(tensor.storage_offset()) * size
        view = None
        if tensor.dim() > 1:
            # The last dimension counts bytes in the layout and items in the engine's tensor.
            shape = (*tensor.shape[:-1], tensor.shape[-1] * size)
            view = ForeignView(tuple(shape), (*(s * size for s in tensor.stride()[:-1]), tensor.stride()[-1]))
        return cls(tensor.untyped_storage(), offset, int(span) * size, owner, view)


@dataclass(frozen=True, slots=True)
class Confirmation:
    """What the device itself says about a release. returned: bytes by its own reading, or why that is not known."""

    returned: Figure
    method: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Holder:
    """Somebody who still held a lease's memory at close. action: "revoked" or "quarantined"."""

    description: str
    nbytes: int
    action: str


@dataclass(frozen=True, slots=True)
class Release:
    """What `close()` did and measured.

    asked: bytes the lease took (cache and step workspaces; 0 if the memory was the engine's). returned: bytes given
    back, proven by dead storages and not contradicted by the device. pinned: bytes in quarantine because a foreign
    holder (numpy, DLPack, native code) still reads them. ours: False for adopted memory, of which nothing is freed.
    """

    asked: int
    returned: int
    pinned: int
    holders: tuple[Holder, ...]
    seconds: float
    confirmation: Confirmation
    ours: bool = True
    owner: str = "kvhal"

    @property
    def is_complete(self) -> bool:
        """True if every byte came back."""
        return self.returned == self.asked and not self.pinned

    def __str__(self) -> str:
        if not self.ours:
            return f"not ours: the memory stays with {self.owner}; {len(self.holders)} holders revoked"
        text = f"{self.returned} of {self.asked} bytes returned in {self.seconds:.3f} s, {len(self.holders)} holders"
        return text + "".join(f"\n  {h.action}: {h.description} ({h.nbytes} bytes)" for h in self.holders)


@dataclass(frozen=True, slots=True)
class KernelSet:
    """The kernels that serve a mode on an arch, and what they need.

    workspace_bytes(geometry of one layer, num_q_heads, max_tokens, max_seqs) -> bytes of scratch `attend` takes; it is
    part of a plan, so it must survive pickling.
    sources: the dotted names of the functions that run, which evidence is about (`kernels.fingerprint`); the table of
    the platform lists the same under `kernels`.
    """

    name: str
    workspace_bytes: Callable[..., int]
    sources: tuple[str, ...] = REFERENCE


class Platform(Protocol):
    """An adapter. Registered under the entry-point group `kvhal.platforms`; `contract` is checked at load."""

    name: str
    contract: int

    def probe(self) -> Probe:
        """The devices that are here, or why none is. Never starts a GPU runtime. DeviceError if a driver fails."""
        ...

    def capabilities(self) -> CapabilityTable:
        """This vendor's table."""
        ...

    def allocate(self, plan: Plan, device: DeviceFacts, memory: Adopted | None = None) -> CacheLease:
        """A live lease over new memory, or over `memory`. After an exception every byte is back. Final."""
        ...

    def profile(self, workload: Callable[[CacheLease], object], plan: Plan, device: DeviceFacts) -> MemoryProfile:
        """Run `workload` on a trial lease of `plan` and measure; the trial never outlives the call. Final."""
        ...

    def profiling(self, plan: Plan, device: DeviceFacts) -> Profiling:
        """The scope `profile` runs in: `with platform.profiling(plan, device) as trial`. Final."""
        ...

    def cleanup(self, lease: CacheLease) -> Release:
        """What `lease.close()` calls: gives every byte back and measures it. Final."""
        ...

    def torch_device(self, device: DeviceFacts) -> torch.device:
        """The torch device of `device`."""
        ...

    def confirm(self, device: DeviceFacts) -> None:
        """Confirm at allocation that the device is the one that was probed; DeviceError naming both if it is not."""
        ...

    def reserve(self, nbytes: int, device: DeviceFacts) -> torch.UntypedStorage:
        """`nbytes` of device memory, resident when this returns; else DeviceError(kind="out_of_memory")."""
        ...

    def memory(self, device: DeviceFacts) -> MemoryReading:
        """The device's memory now, every figure known or typed unknown."""
        ...

    def reset_peak(self, device: DeviceFacts) -> None:
        """Start a new peak measurement, where the platform has one."""
        ...

    def is_capturing(self, device: DeviceFacts) -> bool:
        """True while the current stream is being captured into a graph."""
        ...

    def drop_captures(self, lease: CacheLease) -> None:
        """Run what was bound to the lease (graphs and others that hold raw pointers), newest first."""
        ...

    def synchronize(self, device: DeviceFacts) -> None:
        """Wait until the device has finished all work that may still read the lease."""
        ...

    def trim(self, device: DeviceFacts) -> None:
        """Return cached bytes to the driver or the operating system."""
        ...

    def confirm_released(self, before: MemoryReading, expected: int, device: DeviceFacts) -> Confirmation:
        """Ask the device itself whether about `expected` bytes came back since `before`, with a bounded wait."""
        ...

    def kernels(self, mode: str, arch: str) -> KernelSet:
        """The kernels for `mode` on `arch`; the reference by default."""
        ...

"""The half that adapters on `torch.cuda` share: that namespace serves more than one vendor.

Nothing here starts a runtime before `confirm`, the first step of an allocation; every reading before it comes from the
vendor's management interface.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import torch

from kvhal.contract import Adopted, Confirmation, KernelSet
from kvhal.cuda_runtime import CudaRuntime, OpenDevice, TorchRuntime
from kvhal.detection.child_probe import AskChild, ChildAnswer, ask_child
from kvhal.detection.host import HostFacts
from kvhal.detection.probe import DeviceFacts
from kvhal.errors import DeviceError, SpecMismatch
from kvhal.kernels.triton.kernel_set import TRITON, TritonWorkspace
from kvhal.kernels.triton.tuning import Tuning
from kvhal.lease import CacheLease
from kvhal.plan import Plan
from kvhal.readings import Figure, Known, MemoryReading, Unknown
from kvhal.torch_errors import mapped
from kvhal.torch_platform import RELEASED_SHARE, TorchPlatform
from kvhal.tune.overlay import tuning_in_use

__all__ = ["SEGMENT_BYTES", "Clock", "DriverReading", "Seams", "TorchCudaPlatform"]

# torch's allocator (CUDACachingAllocator.h): requests under kMinLargeAlloc (10 MiB) share segments of kLargeBuffer
# (20 MiB) with other tensors, so a device reading says nothing about less than one such segment.
_OWN_SEGMENT_BYTES = 10 << 20
SEGMENT_BYTES = 20 << 20

_INFO = "torch.cuda.mem_get_info"
_PEAK = "torch.cuda.max_memory_reserved"


@dataclass(frozen=True, slots=True)
class Clock:
    """Time for bounded waits."""

    now: Callable[[], float] = time.perf_counter
    sleep: Callable[[float], None] = time.sleep


@dataclass(frozen=True, slots=True)
class Seams:
    """What stands between an adapter and its machine; tests of machines that are not here put their own parts in.

    host: read when first needed if None. root: where /sys and /proc are read. child: asks a child process.
    """

    host: HostFacts | None = None
    root: Path = Path("/")
    runtime: CudaRuntime = field(default_factory=TorchRuntime)
    child: AskChild = ask_child
    clock: Clock = field(default_factory=Clock)


@dataclass(frozen=True, slots=True)
class DriverReading:
    """What the vendor's management interface says without a context; own: this process's bytes on the device."""

    total: Figure
    free: Figure
    own: Figure


class TorchCudaPlatform(TorchPlatform):
    """Base of the adapters on torch.cuda. A subclass says what an arch is and what its driver's interface reads.

    settle_s, settle_step_s: how long a release may take to show in the device's reading, and how often it is read.
    """

    device_type = "cuda"
    tuning_file: ClassVar[Path]
    settle_s: ClassVar[float]
    settle_step_s: ClassVar[float]

    def __init__(self, seams: Seams | None = None) -> None:
        super().__init__()
        self.seams = seams or Seams()
        self.runtime = self.seams.runtime
        self._answers: dict[tuple[tuple[str, str], ...], ChildAnswer] = {}
        self._host: HostFacts | None = None
        self._opened: set[int] = set()

    def arch_of(self, opened: OpenDevice) -> str:
        """The exact arch token of a device the runtime has opened."""
        raise NotImplementedError

    def uuid_of(self, opened: OpenDevice) -> str:
        """The device's uuid in the probe's own spelling; "" where the runtime's cannot be compared with it."""
        return ""

    def driver_reading(self, device: DeviceFacts) -> DriverReading:
        """What can be read without a context."""
        raise NotImplementedError

    def confirm(self, device: DeviceFacts) -> None:
        """Open the device: from here on a context exists. DeviceError if it is not the one that was probed."""
        with mapped(f"{_where(device)} was asked to start"):
            opened = self.runtime.open(device.index)
        arch = self.arch_of(opened)
        if arch != device.arch:
            raise DeviceError(
                f"{_where(device)} was probed as arch {device.arch!r} and the runtime calls it {arch!r} "
                f"({opened.name}); nothing was allocated; {self.mismatch_hint()}",
                kind="arch_mismatch",
            )
        uuid = self.uuid_of(opened)
        if uuid and device.uuid.startswith("GPU-") and uuid.lower() != device.uuid.lower():
            raise DeviceError(
                f"{_where(device)} was probed as {device.uuid!r} and the runtime opened {uuid!r}; nothing was "
                f"allocated; {self.mismatch_hint()}",
                kind="device_mismatch",
            )
        self._use_kernels(device)
        self._opened.add(device.index)

    def kernels(self, mode: str, arch: str) -> KernelSet:
        """The Triton kernels, one source for every vendor, with the tile shapes of this arch."""
        return KernelSet("triton", TritonWorkspace(self.tuning(arch)), TRITON)

    def tuning(self, arch: str) -> Tuning:
        """The row of this arch, the user's own numbers over the shipped ones; read once a process (`tune/overlay`)."""
        return tuning_in_use(self.tuning_file, arch)

    def _allocate(self, plan: Plan, device: DeviceFacts, memory: Adopted | None) -> CacheLease:
        """As of every adapter, of a plan whose workspace is sized by the row that launches on `device` will use."""
        row = self.tuning(device.arch)
        if any(isinstance(of, TritonWorkspace) and of.tuning != row for of in plan.workspaces):
            raise SpecMismatch(
                f"a cache on {_where(device)} ({device.arch}) was asked for by a plan whose workspace is sized for "
                "another tuning row (another arch, or a process with another overlay); plan anew in this process"
            )
        return super()._allocate(plan, device, memory)

    def _use_kernels(self, device: DeviceFacts) -> None:
        """Register the operators, and the tile shapes for this device. Triton is imported here and no earlier."""
        try:
            from kvhal.kernels.triton import launch, operators
        except ImportError as exc:
            raise DeviceError(
                f"the kernels for {_where(device)} need triton and it cannot be imported ({exc}); install the one your "
                "torch names",
                kind="no_triton",
            ) from exc
        assert operators.LIBRARY is not None
        launch.set_tuning(device.index, self.tuning(device.arch))

    def mismatch_hint(self) -> str:
        """What to do about a device that is not the one probed."""
        return "detect again, and report this if it repeats"

    def reserve(self, nbytes: int, device: DeviceFacts) -> torch.UntypedStorage:
        with mapped(f"{nbytes} bytes were asked of {_where(device)}"):
            if nbytes >= _OWN_SEGMENT_BYTES:
                # A block cut from a cached segment could not go back to the driver while the rest is in use.
                self.runtime.empty_cache()
            return self.runtime.storage(nbytes, self.torch_device(device))

    def memory(self, device: DeviceFacts) -> MemoryReading:
        """Before a context exists, the management interface's figures; after it, the runtime's too."""
        outside = self.driver_reading(device)
        if not self.is_open(device):
            return MemoryReading(
                outside.total, outside.free, outside.own, Unknown("torch has opened no context on this device yet")
            )
        with mapped(f"the memory of {_where(device)} was asked for"):
            free, total = self.runtime.mem_get_info(device.index)
            reserved, peak = self.runtime.reserved(device.index), self.runtime.peak_reserved(device.index)
        own = _checked_own(outside.own, reserved)
        return MemoryReading(
            total=Known(total, _INFO),
            free=self.free_of(Known(free, _INFO), outside),
            own=own,
            peak=_peak(own, reserved, peak),
        )

    def free_of(self, said: Known, outside: DriverReading) -> Figure:
        """The free memory, from the runtime's figure and the management interface's."""
        return said

    def is_open(self, device: DeviceFacts) -> bool:
        """Whether this process has a context on the device; asking never makes one."""
        if not self.runtime.is_initialized():
            return False
        return device.index in self._opened or self.runtime.has_context(device.index)

    def reset_peak(self, device: DeviceFacts) -> None:
        if self.is_open(device):
            self.runtime.reset_peak(device.index)

    def is_capturing(self, device: DeviceFacts) -> bool:
        return self.runtime.is_initialized() and self.runtime.is_capturing(device.index)

    def synchronize(self, device: DeviceFacts) -> None:
        if self.is_open(device):
            with mapped(f"{_where(device)} was asked to finish its work"):
                self.runtime.synchronize(device.index)

    def trim(self, device: DeviceFacts) -> None:
        if self.is_open(device):
            with mapped(f"{_where(device)} was asked to return its cached bytes"):
                self.runtime.empty_cache()

    def confirm_released(self, before: MemoryReading, expected: int, device: DeviceFacts) -> Confirmation:
        """Read the device until it shows the bytes or the bound is reached; torch's own statistics are never asked."""
        started = self.seams.clock.now()
        if expected < SEGMENT_BYTES:
            why = f"{expected} bytes are below what a device reading resolves (a shared segment of {SEGMENT_BYTES})"
            return Confirmation(Unknown(why), "none", 0.0)
        while True:
            figure = _returned(before, self.memory(device), expected)
            waited = self.seams.clock.now() - started
            if _settles_it(figure, expected) or waited >= self.settle_s or isinstance(before.free, Unknown):
                break
            self.seams.clock.sleep(self.settle_step_s)
        method = f"the device's own reading, for at most {self.settle_s} s"
        return Confirmation(_judged(figure, expected), method, waited)

    def read_host(self) -> HostFacts:
        """The host's facts, read afresh for a probe and kept for the readings after it."""
        self._host = self.seams.host or HostFacts.read()
        return self._host

    @property
    def known_host(self) -> HostFacts:
        """The facts of the last probe; a reading must not ask every management library again."""
        return self._host or self.read_host()

    def ask_child_once(self, host: HostFacts) -> ChildAnswer:
        """The child process's answer, kept for as long as the environment that decides it stays."""
        key = tuple(sorted(host.env.items()))
        if key not in self._answers:
            self._answers[key] = self.seams.child()
        return self._answers[key]


def _where(device: DeviceFacts) -> str:
    return f"{device.platform}:{device.index}"


def _checked_own(own: Figure, reserved: int) -> Figure:
    """In a container our process number may be another process's on the host. Ours holds at least `reserved`."""
    if isinstance(own, Known) and own.value < reserved:
        return Unknown(
            f"{own.source} lists {own.value} bytes under this process's number while torch alone holds {reserved}: "
            "another process of the host, or a reading that lags"
        )
    return own


def _peak(own: Figure, reserved: int, peak: int) -> Known:
    """The process's peak: its use now plus what torch held more at its peak, so that both figures can be compared."""
    if isinstance(own, Known):
        return Known(own.value + max(0, peak - reserved), f"{own.source} + {_PEAK} above its current")
    return Known(peak, f"{_PEAK}, without the context and other libraries")


def _returned(before: MemoryReading, after: MemoryReading, expected: int) -> Figure:
    """The rise of free memory; where that falls short, the fall of this process's own use, which no neighbour moves."""
    rise = _difference(before.free, after.free, "rise")
    if not _settles_it(rise, expected):
        fall = _difference(after.own, before.own, "fall")
        if isinstance(fall, Known):
            return fall
    return rise


def _difference(low: Figure, high: Figure, word: str) -> Figure:
    if isinstance(low, Unknown):
        return low
    if isinstance(high, Unknown):
        return high
    if low.source != high.source:
        return Unknown(f"the two readings have different sources ({low.source}; {high.source})")
    return Known(high.value - low.value, f"{word} of {low.source}")


def _settles_it(figure: Figure, expected: int) -> bool:
    return isinstance(figure, Known) and figure.value >= RELEASED_SHARE * expected


def _judged(figure: Figure, expected: int) -> Figure:
    """A figure that others have moved is no figure: negative, or short by less than one segment torch may share."""
    if isinstance(figure, Unknown) or _settles_it(figure, expected):
        return figure
    if figure.value < 0:
        return Unknown(f"the {figure.source} is negative ({figure.value} bytes): something else took memory meanwhile")
    if expected - figure.value < SEGMENT_BYTES:
        return Unknown(
            f"the {figure.source} shows {figure.value} of {expected} bytes; the rest is less than one segment "
            f"({SEGMENT_BYTES} bytes) of torch's allocator, which other tensors may share"
        )
    return figure

"""The shared half of adapters on torch: the final order of allocate, profile and cleanup, and default steps."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable
from typing import TypeVar, final

import torch

from kvhal.capability.table import CapabilityTable
from kvhal.contract import CONTRACT_VERSION, Adopted, Confirmation, KernelSet, Release
from kvhal.detection.probe import DeviceFacts, Probe
from kvhal.errors import CacheError, CaptureActive, DeviceError
from kvhal.kernels.workspace import attend_workspace_bytes
from kvhal.lease import CacheLease
from kvhal.plan import Plan
from kvhal.profile import MemoryProfile, Profiling
from kvhal.readings import Known, MemoryReading, Unknown
from kvhal.region import Region, RegionRelease

__all__ = ["RELEASED_SHARE", "TorchPlatform"]

_LOG = logging.getLogger("kvhal")
_T = TypeVar("_T")
# Of the bytes expected back, the share the device's own reading must show. Readings are in pages and other allocations
# of the process move them; vLLM PR 45827's failure returned none.
RELEASED_SHARE = 0.95


class TorchPlatform:
    """Base of the adapters. Subclasses set `name` and `device_type` and state their own truth in the steps."""

    name: str
    device_type: str
    contract = CONTRACT_VERSION

    def __init__(self) -> None:
        self._trials: weakref.WeakValueDictionary[int, CacheLease] = weakref.WeakValueDictionary()

    def probe(self) -> Probe:
        raise NotImplementedError

    def capabilities(self) -> CapabilityTable:
        raise NotImplementedError

    @final
    def allocate(self, plan: Plan, device: DeviceFacts, memory: Adopted | None = None) -> CacheLease:
        """A live lease of `plan` on `device`, over new memory or over an engine's range.

        Raises UnsupportedMode if the plan's decision was a refusal, CacheError while a trial lease is open on the
        device, CaptureActive during a capture, DeviceError(kind="out_of_memory"), SpecMismatch for memory that does
        not fit. After an exception every byte is back.
        """
        trial = self._trials.get(device.index)
        if trial is not None and trial.is_open:
            raise CacheError(
                f"a trial lease of {trial.layout.nbytes} bytes is open on {device.platform}:{device.index}; a serving "
                "lease beside it would share its readings: leave the profiling scope first"
            )
        return self._allocate(plan, device, memory)

    @final
    def profile(self, workload: Callable[[CacheLease], object], plan: Plan, device: DeviceFacts) -> MemoryProfile:
        """Run `workload(trial)` on a trial lease of `plan` and measure. Its exceptions propagate; the trial closes."""
        scope = self.profiling(plan, device)
        with scope as trial:
            workload(trial)
        return scope.profile

    @final
    def profiling(self, plan: Plan, device: DeviceFacts) -> Profiling:
        """The scope that `profile` runs in, for workloads that are a block of code rather than a function."""

        def allocate_trial() -> CacheLease:
            lease = self.allocate(plan, device)
            self._trials[device.index] = lease
            return lease

        return Profiling(self, plan, device, allocate_trial)

    @final
    def cleanup(self, lease: CacheLease) -> Release:
        """Give back every byte of `lease` and measure it; what `lease.close()` calls.

        Order: synchronise, drop what is bound, release (revoke or quarantine), trim, confirm at the device. If a step
        raises, the later ones still run, and the first error is raised at the end with the lease closed.
        """
        if lease.is_forked:
            return _untouched(lease, "the lease belongs to the parent process")
        if self.is_capturing(lease.device):
            raise CaptureActive("a lease cannot be closed while a graph is being captured; end the capture first")
        started = time.perf_counter()
        errors: list[Exception] = []
        asked, device = lease.asked_bytes, lease.device
        _attempt(errors, lambda: self.synchronize(device))
        _attempt(errors, lambda: self.drop_captures(lease))
        before = _attempt(errors, lambda: self.memory(device))
        freed = lease.relinquish()
        _attempt(errors, lambda: self.trim(device))
        confirmation = _attempt(errors, lambda: self._confirm(before, freed, device))
        release = _release(lease, asked, freed, confirmation, time.perf_counter() - started)
        _log_release(release)
        if errors:
            lease.release = release
            raise errors[0]
        return release

    def torch_device(self, device: DeviceFacts) -> torch.device:
        return torch.device(self.device_type, device.index)

    def confirm(self, device: DeviceFacts) -> None:
        """Open the device, before a byte of it is taken. DeviceError if it is not the one that was probed."""

    def reserve(self, nbytes: int, device: DeviceFacts) -> torch.UntypedStorage:
        try:
            return torch.UntypedStorage(nbytes, device=self.torch_device(device))
        except RuntimeError as exc:
            raise DeviceError(
                f"{nbytes} bytes were asked of {device.platform}:{device.index} and it refused ({exc}); "
                "plan fewer blocks",
                kind="out_of_memory",
            ) from exc

    def memory(self, device: DeviceFacts) -> MemoryReading:
        raise NotImplementedError

    def reset_peak(self, device: DeviceFacts) -> None:
        """No peak to reset by default; the reading's peak is then Unknown."""

    def is_capturing(self, device: DeviceFacts) -> bool:
        return False

    def drop_captures(self, lease: CacheLease) -> None:
        lease.run_drops()

    def synchronize(self, device: DeviceFacts) -> None:
        """Nothing is queued by default."""

    def trim(self, device: DeviceFacts) -> None:
        """Nothing is cached by default."""

    def confirm_released(self, before: MemoryReading, expected: int, device: DeviceFacts) -> Confirmation:
        raise NotImplementedError

    def kernels(self, mode: str, arch: str) -> KernelSet:
        return KernelSet("reference", attend_workspace_bytes)

    def _allocate(self, plan: Plan, device: DeviceFacts, memory: Adopted | None) -> CacheLease:
        plan.decision.raise_if_refused()
        if self.is_capturing(device):
            raise CaptureActive(
                "a cache cannot be allocated while a graph is being captured; allocate before the capture"
            )
        self.confirm(device)
        if memory is None:
            region = Region.own(self.reserve(plan.nbytes, device), plan.nbytes)
            owner = "kvhal"
        else:
            plan.layout.bind(memory.storage, memory.offset, memory.nbytes, memory.view)
            region = Region.adopt(memory, plan.nbytes)
            owner = memory.owner
        try:
            return CacheLease(self, plan, device, region, owner)
        except BaseException:
            region.release()
            raise

    def _confirm(self, before: MemoryReading | None, freed: RegionRelease, device: DeviceFacts) -> Confirmation:
        if before is None:
            return Confirmation(Unknown("the reading before the release failed"), "none", 0.0)
        if not freed.returned:
            return Confirmation(Known(0, "nothing was released"), "none", 0.0)
        return self.confirm_released(before, freed.returned, device)


def _attempt(errors: list[Exception], step: Callable[[], _T]) -> _T | None:
    """Run one step of the cleanup; an error must not keep the later steps from giving memory back."""
    try:
        return step()
    except Exception as exc:  # noqa: BLE001  # collected, and raised when the memory is back
        errors.append(exc)
        return None


def _release(
    lease: CacheLease, asked: int, freed: RegionRelease, confirmation: Confirmation | None, seconds: float
) -> Release:
    """The ownership's claim, lowered to the device's reading where that contradicts it."""
    said = confirmation or Confirmation(Unknown("the confirmation failed"), "none", 0.0)
    returned = freed.returned
    if isinstance(said.returned, Known) and said.returned.value < RELEASED_SHARE * freed.returned:
        returned = max(0, said.returned.value)
    return Release(
        asked=asked,
        returned=returned,
        pinned=freed.pinned,
        holders=freed.holders,
        seconds=seconds,
        confirmation=said,
        ours=not lease.is_adopted,
        owner=lease.owner,
    )


def _untouched(lease: CacheLease, why: str) -> Release:
    return Release(
        lease.asked_bytes, 0, 0, (), 0.0, Confirmation(Unknown(why), "none", 0.0), ours=False, owner="the parent"
    )


def _log_release(release: Release) -> None:
    for holder in release.holders:
        _LOG.warning(
            "lease closed with a holder: %s (%s, %d bytes)",
            holder.description, holder.action, holder.nbytes,
            extra={"event": f"lease.{holder.action}", "holder": holder.description, "nbytes": holder.nbytes},
        )  # fmt: skip

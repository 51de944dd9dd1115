"""Profiling: a scope that owns its trial lease, and the readings of each phase.

The real cache cannot share state with the trial: the scope allocates it, closes it whatever happens inside, and while
it is open no serving lease can be allocated on the device.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING

from kvhal.contract import Release
from kvhal.detection.probe import DeviceFacts
from kvhal.errors import LeakedView
from kvhal.plan import Plan
from kvhal.readings import Figure, Known, MemoryReading, Unknown

if TYPE_CHECKING:
    from kvhal.contract import Platform
    from kvhal.lease import CacheLease

__all__ = ["MemoryProfile", "Phase", "Profiling"]


@dataclass(frozen=True, slots=True)
class Phase:
    """One reading: baseline, trial (allocated), workload (after it ran), released."""

    name: str
    reading: MemoryReading
    seconds: float


@dataclass(frozen=True, slots=True)
class MemoryProfile:
    """What a trial measured. trial_bytes: the trial cache. release: what closing it gave back."""

    phases: tuple[Phase, ...]
    trial_bytes: int
    release: Release

    def reading(self, name: str) -> MemoryReading:
        """The reading of the phase called `name`."""
        return next(p.reading for p in self.phases if p.name == name)

    @property
    def workload_bytes(self) -> Figure:
        """The most the workload took beyond what it found: the rise of the peak, reset when the trial was allocated.

        Unknown where the platform measures no peak. The trial's own steps are in it.
        """
        peak, before = self.reading("workload").peak, self.reading("trial").peak
        if isinstance(peak, Unknown):
            return peak
        if isinstance(before, Unknown):
            return before
        return Known(max(0, peak.value - before.value), f"{peak.source} - {before.source} with the trial allocated")


class Profiling:
    """`with Profiling(platform, plan, device) as trial: workload(trial)`; then `.profile`. Made by `Hal.profiling`."""

    def __init__(self, platform: Platform, plan: Plan, device: DeviceFacts, allocate: Callable[[], CacheLease]) -> None:
        self._platform = platform
        self._plan = plan
        self._device = device
        self._allocate = allocate
        self._phases: list[Phase] = []
        self._lease: CacheLease | None = None
        self._started = 0.0
        self._profile: MemoryProfile | None = None

    @property
    def profile(self) -> MemoryProfile:
        """The result. Raises RuntimeError until the scope has ended without an exception."""
        if self._profile is None:
            raise RuntimeError(
                "the profiling scope has not ended normally, so there is no profile; read it after `with`"
            )
        return self._profile

    def __enter__(self) -> CacheLease:
        self._started = time.perf_counter()
        self._platform.reset_peak(self._device)
        self._read("baseline")
        lease = self._lease = self._allocate()
        try:
            self._platform.reset_peak(self._device)
            self._read("trial")
        except BaseException:
            lease.close()
            raise
        return lease

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        lease = self._lease
        if lease is None:
            return
        try:
            if kind is None:
                self._platform.synchronize(self._device)
                self._read("workload")
        finally:
            # on_leak="raise" must not hide the workload's own exception.
            release = self._close(lease, hide_leak=kind is not None)
        if kind is None:
            self._read("released")
            self._profile = MemoryProfile(tuple(self._phases), self._plan.nbytes, release)

    def _close(self, lease: CacheLease, *, hide_leak: bool) -> Release:
        try:
            return lease.close()
        except LeakedView:
            if not hide_leak or lease.release is None:
                raise
            return lease.release

    def _read(self, name: str) -> None:
        self._phases.append(Phase(name, self._platform.memory(self._device), time.perf_counter() - self._started))

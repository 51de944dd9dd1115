"""The whole of `kvhal tune`: a device, its shipped row, one search after another, and the overlay they add up to."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import kvhal
from kvhal.detection.installed import installed_versions
from kvhal.detection.probe import DeviceFacts
from kvhal.errors import ConfigError, DeviceError
from kvhal.hal import detect
from kvhal.kernels.fingerprint import fingerprint
from kvhal.kernels.triton.kernel_set import TRITON
from kvhal.kernels.triton.tuning import Tuning
from kvhal.tune.overlay import (
    Measured,
    Overlay,
    Provenance,
    differences,
    overlay_path,
    read_overlay,
    shipped_row,
    write_overlay,
)
from kvhal.tune.search import Bench, End, Found, Verdict, search
from kvhal.tune.space import Target, asked_for, explicit, taken_from, targets

__all__ = ["Campaign", "TuneReport", "tune"]

Progress = Callable[[str, float], None]
# Of the free memory, the most that one of five families' pages may take.
_POOL_SHARE = 8


@dataclass(frozen=True, slots=True)
class TuneReport:
    """What came of it. path: where the overlay is, None if none was written. shipped: the row it lies over."""

    device: DeviceFacts
    tuned: Provenance
    shipped: Tuning
    found: tuple[Found, ...]
    path: Path | None
    is_dry_run: bool
    seconds: float

    @property
    def end(self) -> End:
        """What ended the last search, if that was not the search itself: then what was found before it stands."""
        return next((f.end for f in self.found if f.end in (End.INTERRUPTED, End.LOST)), End.DONE)

    @property
    def is_ok(self) -> bool:
        """Whether the shipped row is right wherever it was looked at."""
        return all(f.verdict is not Verdict.FAILED for f in self.found)


def tune(
    platform: str | None = None,
    *,
    device: int = 0,
    families: Sequence[str] = (),
    phases: Sequence[str] = (),
    seconds: float = 300.0,
    out: Path | None = None,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> TuneReport:
    """Search the tuning row of a device and write what is faster to `out`, by default the user's own overlay.

    seconds: no candidate is started later. What an overlay at `out` says of other targets stays. progress(text,
    seconds so far) is called before every candidate. Ctrl-C ends the search and keeps what was found: the report says
    so. Raises ConfigError for unknown names or an overlay that cannot be read, PlatformError if the platform is not
    here, DeviceError where there is no GPU.
    """
    started = time.monotonic()
    wanted = asked_for(families, phases)
    if seconds <= 0:
        raise ConfigError(f"{seconds:g} seconds were asked for; give the search more than 0")
    hal = detect(device, platform=platform)
    from kvhal.torch_cuda import TorchCudaPlatform

    if not isinstance(hal.platform, TorchCudaPlatform):
        raise DeviceError(
            f"the tuning of a GPU was asked for and the platform here is {hal.platform.name!r} ({hal.reason}), whose "
            "kernels have nothing to tune; run this on the machine with the GPU, with a torch built for it",
            kind="no_device",
        )
    shipped = shipped_row(hal.platform.tuning_file, hal.device.arch)
    path = out or overlay_path(hal.device.arch)
    old = read_overlay(path) if path.exists() else Overlay({})
    hal.platform.confirm(hal.device)
    from kvhal.tune.gpu_bench import GpuBench

    free = hal.platform.runtime.mem_get_info(hal.device.index)[0]
    in_use = hal.platform.tuning(hal.device.arch)
    tuned = _provenance(hal.device)
    bench = GpuBench(hal.platform.torch_device(hal.device), in_use, wanted[0], free // _POOL_SHARE)
    campaign = Campaign(bench, hal.device.arch, shipped, old, tuned, None if dry_run else path)
    with bench:
        found = campaign.run(targets(*wanted), started + seconds, progress=progress)
    written = path if campaign.has_written else None
    return TuneReport(hal.device, tuned, shipped, found, written, dry_run, time.monotonic() - started)


@dataclass(slots=True)
class Campaign:
    """Searches one after another, each with its share of the time; what is found is on disk before the next begins.

    old: the overlay that is there. path: where to write, None for a dry run.
    """

    bench: Bench
    arch: str
    shipped: Tuning
    old: Overlay
    tuned: Provenance
    path: Path | None
    now: Callable[[], float] = time.monotonic
    has_written: bool = False

    def run(self, todo: Sequence[Target], deadline: float, *, progress: Progress | None = None) -> tuple[Found, ...]:
        """Everything that was found, target by target, until the deadline (of `now`), Ctrl-C or the device's end."""
        started, shipped = self.now(), explicit(self.shipped)
        row = before = explicit(self.old.over(self.shipped, self.arch))
        measured = self.old.measured
        found: list[Found] = []

        def say(text: str) -> None:
            if progress is not None:
                progress(text, self.now() - started)

        for index, target in enumerate(todo):
            # What one search leaves of its share is the others'.
            until = self.now() + max(0.0, deadline - self.now()) / (len(todo) - index)
            one = search(
                self.bench,
                target,
                taken_from(row, shipped, target),
                seeds=(row,),
                is_time_up=lambda until=until: self.now() >= until,  # type: ignore[misc]  # bound now, not later
                say=say,
            )
            found.append(one)
            if _is_settled(one):
                row = taken_from(row, one.row, target)
                measured = (*(m for m in measured if not _is_of(m, target)), *_measured(one))
            self._write(row, before, measured)
            if one.end in (End.INTERRUPTED, End.LOST):
                break
        return tuple(found)

    def _write(self, row: Tuning, before: Tuning, measured: tuple[Measured, ...]) -> None:
        """Write the overlay if it says anything new."""
        if self.path is None or (row == before and not self.has_written):
            return
        rows = dict(self.old.rows) | {self.arch: differences(row, self.shipped)}
        write_overlay(replace(self.old, rows=rows, tuned=self.tuned, measured=measured), self.path)
        self.has_written = True


def _is_settled(one: Found) -> bool:
    """Whether a target's numbers are now known; a search cut short says nothing against what an overlay has."""
    if one.verdict is Verdict.FASTER:
        return True
    return one.verdict is Verdict.SHIPPED and one.end in (End.DONE, End.TIME) and (one.tried > 0 or one.end is End.DONE)


def _is_of(entry: Measured, target: Target) -> bool:
    return (entry.phase, entry.family) == (target.phase, target.family or "")


def _measured(one: Found) -> tuple[Measured, ...]:
    if one.verdict is not Verdict.FASTER:
        return ()
    names = (one.target.phase, one.target.family or "")
    return tuple(Measured(*names, t.workload, round(t.before_us, 2), round(t.after_us, 2)) for t in one.timings)


def _provenance(device: DeviceFacts) -> Provenance:
    here = installed_versions()
    return Provenance(
        date=datetime.now(UTC).replace(microsecond=0).isoformat(),
        device=device.name,
        kvhal=kvhal.__version__,
        torch=here.torch or "unknown",
        triton=here.triton or "unknown",
        kernels=fingerprint(TRITON).sha256,
    )

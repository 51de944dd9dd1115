"""Prove what can be proved without the device: compile the kernels for an arch, read the machine code, keep the result.

The evidence is of level `isa`: it says that the kernels exist for an arch and are sound code, not that they are right.
"""

from __future__ import annotations

import os
import platform as host
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path

import kvhal
from kvhal import modes
from kvhal.capability.cells import Cell, Support
from kvhal.capability.cells import Path as ComputePath
from kvhal.capability.evidence import CellResult, EvidenceFile, EvidenceVersions, site_folder, write_file
from kvhal.capability.proof import Key, Level
from kvhal.capability.table import CapabilityTable
from kvhal.capability.tables import TUNING_FILE, capability_table, current_keys, tuning_file
from kvhal.capability.versions import Versions
from kvhal.detection.installed import installed_versions
from kvhal.detection.registry import names
from kvhal.errors import ConfigError
from kvhal.kernels import aot
from kvhal.kernels.aot import ARCHES, CODELESS, Compiled, Job, jobs_of
from kvhal.kernels.isa import covers, job_name, problems, worst
from kvhal.kernels.triton.tuning import DEFAULT, Tuning, load_tunings

__all__ = ["HEAD_DIMS", "QUICK_HEAD_DIMS", "ArchResult", "compile_only"]

HEAD_DIMS = (64, 128, 256)
QUICK_HEAD_DIMS = (128,)
# One core of a build machine, measured with Triton 3.7; what was compiled before comes from Triton's cache at once.
_SECONDS_A_JOB = 0.8
_SECONDS_A_CHILD = 4.0
_SAY_EVERY_S = 10.0


@dataclass(frozen=True, slots=True)
class _Target:
    """An arch to compile for, with the table and the tuning of its platform."""

    arch: str
    table: CapabilityTable
    tuning: Tuning


@dataclass(frozen=True, slots=True)
class ArchResult:
    """What was found of one arch.

    compiled: every job with what is wrong with it. refused: modes that the table refuses, so nothing was compiled.
    notes: where the table says more than the machine code shows. path: where the evidence was written.
    """

    evidence: EvidenceFile
    compiled: tuple[tuple[Compiled, tuple[str, ...]], ...]
    refused: tuple[str, ...]
    notes: tuple[str, ...]
    path: Path | None
    seconds: float

    @property
    def is_ok(self) -> bool:
        return not any(wrong for _, wrong in self.compiled)


def compile_only(
    platform: str | None = None,
    *,
    arches: Sequence[str] = (),
    only: Sequence[str] = (),
    head_dims: Sequence[int] = (),
    quick: bool = False,
    folder: Path | None = None,
    progress: Callable[[str], None] | None = None,
) -> Iterator[ArchResult]:
    """Compile for every arch asked for, and write one evidence file an arch to `folder`, by default the user's own.

    platform: of every platform with kernels if None. only: modes; all if empty. quick: decode, store and gather over
    tiled pages of one head size. Raises ConfigError for an unknown arch or mode and without triton, PlatformError for a
    platform that is not installed.
    """
    asked = tuple(dict.fromkeys(modes.mode(name).name for name in only)) or tuple(modes.MODES)
    if find_spec("triton") is None:
        raise ConfigError(
            "`kvhal verify --compile-only` compiles with triton, which is not installed; "
            'install it: pip install "kvhal[compile]"'
        )
    targets = _targets(platform, arches)
    sizes = tuple(head_dims) or (QUICK_HEAD_DIMS if quick else HEAD_DIMS)
    name = "" if len(asked) == len(modes.MODES) else "-" + "+".join(sorted(asked))
    for index, target in enumerate(targets):
        say = _prefixed(progress, f"{target.arch} ({index + 1} of {len(targets)})")
        yield _of_arch(target, asked, sizes, quick=quick, folder=folder or site_folder(), name=name, say=say)


def _of_arch(
    target: _Target,
    asked: tuple[str, ...],
    sizes: tuple[int, ...],
    *,
    quick: bool,
    folder: Path,
    name: str,
    say: Callable[[str], None],
) -> ArchResult:
    started = time.perf_counter()
    here = installed_versions()
    # Now, not at the end: a source that is edited while it compiles was not compiled.
    key = current_keys(target.table, Versions(triton=here.triton))
    found_at = {mode: target.table.cell(mode, target.arch, Versions(here.torch, here.triton)) for mode in asked}
    cells = {mode: cell for mode, cell in found_at.items() if cell.support is not Support.REFUSED}
    jobs = list(_jobs(target.arch, cells, sizes, quick=quick)) if cells else []
    compiled = {found.job: found for found in _compile(jobs, target, say)}
    judged = {job: problems(compiled[job], target.tuning, compiled.get(replace(job, layout="inline"))) for job in jobs}
    evidence = EvidenceFile(
        schema="kvhal.evidence/1",
        platform=target.table.platform,
        arch=target.arch,
        device=f"none: compiled ahead of time for {target.arch}",
        date=datetime.now(UTC).replace(microsecond=0),
        level=Level.ISA,
        # Fewer sizes than a full run has are fewer shapes, whoever chose them.
        quick=quick or not set(HEAD_DIMS) <= set(sizes),
        masquerade=False,
        versions=_versions(here),
        cells=tuple(
            _cell(cell, key(mode, target.arch), [j for j in jobs if _is_about(j, cell)], compiled, judged)
            for mode, cell in cells.items()
        ),
    )
    path = folder / f"isa-{target.arch}{name}.json" if cells else None
    if path is not None:
        write_file(evidence, path)
    notes = tuple(note for cell in cells.values() for note in _notes(cell, compiled.values()))
    refused = tuple(mode for mode in asked if mode not in cells)
    results = tuple((compiled[job], judged[job]) for job in jobs)
    return ArchResult(evidence, results, refused, notes, path, time.perf_counter() - started)


def _targets(platform: str | None, arches: Sequence[str]) -> list[_Target]:
    """The arches asked for, of the platforms that have kernels for an arch elsewhere."""
    offered: dict[str, _Target] = {}
    for name in (platform,) if platform is not None else names():
        file = tuning_file(name)
        if file is None:
            continue
        table, tunings = capability_table(name), load_tunings(file)
        offered |= {arch: _Target(arch, table, tunings.get(arch, DEFAULT)) for arch in table.archs}
    if not offered:
        raise ConfigError(
            f"platform {platform!r} was asked for and has no kernels that are compiled ahead of time (no {TUNING_FILE} "
            "beside its table); leave --platform out for all platforms that have"
        )
    unknown = [arch for arch in arches if arch not in offered]
    if unknown:
        raise ConfigError(
            f"arch {', '.join(map(repr, unknown))} was asked for and no table lists it; known: {', '.join(offered)}"
        )
    chosen = tuple(dict.fromkeys(arches)) or tuple(arch for arch in ARCHES if arch in offered)
    return [offered[arch] for arch in chosen]


def _jobs(arch: str, cells: dict[str, Cell], sizes: tuple[int, ...], *, quick: bool) -> Iterator[Job]:
    pairs = [(mode, encoding) for mode, cell in cells.items() for encoding in cell.encodings]
    layouts, phases = (("tiled",), ("decode",)) if quick else (("tiled", "inline"), aot.PHASES)
    return jobs_of([arch], pairs, layouts, phases=phases, head_dims=sizes)


def _is_about(job: Job, cell: Cell) -> bool:
    return job.kernel in CODELESS or (job.mode == cell.mode and job.encoding in cell.encodings)


def _cell(
    cell: Cell, key: Key, jobs: list[Job], compiled: dict[Job, Compiled], judged: dict[Job, tuple[str, ...]]
) -> CellResult:
    failed = tuple(f"{job_name(job)}: {wrong}" for job in jobs for wrong in judged[job])
    return CellResult(
        mode=cell.mode,
        encodings=cell.encodings,
        key=key,
        passed=not failed and len(jobs) > 0,
        tests=len(jobs),
        worst=worst(compiled[job] for job in jobs),
        failed=failed,
        covers=covers(jobs),
    )


def _notes(cell: Cell, compiled: Iterable[Compiled]) -> Iterator[str]:
    """Encodings that the table calls native and whose attend has no conversion instruction of 8-bit floats."""
    for encoding in cell.encodings:
        if not encoding.startswith("e") or cell.path_of((encoding,)) is not ComputePath.NATIVE:
            continue
        mine = [f for f in compiled if (f.job.kernel, f.job.mode, f.job.encoding) == ("attend", cell.mode, encoding)]
        if any(f.ok and not f.conversions for f in mine):
            yield (
                f"{cell.mode}: {cell.rule} calls {encoding} native on {cell.arch}, and its kernels convert it with "
                "integer instructions"
            )


def _compile(jobs: list[Job], target: _Target, say: Callable[[str], None]) -> Iterator[Compiled]:
    """Compile on every core, one child process each, as results come."""
    workers = max(1, min(len(jobs), os.cpu_count() or 1))
    left_s = len(jobs) * _SECONDS_A_JOB / workers + _SECONDS_A_CHILD
    say(f"{len(jobs)} kernels on {workers} cores, at most {_minutes(left_s)}")
    done: queue.Queue[Compiled | BaseException | None] = queue.Queue()

    def work(mine: list[Job]) -> None:
        try:
            for found in aot.compile_all(mine, {target.arch: target.tuning}):
                done.put(found)
            done.put(None)
        except BaseException as exc:  # noqa: BLE001  # raised again where the results are read
            done.put(exc)

    for worker in range(workers if jobs else 0):
        threading.Thread(target=work, args=(jobs[worker::workers],), daemon=True).start()
    started = said = time.perf_counter()
    count, running = 0, workers if jobs else 0
    while running:
        found = done.get()
        if isinstance(found, BaseException):
            raise found
        if found is None:
            running -= 1
            continue
        count += 1
        yield found
        now = time.perf_counter()
        if now - said > _SAY_EVERY_S and count < len(jobs):
            said = now
            left_s = (now - started) / count * (len(jobs) - count)
            say(f"{count} of {len(jobs)} kernels, {_minutes(left_s)} left")


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.1f} min" if seconds >= 60 else f"{max(1, round(seconds))} s"


def _prefixed(progress: Callable[[str], None] | None, head: str) -> Callable[[str], None]:
    return lambda text: None if progress is None else progress(f"{head}: {text}")


def _versions(here: Versions) -> EvidenceVersions:
    """Of what compiles. CUDA, ROCm and a driver have no part in it: Triton brings its own assemblers."""
    return EvidenceVersions(
        kvhal=kvhal.__version__,
        python=host.python_version(),
        torch=here.torch or "unknown",
        triton=here.triton,
        cuda=None,
        rocm=None,
        driver=None,
    )

"""The main job: a deployment in, a verified release out. Every step's findings are values of the `RunReport`.

detect -> decide -> plan a trial -> profile it -> budget -> plan -> allocate -> use and check -> close.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from kvhal.answers.outline import plan_options, policy_of, spec_on
from kvhal.answers.plan_bytes import PlanBytes, plan_bytes
from kvhal.budget import Budget, BudgetPolicy, BudgetReadings, blocks_that_fit, budget, check_blocks
from kvhal.capability.cells import Operation
from kvhal.config.deployment import Deployment
from kvhal.contract import Release
from kvhal.decision import Decision
from kvhal.detection.probe import DeviceFacts
from kvhal.errors import BudgetError
from kvhal.hal import Hal, detect
from kvhal.lease import CacheLease
from kvhal.plan import Plan
from kvhal.profile import MemoryProfile
from kvhal.readings import Figure, Known, MemoryReading
from kvhal.run.check import Check
from kvhal.run.exercise import GroupRun, exercise
from kvhal.run.workload import tensor_bytes, workload
from kvhal.spec import OpaqueStore

__all__ = ["Allocation", "PlatformFound", "ProfileRun", "RunReport", "run"]


@dataclass(frozen=True, slots=True)
class PlatformFound:
    """The platform and device that were detected, and the device's memory at that time."""

    name: str
    reason: str
    device: DeviceFacts
    memory: MemoryReading
    kernels: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ProfileRun:
    """A trial: its size, what ran on it and what was measured. peak_bytes: without the trial's cache and steps."""

    blocks: int
    rounds: int
    max_tokens: int
    max_seqs: int
    workspace_bytes: int
    peak_bytes: Figure
    measured: MemoryProfile


@dataclass(frozen=True, slots=True)
class Allocation:
    """What was taken: the cache's storage and the steps', by the storages' own sizes."""

    cache_bytes: int
    workspace_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class RunReport:
    """What every step found. not_run: operations the platform declares it lacks and this cache would have used."""

    deployment: str
    platform: PlatformFound
    decisions: tuple[Decision, ...]
    profile: ProfileRun
    budget: Budget
    blocks_from: str
    plan: PlanBytes
    allocation: Allocation
    groups: tuple[GroupRun, ...]
    not_run: tuple[Operation, ...]
    checks: tuple[Check, ...]
    release: Release
    seconds: float

    @property
    def is_ok(self) -> bool:
        """Whether every check holds."""
        return all(check.is_ok for check in self.checks)


def run(
    deployment: Deployment, *, progress: Callable[[str], None] | None = None, evidence: Iterable[Path] = ()
) -> RunReport:
    """Run the deployment's whole flow on the device it names. progress: told each step as it begins.

    evidence: further folders of evidence files.

    Raises the errors of the steps (PlatformError, UnsupportedMode, BudgetError, DeviceError, ...); whatever is raised,
    every byte has been given back. A check that fails raises nothing: see `RunReport.is_ok`.
    """
    started, say = time.perf_counter(), progress or _quiet
    say("detecting the platform")
    hal = replace(detect(deployment.device, platform=deployment.platform), evidence=tuple(evidence))
    table = hal.capabilities()
    found = hal.memory()
    decision = hal.decide(spec_on(deployment, table, hal.device.arch, hal.versions), policy_of(deployment))
    decision.raise_if_refused()
    trial = hal.plan(decision.spec, deployment.profile.blocks, decision=decision, **plan_options(deployment))
    say(f"profiling with a trial cache of {trial.nbytes} bytes")
    profile = _profile(hal, trial, deployment.profile.rounds)
    sized, blocks, blocks_from = _size(deployment, trial, profile)
    plan = trial.with_blocks(blocks)
    say(f"allocating {plan.nbytes} bytes")
    clock = time.perf_counter()
    with hal.allocate(plan) as lease:
        seconds = time.perf_counter() - clock
        say("storing, gathering, attending and checking")
        groups = exercise(lease)
        faults = lease.counters()
        taken = Allocation(_storage_bytes(lease), lease.asked_bytes - plan.nbytes, seconds)
        say("closing the cache")
    assert lease.release is not None
    has_opaque = any(isinstance(s, OpaqueStore) for g in plan.spec.groups for s in g.stores)
    return RunReport(
        deployment=str(deployment.path),
        platform=PlatformFound(hal.platform.name, hal.reason, hal.device, found, _kernels(hal, plan)),
        decisions=decision.decisions,
        profile=profile,
        budget=sized,
        blocks_from=blocks_from,
        plan=plan_bytes(plan),
        allocation=taken,
        groups=groups,
        not_run=(table.operation("attend_opaque", hal.device.arch),) if has_opaque else (),
        checks=(
            *(check for group in groups for check in group.checks),
            *_byte_checks(plan, taken),
            Check("counters", "cache", faults.nonfinite_rows + faults.rejected_slots, 0, "faults", _COUNTED),
            _release_check("trial cache", profile.measured.release),
            _release_check("cache", lease.release),
        ),
        release=lease.release,
        seconds=time.perf_counter() - started,
    )


_COUNTED = "rows with NaN or inf and refused slots, counted by the kernels"


def _quiet(_message: str) -> None:
    """No progress is shown."""


def _kernels(hal: Hal, plan: Plan) -> tuple[str, ...]:
    return tuple(dict.fromkeys(hal.platform.kernels(mode, hal.device.arch).name for mode in plan.spec.modes))


def _profile(hal: Hal, trial: Plan, rounds: int) -> ProfileRun:
    free, tensors = hal.memory().free, tensor_bytes(trial)
    if isinstance(free, Known) and trial.total_bytes + tensors > free.value:
        raise BudgetError(
            f"profiling asks for {trial.total_bytes + tensors} bytes ({trial.nbytes} trial cache + "
            f"{trial.workspace_bytes} workspace + {tensors} k, v, q and output) and {free.value} are free "
            f"({free.source}); lower profile.blocks, memory.max_seqs or memory.max_tokens"
        )
    measured = hal.platform.profile(lambda lease: workload(lease, rounds), trial, hal.device)
    peak, ours = measured.reading("workload").peak, trial.total_bytes
    if isinstance(peak, Known):
        # The budget counts the cache and the workspace by themselves.
        peak = Known(max(0, peak.value - ours), f"{peak.source} less the trial")
    blocks = max(g.num_blocks for g in trial.layout.groups)
    shape = trial.step
    return ProfileRun(blocks, rounds, shape.max_tokens, shape.max_seqs, trial.workspace_bytes, peak, measured)


def _size(deployment: Deployment, trial: Plan, profile: ProfileRun) -> tuple[Budget, int, str]:
    """The budget, the number of blocks and what set it. Raises BudgetError with every term if they do not fit."""
    memory, layout = deployment.memory, trial.layout
    readings = BudgetReadings(
        start=profile.measured.reading("baseline"),
        after=profile.measured.reading("released"),
        peak_bytes=profile.peak_bytes,
        workspace_bytes=trial.workspace_bytes,
    )
    found = budget(readings, BudgetPolicy(memory.fraction, memory.reserve, memory.bytes))
    if memory.blocks is not None:
        check_blocks(memory.blocks, found.cache_bytes, layout.fixed_bytes, layout.block_bytes)
        return found, memory.blocks, "memory.blocks"
    blocks = blocks_that_fit(found.cache_bytes, layout.fixed_bytes, layout.block_bytes)
    return found, blocks, "memory.bytes" if memory.bytes is not None else "the budget"


def _storage_bytes(lease: CacheLease) -> int:
    return lease.cache_tensor().untyped_storage().nbytes()


def _byte_checks(plan: Plan, taken: Allocation) -> tuple[Check, Check]:
    both = (("cache", plan.nbytes, taken.cache_bytes), ("steps", plan.workspace_bytes, taken.workspace_bytes))
    cache, steps = (
        Check("planned = allocated", of, abs(found - asked), 0, "bytes", f"planned {asked:,}, allocated {found:,}")
        for of, asked, found in both
    )
    return cache, steps


def _release_check(subject: str, release: Release) -> Check:
    missing = release.asked - release.returned + release.pinned
    why = f"missing: {release.returned:,} of {release.asked:,} returned, {len(release.holders)} holders"
    return Check("released", subject, missing, 0, "bytes", why)

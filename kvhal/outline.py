"""What can be said of a deployment without a device: its target, its decisions and every byte. No torch.

`kvhal plan` and `kvhal explain` show these values; `kvhal run` starts from the same functions.
"""

from __future__ import annotations

import os
import platform as this_machine
from dataclasses import dataclass, replace
from typing import TypedDict

from kvhal import modes, policy
from kvhal.budget import blocks_that_fit, check_blocks
from kvhal.capability import CapabilityTable
from kvhal.cells import Operation, Shapes
from kvhal.config import Deployment
from kvhal.decision import Decision, OnUnsupported, Policy
from kvhal.errors import ConfigError
from kvhal.kernels.workspace import attend_workspace_bytes
from kvhal.plan import Plan, make_plan
from kvhal.plan_bytes import PlanBytes, plan_bytes
from kvhal.registry import CPU, requested_platform
from kvhal.spec import CacheGroup, CacheSpec, ScaledStore, Store
from kvhal.tables import capability_table

__all__ = ["Explanation", "Outline", "Target", "explain", "outline", "plan_options", "policy_of", "spec_on", "target"]

_ARCH_TOKENS = {"amd64": "x86_64", "x64": "x86_64", "arm64": "aarch64"}


@dataclass(frozen=True, slots=True)
class Target:
    """The platform and arch that a question is about. chosen: why these two."""

    table: CapabilityTable
    arch: str
    chosen: str


@dataclass(frozen=True, slots=True)
class Outline:
    """A plan made without a device. blocks_from: what set the number of blocks.

    held_by_memory_bytes: the blocks an explicit memory.bytes holds, None if the deployment gives no bytes.
    """

    deployment: str
    platform: str
    arch: str
    chosen: str
    decisions: tuple[Decision, ...]
    blocks_from: str
    held_by_memory_bytes: int | None
    kernels: str
    plan: PlanBytes


@dataclass(frozen=True, slots=True)
class Explanation:
    """What a platform says of modes; `operations` only where no single mode was asked for."""

    platform: str
    arch: str
    chosen: str
    table: str
    decisions: tuple[Decision, ...]
    operations: tuple[Operation, ...]

    @property
    def is_accepted(self) -> bool:
        return not any(d.refused for d in self.decisions)


class PlanOptions(TypedDict):
    """What a deployment says beside spec and blocks, by the names of `make_plan`."""

    max_seqs: int
    max_tokens: int
    max_context: int
    layout: str
    order: str
    page_align: int
    addressing: str
    on_leak: str


def target(configured: str | None, platform: str | None, arch: str | None) -> Target:
    """What to answer for: `platform`, else KVHAL_PLATFORM or the deployment's, else the CPU; `arch`, else ours.

    Raises PlatformError for a platform without adapter, UnsupportedMode for an arch its table does not list,
    ConfigError where the arch must be given.
    """
    asked = platform or requested_platform(os.environ, configured)
    table = capability_table(asked or CPU)
    chosen = "--platform" if platform else "asked for" if asked else "default; --platform names another"
    if arch is not None:
        return Target(table, table.known_arch(arch, "an explanation"), chosen)
    machine = this_machine.machine()
    token = _ARCH_TOKENS.get(machine.lower(), machine)
    if token in table.archs:
        return Target(table, token, f"{chosen}; arch of this machine")
    if len(table.archs) == 1:
        return Target(table, table.archs[0], f"{chosen}; its only arch")
    raise ConfigError(
        f"platform {table.platform!r} has the archs {', '.join(table.archs)} and this machine ({token!r}) is none of "
        "them; say which with --arch"
    )


def policy_of(deployment: Deployment) -> Policy:
    """The deployment's `policy:` section as the rules read it."""
    given = deployment.policy
    return Policy(
        experimental=given.experimental == "allow",
        deny=given.deny,
        require_native=given.require.path == "native",
        on_unsupported=OnUnsupported(given.on_unsupported),
        fallback=given.fallback,
    )


def spec_on(deployment: Deployment, table: CapabilityTable, arch: str) -> CacheSpec:
    """The deployment's spec with every encoding it leaves open (null) as this arch stores that mode."""
    asked = {"k": deployment.cache.encoding.k, "v": deployment.cache.encoding.v}

    def store(found: Store) -> Store:
        if isinstance(found, ScaledStore) and asked[found.name] is None:
            return replace(found, encoding=table.cell(found.mode, arch).encoding)
        return found

    def group(found: CacheGroup) -> CacheGroup:
        return replace(found, stores=tuple(map(store, found.stores)))

    spec = deployment.spec()
    return replace(spec, groups=tuple(map(group, spec.groups)))


def plan_options(deployment: Deployment) -> PlanOptions:
    """The deployment's sizes and layout, for `make_plan` and `Hal.plan`."""
    memory, cache = deployment.memory, deployment.cache
    return PlanOptions(
        max_seqs=memory.max_seqs,
        max_tokens=memory.max_tokens,
        max_context=memory.max_context,
        layout=cache.layout,
        order=cache.order,
        page_align=cache.page_align,
        addressing=cache.addressing,
        on_leak=deployment.policy.on_leak,
    )


def outline(deployment: Deployment, at: Target, blocks: int | None = None) -> Outline:
    """Every byte of the deployment on a target, with the scratch of the reference kernels.

    blocks: as given, else memory.blocks, else what memory.bytes holds, else what a full batch needs. Raises
    UnsupportedMode for a refusal, BudgetError if `blocks` do not fit memory.bytes.
    """
    decision = policy.decide_spec(at.table, at.arch, spec_on(deployment, at.table, at.arch), policy_of(deployment))
    plan = make_plan(decision, 1, [attend_workspace_bytes], **plan_options(deployment))
    count, why, held = _blocks(deployment, plan, blocks)
    return Outline(
        deployment=str(deployment.path),
        platform=at.table.platform,
        arch=at.arch,
        chosen=at.chosen,
        decisions=decision.decisions,
        blocks_from=why,
        held_by_memory_bytes=held,
        kernels="reference",
        plan=plan_bytes(plan.with_blocks(count)),
    )


def explain(mode: str | None, at: Target, deployment: Deployment | None, head_dims: tuple[int, ...]) -> Explanation:
    """The decision for `mode`, else for the deployment's modes, else for every mode, under the deployment's policy.

    head_dims: checked against the limits of the row, in place of the deployment's shapes. Raises ConfigError for an
    unknown mode.
    """
    rules = Policy() if deployment is None else policy_of(deployment)
    if mode is None and deployment is not None and not head_dims:
        spec = spec_on(deployment, at.table, at.arch)
        decisions = policy.decide_spec(at.table, at.arch, spec, rules).decisions
    else:
        names = (mode,) if mode is not None else tuple(modes.MODES) if deployment is None else deployment.spec().modes
        shapes = Shapes(head_dims) if head_dims or deployment is None else _shapes(deployment.spec())
        decisions = tuple(policy.decide(at.table, at.arch, n, rules, shapes=shapes) for n in names)
    operations = () if mode is not None else tuple(_operations(at))
    return Explanation(at.table.platform, at.arch, at.chosen, at.table.source, decisions, operations)


def _shapes(spec: CacheSpec) -> Shapes:
    """The shapes of every scaled store, as if all were kept in the mode in question."""
    found = [Shapes.of(spec, name) for name in spec.modes]
    return Shapes(tuple({h for s in found for h in s.head_dims}), tuple({b for s in found for b in s.block_sizes}))


def _operations(at: Target) -> list[Operation]:
    return [found for (_, arch), found in at.table.operations.items() if arch == at.arch]


def _blocks(deployment: Deployment, one: Plan, asked: int | None) -> tuple[int, str, int | None]:
    """The number of blocks, what set it, and how many memory.bytes holds. one: the plan with one block."""
    memory, layout = deployment.memory, one.layout
    held = None
    if memory.bytes is not None:
        held = blocks_that_fit(memory.bytes, layout.fixed_bytes, layout.block_bytes)
    if asked is not None:
        if memory.bytes is not None:
            check_blocks(asked, memory.bytes, layout.fixed_bytes, layout.block_bytes)
        return asked, "--blocks", held
    if memory.blocks is not None:
        return memory.blocks, "memory.blocks", held
    if held is not None:
        return held, "memory.bytes", held
    return memory.max_seqs * one.step.max_blocks, "memory.max_seqs x memory.max_context, a full batch", held

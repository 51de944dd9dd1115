"""What can be said of a deployment without a device: its target and every byte of its plan. No torch.

`kvhal plan` shows these values; `kvhal explain` and `kvhal run` start from the same functions.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypedDict

from kvhal import policy
from kvhal.answers.plan_bytes import PlanBytes, plan_bytes
from kvhal.answers.target import Target
from kvhal.budget import blocks_that_fit, check_blocks
from kvhal.capability.table import CapabilityTable
from kvhal.capability.tables import tuning_file
from kvhal.capability.versions import Versions
from kvhal.config.deployment import Deployment
from kvhal.contract import KernelSet
from kvhal.decision import Decision, OnUnsupported, Policy, RequiredEvidence
from kvhal.kernels.triton.kernel_set import TRITON, TritonWorkspace
from kvhal.kernels.workspace import attend_workspace_bytes
from kvhal.plan import Plan, make_plan
from kvhal.spec import CacheGroup, CacheSpec, ScaledStore, Store
from kvhal.tune.overlay import tuning_in_use

__all__ = [
    "Outline",
    "outline",
    "plan_options",
    "policy_of",
    "spec_on",
]


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


def policy_of(deployment: Deployment) -> Policy:
    """The deployment's `policy:` section as the rules read it."""
    given = deployment.policy
    return Policy(
        experimental=given.experimental == "allow",
        deny=given.deny,
        require_native=given.require.path == "native",
        require_evidence=None if given.require.evidence == "any" else RequiredEvidence(given.require.evidence),
        on_unsupported=OnUnsupported(given.on_unsupported),
        fallback=given.fallback,
    )


def spec_on(deployment: Deployment, table: CapabilityTable, arch: str, versions: Versions | None = None) -> CacheSpec:
    """The deployment's spec with every encoding it leaves open (null) as this arch stores that mode."""
    at = versions or Versions()
    asked = {"k": deployment.cache.encoding.k, "v": deployment.cache.encoding.v}

    def store(found: Store) -> Store:
        if isinstance(found, ScaledStore) and asked[found.name] is None:
            return replace(found, encoding=table.cell(found.mode, arch, at).encoding)
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
    """Every byte of the deployment on a target, with the scratch of the kernels that its adapter will use.

    blocks: as given, else memory.blocks, else what memory.bytes holds, else what a full batch needs. Raises
    UnsupportedMode for a refusal, BudgetError if `blocks` do not fit memory.bytes.
    """
    spec = spec_on(deployment, at.table, at.arch, at.versions)
    decision = policy.decide_spec(at.table, at.arch, spec, policy_of(deployment), versions=at.versions)
    kernels = _kernels(at)
    plan = make_plan(decision, 1, [kernels.workspace_bytes], **plan_options(deployment))
    count, why, held = _blocks(deployment, plan, blocks)
    return Outline(
        deployment=str(deployment.path),
        platform=at.table.platform,
        arch=at.arch,
        chosen=at.chosen,
        decisions=decision.decisions,
        blocks_from=why,
        held_by_memory_bytes=held,
        kernels=kernels.name,
        plan=plan_bytes(plan.with_blocks(count)),
    )


def _kernels(at: Target) -> KernelSet:
    """The kernels of a target, as its adapter names them."""
    file = tuning_file(at.table.platform)
    if file is None:
        return KernelSet("reference", attend_workspace_bytes)
    return KernelSet("triton", TritonWorkspace(tuning_in_use(file, at.arch)), TRITON)


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

"""What `kvhal explain` says: the decision for a mode on any platform, with everything it rests on. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvhal import modes, policy
from kvhal.answers.target import Target
from kvhal.capability.cells import OPERATIONS, Cell, Operation, Shapes
from kvhal.capability.table import UnknownArch
from kvhal.capability.tables import capability_table, table_file
from kvhal.decision import Decision, Policy
from kvhal.spec import CacheSpec

if TYPE_CHECKING:
    from kvhal.config.deployment import Deployment

__all__ = ["Explanation", "NoRow", "explain", "no_row"]


@dataclass(frozen=True, slots=True)
class Explanation:
    """What a platform says of modes. cells: the row of each mode asked for, in the order of `decisions`.

    versions: those that are known, and from where ("given", "installed here"); a decision's `assumed` names those it
    depends on beside them. operations: only where no single mode was asked for.
    """

    platform: str
    arch: str
    chosen: str
    table: str
    versions: Mapping[str, str]
    sources: Mapping[str, str]
    decisions: tuple[Decision, ...]
    cells: tuple[Cell, ...]
    operations: tuple[Operation, ...]

    @property
    def is_accepted(self) -> bool:
        return not any(d.refused for d in self.decisions)


@dataclass(frozen=True, slots=True)
class NoRow:
    """What can be said of an arch that a table does not list. near: the arch to read about first, or None."""

    platform: str
    arch: str
    table: str
    file: str
    near: str | None
    known: tuple[str, ...]
    message: str


def explain(mode: str | None, at: Target, deployment: Deployment | None, shapes: Shapes | None = None) -> Explanation:
    """The decision for `mode`, else for the deployment's modes, else for every mode, under the deployment's policy.

    shapes: checked against the limits of the row; what it leaves open is the deployment's. Raises ConfigError for an
    unknown mode, UnknownVersion where the answer hangs on a version that is neither known nor assumed.
    """
    asked = shapes or Shapes()
    if deployment is None:
        names = tuple(modes.MODES) if mode is None else (mode,)
        decisions = _decide(at, names, Policy(), asked)
    else:
        decisions = _for_deployment(mode, at, deployment, asked)
    return Explanation(
        platform=at.table.platform,
        arch=at.arch,
        chosen=at.chosen,
        table=at.table.source,
        versions=at.versions.known,
        sources=at.sources,
        decisions=decisions,
        cells=tuple(at.table.cell(d.requested, at.arch, at.versions) for d in decisions),
        operations=() if mode is not None else _operations(at),
    )


def _for_deployment(mode: str | None, at: Target, deployment: Deployment, asked: Shapes) -> tuple[Decision, ...]:
    # Reading a deployment loads the planner; without one an answer takes half as long.
    from kvhal.answers.outline import policy_of, spec_on

    rules = policy_of(deployment)
    if mode is None and asked == Shapes():
        spec = spec_on(deployment, at.table, at.arch, at.versions)
        return policy.decide_spec(at.table, at.arch, spec, rules, versions=at.versions).decisions
    spec = deployment.spec()
    own = _shapes(spec)
    checked = Shapes(asked.head_dims or own.head_dims, asked.block_sizes or own.block_sizes)
    return _decide(at, spec.modes if mode is None else (mode,), rules, checked)


def _decide(at: Target, names: Iterable[str], rules: Policy, shapes: Shapes) -> tuple[Decision, ...]:
    return tuple(policy.decide(at.table, at.arch, n, rules, shapes=shapes, versions=at.versions) for n in names)


def _shapes(spec: CacheSpec) -> Shapes:
    """The shapes of every scaled store, as if all were kept in the mode in question."""
    found = [Shapes.of(spec, name) for name in spec.modes]
    return Shapes(tuple({h for s in found for h in s.head_dims}), tuple({b for s in found for b in s.block_sizes}))


def _operations(at: Target) -> tuple[Operation, ...]:
    return tuple(at.table.operation(name, at.arch, at.versions) for name in OPERATIONS)


def no_row(error: UnknownArch) -> NoRow:
    """What to tell somebody who asked about an arch that a platform's table does not list."""
    table, file = capability_table(error.platform), table_file(error.platform)
    return NoRow(table.platform, error.arch, table.source, str(file), error.near, table.archs, str(error))

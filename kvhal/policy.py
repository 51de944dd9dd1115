"""The capability table x a deployment's policy -> a decision, before anything is allocated.

A decision runs exactly the mode that was asked for, or refuses it with a rule, a reason and ways out, or falls back to
a mode that the policy itself lists. Rules are tried in this order: what the table says, `deny`, `require_native`,
`require_evidence`, `experimental`, the row's shape limits, the stored encoding.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace

from kvhal import modes
from kvhal.capability.cells import Cell, Path, Shapes, Support
from kvhal.capability.proof import Level, Status, verify_command
from kvhal.capability.table import CapabilityTable
from kvhal.capability.versions import UnknownVersion, Versions
from kvhal.decision import Action, Decision, OnUnsupported, Policy, RequiredEvidence, SpecDecision
from kvhal.errors import ConfigError
from kvhal.modes import MODES, Scaling
from kvhal.spec import CacheGroup, CacheSpec, ScaledStore, Store

__all__ = [
    "Action",
    "Decision",
    "OnUnsupported",
    "Policy",
    "RequiredEvidence",
    "SpecDecision",
    "decide",
    "decide_spec",
    "sources",
]

logger = logging.getLogger("kvhal")


@dataclass(frozen=True, slots=True)
class _Objection:
    """Why a mode is not accepted. remedy: the change that would lift it, "" if none does."""

    rule: str
    reason: str
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class _Question:
    """Everything a decision depends on beside the mode.

    spec: the cache the mode is part of, if there is one. versions: what is not known is as the table assumes it.
    """

    table: CapabilityTable
    arch: str
    policy: Policy
    shapes: Shapes
    spec: CacheSpec | None = None
    versions: Versions = Versions()  # noqa: RUF009  # frozen

    def cell(self, mode: str) -> Cell:
        return self.table.cell(mode, self.arch, self.versions)

    def objections(self, mode: str, encodings: tuple[str, ...] = ()) -> tuple[_Objection, ...]:
        return tuple(_objections(self.cell(mode), self.policy, self.shapes, encodings))

    def alternatives(self, mode: str) -> tuple[str, ...]:
        """Accepted modes: the row's own suggestions, then those closest in kind to what was asked."""
        # Static modes come last unless one was asked for: only then is there likely to be a calibrated scale.
        order = {
            Scaling.NONE: (Scaling.NONE, Scaling.ROW, Scaling.STATIC),
            Scaling.ROW: (Scaling.ROW, Scaling.NONE, Scaling.STATIC),
            Scaling.STATIC: (Scaling.ROW, Scaling.STATIC, Scaling.NONE),
        }[MODES[mode].scaling]
        ranked = sorted(MODES, key=lambda name: order.index(MODES[name].scaling))
        candidates = dict.fromkeys((*self.cell(mode).instead, *ranked))
        return tuple(n for n in candidates if n != mode and self.accepts(n) and self.makes_a_spec(mode, n))

    def accepts(self, mode: str) -> bool:
        """Whether it is known to run: a mode that hangs on an unknown version is not offered."""
        try:
            return not self.objections(mode)
        except UnknownVersion:
            return False

    def makes_a_spec(self, mode: str, name: str) -> bool:
        """Whether `name` in the place of `mode` leaves a valid spec; it may lack the scales."""
        if self.spec is None:
            return True
        try:
            _swapped(self.spec, {mode: (name, self.cell(name).encoding)})
        except ConfigError:
            return False
        return True

    def ways_out(self, alternatives: tuple[str, ...], objections: tuple[_Objection, ...]) -> tuple[str, ...]:
        ways = []
        if alternatives:
            ways.append(f"use {', '.join(self.labelled(name) for name in alternatives)}")
        # One change is enough only if it lifts the only objection: all are named, or none if one cannot be lifted.
        if all(o.remedy for o in objections):
            ways.append(" and ".join(dict.fromkeys(o.remedy for o in objections)))
        nothing = "use another platform: this one accepts no other mode under the same policy and shapes"
        return tuple(ways) or (nothing,)

    def labelled(self, name: str) -> str:
        """The mode with what it needs to be accepted as it was checked."""
        stored = self.cell(name).encoding
        encoding = f" stored as {stored!r}" if stored != MODES[name].encodings[0] else ""
        scales = " with calibrated k_scale and v_scale" if MODES[name].scaling is Scaling.STATIC else ""
        return f"{name!r}{encoding}{scales}"


def _objections(cell: Cell, policy: Policy, shapes: Shapes, encodings: tuple[str, ...]) -> Iterator[_Objection]:
    said = f"{cell.support.value}: {cell.reason}{sources(cell)}"
    if not cell.support.is_accepted:
        yield _Objection(cell.rule, said)
    if cell.mode in policy.deny:
        yield _Objection("policy.deny", f"the policy denies {cell.mode!r}", f"take {cell.mode!r} out of policy.deny")
    found_path = cell.path_of(encodings or (cell.encoding,))
    if policy.require_native and found_path is not Path.NATIVE and cell.support.is_accepted:
        path = "none" if found_path is None else found_path.value
        found = f"the policy requires a native path and this one is {path} ({cell.rule})"
        yield _Objection("policy.require.path", found, "set policy.require.path to any")
    if policy.require_evidence is not None and cell.support.is_accepted and not _is_proved(cell, policy):
        wanted = policy.require_evidence.value
        found = f"the policy requires {wanted} evidence and there is: {cell.proof.summary}"
        remedy = f"prove it with {verify_command(cell.mode, cell.arch)}"
        yield _Objection("policy.require.evidence", found, remedy)
    if cell.support is Support.EXPERIMENTAL and not policy.experimental:
        found = f"it needs an opt-in ({cell.rule}: {said})"
        prove = f", or prove it with {cell.proof.settle}" if cell.proof.settle else ""
        yield _Objection("policy.experimental", found, f"opt in with policy.experimental: allow{prove}")
    if problem := cell.shape_problem(shapes):
        yield _Objection(cell.rule, f"outside the limits of the row: {problem}")
    for encoding in encodings:
        if encoding not in cell.encodings:
            found = f"it was to be stored as {encoding!r} and {cell.arch!r} stores it as {', '.join(cell.encodings)}"
            yield _Objection(cell.rule, found, f"set its encoding to {cell.encoding!r}")


def _is_proved(cell: Cell, policy: Policy) -> bool:
    """Whether the cell's evidence is what the policy requires."""
    if cell.proof.level is not Level.HARDWARE:
        return False
    if policy.require_evidence is RequiredEvidence.CURRENT:
        return cell.proof.status is Status.CURRENT
    return cell.proof.has_passed


def sources(cell: Cell) -> str:
    """What a row rests on, in brackets, as reasons end with it; "" if it names nothing."""
    shown = (*((f"evidence {cell.evidence}",) if cell.evidence else ()), *cell.links)
    return f" ({', '.join(shown)})" if shown else ""


def decide(
    table: CapabilityTable,
    arch: str,
    mode: str,
    policy: Policy,
    *,
    shapes: Shapes | None = None,
    versions: Versions | None = None,
) -> Decision:
    """What happens to `mode` on `arch`; a fallback is logged as one warning. versions: of what is installed.

    Raises ConfigError for an unknown mode, UnsupportedMode for an arch that the table does not list, UnknownVersion if
    the answer depends on a version that is neither given nor assumed by the table.
    """
    token = table.known_arch(arch, f"mode {mode!r}")
    question = _Question(table, token, policy, shapes or Shapes(), versions=versions or Versions())
    decision = _decide(question, modes.mode(mode).name, ())
    _log(decision)
    return decision


def _decide(question: _Question, mode: str, encodings: tuple[str, ...]) -> Decision:
    cell = question.cell(mode)
    objections = question.objections(mode, encodings)
    accepted = Decision(
        requested=mode,
        effective=mode,
        action=Action.RUN,
        rule=cell.rule,
        reason=cell.reason,
        alternatives=(),
        platform=question.table.platform,
        arch=question.arch,
        path=cell.path_of(encodings or (cell.encoding,)),
        encoding=cell.encoding,
        support=cell.support,
        links=cell.links,
        when=str(cell.when) if cell.when.texts else "",
        assumed=cell.assumed,
        proof=cell.proof,
    )
    if not objections:
        return accepted
    first, alternatives = objections[0], question.alternatives(mode)
    refused = replace(
        accepted,
        effective=None,
        action=Action.REFUSE,
        rule=first.rule,
        reason=first.reason,
        alternatives=alternatives,
        ways_out=question.ways_out(alternatives, objections),
    )
    match question.policy.on_unsupported:
        case OnUnsupported.ERROR:
            return refused
        case OnUnsupported.FALLBACK:
            return _fall_back(question, refused)


def _fall_back(question: _Question, refused: Decision) -> Decision:
    """The first listed mode that is accepted, or the refusal with why each listed one is not."""
    tried: list[str] = []
    for name in question.policy.fallback:
        if name == refused.requested:
            continue
        try:
            objections = question.objections(name)
        except UnknownVersion as exc:
            tried.append(f"{name!r} ({exc})")
            continue
        if objections:
            tried.append(f"{name!r} ({objections[0].rule}: {objections[0].reason})")
            continue
        cell = question.cell(name)
        why = f"{refused.requested!r} is refused by {refused.rule}: {refused.reason}"
        return replace(
            refused,
            effective=name,
            action=Action.FALLBACK,
            reason=f"{why}; policy.fallback takes {name!r} in its place ({cell.rule})",
            path=cell.path_of((cell.encoding,)),
            encoding=cell.encoding,
            support=cell.support,
            proof=cell.proof,
        )
    also = f"; no mode of policy.fallback is accepted either: {', '.join(tried)}" if tried else ""
    return replace(refused, reason=refused.reason + also)


def decide_spec(
    table: CapabilityTable, arch: str, spec: CacheSpec, policy: Policy, *, versions: Versions | None = None
) -> SpecDecision:
    """What happens to every mode of `spec` on `arch`, shapes and encodings included; fallbacks are logged.

    Raises as `decide` does, and ConfigError if a declared fallback makes no valid spec (a static mode without scales).
    """
    token = table.known_arch(arch, f"a cache of {', '.join(repr(m) for m in spec.modes) or 'opaque stores'}")
    at = versions or Versions()
    decisions = tuple(
        _decide_in(_Question(table, token, policy, Shapes.of(spec, m), spec, at), spec, m) for m in spec.modes
    )
    if any(d.refused for d in decisions):
        return SpecDecision(spec, decisions, None)
    swaps = {d.requested: (d.effective, d.encoding) for d in decisions if d.effective is not None and _fell_back(d)}
    effective = _swapped(spec, swaps)
    for decision in decisions:
        _log(decision)
    return SpecDecision(spec, decisions, effective)


def _fell_back(decision: Decision) -> bool:
    return decision.action is Action.FALLBACK


def _decide_in(question: _Question, spec: CacheSpec, mode: str) -> Decision:
    stores = [s for g in spec.groups for s in g.stores if isinstance(s, ScaledStore) and s.mode == mode]
    encodings = tuple(dict.fromkeys(s.encoding for s in stores))
    decision = _decide(question, mode, encodings)
    return decision if _fell_back(decision) else replace(decision, encoding=", ".join(encodings))


def _swapped(spec: CacheSpec, swaps: dict[str, tuple[str, str]]) -> CacheSpec:
    """`spec` with modes replaced, stored as the arch stores them. Raises ConfigError if the scales do not serve it."""
    if not swaps:
        return spec
    swapped = spec.with_modes({mode: name for mode, (name, _) in swaps.items()})

    def stored(old: Store, new: Store) -> Store:
        if isinstance(old, ScaledStore) and isinstance(new, ScaledStore) and old.mode in swaps:
            return replace(new, encoding=swaps[old.mode][1])
        return new

    def group(old: CacheGroup, new: CacheGroup) -> CacheGroup:
        return replace(new, stores=tuple(map(stored, old.stores, new.stores)))

    effective = replace(swapped, groups=tuple(map(group, spec.groups, swapped.groups)))
    for store in (s for g in effective.groups for s in g.stores if isinstance(s, ScaledStore)):
        if store.mode_.scaling is Scaling.STATIC and effective.static_scales is not None:
            effective.static_scales.for_encoding(store.name, store.encoding)
    return effective


def _log(decision: Decision) -> None:
    if not decision.refused and decision.proof.status is Status.STALE:
        logger.warning(
            "mode %r on %s runs on stale evidence: %s", decision.effective, decision.arch, decision.proof,
            extra={"kvhal_event": "evidence.stale", "mode": decision.effective, "source": decision.proof.source},
        )  # fmt: skip
    if not _fell_back(decision):
        return
    logger.warning(
        "%s",
        decision.message,
        extra={
            "kvhal_event": "fallback",
            "requested": decision.requested,
            "effective": decision.effective,
            "rule": decision.rule,
            "reason": decision.reason,
            "platform": decision.platform,
            "arch": decision.arch,
        },
    )

"""What the table does not accept is refused with its reason, before a byte is taken."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvhal.capability.cells import Cell
from kvhal.capability.proof import UNPROVED
from kvhal.decision import Policy, RequiredEvidence, SpecDecision
from kvhal.errors import UnsupportedMode
from kvhal.modes import MODES, Scaling
from kvhal.policy import decide_spec
from kvhal.spec import CacheSpec
from kvhal.testing.cases import K_SCALE, OPT_IN, SHAPES, V_SCALE, Claim, Subject


def spec_of(mode: str, head_dim: int = 64) -> CacheSpec:
    scaled = MODES[mode].scaling is Scaling.STATIC
    return CacheSpec.uniform(
        mode=mode,
        num_layers=1,
        num_kv_heads=2,
        head_dim=head_dim,
        k_scale=K_SCALE if scaled else None,
        v_scale=V_SCALE if scaled else None,
    )


@pytest.mark.usefixtures("no_byte")
def test_a_mode_that_is_not_accepted_refuses_with_its_reason(refusal: Cell, subject: Subject) -> None:
    spec = spec_of(refusal.mode)
    decision = subject.hal.decide(spec, OPT_IN)
    assert decision.refused
    (said,) = decision.decisions
    assert said.rule == refusal.rule
    assert refusal.reason
    assert refusal.reason in said.reason
    assert said.ways_out
    for ask in (decision.raise_if_refused, lambda: subject.hal.plan(spec, 2, policy=OPT_IN)):
        with pytest.raises(UnsupportedMode) as caught:
            ask()
        assert refusal.reason in str(caught.value)


@pytest.mark.usefixtures("no_byte")
def test_allocate_refuses_even_a_plan_made_by_hand(refusal: Cell, subject: Subject) -> None:
    spec = spec_of(refusal.mode)
    other = replace(subject, modes=()).claims()[0]
    plan = replace(other.plan(), decision=subject.hal.decide(spec, OPT_IN))
    with pytest.raises(UnsupportedMode):
        subject.hal.allocate(plan)


@pytest.mark.usefixtures("no_byte")
def test_an_encoding_that_is_not_listed_is_refused(accepted: Claim) -> None:
    for encoding in (e for e in MODES[accepted.cell.mode].encodings if e not in accepted.cell.encodings):
        with pytest.raises(UnsupportedMode, match=encoding):
            accepted.hal.plan(replace(accepted, encoding=encoding).spec(), 2, policy=OPT_IN)


@pytest.mark.usefixtures("no_byte")
def test_a_shape_outside_the_limits_is_refused(accepted: Claim) -> None:
    limits = accepted.cell.head_dim
    outside = [] if limits.max is None else [limits.max + 8 - limits.max % 8]
    outside += [] if limits.multiple_of is None or limits.multiple_of <= 8 else [limits.multiple_of + 8]
    for head_dim in outside:
        spec = accepted.spec(replace(SHAPES[0], head_dim=head_dim, head_dim_v=head_dim))
        with pytest.raises(UnsupportedMode, match=f"head_dim {head_dim}"):
            accepted.hal.plan(spec, 2, policy=OPT_IN)


@pytest.mark.usefixtures("no_byte")
def test_a_policy_can_always_narrow(accepted: Claim) -> None:
    denied = Policy(experimental=True, deny=(accepted.cell.mode,))
    with pytest.raises(UnsupportedMode, match=r"policy\.deny"):
        accepted.hal.plan(accepted.spec(), 2, policy=denied)
    required = Policy(experimental=True, require_evidence=RequiredEvidence.CURRENT)
    bare = replace(accepted.subject.table, mode_rows=_unproved(accepted))
    decision = decide_spec(
        bare, accepted.hal.device.arch, accepted.spec(), required, versions=accepted.subject.versions
    )
    assert isinstance(decision, SpecDecision)
    assert [d.rule for d in decision.decisions] == ["policy.require.evidence"]


def _unproved(claim: Claim) -> dict[tuple[str, str], tuple[Cell, ...]]:
    rows = claim.subject.table.mode_rows
    return {key: tuple(replace(c, proof=UNPROVED) for c in cells) for key, cells in rows.items()}

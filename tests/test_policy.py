"""A mode runs as asked, or is refused with ways out that hold, or falls back to what is listed; never silently."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path as FilePath

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvhal.capability.table import CapabilityTable, Path, Shapes, Support
from kvhal.errors import ConfigError, UnsupportedMode
from kvhal.modes import MODES, Scaling
from kvhal.policy import Action, Decision, OnUnsupported, Policy, decide, decide_spec
from kvhal.spec import CacheGroup, CacheSpec, OpaqueStore

CPU = CapabilityTable.load(FilePath(__file__).parent.parent / "platforms" / "kvhal_cpu" / "capabilities.yaml")

# One arch that runs fp8 natively as FNUZ, one that never can and has limits, one where nothing quantized works.
TABLE = CapabilityTable.from_text(
    """\
platform: fake
archs: [gfx942, sm_80, old]
modes:
  - {archs: all, modes: [bfloat16, float16], support: run, path: native}
  - {archs: [gfx942], modes: [fp8_e4m3, fp8_per_token_head], support: run, path: native, encoding: e4m3fnuz}
  - {archs: [gfx942], modes: [fp8_e5m2], support: run, path: native, encoding: e5m2fnuz}
  - {archs: [sm_80], modes: [fp8_e4m3, fp8_e5m2, fp8_per_token_head], support: refused, reason: no fp8 conversion, instead: [int8_per_token_head], links: [issue 12]}
  - {archs: [gfx942], modes: [int8_per_token_head, int4_per_token_head], support: experimental, path: emulated, reason: not measured}
  - {archs: [sm_80], modes: [int8_per_token_head], support: run, path: emulated, head_dim: {max: 256}}
  - {archs: [sm_80], modes: [int4_per_token_head], support: broken, path: emulated, reason: no kernel yet}
  - {archs: [old], modes: [fp8_e4m3, fp8_e5m2, int8_per_token_head, fp8_per_token_head, int4_per_token_head], support: refused, reason: too old}
operations:
  - {archs: all, operations: [release_visibly, graph_memory_profiling, expandable_segments, virtual_memory_remap, peer_copy], support: run}
  - {archs: all, operations: [attend_opaque, alibi, tree_mask, cross_attention], support: refused, reason: not here}
""",  # noqa: E501 - one row a line, so that a rule's line can be counted
    "fake.yaml",
)
ARCHS = {"gfx942": TABLE, "sm_80": TABLE, "old": TABLE, "x86_64": CPU, "aarch64": CPU}
DEFAULT = Policy()


def fall_back_to(*modes: str) -> Policy:
    return Policy(on_unsupported=OnUnsupported.FALLBACK, fallback=modes)


def spec(mode: str | tuple[str, str], *, head_dim: int = 128, encoding: str | None = None) -> CacheSpec:
    names = (mode, mode) if isinstance(mode, str) else mode
    static = [name for name in names if MODES[name].scaling is Scaling.STATIC]
    return CacheSpec.uniform(
        mode=mode,
        num_layers=2,
        num_kv_heads=2,
        head_dim=head_dim,
        encoding=encoding,
        k_scale=0.5 if names[0] in static else None,
        v_scale=0.5 if names[1] in static else None,
    )


def message(decision: Decision) -> str:
    with pytest.raises(UnsupportedMode) as caught:
        decision.raise_if_refused()
    return str(caught.value)


def test_an_accepted_mode_runs_as_asked() -> None:
    found = decide(TABLE, "gfx942:sramecc+", "fp8", DEFAULT)
    assert (found.requested, found.effective, found.action) == ("fp8_e4m3", "fp8_e4m3", Action.RUN)
    assert (found.arch, found.path, found.encoding, found.rule) == ("gfx942", Path.NATIVE, "e4m3fnuz", "fake.yaml:5")
    found.raise_if_refused()


def test_a_refusal_says_what_was_asked_what_was_found_and_what_to_do() -> None:
    found = decide(TABLE, "sm_80", "fp8_per_token_head", DEFAULT)
    assert (found.action, found.effective, found.rule) == (Action.REFUSE, None, "fake.yaml:7")
    assert found.alternatives == ("int8_per_token_head", "bfloat16", "float16")
    text = message(found)
    for part in (
        "'fp8_per_token_head' was asked",
        "platform 'fake', arch 'sm_80'",
        "fake.yaml:7: refused: no fp8 conversion (issue 12)",
        "use 'int8_per_token_head', 'bfloat16', 'float16'",
    ):
        assert part in text
    assert "policy" not in text  # no opt-in would help


def test_a_broken_mode_is_refused_even_when_opted_in() -> None:
    found = decide(TABLE, "sm_80", "int4_per_token_head", Policy(experimental=True))
    assert (found.refused, found.support, found.reason) == (True, Support.BROKEN, "broken: no kernel yet")


def test_no_opt_in_is_named_where_none_would_be_enough() -> None:
    text = message(decide(TABLE, "sm_80", "fp8", Policy(deny=("fp8",))))
    assert "policy.deny" not in text


def test_an_experimental_mode_needs_an_opt_in_and_both_remedies_are_named() -> None:
    found = decide(TABLE, "gfx942", "int8_per_token_head", DEFAULT)
    assert (found.refused, found.rule) == (True, "policy.experimental")
    text = message(found)
    assert "use 'fp8_per_token_head' stored as 'e4m3fnuz'" in text
    assert "or opt in with policy.experimental: allow" in text
    opted = decide(TABLE, "gfx942", "int8_per_token_head", Policy(experimental=True))
    assert (opted.action, opted.support) == (Action.RUN, Support.EXPERIMENTAL)


def test_every_change_that_is_needed_is_named() -> None:
    found = decide(TABLE, "gfx942", "int8_per_token_head", Policy(deny=("int8_per_token_head",), require_native=True))
    assert found.rule == "policy.deny"
    assert found.ways_out[-1] == (
        "take 'int8_per_token_head' out of policy.deny and set policy.require.path to any "
        "and opt in with policy.experimental: allow"
    )


@pytest.mark.parametrize(
    ("arch", "mode", "policy", "head_dim", "rule"),
    [
        ("sm_80", "fp8_e4m3", Policy(deny=("fp8",), require_native=True), 128, "fake.yaml:7"),
        (
            "sm_80",
            "int8_per_token_head",
            Policy(deny=("int8_per_token_head",), require_native=True),
            512,
            "policy.deny",
        ),
        ("sm_80", "int8_per_token_head", Policy(require_native=True), 512, "policy.require.path"),
        ("gfx942", "int4_per_token_head", Policy(require_native=True), 128, "policy.require.path"),
        ("gfx942", "int4_per_token_head", Policy(), 128, "policy.experimental"),
        ("sm_80", "int8_per_token_head", Policy(), 512, "fake.yaml:9"),
    ],
)
def test_rules_are_tried_in_order(arch: str, mode: str, policy: Policy, head_dim: int, rule: str) -> None:
    assert decide(TABLE, arch, mode, policy, shapes=Shapes((head_dim,), (16,))).rule == rule


def test_a_shape_outside_the_limits_is_refused_before_any_kernel() -> None:
    text = message(decide(TABLE, "sm_80", "int8_per_token_head", DEFAULT, shapes=Shapes((80, 512), (16,))))
    assert "arch 'sm_80': refused by fake.yaml:9: outside the limits of the row: head_dim 512 is above 256" in text


def test_rows_with_their_own_scales_are_suggested_first_for_a_quantized_mode() -> None:
    found = decide(CPU, "x86_64", "fp8", Policy(deny=("fp8",)))
    scalings = [MODES[name].scaling for name in found.alternatives]
    assert scalings == [Scaling.ROW] * 3 + [Scaling.STATIC] + [Scaling.NONE] * 2
    assert "'fp8_e5m2' with calibrated k_scale and v_scale" in message(found)


def test_a_refusal_without_any_alternative_says_so() -> None:
    assert "use another platform" in message(decide(TABLE, "old", "fp8", Policy(deny=("bfloat16", "float16"))))


def test_a_fallback_happens_only_if_the_policy_says_so_and_lists_it() -> None:
    listed = Policy(fallback=("bfloat16",))
    assert decide(TABLE, "old", "fp8", listed).refused
    found = decide(TABLE, "old", "fp8", fall_back_to("int8_per_token_head", "half", "bf16"))
    assert (found.action, found.requested, found.effective) == (Action.FALLBACK, "fp8_e4m3", "float16")
    assert (found.rule, found.path, found.support) == ("fake.yaml:11", Path.NATIVE, Support.RUN)
    assert "'fp8_e4m3' is refused by fake.yaml:11: refused: too old" in found.reason
    assert "policy.fallback takes 'float16'" in found.reason
    found.raise_if_refused()


def test_a_fallback_that_is_not_accepted_either_is_explained() -> None:
    text = message(decide(TABLE, "old", "fp8", fall_back_to("int8_per_token_head", "fp8")))
    assert (
        "no mode of policy.fallback is accepted either: 'int8_per_token_head' (fake.yaml:11: refused: too old)" in text
    )


def test_a_fallback_is_one_structured_warning(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="kvhal")
    decide_spec(TABLE, "old", spec("int8_per_token_head"), fall_back_to("bf16"))
    (record,) = caplog.records
    assert (record.name, record.levelname) == ("kvhal", "WARNING")
    found = vars(record)
    assert (found["kvhal_event"], found["requested"], found["effective"]) == (
        "fallback",
        "int8_per_token_head",
        "bfloat16",
    )
    caplog.clear()
    decide(TABLE, "old", "fp8", fall_back_to("bf16"))
    decide(TABLE, "old", "fp8", DEFAULT)
    decide(TABLE, "old", "bf16", fall_back_to("half"))
    assert len(caplog.records) == 1


def test_a_spec_is_planned_as_asked_or_after_a_declared_fallback() -> None:
    asked = spec(("int8_per_token_head", "bfloat16"))
    assert decide_spec(TABLE, "sm_80", asked, DEFAULT).effective_spec is asked
    found = decide_spec(TABLE, "old", asked, fall_back_to("float16"))
    assert [(d.requested, d.effective) for d in found.decisions] == [
        ("int8_per_token_head", "float16"),
        ("bfloat16", "bfloat16"),
    ]
    assert found.effective_spec == spec(("float16", "bfloat16"))


def test_a_refused_spec_raises_with_every_refused_mode() -> None:
    found = decide_spec(TABLE, "old", spec(("int8_per_token_head", "int4_per_token_head")), DEFAULT)
    assert found.refused
    for ask in (found.raise_if_refused, lambda: found.effective_spec):
        with pytest.raises(
            UnsupportedMode, match=r"(?s)'int8_per_token_head' was asked.*'int4_per_token_head' was asked"
        ):
            ask()


def test_an_encoding_that_the_arch_does_not_store_is_refused_by_both_names() -> None:
    found = decide_spec(TABLE, "gfx942", spec("fp8_per_token_head"), DEFAULT)
    with pytest.raises(
        UnsupportedMode, match=r"'e4m3fn' and 'gfx942' stores it as e4m3fnuz.*set its encoding to 'e4m3fnuz'"
    ):
        found.raise_if_refused()
    kept = decide_spec(TABLE, "gfx942", spec("fp8_per_token_head", encoding="e4m3fnuz"), DEFAULT)
    assert (kept.refused, kept.decisions[0].encoding) == (False, "e4m3fnuz")
    assert decide_spec(CPU, "x86_64", spec("fp8_per_token_head", encoding="e4m3fnuz"), DEFAULT).decisions[
        0
    ].encoding == ("e4m3fnuz")


def test_a_fallback_is_stored_as_the_arch_stores_it() -> None:
    found = decide_spec(TABLE, "gfx942", spec("int8_per_token_head"), fall_back_to("fp8_per_token_head"))
    assert found.effective_spec == spec("fp8_per_token_head", encoding="e4m3fnuz")


def test_a_fallback_to_static_scales_without_any_is_an_error() -> None:
    with pytest.raises(ConfigError, match="needs a calibrated k_scale"):
        decide_spec(TABLE, "gfx942", spec("int8_per_token_head"), fall_back_to("fp8"))


def test_scales_calibrated_for_another_format_do_not_serve_a_fallback() -> None:
    asked = CacheSpec.uniform(
        mode="fp8",
        num_layers=1,
        num_kv_heads=1,
        head_dim=64,
        k_scale=1.0,
        v_scale=1.0,
        scales_encoding="e4m3fn",
    )
    denied = Policy(deny=("fp8",), on_unsupported=OnUnsupported.FALLBACK, fallback=("fp8_e5m2",))
    with pytest.raises(ConfigError, match="calibrated for 'e4m3fn' cannot serve"):
        decide_spec(CPU, "x86_64", asked, denied)
    assert "fp8_e5m2" not in decide_spec(CPU, "x86_64", asked, Policy(deny=("fp8",))).decisions[0].alternatives


def test_a_cache_of_opaque_stores_has_nothing_to_refuse() -> None:
    latent = CacheSpec((CacheGroup("mla", (0,), 16, (OpaqueStore("latent", "bfloat16", (576,)),)),))
    found = decide_spec(TABLE, "old", latent, DEFAULT)
    assert (found.decisions, found.effective_spec) == ((), latent)


def test_an_unknown_arch_is_refused_whatever_the_policy_lists() -> None:
    for ask in (decide, decide_spec):
        what = "bfloat16" if ask is decide else spec("bfloat16")
        with pytest.raises(UnsupportedMode, match="no row for arch 'gfx90a'"):
            ask(TABLE, "gfx90a", what, fall_back_to("bfloat16"))  # type: ignore[arg-type]  # each gets its own
    with pytest.raises(ConfigError, match="mode 'fp9' is unknown"):
        decide(TABLE, "old", "fp9", fall_back_to("bfloat16"))


def test_a_policy_names_modes_canonically_and_every_problem_together() -> None:
    policy = Policy(deny=("fp8", "fp8_e4m3", "half"), fallback=("bf16",))
    assert (policy.deny, policy.fallback) == (("fp8_e4m3", "float16"), ("bfloat16",))
    with pytest.raises(ConfigError) as caught:
        Policy(deny=("fp9",), fallback=("int3",))
    assert [str(p)[:30] for p in caught.value.problems] == [
        "policy.deny: mode 'fp9' is unk",
        "policy.fallback: mode 'int3' i",
    ]
    with pytest.raises(ConfigError, match="lists no mode"):
        Policy(on_unsupported=OnUnsupported.FALLBACK)


def test_a_policy_of_the_wrong_types_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"policy.experimental is 'forbid'"):
        Policy(experimental="forbid")  # type: ignore[arg-type]  # what an untyped caller may pass
    with pytest.raises(ConfigError, match=r"policy.deny is 'fp8'; it must be a list"):
        Policy(deny="fp8")  # type: ignore[arg-type]  # what an untyped caller may pass
    with pytest.raises(ConfigError, match="on_unsupported is 'fallback'"):
        Policy(on_unsupported="fallback")  # type: ignore[arg-type]  # what an untyped caller may pass


mode_lists = st.lists(st.sampled_from(sorted(MODES)), max_size=4, unique=True).map(tuple)
policies = st.builds(
    lambda experimental, deny, native, fallback, falls: Policy(
        experimental,
        deny,
        native,
        OnUnsupported.FALLBACK if falls and fallback else OnUnsupported.ERROR,
        fallback,
    ),
    st.booleans(),
    mode_lists,
    st.booleans(),
    mode_lists,
    st.booleans(),
)
head_dims = st.sampled_from([8, 64, 80, 96, 128, 256, 512])


@given(st.sampled_from(sorted(ARCHS)), st.sampled_from(sorted(MODES)), policies, head_dims)
def test_nothing_changes_the_mode_silently(arch: str, mode: str, policy: Policy, head_dim: int) -> None:
    table = ARCHS[arch]
    found = decide(table, arch, mode, policy, shapes=Shapes((head_dim,), (16,)))
    cell = table.cell(mode, arch)
    may_run = (
        cell.support in (Support.RUN, Support.EXPERIMENTAL)
        and (cell.support is Support.RUN or policy.experimental)
        and mode not in policy.deny
        and (cell.path is Path.NATIVE or not policy.require_native)
        and not (arch == "sm_80" and head_dim == 512 and mode == "int8_per_token_head")
    )
    assert found.requested == mode
    match found.action:
        case Action.RUN:
            assert may_run
            assert found.effective == mode
        case Action.FALLBACK:
            assert not may_run
            assert policy.on_unsupported is OnUnsupported.FALLBACK
            assert found.effective in policy.fallback
        case Action.REFUSE:
            assert not may_run
            assert found.effective is None
            assert found.reason
            assert found.ways_out


@given(st.sampled_from(sorted(ARCHS)), st.sampled_from(sorted(MODES)), policies, head_dims)
def test_every_suggestion_is_accepted_under_the_same_policy(
    arch: str, mode: str, policy: Policy, head_dim: int
) -> None:
    table, shapes = ARCHS[arch], Shapes((head_dim,), (16,))
    strict = replace(policy, on_unsupported=OnUnsupported.ERROR)
    found = decide(table, arch, mode, strict, shapes=shapes)
    for name in found.alternatives:
        assert decide(table, arch, name, strict, shapes=shapes).action is Action.RUN
    if found.action is Action.RUN:
        return
    everything = {m for m in MODES if decide(table, arch, m, strict, shapes=shapes).action is Action.RUN}
    assert set(found.alternatives) == everything


@given(st.sampled_from(sorted(ARCHS)), st.sampled_from(sorted(MODES)), policies, head_dims)
def test_every_suggestion_for_a_spec_makes_a_spec_that_is_accepted(
    arch: str, mode: str, policy: Policy, head_dim: int
) -> None:
    table = ARCHS[arch]
    strict = replace(policy, on_unsupported=OnUnsupported.ERROR)
    (decision,) = decide_spec(table, arch, spec(mode, head_dim=head_dim), strict).decisions
    for name in decision.alternatives:
        again = spec(name, head_dim=head_dim, encoding=table.cell(name, arch).encoding)
        assert not decide_spec(table, arch, again, strict).refused


@given(st.sampled_from(sorted(ARCHS)), st.sampled_from(sorted(MODES)), policies)
def test_an_opt_in_that_is_named_does_help(arch: str, mode: str, policy: Policy) -> None:
    found = decide(ARCHS[arch], arch, mode, replace(policy, on_unsupported=OnUnsupported.ERROR))
    named = " ".join(found.ways_out)
    wider = replace(
        policy,
        on_unsupported=OnUnsupported.ERROR,
        experimental=policy.experimental or "policy.experimental: allow" in named,
        require_native=policy.require_native and "set policy.require.path to any" not in named,
        deny=tuple(m for m in policy.deny if f"take {m!r} out of" not in named),
    )
    helps = decide(ARCHS[arch], arch, mode, wider).action is Action.RUN
    assert helps == (found.action is Action.RUN or "policy." in named)

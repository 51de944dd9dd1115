"""Rows may hold at some versions only; then exactly one answers at each, and an unknown version is never guessed."""

from __future__ import annotations

import pytest

from kvhal.capability.table import CapabilityTable, Support, UnknownVersion, Versions
from kvhal.errors import ConfigError, UnsupportedMode
from kvhal.policy import Action, OnUnsupported, Policy, decide, decide_spec
from kvhal.spec import CacheSpec

# Line 1 is `platform`; rows of modes stand at lines 4 to 8, of operations at 10 to 12.
FAKE = """\
platform: fake
archs: [gfx906, gfx942]
modes:
  - {archs: all, modes: [bfloat16, float16, int4_per_token_head, fp8_e5m2], support: run, path: native}
  - {archs: [gfx942], modes: [int8_per_token_head, fp8_e4m3, fp8_per_token_head], support: run, path: native}
  - {archs: [gfx906], modes: [int8_per_token_head, fp8_e4m3, fp8_per_token_head], when: {triton: "<3.8"}, support: refused, reason: unsupported target}
  - {archs: [gfx906], modes: [int8_per_token_head, fp8_e4m3, fp8_per_token_head], when: {triton: ">=3.8", rocm: "<7"}, support: broken, path: native, reason: faults}
  - {archs: [gfx906], modes: [int8_per_token_head, fp8_e4m3, fp8_per_token_head], when: {triton: ">=3.8", rocm: ">=7"}, support: run, path: emulated, reason: works}
operations:
  - {archs: all, operations: [release_visibly, alibi, tree_mask, cross_attention, attend_opaque, expandable_segments, virtual_memory_remap, peer_copy], support: run}
  - {archs: all, operations: [graph_memory_profiling], when: {rocm: "!=7.1.*"}, support: run}
  - {archs: all, operations: [graph_memory_profiling], when: {rocm: "==7.1.*"}, support: broken, reason: aborts}
"""  # noqa: E501 - one row a line, so that a rule's line can be counted
ASSUMING = FAKE.replace("modes:\n", "assume: {triton: '3.8.0', rocm: '7.2'}\nmodes:\n", 1)


def table(text: str = FAKE) -> CapabilityTable:
    return CapabilityTable.from_text(text, "fake.yaml")


def problems(old: str, new: str) -> list[str]:
    assert old in FAKE
    with pytest.raises(ConfigError) as caught:
        table(FAKE.replace(old, new, 1))
    return [str(p) for p in caught.value.problems]


@pytest.mark.parametrize(
    ("versions", "rule"),
    [
        (Versions(triton="3.7.1", rocm="7.2"), "fake.yaml:6"),
        (Versions(triton="3.7.999"), "fake.yaml:6"),
        (Versions(triton="3.8.0.dev1", rocm="6.4"), "fake.yaml:7"),
        (Versions(triton="3.8.0", rocm="6.2.41133-dd7f95766"), "fake.yaml:7"),
        (Versions(triton="3.8.0", rocm="7.0"), "fake.yaml:8"),
        (Versions(triton="3.9.0+rocm7.2", rocm="7.2.53211"), "fake.yaml:8"),
    ],
)
def test_one_row_answers_at_each_version(versions: Versions, rule: str) -> None:
    found = table().cell("int8_per_token_head", "gfx906:xnack-", versions)
    assert (found.rule, found.assumed) == (rule, ())


@pytest.mark.parametrize(("rocm", "rule"), [("7.0.9", 11), ("7.1", 12), ("7.1.9", 12), ("7.2", 11)])
def test_an_operation_answers_by_version_too(rocm: str, rule: int) -> None:
    assert table().operation("graph_memory_profiling", "gfx942", Versions(rocm=rocm)).rule == f"fake.yaml:{rule}"


def test_a_version_that_matters_and_is_unknown_is_asked_for() -> None:
    for versions, unknown in ((Versions(), ("triton", "rocm")), (Versions(triton="3.9"), ("rocm",))):
        with pytest.raises(UnknownVersion) as caught:
            table().cell("fp8", "gfx906", versions)
        assert caught.value.dimensions == unknown
        assert f"depends on the version of {' and '.join(unknown)}, which is not known" in str(caught.value)
        assert "triton >=3.8 and rocm <7: broken (fake.yaml:7)" in str(caught.value)
    assert isinstance(caught.value, UnsupportedMode)
    with pytest.raises(UnknownVersion, match="operation 'graph_memory_profiling' was asked"):
        _ = table().operations


def test_a_version_that_does_not_matter_may_be_unknown() -> None:
    assert table().cell("int8_per_token_head", "gfx942").rule == "fake.yaml:5"
    assert table().cell("int8_per_token_head", "gfx906", Versions(triton="3.5")).rule == "fake.yaml:6"


def test_an_assumed_version_answers_and_is_named() -> None:
    found = table(ASSUMING)
    assert found.assume == Versions(triton="3.8.0", rocm="7.2")
    cell = found.cell("fp8", "gfx906")
    assert (cell.support, cell.assumed) == (Support.RUN, ("triton 3.8.0", "rocm 7.2"))
    assert found.cell("fp8", "gfx906", Versions(rocm="6.4")).assumed == ("triton 3.8.0",)
    assert found.cell("fp8", "gfx942").assumed == ()
    assert found.operations["graph_memory_profiling", "gfx942"].assumed == ("rocm 7.2",)
    assert found.cells["fp8_e4m3", "gfx906"] == cell


def test_a_decision_names_the_conditions_and_what_was_assumed() -> None:
    found = decide(table(ASSUMING), "gfx906", "fp8", Policy())
    assert (found.action, found.when) == (Action.RUN, "triton >=3.8 and rocm >=7")
    assert "(assuming triton 3.8.0, rocm 7.2)" in found.message
    at = Versions(triton="3.7.1")
    refused = decide(table(ASSUMING), "gfx906", "fp8", Policy(), versions=at)
    assert (refused.refused, refused.rule, refused.assumed) == (True, "fake.yaml:7", ("rocm 7.2",))
    assert refused.alternatives == ("int4_per_token_head", "fp8_e5m2", "bfloat16", "float16")
    for name in refused.alternatives:
        assert decide(table(ASSUMING), "gfx906", name, Policy(), versions=at).action is Action.RUN


def test_a_spec_is_decided_at_the_versions_that_are_there() -> None:
    spec = CacheSpec.uniform(mode="int8_per_token_head", num_layers=1, num_kv_heads=1, head_dim=64)
    assert decide_spec(table(), "gfx906", spec, Policy(), versions=Versions(triton="3.7")).refused
    assert not decide_spec(table(), "gfx906", spec, Policy(), versions=Versions(triton="3.8", rocm="7.1")).refused
    with pytest.raises(UnknownVersion):
        decide_spec(table(), "gfx906", spec, Policy())


def test_a_mode_that_hangs_on_an_unknown_version_is_neither_offered_nor_fallen_back_to() -> None:
    denied = decide(table(), "gfx906", "bf16", Policy(deny=("bf16",)))
    assert denied.alternatives == ("float16", "int4_per_token_head", "fp8_e5m2")
    falls = Policy(deny=("bf16",), on_unsupported=OnUnsupported.FALLBACK, fallback=("fp8", "half"))
    assert decide(table(), "gfx906", "bf16", falls).effective == "float16"
    nowhere = Policy(deny=("bf16",), on_unsupported=OnUnsupported.FALLBACK, fallback=("fp8",))
    assert "depends on the version of triton and rocm" in decide(table(), "gfx906", "bf16", nowhere).reason


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (
            'when: {triton: "<3.8"}',
            'when: {triton: "<3.7"}',
            "fake.yaml:6:5: modes: 'fp8_e4m3' on 'gfx906' has no row at triton 3.7, rocm 6.999999 (fake.yaml:6 answers",
        ),
        (
            'when: {triton: "<3.8"}',
            'when: {triton: "<=3.8"}',
            "fake.yaml:7:5: modes: 'fp8_e4m3' on 'gfx906' is answered twice at triton 3.8, rocm 6.999999 (first at",
        ),
        (
            '"!=7.1.*"',
            '"!=7.1"',
            "on 'gfx906', 'gfx942' is answered twice at rocm 7.1.0.0.1 (first at fake.yaml:11); let their `when`",
        ),
        (
            '"==7.1.*"',
            '"==7.1"',
            "fake.yaml:11:5: operations: 'graph_memory_profiling' on 'gfx906', 'gfx942' has no row",
        ),
        ('when: {triton: "<3.8"}, ', "", "fake.yaml:7:5: modes: 'fp8_per_token_head' on 'gfx906' is answered twice at"),
        ('rocm: "<7"}', 'rocm: "<7,>8"}', "no version is triton >=3.8 and rocm <7,>8; correct its `when`"),
        (
            '{triton: "<3.8"}',
            "{}",
            "fake.yaml:6:89: when limits nothing; name one of torch, triton, cuda, rocm, driver",
        ),
        ('{triton: "<3.8"}', "'<3.8'", "fake.yaml:6:89: when must be a mapping of keys to values"),
        ('{triton: "<3.8"}', "{python: '<3.8'}", "when: key 'python' is unknown; known: torch, triton, cuda"),
        ('{triton: "<3.8"}', "{triton: 3.8}", "fake.yaml:6:98: when.triton must be a text that is not blank"),
        ('{triton: "<3.8"}', "{triton: 'below 3.8'}", "when.triton: 'below 3.8' is not a version specifier"),
        ('{triton: "<3.8"}', "{triton: '<3.8.0rc1'}", "when.triton: '<3.8.0rc1' names '3.8.0rc1'; conditions name"),
        ("modes:\n", "assume: {triton: nightly}\nmodes:\n", "assume.triton: 'nightly' is not a version"),
        ("modes:\n", "assume: {triton: 3.8}\nmodes:\n", "assume.triton must be a text that is not blank"),
        (
            "[gfx942], modes: [int8_per_token_head, fp8_e4m3, fp8_per_token_head], support: run",
            "[gfx942], modes: [int8_per_token_head, fp8_e4m3, fp8_per_token_head], support: run, archs: [gfx942]",
            "the key 'archs' stands here a second time",
        ),
    ],
)
def test_a_table_whose_conditions_leave_a_gap_or_overlap_does_not_load(old: str, new: str, expected: str) -> None:
    found = problems(old, new)
    assert any(expected in problem for problem in found), found


def test_every_row_that_leaves_a_gap_is_named() -> None:
    (problem, *_) = problems('when: {triton: "<3.8"}', 'when: {triton: "<3.7"}')
    for row in ("6 answers triton <3.7", "7 answers triton >=3.8 and rocm <7", "8 answers triton >=3.8 and rocm >=7"):
        assert f"fake.yaml:{row}" in problem


def test_conditions_that_cannot_be_read_are_reported_once() -> None:
    assert len(problems('{triton: "<3.8"}', "{triton: '<3.8.0rc1'}")) == 1


def test_a_suggestion_must_be_accepted_wherever_the_row_answers() -> None:
    row = 'when: {triton: "<3.8"}, support: refused'
    found = problems(row, f"{row}, instead: [int8_per_token_head, bfloat16]")
    assert any("instead of 'fp8_e4m3': 'int8_per_token_head' is refused on 'gfx906'" in p for p in found)
    # Broken only at versions where the suggesting row does not answer: no problem.
    split = FAKE.replace(
        "int4_per_token_head, fp8_e5m2], support: run, path: native}", "fp8_e5m2], support: run, path: native}"
    )
    split = split.replace(
        "operations:\n",
        "  - {archs: all, modes: [int4_per_token_head], when: {triton: '<3.8'}, support: run, path: native}\n"
        "  - {archs: all, modes: [int4_per_token_head], when: {triton: '>=3.8'}, support: refused, reason: gone}\n"
        "operations:\n",
        1,
    )
    assert table(split.replace(row, f"{row}, instead: [int4_per_token_head]")).cell(
        "fp8", "gfx906", Versions(triton="3.7")
    ).instead == ("int4_per_token_head",)

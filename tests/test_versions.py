"""Versions compare by release, and a set of conditions is checked at every release where one of them may change."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from packaging.version import Version

from kvhal.capability.versions import (
    ALWAYS,
    Conditions,
    Versions,
    at_text,
    faults,
    meet,
    release,
    samples,
    specifier_problem,
)
from kvhal.errors import ConfigError


def on(**texts: str) -> Conditions:
    return Conditions(tuple(texts.items()))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2.13.0+cpu", "2.13.0"),
        ("2.14.0.dev20260802+rocm7.2", "2.14.0"),
        ("2.14.0a0+git1234567", "2.14.0"),
        ("3.9.0rc1", "3.9.0"),
        ("3.7.1.post2", "3.7.1"),
        ("3.7.1+git0263a6a6.rocm7.14.0", "3.7.1"),
        ("6.2.41133-dd7f95766", "6.2.41133"),
        ("580.95.05", "580.95.5"),
        ("13", "13"),
    ],
)
def test_a_version_stands_for_its_release(text: str, expected: str) -> None:
    assert release(text) == Version(expected)


@pytest.mark.parametrize("nightly", ["2.14.0.dev20260802", "2.14.0rc1", "2.14.0+cu130", "2.14.0.post1"])
def test_a_nightly_is_on_exactly_one_side_of_the_release_it_leads_to(nightly: str) -> None:
    at = Versions(torch=nightly).releases
    assert on(torch=">=2.14").hold(at)
    assert not on(torch="<2.14").hold(at)


def test_every_text_that_is_no_version_is_named() -> None:
    with pytest.raises(ConfigError) as caught:
        Versions(torch="nightly", triton="3.8", driver="535.x")
    assert [p.message.split(";")[0] for p in caught.value.problems] == [
        "torch: 'nightly' is not a version",
        "driver: '535.x' is not a version",
    ]


def test_what_is_known_goes_before_what_is_assumed() -> None:
    assert Versions(torch="2.13").or_else(Versions(torch="2.14", triton="3.8")) == Versions(torch="2.13", triton="3.8")
    assert Versions().known == {}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (">=3.5,<3.9", ""),
        ("!=3.9.*", ""),
        ("~=3.8", ""),
        ("3.5", "is not a version specifier"),
        (">=3.5 or <2", "is not a version specifier"),
        ("===3.5", "compares texts"),
        (">=2.14.0.dev0", "conditions name releases"),
        ("==2.13.0+cpu", "conditions name releases"),
    ],
)
def test_a_condition_is_a_specifier_of_releases(text: str, problem: str) -> None:
    found = specifier_problem(text)
    assert problem in found
    assert bool(found) == bool(problem)


def test_conditions_read_as_they_are_written() -> None:
    assert str(on(torch=">=2.2", triton="<3.9")) == "torch >=2.2 and triton <3.9"
    assert str(ALWAYS) == "any version"
    assert at_text([("torch", "2.9"), ("triton", "3.5")]) == "torch 2.9, triton 3.5"


@pytest.mark.parametrize(
    ("text", "edges"),
    [
        (">=3.5", ["3.5"]),
        ("<=3.5,>2", ["3.5", "2"]),
        ("==3.9.*", ["3.9", "3.10"]),
        ("!=3.9.*", ["3.9", "3.10"]),
        ("~=3.8", ["3.8", "4"]),
        ("~=3.8.1", ["3.8.1", "3.9"]),
    ],
)
def test_samples_lie_on_both_sides_of_every_edge(text: str, edges: list[str]) -> None:
    found = [at["triton"] for at in samples([on(triton=text)])]
    for edge in map(Version, edges):
        assert edge in found
        assert max(v for v in found if v < edge) > Version(f"{edge.major - 1}.0")
        below = [v for v in found if v < edge]
        above = [v for v in found if v > edge]
        assert below
        assert above


def test_dimensions_are_combined() -> None:
    assert len(list(samples([on(torch=">=2.2"), on(triton=">=3.5")]))) == 9
    assert len(list(samples([on(torch=">=2.2"), on(triton=">=3.5")], over=["triton"]))) == 3
    assert list(samples([ALWAYS])) == [{}]


@pytest.mark.parametrize(
    "whens",
    [
        (ALWAYS,),
        (on(triton="<3.9"), on(triton=">=3.9")),
        (on(triton="==3.9.*"), on(triton="!=3.9.*")),
        (on(triton="<3.5"), on(triton=">=3.5,<3.9"), on(triton=">=3.9")),
        (on(torch="<2.12"), on(torch=">=2.12", rocm="<7"), on(torch=">=2.12", rocm=">=7")),
    ],
)
def test_a_partition_has_no_fault(whens: tuple[Conditions, ...]) -> None:
    assert faults(whens) is None


@pytest.mark.parametrize(
    ("whens", "missing", "twice", "never"),
    [
        ((on(triton="<3.9"), on(triton=">3.9")), "triton 3.9", "", ()),
        ((on(triton="<=3.9"), on(triton=">=3.9")), "", "triton 3.9", ()),
        ((on(triton="<3.9"), on(triton=">=3.10")), "triton 3.9", "", ()),
        ((on(triton="==3.9"), on(triton="!=3.9.*")), "triton 3.9.0.0.1", "", ()),
        ((ALWAYS, on(triton=">=3.9")), "", "triton 3.9", ()),
        ((ALWAYS, on(triton=">=3.9,<3.8")), "", "", (1,)),
        ((on(torch="<2.12"), on(torch=">=2.12", rocm="<7")), "torch 2.12, rocm 7", "", ()),
        ((on(torch="<2.12"), on(rocm=">=7"), on(torch=">=2.12", rocm="<7")), "", "torch 2.11.999999, rocm 7", ()),
    ],
)
def test_a_gap_or_an_overlap_is_found_and_named(
    whens: tuple[Conditions, ...], missing: str, twice: str, never: tuple[int, ...]
) -> None:
    found = faults(whens)
    assert found is not None
    assert ("" if found.missing is None else at_text(found.missing)) == missing
    assert ("" if found.twice is None else at_text(found.twice[0])) == twice
    assert found.never == never


def test_two_conditions_meet_where_both_hold() -> None:
    assert meet(on(triton=">=3.5"), on(triton="<3.9"))
    assert not meet(on(triton=">=3.9"), on(triton="<3.9"))
    assert meet(ALWAYS, ALWAYS)


parts = st.builds(
    lambda operator, release, wild: (
        f"{operator}{release}.*" if wild and operator in ("==", "!=") else operator + release
    ),
    st.sampled_from([">=", ">", "<", "<=", "==", "!="]),
    st.sampled_from(["3", "3.0", "3.5", "3.9", "3.9.1", "3.10"]),
    st.booleans(),
)
conditions = st.lists(parts, min_size=1, max_size=2).map(lambda p: on(triton=",".join(p)))
releases = st.lists(st.integers(0, 11), min_size=1, max_size=3).map(lambda p: Version(".".join(map(str, [3, *p]))))


@given(st.lists(conditions, min_size=1, max_size=3).map(tuple), releases)
def test_what_the_samples_do_not_show_is_nowhere(whens: tuple[Conditions, ...], version: Version) -> None:
    """The samples are a proof: at no release whatever does a set without faults answer twice or not at all."""
    if faults(whens) is None:
        assert sum(when.hold({"triton": version}) for when in whens) == 1

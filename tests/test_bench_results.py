"""The benchmarks' documents: values that survive the file, and files that are none."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.results import COPY, READ, Case, Ceiling, Failure, PeerTime, Result, floor_us
from kvhal.errors import ConfigError

WHERE: dict[str, str | int] = {"machine": "a GPU", "arch": "sm_90", "torch": "2.11.0", "threads": 8}
CASE = Case(
    name="decode int8 64x8192",
    us=250.0,
    spread_us=2.0,
    labels={"kind": "decode", "mode": "int8", "shape": "64x8192", "q_heads": 32},
    nbytes=1_000_000_000,
    floor_us=200.0,
    error=1.5e-3,
    peers=(PeerTime("one", 500.0, 1.0, 2e-3), PeerTime("two", note="absent: no module")),
)
RESULT = Result(
    benchmark="decode",
    where=WHERE,
    ceilings=(Ceiling(READ, 1_000_000, 0.25, 0.01),),
    peers={"one": "", "two": "absent: no module"},
    cases=(CASE, Case("host store 1", 20.0, 0.5)),
    failures=(Failure("decode x", "ValueError: no"),),
    facts={"asked_bytes": 7},
    is_complete=False,
)


def test_a_result_survives_its_file(tmp_path: Path) -> None:
    RESULT.save(tmp_path / "r.json")
    assert Result.load(tmp_path / "r.json") == RESULT
    assert [path.name for path in tmp_path.iterdir()] == ["r.json"]


def test_the_document_says_rate_and_ratio() -> None:
    """10^9 bytes in 250 us are 4000 GB/s; 250 us are 1.25 times 200 us; 10^6 bytes in 0.25 us are 4000 GB/s."""
    document = json.loads(RESULT.to_json())
    assert (document["benchmark"], document["version"]) == ("decode", 1)
    assert (document["cases"][0]["gb_s"], document["cases"][0]["ratio"]) == (4000, 1.25)
    assert (document["cases"][1]["gb_s"], document["cases"][1]["ratio"]) == (None, None)
    assert document["ceilings"][0]["gb_s"] == 4000


def test_a_result_that_is_no_number_cannot_be_written() -> None:
    with pytest.raises(ValueError, match="JSON"):
        replace(RESULT, cases=(replace(CASE, error=math.nan),)).to_json()


@pytest.mark.parametrize(
    ("change", "is_right", "is_good"),
    [
        ({}, True, True),
        ({"error": 2.9e-3}, True, True),
        ({"error": 3.1e-3}, False, False),
        ({"error": math.nan}, False, False),
        ({"exact": True}, True, True),
        ({"exact": False}, False, False),
        ({"limit_us": 251.0}, True, True),
        ({"limit_us": 249.0}, True, False),
    ],
)
def test_what_is_right_and_what_is_good(change: dict[str, Any], is_right: bool, is_good: bool) -> None:
    case = replace(CASE, **change)
    assert (case.is_right, case.is_good) == (is_right, is_good)
    assert Result("decode", WHERE, cases=(case,)).is_good == is_good


def test_a_failure_makes_a_result_bad() -> None:
    good = Result("decode", WHERE, cases=(CASE,))
    assert good.is_good
    assert not good.with_case(Failure("x", "y")).is_good


def test_the_floor_is_the_nearest_ceilings_rate() -> None:
    """100 bytes at 1 byte/us, 10 000 at 4: 900 bytes are nearer (by ratio) to 100, 1100 to 10 000."""
    found = [Ceiling(READ, 100, 100.0, 0.0), Ceiling(READ, 10_000, 2500.0, 0.0), Ceiling(COPY, 1000, 1.0, 0.0)]
    assert floor_us(found, READ, 900) == 900.0
    assert floor_us(found, READ, 1100) == 275.0
    assert floor_us(found, COPY, 500) == 0.5
    assert floor_us([], READ, 500) is None


@pytest.mark.parametrize(
    "text",
    [
        "no json",
        "[]",
        '{"benchmark": "decode", "version": 99, "where": {}}',
        '{"benchmark": "cpu", "version": 1, "machine": "x", "figures": []}',
        '{"benchmark": "decode", "version": 1, "where": {"machine": "x"}}',
    ],
)
def test_files_that_are_no_results_are_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "r.json").write_text(text)
    with pytest.raises(ConfigError, match="r.json"):
        Result.load(tmp_path / "r.json")
    with pytest.raises(ConfigError, match="nothing.json"):
        Result.load(tmp_path / "nothing.json")

"""The documents and pages: figures, unknowns, and plans whose parts sum to their total."""

import json
import math
from enum import Enum
from pathlib import Path

import pytest

from kvhal.answers.outline import plan_options
from kvhal.answers.plan_bytes import PlanBytes, plan_bytes
from kvhal.capability.tables import capability_table
from kvhal.config.deployment import load
from kvhal.contract import Confirmation, Holder, Release
from kvhal.errors import ConfigError, Problem
from kvhal.kernels.workspace import attend_workspace_bytes
from kvhal.plan import make_plan
from kvhal.policy import decide_spec
from kvhal.readings import Known, Unknown
from kvhal.report import document
from kvhal.report.parts import human

CONFIGS = Path(__file__).parents[1] / "configs"


def planned(config: str, *sets: str) -> PlanBytes:
    from kvhal.decision import Policy

    deployment = load(CONFIGS / f"{config}.yaml", sets, env={})
    decision = decide_spec(capability_table("cpu"), "x86_64", deployment.spec(), Policy())
    return plan_bytes(make_plan(decision, 5, [attend_workspace_bytes], **plan_options(deployment)))


@pytest.mark.parametrize("config", ["cpu-demo", "hybrid", "mixed-kv", "fp8-static", "deepseek-v3", "gemma-2-9b"])
@pytest.mark.parametrize("sets", [(), ("cache.layout=inline",), ("cache.page_align=4096", "cache.order=block_major")])
def test_the_parts_of_a_plan_sum_to_its_bytes(config: str, sets: tuple[str, ...]) -> None:
    plan = planned(config, *sets)
    parts = plan.payload_bytes + plan.word_bytes + plan.opaque_bytes + plan.padding_bytes
    assert parts + plan.scales_bytes + plan.counters_bytes == plan.nbytes
    assert plan.num_blocks * plan.block_bytes + plan.fixed_bytes == plan.nbytes
    assert plan.total_bytes == plan.nbytes + sum(g.step_bytes for g in plan.groups)
    assert plan.padding_bytes >= sum(g.padding_bytes for g in plan.groups)


def test_padding_is_what_no_field_holds() -> None:
    plan = planned("cpu-demo", "cache.page_align=4096")
    # A page of 4352 bytes stands at a stride of 8192, in 5 blocks of 4 layers.
    assert plan.padding_bytes == 5 * 4 * (8192 - 4352)


def test_opaque_bytes_are_those_of_the_latent_and_the_rope_part() -> None:
    plan = planned("deepseek-v3")
    assert plan.opaque_bytes == 5 * 61 * 16 * (512 + 64) * 2
    assert plan.payload_bytes == 0


def test_figures_are_known_with_a_source_or_unknown_with_a_reason() -> None:
    assert document.plain(Known(5, "here")) == {"bytes": 5, "source": "here"}
    assert document.plain(Unknown("no driver")) == {"bytes": None, "unknown": "no driver"}


def test_every_value_of_a_document_is_json() -> None:
    class Kind(Enum):
        ONE = "one"

    said = document.plain({"a": (1, 2.5, None, True), "b": Kind.ONE, "c": math.nan, "d": [math.inf], 3: "x"})
    assert said == {"a": [1, 2.5, None, True], "b": "one", "c": "nan", "d": ["inf"], "3": "x"}
    assert json.loads(document.to_json(said)) == said
    with pytest.raises(TypeError, match="no place"):
        document.plain(object())


def test_a_release_names_its_holders_and_what_the_device_said() -> None:
    release = Release(
        100, 60, 40, (Holder("numpy array", 40, "quarantined"),), 0.25, Confirmation(Unknown("lagging"), "poll", 0.1)
    )
    assert document._release(release) == {
        "complete": False,
        "bytes_asked": 100,
        "bytes_returned": 60,
        "bytes_pinned": 40,
        "holders": [{"description": "numpy array", "nbytes": 40, "action": "quarantined"}],
        "seconds": 0.25,
        "ours": True,
        "owner": "kvhal",
        "confirmation": {"returned": {"bytes": None, "unknown": "lagging"}, "method": "poll", "seconds": 0.1},
    }


def test_an_error_document_has_every_problem_with_its_place() -> None:
    error = ConfigError(Problem("unknown key", "a.yaml:3:1", hint="did you mean mode?"), "second")
    found = document.error_document(error, 2)
    assert (found["ok"], found["kind"]) == (False, "error")
    assert [p["where"] for p in found["error"]["problems"]] == ["a.yaml:3:1", ""]
    assert found["error"]["problems"][0]["hint"] == "did you mean mode?"


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (64 << 20, "64.0 MiB"), (-(3 << 40), "-3.0 TiB")],
)
def test_sizes_are_readable(nbytes: int, text: str) -> None:
    assert human(nbytes) == text

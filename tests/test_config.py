"""Deployment files: what is accepted, where each value came from, and every mistake with its place, all at once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from kvhal.cli import config as cli_config
from kvhal.config.deployment import Deployment, load
from kvhal.config.schema import json_schema
from kvhal.errors import ConfigError, Problem
from kvhal.source.sizes import parse_size
from kvhal.spec import CacheSpec, OpaqueStore, ScaledStore, StaticScales

ROOT = Path(__file__).parent.parent
CONFIGS = ROOT / "configs"
SMALL = """\
kvhal: 1
model:
  num_layers: 4
  num_kv_heads: 2
  num_q_heads: 8
  head_dim: 64
cache:
  mode: int8_per_token_head
"""
Write = Callable[..., str]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Writes a file next to others and returns its name; the working directory is theirs."""
    monkeypatch.chdir(tmp_path)

    def to(text: str, name: str = "d.yaml") -> str:
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(text, encoding="utf-8")
        return name

    return to


def problems(path: str, *sets: str, env: dict[str, str] | None = None) -> tuple[Problem, ...]:
    with pytest.raises(ConfigError) as caught:
        load(path, sets, env or {})
    assert caught.value.exit_code == 2
    return caught.value.problems


def places(found: tuple[Problem, ...]) -> list[tuple[str, str]]:
    return [(p.where, p.message) for p in found]


def small(**sections: str) -> str:
    """SMALL with more lines: `cache` adds to its section, other sections are appended."""
    text = SMALL + "".join(f"  {line}\n" for line in sections.pop("cache", "").splitlines())
    return text + "".join(f"{name}: {value}\n" for name, value in sections.items())


# What is accepted.


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda p: p.name)
def test_every_committed_file_loads(path: Path) -> None:
    if path.name == "base.yaml":
        found = problems(str(path))
        assert [p.message.split()[0] for p in found] == ["model", "cache.mode"], "only what extending files add"
        return
    deployment = load(path, env={})
    assert isinstance(deployment.spec(), CacheSpec)
    assert deployment.spec().num_layers == deployment.geometry.num_layers


def test_the_demo() -> None:
    deployment = load(CONFIGS / "cpu-demo.yaml", env={})
    assert deployment.spec() == CacheSpec.uniform(
        mode="int8_per_token_head", num_layers=4, num_kv_heads=2, num_q_heads=8, head_dim=64, block_size=16
    )
    assert (deployment.platform, deployment.device) == ("auto", 0)
    assert deployment.memory.bytes == 64 * 2**20
    assert deployment.memory.blocks is None


def test_the_h200_deployment_extends_its_base() -> None:
    deployment = load(CONFIGS / "h200.yaml", env={})
    (group,) = deployment.spec().groups
    assert (len(group.layers), group.num_q_heads, group.block_size) == (32, 32, 16)
    assert group.k == ScaledStore("k", "fp8_per_token_head", "e4m3fn", 8, 128)
    assert deployment.platform == "cuda"
    assert deployment.memory.reserve == 2**30
    assert deployment.origin["memory.reserve"] == f"{CONFIGS / 'base.yaml'}:8"
    assert deployment.origin["cache.mode.k"] == f"{CONFIGS / 'h200.yaml'}:8"
    assert deployment.origin["cache.order"] == "default"


def test_static_scales_reach_the_spec() -> None:
    scales = load(CONFIGS / "fp8-static.yaml", env={}).spec().static_scales
    assert scales == StaticScales((0.25, 0.25, 0.5, 0.5), (0.125,) * 4, "e4m3fn")


def test_static_scales_default_to_the_format_of_checkpoints(write: Write) -> None:
    path = write(small().replace("int8_per_token_head", "fp8_e5m2") + "  static_scales: {k: 1, v: 2}\n")
    assert load(path, env={}).spec().static_scales == StaticScales((1.0,) * 4, (2.0,) * 4, "e5m2")


def test_k_and_v_may_differ() -> None:
    deployment = load(CONFIGS / "mixed-kv.yaml", env={})
    assert deployment.cache.mode.pair == ("fp8_per_token_head", "int4_per_token_head")
    assert deployment.spec().modes == ("fp8_per_token_head", "int4_per_token_head")


def test_hybrid_groups_and_shares() -> None:
    spec = load(CONFIGS / "hybrid.yaml", env={}).spec()
    assert [(g.name, g.layers, g.window) for g in spec.groups] == [
        ("full", (5,), None),
        ("sliding", (0, 1, 2, 3, 4, 6, 7, 8, 9), 128),
    ]
    assert spec.shares == ((10, 9), (11, 5))


def test_opaque_stores_beside_k_and_v(write: Write) -> None:
    path = write(
        "kvhal: 1\nmodel:\n  groups:\n  - {name: a, layers: [0], num_kv_heads: 1, num_q_heads: 1, head_dim: 8,\n"
        "     opaque: [{name: index, dtype: uint8, shape: [132]}]}\n"
        "  - {name: s, layers: [1], block_size: 32,\n"
        "     opaque: [{name: state, dtype: float32, shape: [4, 8], per: block}]}\n"
        "cache: {mode: bf16}\n"
    )
    first, second = load(path, env={}).spec().groups
    assert first.stores[2] == OpaqueStore("index", "uint8", (132,))
    assert second.stores == (OpaqueStore("state", "float32", (4, 8), "block"),)
    assert (first.block_size, second.block_size) == (16, 32)


def test_an_explicit_off_has_its_effect(write: Write) -> None:
    write(
        small(
            policy="{deny: [fp8], on_unsupported: fallback, fallback: [bfloat16]}",
            memory="{bytes: 1GiB, reserve: 2GiB}",
        )
    )
    path = write(
        "kvhal: 1\nextends: d.yaml\nmemory: {bytes: null, reserve: 0}\n"
        "policy: {deny: [], on_unsupported: error, fallback: []}\n",
        "top.yaml",
    )
    deployment = load(path, env={})
    assert deployment.policy.deny == ()
    assert deployment.policy.fallback == ()
    assert deployment.memory.bytes is None
    assert deployment.memory.reserve == 0
    assert deployment.origin["memory.reserve"] == "top.yaml:3"


def test_defaults() -> None:
    d = load(CONFIGS / "hybrid.yaml", env={})
    assert (d.cache.layout, d.cache.order, d.cache.page_align, d.cache.addressing) == (
        "tiled",
        "layer_major",
        16,
        "checked",
    )
    assert (d.memory.fraction, d.memory.reserve, d.memory.max_seqs, d.memory.max_tokens) == (0.9, 256 * 2**20, 8, 64)
    assert (d.policy.experimental, d.policy.require.path, d.policy.on_leak) == ("deny", "any", "revoke")
    assert (d.profile.blocks, d.profile.rounds, d.report.format) == (16, 2, "terminal")


@pytest.mark.parametrize(
    "path", [p for p in sorted(CONFIGS.glob("*.yaml")) if p.name != "base.yaml"], ids=lambda p: p.name
)
def test_resolved_loads_to_the_same_deployment(path: Path, write: Write) -> None:
    first = load(path, env={})
    again = load(write(yaml.safe_dump(json.loads(json.dumps(first.resolved())))), env={})
    assert again.resolved() == first.resolved()
    assert again.spec() == first.spec()
    assert set(again.origin.values()).isdisjoint({"default"})


# Precedence and origin.


def test_later_wins(write: Write) -> None:
    write("kvhal: 1\nmemory: {max_seqs: 1, max_tokens: 1, max_context: 1, blocks: 1}\n", "sub/base.yaml")
    write("kvhal: 1\nextends: [sub/base.yaml]\nmemory: {max_tokens: 2, max_context: 2, blocks: 2}\n", "mid.yaml")
    path = write(f"extends: mid.yaml\n{SMALL}memory: {{max_context: 3, blocks: 3}}\n")
    d = load(path, ["memory.blocks=5"], {"KVHAL__MEMORY__MAX_CONTEXT": "4", "KVHAL__MEMORY__BLOCKS": "4"})
    m = d.memory
    assert (m.max_seqs, m.max_tokens, m.max_context, m.blocks) == (1, 2, 4, 5)
    assert {
        key: d.origin[f"memory.{key}"] for key in ("max_seqs", "max_tokens", "max_context", "blocks", "fraction")
    } == {
        "max_seqs": "sub/base.yaml:2",
        "max_tokens": "mid.yaml:3",
        "max_context": "KVHAL__MEMORY__MAX_CONTEXT",
        "blocks": "--set memory.blocks",
        "fraction": "default",
    }


def test_later_entries_of_extends_win(write: Write) -> None:
    for i in (1, 2):
        write(f"kvhal: 1\nmemory: {{max_seqs: {i}}}\n", f"{i}.yaml")
    assert load(write(f"extends: [1.yaml, 2.yaml]\n{SMALL}"), env={}).memory.max_seqs == 2
    assert load(write(f"extends: [2.yaml, 1.yaml]\n{SMALL}"), env={}).memory.max_seqs == 1


def test_one_mode_replaces_a_pair_and_the_other_way_round(write: Write) -> None:
    path = write(SMALL)
    d = load(path, ["cache.mode={k: bfloat16, v: float16}"], {})
    assert d.cache.mode.pair == ("bfloat16", "float16")
    assert d.origin["cache.mode.v"] == "--set cache.mode"
    d = load(path, ["cache.mode={k: bfloat16, v: float16}", "cache.mode=fp16"], {})
    assert d.cache.mode.pair == ("fp16", "fp16")


def test_model_config_is_relative_to_the_file_that_names_it(write: Write) -> None:
    write((CONFIGS / "models" / "llama-3.1-8b.json").read_text(), "deep/models/m.json")
    write("kvhal: 1\nmodel: {config: models/m.json}\n", "deep/base.yaml")
    d = load(write("kvhal: 1\nextends: deep/base.yaml\ncache: {mode: bf16}\n"), env={})
    assert d.geometry.num_layers == 32
    assert d.model.config == str(Path("deep/models/m.json").absolute())
    (problem,) = problems("d.yaml", "model.config=absent.json")
    assert problem.message == "the file does not exist"
    assert "model.config at --set model.config" in problem.hint


def test_the_process_environment_is_the_default(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVHAL__DEVICE", "3")
    assert load(write(SMALL)).device == 3
    assert load(write(SMALL), env={}).device == 0


# Mistakes.


def test_wrong_values_of_a_public_case_all_at_once(write: Write) -> None:
    """PUB-27: unknown key, right key at the wrong level, duplicate key, FP8, fraction 1.2, 1e3 blocks, off."""
    path = write(
        "kvhal: 1\n"
        "kv_cahce_dtype: fp8\n"
        "block_size: 32\n"
        "prefix_zeroing: false\n"
        "model: {num_layers: 4, num_kv_heads: 2, num_q_heads: 8, head_dim: 64}\n"
        "cache:\n"
        "  mode: FP8\n"
        "  layout: tiled\n"
        "  layout: inline\n"
        "memory:\n"
        "  fraction: 1.2\n"
        "  blocks: 1e3\n"
        "policy: {on_leak: off}\n"
    )
    found = problems(path)
    modes = (
        "bf16, bfloat16, float16, fp16, fp8, fp8_e4m3, fp8_e5m2, fp8_per_token_head, half, int4_per_token_head, "
        "int8_per_token_head"
    )
    assert [(p.where, p.message, p.hint) for p in found] == [
        ("d.yaml:2:1", "kv_cahce_dtype is not a key that kvhal knows", "did you mean cache.mode?"),
        (
            "d.yaml:3:1",
            "block_size is not a key that kvhal knows",
            "it belongs at model.groups[].block_size or cache.block_size",
        ),
        (
            "d.yaml:4:1",
            "prefix_zeroing is not a key that kvhal knows",
            "keys here: kvhal, extends, platform, device, model, cache, memory, policy, profile, report",
        ),
        ("d.yaml:7:9", f"cache.mode is the text 'FP8'; it must be one of {modes}", "write fp8"),
        ("d.yaml:9:3", "the key 'layout' stands here a second time; first on line 8", "keep one of the two"),
        ("d.yaml:11:13", "memory.fraction is 1.2; it must be a number above 0 and at most 1", ""),
        (
            "d.yaml:12:11",
            "memory.blocks is the text '1e3'; it must be a whole number, 1 or more, or null",
            "write 1000, without quotes",
        ),
        (
            "d.yaml:13:19",
            "policy.on_leak is false; it must be revoke or raise",
            "YAML reads on, off, yes, no, true and false as true or false; quote it if it is text",
        ),
    ]
    assert found[3].excerpt == "    7 |   mode: FP8\n      |         ^"
    text = str(ConfigError(*found))
    assert "d.yaml:7:9: cache.mode is the text 'FP8'" in text
    for jargon in ("pydantic", "validation", "literal", "Input", "extra", "type="):
        assert jargon not in text


@pytest.mark.parametrize(
    ("key", "value", "message", "hint"),
    [
        (
            "memory.fraction",
            "'0.9'",
            "the text '0.9'; it must be a number above 0 and at most 1",
            "write 0.9, without quotes",
        ),
        ("memory.fraction", "0", "0; it must be a number above 0 and at most 1", ""),
        ("memory.fraction", "-0.5", "-0.5; it must be a number above 0 and at most 1", ""),
        ("memory.fraction", ".nan", "nan; it must be a number above 0 and at most 1", ""),
        ("memory.fraction", "true", "true; it must be a number above 0 and at most 1", ""),
        ("memory.max_seqs", "0", "0; it must be a whole number, 1 or more", ""),
        ("memory.max_seqs", "8.0", "8.0; it must be a whole number, 1 or more", ""),
        ("memory.max_seqs", "yes", "true; it must be a whole number, 1 or more", ""),
        ("memory.max_seqs", "null", "null; it must be a whole number, 1 or more", ""),
        ("memory.max_seqs", "99999999999", "99999999999; it must be a whole number, 1 or more", ""),
        ("memory.blocks", "0", "0; it must be a whole number, 1 or more, or null", ""),
        ("cache.block_size", "0", "0; it must be a whole number of tokens, 1 or more", ""),
        ("cache.page_align", "48", "48; it must be a power of two, 16 or more", ""),
        ("cache.page_align", "8", "8; it must be a power of two, 16 or more", ""),
        ("cache.layout", "Tiled", "the text 'Tiled'; it must be tiled or inline", "write tiled"),
        (
            "cache.mode",
            "INT8_per_token_head",
            "the text 'INT8_per_token_head'; it must be one of",
            "write int8_per_token_head",
        ),
        ("cache.mode", "[fp8]", "a list; it must be one of", ""),
        ("cache.mode", "off", "false; it must be one of", ""),
        ("cache.encoding", "E4M3FN", "the text 'E4M3FN'; it must be one of", "write e4m3fn"),
        ("device", "cuda:0", "the text 'cuda:0'; it must be a whole number: the device's logical index", ""),
        ("device", "-1", "-1; it must be a whole number: the device's logical index", ""),
        ("platform", "CUDA", "the text 'CUDA'; it must be auto, or the name of an adapter such as cuda", ""),
        ("policy.deny", "fp8", "the text 'fp8'; it must be a list of modes", ""),
        ("profile", "null", "null; it must be a mapping", ""),
        ("memory", "[1]", "a list; it must be a mapping", ""),
        ("policy.require.path", "fast", "the text 'fast'; it must be any or native", ""),
    ],
)
def test_one_wrong_value(write: Write, key: str, value: str, message: str, hint: str) -> None:
    path = write(SMALL)
    (problem,) = problems(path, f"{key}={value}")
    assert problem.message.startswith(f"{key} is {message}")
    assert problem.where == f"--set {key}"
    assert problem.hint == hint


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("cache.lay_out", "did you mean cache.layout?"),
        ("cahce", "did you mean cache?"),
        ("mode", "it belongs at cache.mode"),
        ("memory.mode", "it belongs at cache.mode"),
        ("cache.fraction", "it belongs at memory.fraction"),
        ("memory_fraction", "it belongs at memory.fraction"),
        ("gpu_memory_utilization", "it belongs at memory.fraction"),
        ("memory.gpu_memory_utilisation", "did you mean memory.fraction?"),
        ("policy.path", "it belongs at policy.require.path"),
        ("report.zzz", "keys here: format"),
    ],
)
def test_unknown_keys_point_to_the_right_one(write: Write, key: str, hint: str) -> None:
    (problem,) = problems(write(SMALL), f"{key}=1")
    assert problem.message == f"{key} is not a key that kvhal knows"
    assert problem.hint == hint


def test_unknown_key_inside_a_list_has_its_place(write: Write) -> None:
    path = write(
        "kvhal: 1\nmodel:\n  groups:\n  - name: a\n    layers: 0-1\n    windows: 3\n    head_dim: 8\n"
        "cache: {mode: fp16}\n"
    )
    found = problems(path)
    assert places(found) == [
        (
            "d.yaml:4:5",
            "model.groups[0] has head_dim but not num_kv_heads, num_q_heads; k and v need all three",
        ),
        ("d.yaml:6:5", "model.groups[0].windows is not a key that kvhal knows"),
    ]
    assert found[1].hint == "did you mean model.groups[0].window?"


@pytest.mark.parametrize(
    ("text", "where", "message"),
    [
        (small(memory="{bytes: 1GiB, blocks: 4}"), "d.yaml:9:23", "memory.bytes and memory.blocks are both given"),
        (
            small(cache="block_size: 24"),
            "d.yaml:9:15",
            "cache.block_size is 24; the tiled layout needs a multiple of 16",
        ),
        (
            small(cache="encoding: e4m3fn"),
            "d.yaml:9:13",
            "cache.encoding is 'e4m3fn', but mode 'int8_per_token_head' cannot",
        ),
        (
            small(cache="static_scales: {k: 1.0}"),
            "d.yaml:9:19",
            "cache.static_scales.k is given, but k is stored as 'int8_per_token_head', which has none",
        ),
        (small(cache="static_scales: {}"), "d.yaml:9:3", "cache.static_scales is given, but no mode of this cache has"),
        (
            small(policy="{on_unsupported: fallback}"),
            "d.yaml:9:26",
            "policy.on_unsupported is fallback, but policy.fallback",
        ),
        (
            small(policy="{fallback: [bf16]}"),
            "d.yaml:9:10",
            "policy.fallback lists modes, but policy.on_unsupported is error",
        ),
        (
            small(policy="{on_unsupported: fallback, fallback: [bf16, fp8]}"),
            "d.yaml:9:53",
            "policy.fallback lists 'fp8', which needs calibrated scales for k and v that this file lacks",
        ),
        (
            SMALL.replace("64", "12"),
            "d.yaml:6:13",
            "group 'default': k: head_dim is 12; it must be a positive multiple of 8",
        ),
        (
            SMALL.replace("8\n  head", "7\n  head"),
            "d.yaml:5:16",
            "group 'default': num_q_heads is 7; it must be a multiple",
        ),
        (SMALL.replace("  num_q_heads: 8\n", ""), "d.yaml:2:1", "model.num_q_heads is missing; an inline model needs"),
        (
            SMALL.replace("  head_dim", "  config: x\n  head_dim"),
            "d.yaml:3:3",
            "model.config and model.num_layers are both",
        ),
        (
            "kvhal: 1\ncache: {mode: bf16}\n",
            "d.yaml:1:1",
            "model needs `config:` (a config.json), `groups:`, or num_layers",
        ),
        ("kvhal: 1\nmodel:\ncache: {mode: bf16}\n", "d.yaml:2:7", "model is null; it must be a mapping"),
        (SMALL[: SMALL.index("cache")], "d.yaml:1:1", "cache.mode is missing; it must be the name of a mode"),
        (SMALL.replace("mode: int8_per_token_head", "mode: {k: bf16}"), "d.yaml:8:3", "cache.mode.v is missing"),
        (SMALL.replace("kvhal: 1\n", ""), "d.yaml:1:1", "kvhal is missing; every file states its schema"),
        (SMALL.replace("kvhal: 1", "kvhal: 2"), "d.yaml:1:8", "kvhal is 2; this kvhal reads version 1 of the schema"),
        (SMALL.replace("kvhal: 1", "kvhal: true"), "d.yaml:1:8", "kvhal is True; this kvhal reads version 1"),
        (SMALL.replace("kvhal: 1", "kvhal: '1'"), "d.yaml:1:8", "kvhal is '1'; this kvhal reads version 1"),
    ],
)
def test_rules_between_values(write: Write, text: str, where: str, message: str) -> None:
    found = problems(write(text))
    assert found[0].where == where
    assert found[0].message.startswith(message)


def test_a_block_size_that_does_not_tile_names_both_ways_out(write: Write) -> None:
    (problem,) = problems(write(small(cache="block_size: 24")))
    assert problem.hint == "write 32, or choose `cache.layout: inline`"
    assert load(write(small(cache="block_size: 24\nlayout: inline")), env={}).spec().groups[0].block_size == 24


def test_static_modes_need_their_scales(write: Write) -> None:
    path = write(SMALL.replace("int8_per_token_head", "fp8"))
    assert places(problems(path)) == [
        ("d.yaml:8:9", "mode 'fp8_e4m3' needs a calibrated scale and cache.static_scales.k gives none"),
        ("d.yaml:8:9", "mode 'fp8_e4m3' needs a calibrated scale and cache.static_scales.v gives none"),
    ]
    for scales, message in (
        ("{k: 1, v: [1, 2]}", "v_scale has 2 values for 4 layers; give one, or one a layer"),
        ("{k: 1, v: 0}", "cache.static_scales.v is 0.0; it must be a number above 0"),
        ("{k: 1, v: .inf}", "cache.static_scales.v is inf; it must be a number above 0"),
        ("{k: 1, v: 1.0e-300}", "v_scale 1e-300 must be finite and between"),
        (
            "{k: 1, v: 1, encoding: int8}",
            "cache.static_scales.encoding is 'int8', but mode 'fp8_e4m3' is never stored so",
        ),
    ):
        (problem,) = problems(path, f"cache.static_scales={scales}")
        assert problem.message.startswith(message)
        assert problem.where == "--set cache.static_scales"
    (problem,) = problems(path, "cache.mode={k: fp8_e4m3, v: fp8_e5m2}", "cache.static_scales={k: 1, v: 1}")
    assert problem.message.endswith("static scales serve one format at a time")


def test_a_mode_that_nothing_is_stored_in_is_refused() -> None:
    path = str(CONFIGS / "deepseek-v3.yaml")
    (problem,) = problems(path, "cache.mode=int8_per_token_head")
    assert "this model has no k and v" in problem.message
    assert problem.hint == "write bfloat16"
    (problem,) = problems(path, "cache.mode=float16")
    assert problem.where == "--set cache.mode"


def test_problems_of_a_config_json_name_it_and_the_line_that_asked(write: Write) -> None:
    write('{"num_hidden_layers": 0}', "m/config.json")
    found = problems(write("kvhal: 1\nmodel: {config: m/config.json}\ncache: {mode: FP8}\n"))
    assert [p.where for p in found] == ["d.yaml:3:15", *["m/config.json"] * 4]
    assert all("model.config at d.yaml:2:17" in p.hint for p in found[1:])


def test_problems_of_groups_stand_at_their_group(write: Write) -> None:
    path = write(
        "kvhal: 1\nmodel:\n  groups:\n"
        "  - {name: a, layers: 0-1, num_kv_heads: 2, num_q_heads: 2, head_dim: 64}\n"
        "  - {name: b, layers: [2], num_kv_heads: 2, num_q_heads: 2, head_dim: 20}\n"
        "cache: {mode: bf16}\n"
    )
    assert {p.where for p in problems(path)} == {"d.yaml:5:71"}


@pytest.mark.parametrize(
    "layers", ["3-1", "a", "-1", "0-", "0-99999999999999", "²", "0--3", "''", "[a]", "[-1]", "4096"]
)
def test_layer_ranges_that_mean_nothing(write: Write, layers: str) -> None:
    path = write(
        f"kvhal: 1\nmodel:\n  groups:\n  - name: a\n    layers: {layers if layers.startswith('[') else repr(layers)}\n"
        "    num_kv_heads: 2\n    num_q_heads: 2\n    head_dim: 64\ncache: {mode: bf16}\n".replace('"', "'")
    )
    found = problems(path)
    assert found[0].where.startswith("d.yaml:5:")


# Layers: extends, environment, options.


def test_extends_in_a_circle(write: Write) -> None:
    write("kvhal: 1\nextends: d.yaml\n", "b.yaml")
    found = problems(write(f"extends: b.yaml\n{SMALL}"))
    assert places(found) == [("b.yaml:2:10", "extends goes in a circle: d.yaml -> b.yaml -> d.yaml")]
    found = problems(write(f"extends: ./d.yaml\n{SMALL}"))
    assert places(found) == [("d.yaml:1:10", "extends goes in a circle: d.yaml -> d.yaml")]


def test_extends_has_a_limit(write: Write) -> None:
    for i in range(12):
        write(f"kvhal: 1\nextends: {i + 1}.yaml\n", f"{i}.yaml")
    write(SMALL, "12.yaml")
    (problem,) = problems("0.yaml")
    assert problem.message.startswith("extends goes deeper than 8 files")
    assert load("4.yaml", env={}).geometry.num_layers == 4
    for i in range(8):
        write(f"kvhal: 1\nextends: [{i + 1}.yaml, {i + 1}.yaml, {i + 1}.yaml]\n", f"{i}.yaml")
    write(SMALL, "8.yaml")
    assert "or further than 32 in all" in problems("0.yaml")[0].message


@pytest.mark.parametrize("extends", ["3", "{a: b}", "/abs.yaml", "[[x]]", "''", "[null]"])
def test_extends_must_be_a_relative_path(write: Write, extends: str) -> None:
    (problem,) = problems(write(f"extends: {extends}\n{SMALL}"))
    assert problem.message.endswith("it must be a path relative to this file, or a list of them")
    assert problem.where.startswith("d.yaml:1:")


def test_an_unreadable_base_does_not_make_everything_look_missing(write: Write) -> None:
    found = problems(write("kvhal: 1\nextends: absent.yaml\ncache: {layout: x}\n"))
    assert [p.where for p in found] == ["absent.yaml", "d.yaml:2:10", "d.yaml:3:17"]


def test_a_large_file_of_something_else_is_refused_quickly(write: Write) -> None:
    path = write("kvhal: 1\n" + "".join(f"key{i}: {i}\n" for i in range(60_000)))
    start = time.process_time()
    found = problems(path)
    assert time.process_time() - start < 10
    assert len(found) == 101
    assert found[-1].message == "there are more problems; these are the first"


def test_an_alias_is_reported_once(write: Write) -> None:
    found = problems(write(SMALL.replace("int8_per_token_head", "*m").replace("num_layers: 4", "num_layers: *n")))
    assert [p.where for p in found] == ["d.yaml:3:15", "d.yaml:8:9"]
    found = problems(write("kvhal: 1\nmodel: {<<: {a: 1}}\ncache: {mode: bf16, layout: x}\n"))
    assert [p.where for p in found] == ["d.yaml:2:9", "d.yaml:3:29"]


def test_environment_variables_that_are_wrong(write: Write) -> None:
    env = {
        "KVHAL__CACHE__ODER": "1",
        "KVHAL__DEVICE": "'0'",
        "KVHAL__CACHE__": "1",
        "KVHAL__CACHE__mode": "fp8",
        "KVHAL__EXTENDS": "x.yaml",
        "KVHAL__MEMORY__BYTES": "",
        "KVHAL_PLATFORM": "no such platform",
        "KVHAL_CACHE_MODE": "not ours",
        "PATH": "/bin",
    }
    assert [(p.where, p.hint) for p in problems(write(SMALL), env=env)] == [
        ("KVHAL__CACHE__", "name a section and a key: cache.mode"),
        ("KVHAL__CACHE__ODER", "did you mean cache.order?"),
        ("KVHAL__CACHE__mode", "write KVHAL__CACHE__MODE"),
        ("KVHAL__DEVICE", "write 0, without quotes"),
        ("KVHAL__EXTENDS", "write it into the file"),
        ("KVHAL__MEMORY__BYTES", "write null to unset it"),
    ]


def test_options_that_are_wrong(write: Write) -> None:
    found = problems(write(SMALL), "cache.mode", "cache..x=1", "=1", "kvhal=1", "memory.blocks=[", "memory.bytes=0")
    assert [p.where for p in found] == [
        "--set",
        "--set ",
        "--set cache..x",
        "--set kvhal",
        "--set memory.blocks",
        "--set memory.bytes",
    ]


# Sizes.


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("8GiB", 8 * 2**30),
        ("512MiB", 512 * 2**20),
        ("1.5GiB", 3 * 2**29),
        ("8GB", 8 * 10**9),
        ("8 kB", 8000),
        ("1B", 1),
        ("1000000", 10**6),
        (1000000, 10**6),
        (0, 0),
        ("0", 0),
    ],
)
def test_sizes(text: object, expected: int) -> None:
    assert parse_size(text) == expected


@pytest.mark.parametrize(
    "text", [-1, "-1GiB", True, None, 1.5, "1.5B", "0.3KiB", "8gib", "8XB", "GiB", "", "1e9", "١GiB", [1]]
)
def test_sizes_that_mean_nothing(text: object) -> None:
    with pytest.raises(ValueError, match=r"write|unit|negative|whole number"):
        parse_size(text)


def test_a_unit_in_the_wrong_case_is_named(write: Write) -> None:
    (problem,) = problems(write(SMALL), "memory.bytes=8gib")
    assert problem.hint == "the unit 'gib' is unknown; did you mean 8GiB?"
    (problem,) = problems(write(SMALL), "memory.bytes=0")
    assert problem.message.startswith("memory.bytes is 0; it must be above 0")


# Schema, command line, start-up.


def test_the_json_schema_accepts_what_loads_and_refuses_unknown_keys() -> None:
    schema = json_schema()
    validator = jsonschema.Draft202012Validator(schema)
    validator.check_schema(schema)
    for path in CONFIGS.glob("*.yaml"):
        validator.validate(yaml.safe_load(path.read_text()))
    good = yaml.safe_load(SMALL)
    bad: dict[str, Any]
    for bad in ({"kvhal": 2}, {"cahce": {}}, {"cache": {"mode": "FP8"}}, {"memory": {"fraction": 1.2}}, {"device": -1}):
        assert not validator.is_valid({**good, **bad})


def invoke(*args: str) -> str:
    result = CliRunner().invoke(cli_config.app, list(args))
    if result.exception is not None:
        raise result.exception
    return result.stdout


def test_check_and_resolve(write: Write) -> None:
    path = write(SMALL)
    assert invoke("check", path) == "d.yaml: ok (4 layers, 1 group(s), int8_per_token_head)\n"
    assert "cache.block_size = 16\n" in invoke("resolve", path)
    shown = invoke("resolve", path, "--origin", "--set", "cache.block_size=32")
    assert "--set cache.block_size" in next(
        line for line in shown.splitlines() if line.startswith("cache.block_size = 32")
    )
    document = json.loads(invoke("resolve", path, "--json", "--origin"))
    assert document["schema"] == "kvhal.deployment/1"
    assert document["deployment"]["cache"]["mode"] == {"k": "int8_per_token_head", "v": "int8_per_token_head"}
    assert document["origin"]["cache.mode.k"] == "d.yaml:8"
    assert json.loads(invoke("schema"))["title"] == "kvhal deployment"
    with pytest.raises(ConfigError, match="not a key that kvhal knows"):
        invoke("check", path, "--set", "x=1")


def test_checking_a_file_needs_no_torch() -> None:
    code = (
        "import sys; from kvhal.config.deployment import load; load('configs/h200.yaml', env={});"
        "import kvhal.cli.config; print([m for m in ('torch', 'numpy', 'rich') if m in sys.modules])"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


_JSON: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["fp8", "0-3", "1GiB"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["k", "v", "mode", "groups", "name", "layers", "config", "block_size", "static_scales", "deny"]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=8,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    section=st.sampled_from(
        ["model", "cache", "memory", "policy", "profile", "report", "platform", "extends", "device"]
    ),
    value=_JSON,
)
def test_any_tree_loads_or_is_refused_with_places(write: Write, section: str, value: Any) -> None:
    path = write(yaml.safe_dump({**yaml.safe_load(SMALL), section: value}, allow_unicode=True))
    try:
        assert isinstance(load(path, env={}), Deployment)
    except ConfigError as exc:
        assert all(p.where and p.message for p in exc.problems)  # either outcome is right

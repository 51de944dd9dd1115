"""Model geometry: the committed models against their known numbers, and every way a config.json can be unclear."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvhal.config.geometry import Geometry, LayerGroup
from kvhal.config.hf_config import from_hf, geometry_of
from kvhal.errors import ConfigError
from kvhal.spec import CacheSpec, OpaqueStore

MODELS = Path(__file__).parent.parent / "configs" / "models"
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}


def problems_of(config: dict[str, Any]) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        geometry_of(config, "config.json")
    assert {p.where for p in caught.value.problems} == {"config.json"}
    return [p.message for p in caught.value.problems]


@pytest.mark.parametrize(
    ("name", "layers", "q_heads", "kv_heads", "head_dim"),
    [
        ("llama-3.1-8b", 32, 32, 8, 128),
        ("llama-3.3-70b", 80, 64, 8, 128),
        ("llama-3.1-405b", 126, 128, 8, 128),
        ("qwen2.5-7b", 28, 28, 4, 128),
        ("qwen3-8b", 36, 32, 8, 128),
    ],
)
def test_models_that_see_everything(name: str, layers: int, q_heads: int, kv_heads: int, head_dim: int) -> None:
    geometry = from_hf(MODELS / f"{name}.json")
    assert geometry.groups == (LayerGroup("full", tuple(range(layers)), q_heads, kv_heads, head_dim, head_dim),)
    assert geometry.shares == ()
    assert geometry.num_layers == layers


@pytest.mark.parametrize(
    ("name", "layers", "q_heads", "kv_heads", "head_dim", "window"),
    [("mistral-7b-v0.1", 32, 32, 8, 128, 4096), ("phi-3-mini-4k", 32, 32, 32, 96, 2047)],
)
def test_models_whose_layers_all_slide(
    name: str, layers: int, q_heads: int, kv_heads: int, head_dim: int, window: int
) -> None:
    (group,) = from_hf(MODELS / f"{name}.json").groups
    assert group == LayerGroup("sliding", tuple(range(layers)), q_heads, kv_heads, head_dim, head_dim, window)


def test_gemma_2_slides_on_every_even_layer() -> None:
    full, sliding = from_hf(MODELS / "gemma-2-9b.json").groups
    assert full == LayerGroup("full", tuple(range(1, 42, 2)), 16, 8, 256, 256)
    assert sliding == LayerGroup("sliding", tuple(range(0, 42, 2)), 16, 8, 256, 256, 4096)


def test_gpt_oss_slides_by_its_layer_types() -> None:
    full, sliding = from_hf(MODELS / "gpt-oss-20b.json").groups
    assert full == LayerGroup("full", tuple(range(1, 24, 2)), 64, 8, 64, 64)
    assert sliding == LayerGroup("sliding", tuple(range(0, 24, 2)), 64, 8, 64, 64, 128)


def test_gemma_3n_shares_the_last_layer_of_the_same_kind() -> None:
    geometry = from_hf(MODELS / "gemma-3n-e4b.json")
    full, sliding = geometry.groups
    assert full.layers == (4, 9, 14, 19)
    assert sliding.layers == tuple(i for i in range(20) if (i + 1) % 5)
    assert (full.window, sliding.window, full.num_kv_heads, full.num_q_heads) == (None, 512, 2, 8)
    assert dict(geometry.shares) == {i: 19 if (i + 1) % 5 == 0 else 18 for i in range(20, 35)}
    assert geometry.num_layers == 35


def test_deepseek_v3_keeps_a_latent_and_a_rope_store() -> None:
    (group,) = from_hf(MODELS / "deepseek-v3.json").groups
    assert group.layers == tuple(range(61))
    assert group.num_q_heads == 128
    assert not group.has_kv
    assert group.opaque == (OpaqueStore("latent", "bfloat16", (512,)), OpaqueStore("rope", "bfloat16", (64,)))
    spec = CacheSpec(from_hf(MODELS / "deepseek-v3.json").cache_groups(("bfloat16", "bfloat16"), (None, None), 16))
    stores = [s for s in spec.groups[0].stores if isinstance(s, OpaqueStore)]
    assert sum(s.nbytes_each for s in stores) == 1152, "bytes a token and layer: (512 + 64) x 2"


@pytest.mark.parametrize("path", sorted(MODELS.glob("*.json")), ids=lambda p: p.stem)
def test_every_committed_model_makes_a_spec(path: Path) -> None:
    geometry = from_hf(path)
    spec = CacheSpec(geometry.cache_groups(("bfloat16", "bfloat16"), (None, None), 16), geometry.shares)
    assert spec.num_layers == json.loads(path.read_text())["num_hidden_layers"]
    assert path.stem in (MODELS / "README.md").read_text(), "each states its source"


def test_defaults_are_those_of_transformers() -> None:
    config = {key: LLAMA[key] for key in LLAMA if key != "num_key_value_heads"}
    (group,) = geometry_of(config, "c").groups
    assert (group.num_kv_heads, group.head_dim, group.head_dim_v) == (32, 128, 128)
    (group,) = geometry_of({**LLAMA, "head_dim": None, "v_head_dim": 64}, "c").groups
    assert (group.head_dim, group.head_dim_v) == (128, 64)


def test_text_config_of_a_multimodal_model() -> None:
    geometry = geometry_of({"model_type": "gemma3", "text_config": LLAMA, "vision_config": {"hidden_size": 1}}, "c")
    assert geometry.groups[0].num_kv_heads == 8
    assert problems_of({**LLAMA, "num_hidden_layers": 40, "text_config": LLAMA}) == [
        "num_hidden_layers is 40 at the top and 32 in text_config; keep one"
    ]


def test_qwen2_windows() -> None:
    config = {**LLAMA, "model_type": "qwen2", "sliding_window": 4096, "max_window_layers": 28}
    full, sliding = geometry_of({**config, "use_sliding_window": True}, "c").groups
    assert (full.layers, sliding.layers) == (tuple(range(28)), (28, 29, 30, 31))
    assert (full.window, sliding.window) == (None, 4096)
    (group,) = geometry_of({**config, "use_sliding_window": False}, "c").groups
    assert group.window is None
    assert problems_of({**config, "use_sliding_window": True, "max_window_layers": None}) == [
        "use_sliding_window is true, but max_window_layers is None: which layers slide?"
    ]


def test_sliding_window_pattern_of_gemma_3() -> None:
    config = {**LLAMA, "model_type": "gemma3_text", "head_dim": 256, "sliding_window": 512}
    for written in ({}, {"sliding_window_pattern": 6}):
        full, sliding = geometry_of({**config, **written}, "c").groups
        assert full.layers == (5, 11, 17, 23, 29)
        assert len(sliding.layers) == 27
        assert full.head_dim == 256


def test_what_a_nested_text_config_leaves_out_is_not_guessed() -> None:
    """google/gemma-3-12b-it: head_dim is the class's 256, not 3840 / 16; the same for other families' defaults."""
    gemma = {"model_type": "gemma3_text", "hidden_size": 3840, "num_attention_heads": 16, "num_hidden_layers": 48}
    assert problems_of({"text_config": {**gemma, "num_key_value_heads": 8, "sliding_window": 1024}}) == [
        "head_dim is missing, and for model_type 'gemma3_text' it need not be hidden_size / num_attention_heads"
    ]
    assert problems_of({**LLAMA, "model_type": "mistral", "num_key_value_heads": None}) == [
        "sliding_window is missing, and model_type 'mistral' has a default for it that shapes the cache",
        "num_key_value_heads is missing, and for model_type 'mistral' that need not mean one a query head",
    ]
    (group,) = geometry_of({**LLAMA, "model_type": "mistral", "sliding_window": None}, "c").groups
    assert group.window is None


def test_a_window_without_a_rule_is_not_guessed() -> None:
    (message,) = problems_of({**LLAMA, "model_type": "unheard_of", "head_dim": 128, "sliding_window": 512})
    assert message == "sliding_window is 512, but nothing says which layers slide (model_type 'unheard_of')"


def test_everything_missing_is_listed_at_once() -> None:
    assert problems_of({}) == [
        "num_hidden_layers is missing",
        "num_attention_heads is missing",
        "num_key_value_heads is missing, and for model_type None that need not mean one a query head",
        "head_dim and hidden_size are both missing",
    ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0; it must be a whole number, 1 or more"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True; it must be a whole number, 1 or more"),
        ({"num_hidden_layers": "32"}, "num_hidden_layers is '32'; it must be a whole number, 1 or more"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000; at most 4096 are supported"),
        ({"num_key_value_heads": [8, 4]}, "num_key_value_heads is [8, 4]; it must be a whole number, 1 or more"),
        ({"num_key_value_heads": 5}, "num_attention_heads is 32, not a multiple of num_key_value_heads 5"),
        ({"hidden_size": 4097}, "hidden_size 4097 is not a multiple of num_attention_heads 32 and head_dim is missing"),
        ({"layer_types": ["full_attention"] * 3}, "layer_types has 3 entries for num_hidden_layers 32"),
        ({"layer_types": "full_attention"}, "layer_types is 'full_attention'; it must be a list of names, one a layer"),
        ({"layer_types": ["sliding_attention"] * 32}, "sliding_window is missing"),
        (
            {"layer_types": ["sliding_attention"] * 32, "sliding_window": 8, "use_sliding_window": False},
            "use_sliding_window is false, but layer_types has 'sliding_attention'; keep one",
        ),
        ({"num_kv_shared_layers": 32}, "num_kv_shared_layers is 32 of 32 layers; at least one must own its cache"),
        (
            {
                "layer_types": ["full_attention"] * 31 + ["sliding_attention"],
                "sliding_window": 8,
                "num_kv_shared_layers": 1,
            },
            "num_kv_shared_layers is 1: no layer before 31 is 'sliding_attention' for them to share",
        ),
        ({"kv_lora_rank": 512, "torch_dtype": "bfloat16"}, "qk_rope_head_dim is missing"),
        (
            {"kv_lora_rank": 512, "qk_rope_head_dim": 64},
            "torch_dtype is missing; it gives the type of the latent store",
        ),
    ],
)
def test_contradictions_are_errors(change: dict[str, Any], message: str) -> None:
    assert problems_of({**LLAMA, **change}) == [message]


@pytest.mark.parametrize("kind", ["linear_attention", "mamba", "conv", "chunked_attention"])
def test_layers_that_are_not_attention_need_explicit_groups(kind: str) -> None:
    with pytest.raises(ConfigError) as caught:
        geometry_of({**LLAMA, "layer_types": ["full_attention"] * 8 + [kind] * 24}, "config.json")
    (problem,) = caught.value.problems
    assert problem.message.startswith(f"layer_types has {kind!r} (24 layers), which kvhal cannot read from config.json")
    assert problem.hint.startswith("state stores and other caches need explicit groups")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("global_head_dim", 512),
        ("full_attention_interval", 4),
        ("attn_layer_period", 8),
        ("attention_chunk_size", 8192),
        ("index_topk", 2048),
        ("is_encoder_decoder", True),
    ],
)
def test_keys_that_change_the_cache_are_never_ignored(key: str, value: object) -> None:
    (message,) = problems_of({**LLAMA, key: value})
    assert message.startswith(f"{key} is {value}: ")
    assert geometry_of({**LLAMA, key: None}, "c") == geometry_of({**LLAMA, key: False}, "c") == geometry_of(LLAMA, "c")


def test_a_foreign_name_for_kv_heads_is_not_read_as_multi_head() -> None:
    config = {**LLAMA, "num_key_value_heads": None, "multi_query": True}
    (message,) = problems_of(config)
    assert message.startswith("num_key_value_heads is missing and multi_query is True")


@pytest.mark.parametrize(
    ("text", "where", "message"),
    [
        ("", ":1:1", "this is not valid JSON"),
        ('{"a": 1,\n "b" 2}', ":2:6", "this is not valid JSON: Expecting ':' delimiter"),
        ("[]", "", "the top of the file is not an object"),
        ('{"num_hidden_layers": 1, "num_hidden_layers": 2}', "", "keys stand twice: 'num_hidden_layers'"),
        ("[" * 100_000, "", "the JSON is nested too deep"),
        ('{"hidden_size": ' + "9" * 5000 + "}", "", "the JSON is nested too deep or holds an endless number"),
    ],
)
def test_files_that_are_no_config(tmp_path: Path, text: str, where: str, message: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        from_hf(path)
    (problem,) = caught.value.problems
    assert problem.where == f"{path}{where}"
    assert problem.message.startswith(message)


def test_uniform_geometry_equals_the_uniform_spec() -> None:
    geometry = Geometry.uniform(
        num_layers=4, num_kv_heads=2, num_q_heads=8, head_dim=64, head_dim_v=32, window=128, shares={3: 2}
    )
    groups = geometry.cache_groups(("fp8_per_token_head", "int4_per_token_head"), (None, None), 32)
    assert CacheSpec(groups, geometry.shares) == CacheSpec.uniform(
        mode=("fp8_per_token_head", "int4_per_token_head"),
        num_layers=4,
        num_kv_heads=2,
        num_q_heads=8,
        head_dim=64,
        head_dim_v=32,
        window=128,
        block_size=32,
        shares={3: 2},
    )

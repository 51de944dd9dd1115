"""What a cache spec accepts, and how it says no."""

from __future__ import annotations

import pytest

from kvhal import CacheGroup, CacheSpec, ConfigError, OpaqueStore, ScaledStore, StaticScales
from kvhal.modes import ENCODINGS, MODES, mode


def uniform(**changes: object) -> CacheSpec:
    base: dict[str, object] = {"mode": "int8_per_token_head", "num_layers": 2, "num_kv_heads": 2, "head_dim": 64}
    return CacheSpec.uniform(**{**base, **changes})  # type: ignore[arg-type]  # bad values on purpose


def test_alias_is_kept_as_the_canonical_name() -> None:
    spec = uniform(mode="fp8", k_scale=0.5, v_scale=0.25)
    assert spec.modes == ("fp8_e4m3",)


def test_k_and_v_may_differ_in_mode_and_head_dim() -> None:
    spec = uniform(mode=("fp8_per_token_head", "int4_per_token_head"), head_dim=192, head_dim_v=128)
    k, v = spec.groups[0].k, spec.groups[0].v
    assert k is not None
    assert v is not None
    assert (k.mode, k.encoding, k.head_dim) == ("fp8_per_token_head", "e4m3fn", 192)
    assert (v.mode, v.encoding, v.head_dim) == ("int4_per_token_head", "int4", 128)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"mode": "FP8"}, ("'FP8'", "unknown", "'fp8'")),
        ({"mode": "int8"}, ("'int8'", "int8_per_token_head")),
        ({"encoding": "e4m3fnuz"}, ("int8_per_token_head", "e4m3fnuz")),
        ({"block_size": 0}, ("block_size is 0",)),
        ({"block_size": -16}, ("block_size is -16",)),
        ({"head_dim": 12}, ("head_dim is 12", "multiple of 8")),
        ({"head_dim": 0}, ("head_dim is 0",)),
        ({"head_dim_v": 4}, ("head_dim is 4",)),
        ({"num_kv_heads": 0}, ("num_kv_heads is 0",)),
        ({"num_layers": 0}, ("num_layers is 0",)),
        ({"num_q_heads": 3}, ("num_q_heads is 3", "multiple of num_kv_heads (2)")),
        ({"window": 0}, ("window is 0",)),
        ({"mode": "fp8_e4m3"}, ("k_scale", "v_scale", "none was given")),
        ({"mode": "fp8_e4m3", "k_scale": 0.5}, ("v_scale", "none was given")),
        ({"k_scale": 0.5, "v_scale": 0.5}, ("k_scale was given", "no static scale")),
        ({"mode": "fp8_e5m2", "k_scale": [1.0, 1.0, 1.0], "v_scale": 1.0}, ("3 values for 2 layers",)),
        ({"mode": "fp8_e5m2", "k_scale": 0.0, "v_scale": 1.0}, ("k_scale 0.0", "finite")),
        ({"mode": "fp8_e5m2", "k_scale": float("nan"), "v_scale": 1.0}, ("k_scale nan",)),
        ({"mode": "fp8_e5m2", "k_scale": -1.0, "v_scale": 1.0}, ("k_scale -1.0",)),
        ({"shares": {1: 5}}, ("layer 1 shares layer 5",)),
    ],
)
def test_a_spec_that_cannot_be_is_refused_in_words(changes: dict[str, object], words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        uniform(**changes)
    assert caught.value.exit_code == 2
    for word in words:
        assert word in str(caught.value)


def test_every_problem_is_reported_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        uniform(block_size=0, head_dim=12, num_kv_heads=0)
    # head_dim is wrong for k and for v, as is the number of heads.
    assert len(caught.value.problems) == 5


def test_scales_follow_the_encoding_they_are_stored_in() -> None:
    """Codes of e4m3fnuz mean half of e4m3fn's, so a scale calibrated for OCP doubles exactly."""
    stored = uniform(
        mode="fp8_e4m3", encoding="e4m3fnuz", k_scale=[0.1, 0.3], v_scale=0.7, scales_encoding="e4m3fn"
    ).stored_scales(1)
    assert stored == (0.6, 1.4)
    assert uniform(mode="fp8_e4m3", encoding="e4m3fnuz", k_scale=0.1, v_scale=0.7).stored_scales(0) == (0.1, 0.7)


def test_scales_of_an_unrelated_encoding_are_refused() -> None:
    spec = uniform(mode="fp8_e4m3", k_scale=1.0, v_scale=1.0, scales_encoding="e5m2")
    with pytest.raises(ConfigError, match="'e5m2'"):
        spec.stored_scales(0)


def test_shared_layers_own_nothing() -> None:
    spec = uniform(num_layers=4, shares={2: 0, 3: 1})
    assert spec.num_layers == 4
    assert spec.groups[0].layers == (0, 1)
    assert [spec.source_of(i) for i in range(4)] == [0, 1, 0, 1]


def test_groups_with_opaque_stores() -> None:
    latent = OpaqueStore("latent", "bfloat16", (512,))
    state = OpaqueStore("state", "float32", (16, 64), per="block")
    spec = CacheSpec((CacheGroup("mla", (0, 1), 16, (latent,)), CacheGroup("ssm", (2,), 1, (state,))))
    assert latent.nbytes_each == 1024
    assert state.nbytes_each == 4096
    assert spec.modes == ()


@pytest.mark.parametrize(
    ("group", "words"),
    [
        (CacheGroup("g", (0,), 16, ()), "at least one"),
        (CacheGroup("g", (0,), 16, (ScaledStore.of("k", "bfloat16", 1, 64),)), "a k store needs a v store"),
        (CacheGroup("g", (0,), 16, (OpaqueStore("k", "uint8", (4,)),)), "takes the name of a scaled one"),
        (CacheGroup("g", (0,), 16, (OpaqueStore("x", "float64", (4,)),)), "'float64' is unknown"),
        (CacheGroup("g", (0,), 16, (OpaqueStore("x", "uint8", ()),)), "every dimension"),
        (CacheGroup("g", (0,), 16, (OpaqueStore("x", "uint8", (4,), per="head"),)), "'token' or 'block'"),
        (CacheGroup("g", (1,), 16, (OpaqueStore("x", "uint8", (4,)),)), "layers must be 0 to n-1"),
    ],
)
def test_a_group_that_cannot_be_is_refused(group: CacheGroup, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        CacheSpec((group,))


def test_a_fallback_mode_keeps_shapes_and_drops_scales() -> None:
    spec = uniform(mode="fp8_e4m3", k_scale=1.0, v_scale=1.0).with_modes({"fp8_e4m3": "int8_per_token_head"})
    assert spec.modes == ("int8_per_token_head",)
    assert spec.static_scales is None


def test_a_fallback_of_one_store_keeps_the_scales_of_the_other() -> None:
    spec = uniform(mode=("fp8_e4m3", "fp8_e5m2"), k_scale=0.5, v_scale=0.25)
    left = spec.with_modes({"fp8_e4m3": "int8_per_token_head"})
    assert left.stored_scales(1) == (1.0, 0.25)


def test_encodings_have_the_documented_bytes_a_row() -> None:
    assert {name: e.row_bytes(128) for name, e in ENCODINGS.items()} == {
        "bfloat16": 256, "float16": 256, "e4m3fn": 128, "e4m3fnuz": 128, "e5m2": 128, "e5m2fnuz": 128,
        "int8": 128, "int4": 64,
    }  # fmt: skip
    assert {m.name for m in MODES.values() if len(m.encodings) == 2} == {"fp8_e4m3", "fp8_e5m2", "fp8_per_token_head"}
    assert mode("bf16") is MODES["bfloat16"]


def test_static_scales_give_each_store_its_own() -> None:
    scales = StaticScales((0.25,), (0.5,))
    assert (scales.of("k"), scales.of("v")) == ((0.25,), (0.5,))

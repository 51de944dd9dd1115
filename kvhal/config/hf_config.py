"""Model geometry from a Hugging Face config.json.

Nothing is guessed in silence: a field that is missing, contradicts another, or describes a cache that the groups below
cannot hold is an error, and all of them are reported together with the file's name. A key may be left out only where
Transformers' class for that model_type derives it: `hf_families` has the tables.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kvhal.config.geometry import MAX_LAYERS, Geometry, LayerGroup
from kvhal.config.hf_families import (
    BEYOND,
    FULL,
    FULL_EVERY,
    HEAD_DIM_FROM_HIDDEN,
    KINDS,
    KV_HEADS_FROM_Q,
    MUST_STATE,
    OTHER_KV_NAMES,
    SLIDING,
    STATE,
)
from kvhal.errors import ConfigError, Problem
from kvhal.source.textfile import read_text
from kvhal.spec import OPAQUE_ITEM_BYTES, OpaqueStore

__all__ = ["from_hf", "geometry_of"]

_WRITE_GROUPS = "describe the layers with `model.groups` in the deployment file"


def from_hf(path: Path, name: str | None = None) -> Geometry:
    """The geometry in the config.json at `path`. Raises ConfigError with every problem; `name` is how they call it."""
    shown = str(path) if name is None else name
    return geometry_of(_load(read_text(path, shown), shown), shown)


def geometry_of(config: dict[str, Any], name: str) -> Geometry:
    """The geometry in an already loaded configuration."""
    return _Reading(config, name).geometry()


def _load(text: str, name: str) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            twice = sorted({key for key, _ in pairs if sum(key == other for other, _ in pairs) > 1})
            raise ConfigError(Problem(f"keys stand twice: {', '.join(map(repr, twice))}", name, hint="keep one"))
        return found

    try:
        config = json.loads(text, object_pairs_hook=unique)
    except json.JSONDecodeError as exc:
        where = f"{name}:{exc.lineno}:{exc.colno}"
        raise ConfigError(Problem(f"this is not valid JSON: {exc.msg}", where, hint="expected a config.json")) from None
    except (RecursionError, ValueError):
        raise ConfigError(Problem("the JSON is nested too deep or holds an endless number", name)) from None
    if not isinstance(config, dict):
        raise ConfigError(Problem("the top of the file is not an object", name, hint="expected a config.json"))
    return config


class _Reading:
    """One pass over a configuration that collects every problem before it gives up."""

    def __init__(self, config: dict[str, Any], name: str) -> None:
        self.name = name
        self.problems: list[Problem] = []
        self.outer = config
        nested = config.get("text_config")
        self.config: dict[str, Any] = config
        if isinstance(nested, dict) and ("num_hidden_layers" in nested or "num_hidden_layers" not in config):
            self.config = nested
            for key in ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "hidden_size"):
                if key in config and key in nested and config[key] != nested[key]:
                    self.refuse(f"{key} is {config[key]!r} at the top and {nested[key]!r} in text_config; keep one")

        self.family = str(self.config.get("model_type"))
        self.kind_of_model = f"model_type {self.config.get('model_type')!r}"

    def refuse(self, message: str, hint: str = "") -> None:
        self.problems.append(Problem(message, self.name, hint=hint))

    def given(self, key: str) -> Any:
        """The value of `key`, None where it is missing, null, or switched off."""
        value = self.config.get(key)
        return None if value is False else value

    def count(self, key: str, default: int | None = None) -> int:
        """A whole number of 1 or more; 0 after a problem was noted."""
        value = self.config.get(key)
        if value is None and default is not None:
            return default
        if value is None:
            self.refuse(f"{key} is missing", self._other_name(key))
        elif not isinstance(value, int) or isinstance(value, bool) or not 1 <= value < 2**31:
            self.refuse(f"{key} is {value!r}; it must be a whole number, 1 or more")
        else:
            return value
        return 0

    def _other_name(self, key: str) -> str:
        names = {
            "num_hidden_layers": ("n_layer", "n_layers", "num_layers"),
            "num_attention_heads": ("n_head", "n_heads"),
        }
        found = [name for name in names.get(key, ()) if name in self.config]
        if found:
            return f"the file has {found[0]!r}, which kvhal does not read; write the geometry inline under `model:`"
        return "is this the model's config.json?"

    def geometry(self) -> Geometry:
        for key, why in BEYOND.items():
            if self.given(key) not in (None, 0, [], {}):
                self.refuse(
                    f"{key} is {self._short(key)}: {why}, which config.json fields do not describe", _WRITE_GROUPS
                )
        for key, why in STATE.items():
            if self.given(key) not in (None, 0, [], {}) and "layer_types" not in self.config:
                hint = f"state stores need explicit groups: {_WRITE_GROUPS}"
                self.refuse(f"{key} is {self._short(key)}: {why}, whose state is not k and v", hint)
        for key in MUST_STATE.get(self.family, ()):
            if key not in self.config:
                self.refuse(
                    f"{key} is missing, and {self.kind_of_model} has a default for it that shapes the cache",
                    f"add {key} (null or 0 if the model does not use it)",
                )
        num_layers = self.count("num_hidden_layers")
        if num_layers > MAX_LAYERS:
            self.refuse(f"num_hidden_layers is {num_layers}; at most {MAX_LAYERS} are supported")
            num_layers = 0
        if self.given("kv_lora_rank") is not None:
            return self._latent(num_layers)
        return self._attention(num_layers)

    def _short(self, key: str) -> str:
        text = repr(self.config[key])
        return text if len(text) <= 40 else f"{text[:37]}..."

    def _attention(self, num_layers: int) -> Geometry:
        heads = self.count("num_attention_heads")
        kv_heads = self._kv_heads(heads)
        head_dim = self._head_dim(heads)
        head_dim_v = self.count("v_head_dim", default=head_dim)
        if heads and kv_heads and heads % kv_heads:
            self.refuse(f"num_attention_heads is {heads}, not a multiple of num_key_value_heads {kv_heads}")
        kinds = self._kinds(num_layers)
        shares = self._shares(kinds)
        window = self.count("sliding_window") if SLIDING in kinds else 0
        self._finish()
        shared = dict(shares)
        groups = tuple(
            LayerGroup(
                name=name,
                layers=layers,
                num_q_heads=heads,
                num_kv_heads=kv_heads,
                head_dim=head_dim,
                head_dim_v=head_dim_v,
                window=window if kind == SLIDING else None,
            )
            for kind, name in ((FULL, "full"), (SLIDING, "sliding"))
            if (layers := tuple(i for i, k in enumerate(kinds) if k == kind and i not in shared))
        )
        return Geometry(groups, shares, self.name)

    def _kv_heads(self, heads: int) -> int:
        if self.config.get("num_key_value_heads") is not None:
            return self.count("num_key_value_heads")
        others = [key for key in OTHER_KV_NAMES if self.given(key) is not None]
        for key in others:
            self.refuse(
                f"num_key_value_heads is missing and {key} is {self._short(key)}: how many kv heads?",
                "add num_key_value_heads",
            )
        if not others and self.family not in KV_HEADS_FROM_Q:
            self.refuse(
                f"num_key_value_heads is missing, and for {self.kind_of_model} that need not mean one a query head",
                f"add num_key_value_heads ({heads} if every query head has its own)",
            )
        return heads

    def _head_dim(self, heads: int) -> int:
        if self.config.get("head_dim") is not None:
            return self.count("head_dim")
        if self.config.get("hidden_size") is None:
            self.refuse("head_dim and hidden_size are both missing", "add head_dim")
            return 0
        hidden = self.count("hidden_size")
        if self.family not in HEAD_DIM_FROM_HIDDEN:
            self.refuse(
                f"head_dim is missing, and for {self.kind_of_model} it need not be hidden_size / num_attention_heads",
                f"add head_dim ({hidden // heads if heads else '?'} if it is)",
            )
            return 0
        if hidden and heads and hidden % heads:
            self.refuse(
                f"hidden_size {hidden} is not a multiple of num_attention_heads {heads} and head_dim is missing",
                "add head_dim",
            )
            return 0
        return hidden // heads if hidden and heads else 0

    def _kinds(self, num_layers: int) -> list[str]:
        """The kind of each layer."""
        types = self.config.get("layer_types")
        if types is None:
            return self._kinds_without_types(num_layers)
        if not isinstance(types, list) or not all(isinstance(t, str) for t in types):
            self.refuse(f"layer_types is {self._short('layer_types')}; it must be a list of names, one a layer")
            return []
        for kind in sorted({t for t in types if t not in KINDS}):
            number = types.count(kind)
            self.refuse(
                f"layer_types has {kind!r} ({number} layers), which kvhal cannot read from config.json; it reads "
                f"{FULL!r} and {SLIDING!r}",
                f"state stores and other caches need explicit groups: {_WRITE_GROUPS}",
            )
        if num_layers and len(types) != num_layers:
            self.refuse(f"layer_types has {len(types)} entries for num_hidden_layers {num_layers}")
        if self.config.get("use_sliding_window") is False and SLIDING in types:
            self.refuse("use_sliding_window is false, but layer_types has 'sliding_attention'; keep one")
        return [KINDS.get(t, FULL) for t in types]

    def _kinds_without_types(self, num_layers: int) -> list[str]:
        if self.given("sliding_window") is None or self.config.get("use_sliding_window") is False:
            return [FULL] * num_layers
        if self.given("use_sliding_window") is not None:
            first = self.config.get("max_window_layers")
            if not isinstance(first, int) or isinstance(first, bool) or first < 0:
                self.refuse(f"use_sliding_window is true, but max_window_layers is {first!r}: which layers slide?")
                return []
            return [SLIDING if i >= first else FULL for i in range(num_layers)]
        every = self.config.get("sliding_window_pattern", FULL_EVERY.get(self.family))
        if not isinstance(every, int) or isinstance(every, bool) or every < 0:
            self.refuse(
                f"sliding_window is {self._short('sliding_window')}, but nothing says which layers slide "
                f"({self.kind_of_model})",
                "add layer_types, one 'sliding_attention' or 'full_attention' a layer",
            )
            return []
        return [FULL if every and not (i + 1) % every else SLIDING for i in range(num_layers)]

    def _shares(self, kinds: list[str]) -> tuple[tuple[int, int], ...]:
        """The last num_kv_shared_layers read the last layer of their kind before them (Gemma 3n)."""
        number = self.given("num_kv_shared_layers")
        if number in (None, 0) or not kinds:
            return ()
        if not isinstance(number, int) or not 0 < number < len(kinds):
            self.refuse(f"num_kv_shared_layers is {number!r} of {len(kinds)} layers; at least one must own its cache")
            return ()
        first = len(kinds) - number
        last = {kind: i for i, kind in enumerate(kinds[:first])}
        for kind in sorted(set(kinds[first:]) - set(last)):
            self.refuse(f"num_kv_shared_layers is {number}: no layer before {first} is {kind!r} for them to share")
            return ()
        return tuple((i, last[kinds[i]]) for i in range(first, len(kinds)))

    def _latent(self, num_layers: int) -> Geometry:
        heads = self.count("num_attention_heads")
        rank, rope = self.count("kv_lora_rank"), self.count("qk_rope_head_dim")
        dtype = next((d for c in (self.config, self.outer) for k in ("dtype", "torch_dtype") if (d := c.get(k))), None)
        if dtype is None:
            self.refuse("torch_dtype is missing; it gives the type of the latent store", "add torch_dtype")
        elif not isinstance(dtype, str) or dtype not in OPAQUE_ITEM_BYTES:
            self.refuse(f"torch_dtype is {dtype!r}; the latent store can be {', '.join(OPAQUE_ITEM_BYTES)}")
        kinds = set(self._kinds(num_layers)) - {FULL}
        if kinds:
            self.refuse("kv_lora_rank with sliding layers is not supported", _WRITE_GROUPS)
        if self.given("num_kv_shared_layers") not in (None, 0):
            self.refuse("kv_lora_rank with num_kv_shared_layers is not supported", _WRITE_GROUPS)
        self._finish()
        stores = (OpaqueStore("latent", str(dtype), (rank,)), OpaqueStore("rope", str(dtype), (rope,)))
        group = LayerGroup(name="latent", layers=tuple(range(num_layers)), num_q_heads=heads, opaque=stores)
        return Geometry((group,), source=self.name)

    def _finish(self) -> None:
        if self.problems:
            raise ConfigError(*self.problems)

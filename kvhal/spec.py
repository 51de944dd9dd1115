"""Model geometry times mode: what a cache must hold. No torch, no bytes, no strides.

A `CacheSpec` has groups; the layers of a group have equal pages. A page holds the stores of one layer for `block_size`
tokens: `k` and `v` (scaled stores), and opaque ones (latent, rope, index, state) that are owned, copied and budgeted
but never interpreted.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from kvhal import modes
from kvhal.errors import ConfigError, Problem
from kvhal.modes import Encoding, Mode, Scaling

__all__ = ["CacheGroup", "CacheSpec", "OpaqueStore", "ScaledStore", "StaticScales", "is_count"]

_T = TypeVar("_T")

HEAD_DIM_STEP = 8
OPAQUE_ITEM_BYTES = {"uint8": 1, "int8": 1, "float16": 2, "bfloat16": 2, "int32": 4, "float32": 4}


@dataclass(frozen=True, slots=True)
class ScaledStore:
    """Keys or values: `num_kv_heads` rows of `head_dim` elements a token, stored in `mode` with `encoding`."""

    name: str
    mode: str
    encoding: str
    num_kv_heads: int
    head_dim: int

    @classmethod
    def of(cls, name: str, mode: str, num_kv_heads: int, head_dim: int, encoding: str | None = None) -> ScaledStore:
        """A store by mode name or alias, in the mode's default encoding unless one is named."""
        found = modes.mode(mode)
        return cls(name, found.name, modes.encoding(found, encoding).name, num_kv_heads, head_dim)

    @property
    def mode_(self) -> Mode:
        return modes.MODES[self.mode]

    @property
    def encoding_(self) -> Encoding:
        return modes.ENCODINGS[self.encoding]


@dataclass(frozen=True, slots=True)
class OpaqueStore:
    """Bytes of a block that kvhal does not interpret: `shape` items of `dtype` per token or per block."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    per: str = "token"

    @property
    def nbytes_each(self) -> int:
        """Bytes for one token (or one block)."""
        return OPAQUE_ITEM_BYTES[self.dtype] * math.prod(self.shape)


Store = ScaledStore | OpaqueStore


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers with equal pages. window: how many tokens a query sees, itself included; None sees all."""

    name: str
    layers: tuple[int, ...]
    block_size: int
    stores: tuple[Store, ...]
    num_q_heads: int = 0
    window: int | None = None

    def scaled(self, name: str) -> ScaledStore | None:
        """The scaled store called `name`, or None if this group has none (an opaque-only group)."""
        return next((s for s in self.stores if isinstance(s, ScaledStore) and s.name == name), None)

    @property
    def k(self) -> ScaledStore | None:
        return self.scaled("k")

    @property
    def v(self) -> ScaledStore | None:
        return self.scaled("v")


@dataclass(frozen=True, slots=True)
class StaticScales:
    """Calibrated per-tensor scales, one a layer for k and for v: value = code * scale.

    encoding: the encoding they were calibrated for. A checkpoint's are for the OCP formats; stored as FNUZ the same
    codes mean half as much, so `for_encoding` doubles them (exactly: a power of two).
    """

    k: tuple[float, ...]
    v: tuple[float, ...]
    encoding: str | None = None

    def of(self, store: str) -> tuple[float, ...]:
        return self.k if store == "k" else self.v

    def for_encoding(self, store: str, target: str) -> tuple[float, ...]:
        """The scales of `store` for codes kept as `target`."""
        if self.encoding is None or self.encoding == target:
            return self.of(store)
        if modes.ENCODINGS[self.encoding].counterpart != target:
            raise ConfigError(
                f"static scales calibrated for {self.encoding!r} cannot serve {store} stored as {target!r}; "
                "calibrate for that format"
            )
        factor = 2.0 if modes.ENCODINGS[target].is_fnuz else 0.5
        return tuple(s * factor for s in self.of(store))


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """What a cache holds. Build it with `uniform(...)` or from groups; it is checked when built.

    shares: (layer, source) pairs; the layer reads the source's pages and owns none; storing through it is refused.
    """

    groups: tuple[CacheGroup, ...]
    shares: tuple[tuple[int, int], ...] = ()
    static_scales: StaticScales | None = None

    def __post_init__(self) -> None:
        problems = list(_problems(self))
        if problems:
            raise ConfigError(*(Problem(p) for p in problems))

    @classmethod
    def uniform(
        cls,
        *,
        mode: str | tuple[str, str],
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        num_q_heads: int | None = None,
        block_size: int = 16,
        head_dim_v: int | None = None,
        window: int | None = None,
        encoding: str | tuple[str | None, str | None] | None = None,
        k_scale: float | Iterable[float] | None = None,
        v_scale: float | Iterable[float] | None = None,
        scales_encoding: str | None = None,
        shares: Mapping[int, int] | None = None,
    ) -> CacheSpec:
        """One group of equal layers. `mode` and `encoding` may be (k, v) pairs; scales are per tensor or per layer.

        A mode with static scales needs `k_scale` and `v_scale`: none is ever invented. Raises ConfigError with every
        problem.
        """
        k_mode, v_mode = _pair("mode", mode)
        k_enc, v_enc = _pair("encoding", encoding)
        if not is_count(num_layers):
            raise ConfigError(f"num_layers is {num_layers!r}; a cache needs 1 layer or more")
        shared = dict(shares or {})
        v_dim = head_dim if head_dim_v is None else head_dim_v
        group = CacheGroup(
            name="default",
            layers=tuple(i for i in range(num_layers) if i not in shared),
            block_size=block_size,
            stores=(
                ScaledStore.of("k", k_mode, num_kv_heads, head_dim, k_enc),
                ScaledStore.of("v", v_mode, num_kv_heads, v_dim, v_enc),
            ),
            num_q_heads=num_kv_heads if num_q_heads is None else num_q_heads,
            window=window,
        )
        scales = None
        if k_scale is not None or v_scale is not None:
            scales = StaticScales(_per_layer(k_scale, num_layers), _per_layer(v_scale, num_layers), scales_encoding)
        return cls((group,), tuple(sorted(shared.items())), scales)

    @property
    def num_layers(self) -> int:
        """Layers of the model, sharers included."""
        return sum(len(g.layers) for g in self.groups) + len(self.shares)

    @property
    def modes(self) -> tuple[str, ...]:
        """Every scaled mode in use, once each, in order of first use."""
        return tuple(dict.fromkeys(s.mode for g in self.groups for s in g.stores if isinstance(s, ScaledStore)))

    def group_of(self, layer: int) -> CacheGroup:
        """The group whose pages `layer` reads. Raises ConfigError for a layer the spec does not have."""
        source = self.source_of(layer)
        for group in self.groups:
            if source in group.layers:
                return group
        raise ConfigError(f"layer {layer} is not in this spec; its layers are 0 to {self.num_layers - 1}")

    def source_of(self, layer: int) -> int:
        """The layer that owns the pages `layer` reads: itself unless it shares."""
        return dict(self.shares).get(layer, layer)

    def stored_scales(self, layer: int) -> tuple[float, float]:
        """The static (k, v) scales of `layer` as its codes are kept, 1.0 for a store that has none."""
        group = self.group_of(layer)

        def scale(name: str) -> float:
            store = group.scaled(name)
            if store is None or self.static_scales is None or store.mode_.scaling is not Scaling.STATIC:
                return 1.0
            return self.static_scales.for_encoding(name, store.encoding)[layer]

        return scale("k"), scale("v")

    def with_modes(self, replacement: Mapping[str, str]) -> CacheSpec:
        """This spec with each mode of `replacement` swapped, in its default encoding. Used by a declared fallback."""

        def swap(store: Store) -> Store:
            if isinstance(store, OpaqueStore) or store.mode not in replacement:
                return store
            return ScaledStore.of(store.name, replacement[store.mode], store.num_kv_heads, store.head_dim)

        groups = tuple(replace(g, stores=tuple(swap(s) for s in g.stores)) for g in self.groups)
        return replace(self, groups=groups, static_scales=_scales_still_used(self.static_scales, groups))


def _scales_still_used(scales: StaticScales | None, groups: Iterable[CacheGroup]) -> StaticScales | None:
    static = {
        s.name for g in groups for s in g.stores if isinstance(s, ScaledStore) and s.mode_.scaling is Scaling.STATIC
    }
    if scales is None or not static:
        return None
    return replace(scales, k=scales.k if "k" in static else (), v=scales.v if "v" in static else ())


def _pair(name: str, value: _T | tuple[_T, _T]) -> tuple[_T, _T]:
    """(k, v) of an argument that may be one for both."""
    if not isinstance(value, tuple):
        return value, value
    if len(value) != 2:
        raise ConfigError(f"{name} is {value!r}; give one for both or a (k, v) pair")
    return value


def is_count(value: object) -> bool:
    """Whether `value` is an integer of 1 or more: True and 2.0 are none."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _per_layer(scale: float | Iterable[float] | None, num_layers: int) -> tuple[float, ...]:
    if scale is None:
        return ()
    if isinstance(scale, (int, float)):
        return (float(scale),) * num_layers
    return tuple(float(s) for s in scale)


def _problems(spec: CacheSpec) -> Iterable[str]:
    if not spec.groups:
        yield "a cache spec needs at least one group of layers"
        return
    names = [g.name for g in spec.groups]
    if len(set(names)) != len(names):
        yield f"group names must differ, found {names!r}"
    owned = [layer for g in spec.groups for layer in g.layers]
    everyone = sorted(owned + [layer for layer, _ in spec.shares])
    if not everyone:
        yield "num_layers is 0; a cache needs at least one layer"
    elif everyone != list(range(len(everyone))):
        yield f"layers must be 0 to n-1, each in one group or shared once; found {everyone!r}"
    for layer, source in spec.shares:
        if source not in owned:
            yield f"layer {layer} shares layer {source}, which owns no pages; share a layer of {sorted(owned)!r}"
    for group in spec.groups:
        yield from _group_problems(group)
    yield from _scale_problems(spec)


def _group_problems(group: CacheGroup) -> Iterable[str]:
    where = f"group {group.name!r}: "
    if not is_count(group.block_size):
        yield f"{where}block_size is {group.block_size!r}; it must be 1 or more tokens"
    if group.window is not None and not is_count(group.window):
        yield f"{where}window is {group.window!r}; it must be 1 or more tokens, or null for none"
    store_names = [s.name for s in group.stores]
    if not store_names or len(set(store_names)) != len(store_names):
        yield f"{where}stores need different names and at least one, found {store_names!r}"
    if (group.k is None) != (group.v is None):
        yield f"{where}a k store needs a v store and the other way round, found {store_names!r}"
    for store in group.stores:
        if isinstance(store, ScaledStore):
            yield from _scaled_problems(where, store)
        else:
            yield from _opaque_problems(where, store)
    if group.k and group.v:
        if group.k.num_kv_heads != group.v.num_kv_heads:
            yield f"{where}k has {group.k.num_kv_heads} kv heads and v has {group.v.num_kv_heads}; they must be equal"
        heads, queries = group.k.num_kv_heads, group.num_q_heads
        if is_count(heads) and (not is_count(queries) or queries % heads):
            yield (
                f"{where}num_q_heads is {group.num_q_heads!r}; it must be a multiple of num_kv_heads "
                f"({group.k.num_kv_heads}) and at least 1"
            )


def _scaled_problems(where: str, store: ScaledStore) -> Iterable[str]:
    if store.name not in ("k", "v"):
        yield f"{where}scaled store {store.name!r} is unknown; scaled stores are 'k' and 'v', others are opaque"
    if not is_count(store.num_kv_heads):
        yield f"{where}{store.name}: num_kv_heads is {store.num_kv_heads!r}; it must be 1 or more"
    if not is_count(store.head_dim) or store.head_dim % HEAD_DIM_STEP:
        yield f"{where}{store.name}: head_dim is {store.head_dim!r}; it must be a positive multiple of {HEAD_DIM_STEP}"
    modes.encoding(modes.mode(store.mode), store.encoding)


def _opaque_problems(where: str, store: OpaqueStore) -> Iterable[str]:
    if store.name in ("k", "v"):
        yield f"{where}opaque store {store.name!r} takes the name of a scaled one; choose another"
    if store.dtype not in OPAQUE_ITEM_BYTES:
        yield f"{where}{store.name}: dtype {store.dtype!r} is unknown; known: {', '.join(OPAQUE_ITEM_BYTES)}"
    if not store.shape or not all(map(is_count, store.shape)):
        yield f"{where}{store.name}: shape is {store.shape!r}; every dimension must be 1 or more"
    if store.per not in ("token", "block"):
        yield f"{where}{store.name}: per is {store.per!r}; it is 'token' or 'block'"


def _scale_problems(spec: CacheSpec) -> Iterable[str]:
    for name in ("k", "v"):
        stores = [s for g in spec.groups if (s := g.scaled(name)) is not None]
        static = [s for s in stores if s.mode_.scaling is Scaling.STATIC]
        given = spec.static_scales.of(name) if spec.static_scales is not None else ()
        if static and not given:
            yield (
                f"{name} is stored as {static[0].mode!r}, which needs a calibrated {name}_scale; none was given and "
                "none is invented: pass it, or choose a per_token_head mode"
            )
        if given and not static:
            found = ", ".join(sorted({s.mode for s in stores})) or "no such store"
            yield f"{name}_scale was given but {name} has no static scale ({found}); remove it"
        if given and static and len(given) != spec.num_layers:
            yield f"{name}_scale has {len(given)} values for {spec.num_layers} layers; give one, or one a layer"
        for value in given:
            if not (math.isfinite(value) and 2.0**-126 <= value <= 2.0**120):
                yield f"{name}_scale {value!r} must be finite and between 2**-126 and 2**120"
                break

"""The shape of a model's cache: which layers, how many heads, which windows. No torch, no modes, no bytes.

A `Geometry` comes from a deployment file's `model:` section or from a Hugging Face config.json (`hf_config`); together
with modes it becomes the groups of a `CacheSpec`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvhal.spec import CacheGroup, OpaqueStore, ScaledStore, Store

__all__ = ["MAX_LAYERS", "Geometry", "LayerGroup"]

MAX_LAYERS = 4096


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers of equal shape. num_kv_heads 0 means no k and v: only opaque stores. block_size None: the cache's own."""

    name: str
    layers: tuple[int, ...]
    num_q_heads: int = 0
    num_kv_heads: int = 0
    head_dim: int = 0
    head_dim_v: int = 0
    window: int | None = None
    block_size: int | None = None
    opaque: tuple[OpaqueStore, ...] = ()

    @property
    def has_kv(self) -> bool:
        return self.num_kv_heads > 0


@dataclass(frozen=True, slots=True)
class Geometry:
    """The groups of a model, the layers that read another's pages, and where this was read from."""

    groups: tuple[LayerGroup, ...]
    shares: tuple[tuple[int, int], ...] = ()
    source: str = "inline"

    @classmethod
    def uniform(
        cls,
        *,
        num_layers: int,
        num_kv_heads: int,
        num_q_heads: int,
        head_dim: int,
        head_dim_v: int | None = None,
        window: int | None = None,
        shares: Mapping[int, int] | None = None,
    ) -> Geometry:
        """One group of equal layers; a layer in `shares` owns no pages."""
        shared = dict(shares or {})
        group = LayerGroup(
            name="default",
            layers=tuple(i for i in range(num_layers) if i not in shared),
            num_q_heads=num_q_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            head_dim_v=head_dim if head_dim_v is None else head_dim_v,
            window=window,
        )
        return cls((group,), tuple(sorted(shared.items())))

    @property
    def num_layers(self) -> int:
        """Layers of the model, sharers included."""
        return sum(len(g.layers) for g in self.groups) + len(self.shares)

    @property
    def has_kv(self) -> bool:
        """Whether any group has k and v, so that a mode means something."""
        return any(g.has_kv for g in self.groups)

    def cache_groups(
        self, modes: tuple[str, str], encodings: tuple[str | None, str | None], block_size: int
    ) -> tuple[CacheGroup, ...]:
        """The groups of a CacheSpec, with k and v in the (k, v) pair of modes and encodings."""

        def stores(group: LayerGroup) -> tuple[Store, ...]:
            if not group.has_kv:
                return group.opaque
            k = ScaledStore.of("k", modes[0], group.num_kv_heads, group.head_dim, encodings[0])
            v = ScaledStore.of("v", modes[1], group.num_kv_heads, group.head_dim_v, encodings[1])
            return (k, v, *group.opaque)

        return tuple(
            CacheGroup(g.name, g.layers, g.block_size or block_size, stores(g), g.num_q_heads, g.window)
            for g in self.groups
        )

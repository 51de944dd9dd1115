"""Caches filled with random rows, at any number of blocks, on any device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bench.cases import BLOCK_SIZE
from kvhal.kernels.geometry import LayerGeometry
from kvhal.kernels.triton import launch
from kvhal.layout import Layout
from kvhal.spec import CacheSpec

__all__ = ["CacheShape", "Pool"]

FILL_BLOCKS = 1024


@dataclass(frozen=True, slots=True)
class CacheShape:
    """One layer's pages. window: tokens a query sees, None for all."""

    mode: str
    kv_heads: int
    head_dim: int
    layout: str = "tiled"
    window: int | None = None

    def laid_out(self, blocks: int) -> Layout:
        spec = CacheSpec.uniform(
            mode=self.mode,
            num_layers=1,
            num_kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            block_size=BLOCK_SIZE,
            window=self.window,
        )
        return Layout.of(spec, blocks, kind=self.layout)

    @property
    def token_bytes(self) -> int:
        """Bytes of the cache that hold one token, row words and padding inside the page included."""
        return self.laid_out(1).groups[0].page_bytes // BLOCK_SIZE


@dataclass(frozen=True, slots=True)
class Pool:
    """A cache of one layer: its bytes (uint8, as `Layout.of` lays them out) and its geometry."""

    data: Tensor
    geometry: LayerGeometry

    @classmethod
    def empty(cls, shape: CacheShape, blocks: int, device: torch.device, poison: int = 0) -> Pool:
        """Every page byte is `poison`; the counters are zero."""
        layout = shape.laid_out(blocks)
        data = torch.full((layout.nbytes,), poison, dtype=torch.uint8, device=device)
        data[layout.counters_offset :] = 0
        return cls(data, LayerGeometry.of(layout, 0))

    @classmethod
    def filled(cls, shape: CacheShape, blocks: int, device: torch.device) -> Pool:
        """Normally distributed rows in every slot; they repeat after FILL_BLOCKS blocks."""
        pool = cls.empty(shape, blocks, device)
        piece = min(blocks, FILL_BLOCKS) * BLOCK_SIZE
        k, v = (
            torch.randn(piece, shape.kv_heads, shape.head_dim, device=device, dtype=torch.bfloat16) for _ in range(2)
        )
        for start in range(0, blocks * BLOCK_SIZE, piece):
            count = min(piece, blocks * BLOCK_SIZE - start)
            slots = torch.arange(start, start + count, device=device)
            launch.store(pool.data, k[:count], v[:count], slots, pool.geometry, checked=False)
        return pool

    def values(self, slots: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """K and V of `slots`, each [slots, kv_heads, head_dim]."""
        g = self.geometry
        k, v = (
            torch.empty(slots.shape[0], g.num_kv_heads, of.head_dim, device=slots.device, dtype=dtype)
            for of in (g.k, g.v)
        )
        launch.gather(self.data, slots, k, v, g, checked=False)
        return k, v

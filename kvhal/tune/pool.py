"""A cache on the device filled with random rows, one a family, and the same pages on the CPU for the reference."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvhal.kernels import reference
from kvhal.kernels.geometry import LayerGeometry
from kvhal.kernels.triton import launch
from kvhal.layout import Layout
from kvhal.modes import MODES, Scaling
from kvhal.spec import CacheSpec

__all__ = ["MODE_OF", "Heads", "Pool", "layout_of"]

MODE_OF = {
    "int8": "int8_per_token_head",
    "float8": "fp8_per_token_head",
    "int4": "int4_per_token_head",
    "static": "fp8_e4m3",
    "wide": "bfloat16",
}
BLOCK = 16
# Codes of a normal distribution then fill most of fp8's range.
STATIC_SCALE = 0.02
_FILLED_AT_ONCE = 1024


@dataclass(frozen=True, slots=True)
class Heads:
    """The shape of a layer: that of the common 8B models."""

    kv: int = 8
    group: int = 4
    dim: int = 128


def layout_of(family: str, heads: Heads, blocks: int, hardware: tuple[str, ...] = ()) -> Layout:
    """One layer of a family's mode, in the encoding that the arch converts by itself where the mode has it."""
    mode = MODES[MODE_OF[family]]
    encoding = next((name for name in hardware if name in mode.encodings), mode.encodings[0])
    scale = STATIC_SCALE if mode.scaling is Scaling.STATIC else None
    spec = CacheSpec.uniform(
        mode=mode.name,
        num_layers=1,
        num_kv_heads=heads.kv,
        head_dim=heads.dim,
        num_q_heads=heads.kv * heads.group,
        block_size=BLOCK,
        encoding=encoding,
        k_scale=scale,
        v_scale=scale,
    )
    return Layout.of(spec, blocks)


@dataclass(slots=True)
class Pool:
    """`blocks` blocks of random rows. data: the whole storage, on the device."""

    layout: Layout
    g: LayerGeometry
    data: Tensor

    @classmethod
    def of(cls, layout: Layout, device: torch.device) -> Pool:
        pool = cls.empty(layout, device)
        heads, dim, blocks = pool.g.num_kv_heads, pool.g.k.head_dim, pool.g.num_blocks
        generator = torch.Generator(device).manual_seed(0)
        piece = min(blocks, _FILLED_AT_ONCE) * BLOCK
        shape = (2, piece, heads, dim)
        k, v = torch.randn(shape, generator=generator, device=device, dtype=torch.float32).bfloat16()
        for start in range(0, blocks * BLOCK, piece):
            slots = torch.arange(start, min(start + piece, blocks * BLOCK), device=device)
            count = slots.shape[0]
            launch.store(pool.data, k[:count], v[:count], slots, pool.g, checked=False)
        return pool

    @classmethod
    def empty(cls, layout: Layout, device: torch.device) -> Pool:
        """Zeros, but for the static scales."""
        data = torch.zeros(layout.nbytes, dtype=torch.uint8, device=device)
        if layout.scales_offset is not None:
            data[layout.scales_offset : layout.scales_offset + 8].view(torch.float32).fill_(STATIC_SCALE)
        return cls(layout, LayerGeometry.of(layout, 0), data)

    def rows_of(self, table: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """The first `length` keys and values of a sequence in float64, read from its pages by the reference."""
        blocks = -(-length // BLOCK)
        here = Pool.empty(self.layout.with_blocks(blocks), torch.device("cpu"))
        pages = self.data[self.g.base : self.g.base + self.g.num_blocks * self.g.block_stride]
        own = pages.view(-1, self.g.block_stride)[table[:blocks].long()].cpu()
        here.data[here.g.base : here.g.base + own.numel()] = own.flatten()
        k, v = (torch.empty(length, self.g.num_kv_heads, of.head_dim) for of in (self.g.k, self.g.v))
        reference.gather(here.data, torch.arange(length), k, v, here.g, checked=True)
        return k.double(), v.double()

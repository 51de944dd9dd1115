"""Handles on cache memory that own nothing and say so when they are stale."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kvhal.page import Field

if TYPE_CHECKING:
    from kvhal.lease import CacheLease

__all__ = ["CacheView"]


class CacheView:
    """One field of one layer. Keep the view as long as you like and call `.tensor()` where it is used.

    The tensor has shape [blocks, head, tile, hi, channel, lo] and the field's strides; token in the page =
    (tile * HI + hi) * LO + lo (see layout.py). It is memory of the lease: after close it raises StaleView.
    """

    __slots__ = ("_base", "_block_stride", "_blocks", "_lease", "field", "name")

    def __init__(self, lease: CacheLease, name: str, field: Field, base: int, blocks: int, block_stride: int) -> None:
        self.name = name
        self.field = field
        self._lease = lease
        self._base = base
        self._blocks = blocks
        self._block_stride = block_stride

    def __repr__(self) -> str:
        state = "open" if self._lease.is_open else "stale"
        return f"CacheView({self.name!r}, {self.field.dtype} {(self._blocks, *self.field.shape)!r}, {state})"

    def tensor(self) -> torch.Tensor:
        """The strided tensor. Raises StaleView after close, ForkedLease in a forked child."""
        shape = (self._blocks, *self.field.shape)
        strides = (self._block_stride, *self.field.strides)
        return self._lease.bytes_at(self.field.dtype, self._base + self.field.offset, shape, strides)

"""Reading and writing rows of paged fields in a flat byte storage: the address arithmetic of the reference.

A slot is block * block_size + token. A row is what one token of one head keeps in a field. Fields whose `lo` axis is
4 (V of the tiled layout) interleave the rows of four tokens; a *run* is such a group, whole in one call and in order.
Addresses are int64 byte offsets into the cache tensor, so nothing wraps at 2^31. Every slot handed in is valid.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from kvhal.kernels.geometry import LayerGeometry
from kvhal.page import Field

__all__ = ["RowTarget", "Runs", "find_runs", "indices_of", "interleave", "items_of"]

BYTES_OF_INT32 = 4
_UNITS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


class Runs(NamedTuple):
    """Where a call's valid slots form whole groups of `lo` consecutive tokens.

    starts: positions in the call of each group's first token, ascending. lone: positions of all other valid slots.
    """

    starts: Tensor
    lone: Tensor


def find_runs(slots: Tensor, lo: int) -> Runs:
    """Split the positions of `slots` (int64, -1 where there is nothing to do) into whole groups and single slots."""
    valid = slots >= 0
    if lo == 1:
        return Runs(valid.nonzero().flatten(), slots.new_empty(0))
    count = max(0, slots.numel() - lo + 1)
    first = slots[:count]
    whole = valid[:count] & (first % lo == 0)
    for j in range(1, lo):
        whole &= slots[j : j + count] == first + j
    starts = whole.nonzero().flatten()
    for j in range(lo):
        valid[starts + j] = False
    return Runs(starts, valid.nonzero().flatten())


class RowTarget(NamedTuple):
    """The rows of one field at chosen slots: every address worked out once, used piece by piece.

    windows: all byte strings of a row's length in the cache, as overlapping rows of wide items. units: int64
    [slots, heads], which of them is whose.
    """

    windows: Tensor
    units: Tensor

    @classmethod
    def of(cls, cache: Tensor, g: LayerGeometry, field: Field, slots: Tensor, runs: int = 1) -> RowTarget:
        """Rows of `field` at `slots` (int64, valid); runs: how many interleaved tokens one row holds."""
        nbytes = field.shape[3] * field.itemsize * runs
        unit = math.gcd(g.base + field.offset, g.block_stride, nbytes, *field.strides[:3], 8)
        typed = cache.view(_UNITS[unit])
        width = nbytes // unit
        windows = typed.as_strided((typed.numel() - width + 1, width), (1, 1), typed.storage_offset())
        return cls(windows, _addresses(g, field, slots).div_(unit, rounding_mode="floor"))

    def put(self, piece: slice, rows: Tensor) -> None:
        """Write the rows of `piece` of the slots: any contiguous tensor of the right number of bytes."""
        values = rows.view(-1).view(self.windows.dtype).view(-1, self.windows.shape[1])
        self.windows.index_put_((self.units[piece].flatten(),), values)

    def get(self, piece: slice, dtype: torch.dtype) -> Tensor:
        """The rows of `piece` of the slots: [n, heads, row length in `dtype`]."""
        units = self.units[piece]
        found = torch.index_select(self.windows, 0, units.flatten())
        return found.view(dtype).view(*units.shape, -1)


def items_of(cache: Tensor, g: LayerGeometry, field: Field, dtype: torch.dtype) -> Tensor:
    """The field of every block as [block, tile, hi, lo, head, channel], to index with `indices_of`."""
    typed = cache.view(dtype)
    size = field.itemsize
    heads, tiles, his, items, los = field.shape
    head, tile, hi, channel, lo = (s // size for s in field.strides)
    return typed.as_strided(
        (g.num_blocks, tiles, his, los, heads, items),
        (g.block_stride // size, tile, hi, lo, head, channel),
        typed.storage_offset() + (g.base + field.offset) // size,
    )


def indices_of(g: LayerGeometry, field: Field, slots: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(block, tile, hi, lo) of each slot; all slots are >= 0, where torch's rounding modes agree."""
    _, _, his, _, los = field.shape
    block = slots.div(g.block_size, rounding_mode="floor")
    token = slots - block * g.block_size
    if his * los == 1:
        return block, token, torch.zeros_like(token), torch.zeros_like(token)
    tile = token.div(his * los, rounding_mode="floor")
    inside = token - tile * (his * los)
    hi = inside.div(los, rounding_mode="floor")
    return block, tile, hi, inside - hi * los


def interleave(codes: Tensor, lo: int, scratch: Tensor) -> Tensor:
    """[n * lo, heads, C] -> [n, heads, C] items of `lo` tokens side by side (contiguous; lies in fp32 `scratch`)."""
    _, heads, items = codes.shape
    groups = codes.view(-1, lo, heads, items)
    count = codes.numel() // lo
    if codes.dtype is not torch.uint8 or lo != BYTES_OF_INT32:
        packed = scratch.view(codes.dtype)[: codes.numel()].view(-1, heads, items, lo)
        return packed.copy_(groups.permute(0, 2, 3, 1))
    # Shifts on int32 are vectorised; a strided byte copy costs twice as much.
    words = scratch.view(torch.int32)
    packed, other = words[:count].view(-1, heads, items), words[count : 2 * count].view(-1, heads, items)
    packed.copy_(groups[:, lo - 1])
    for j in range(lo - 2, -1, -1):
        packed.bitwise_left_shift_(8).bitwise_or_(other.copy_(groups[:, j]))
    return packed


def _addresses(g: LayerGeometry, field: Field, slots: Tensor) -> Tensor:
    """Byte address of channel 0 of each slot's row: int64 [slots, heads]."""
    block, tile, hi, lo = indices_of(g, field, slots)
    head, tile_stride, hi_stride, _, lo_stride = field.strides
    token = block.mul_(g.block_stride).add_(g.base + field.offset)
    token.add_(tile, alpha=tile_stride).add_(hi, alpha=hi_stride).add_(lo, alpha=lo_stride)
    return token.unsqueeze(1) + torch.arange(field.shape[0], dtype=torch.int64) * head

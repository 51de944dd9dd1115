"""Slots from block tables: the helper that everybody writes."""

from __future__ import annotations

import torch

from kvhal.errors import SpecMismatch

__all__ = ["slots"]


def slots(block_table: torch.Tensor, positions: torch.Tensor, *, block_size: int = 16) -> torch.Tensor:
    """The slot of each position: block_table[sequence, position // block_size] * block_size + position % block_size.

    block_table: int [num_seqs, max_blocks]. positions: int [num_seqs] or [num_seqs, n], -1 = padding. Returns int64 of
    the shape of `positions`, -1 for padding and for a block-table entry of -1. Raises SpecMismatch for shapes that do
    not belong together and IndexError (torch's) for a position past the table.
    """
    if block_table.dim() != 2 or positions.dim() not in (1, 2) or positions.shape[0] != block_table.shape[0]:
        raise SpecMismatch(
            f"block_table {tuple(block_table.shape)!r} and positions {tuple(positions.shape)!r} do not belong "
            "together; pass [num_seqs, max_blocks] and [num_seqs] or [num_seqs, n]"
        )
    at = positions.to(torch.int64).reshape(positions.shape[0], -1)
    is_padding = at < 0
    safe = at.masked_fill(is_padding, 0)
    blocks = block_table.to(torch.int64).gather(1, safe // block_size)
    found = blocks * block_size + safe % block_size
    return found.masked_fill(is_padding | (blocks < 0), -1).reshape(positions.shape)

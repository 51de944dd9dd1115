"""What an `attend` call asks of each sequence, checked before any arithmetic."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kvhal.errors import AddressError
from kvhal.kernels.geometry import LayerGeometry

__all__ = ["Sequence", "sequences_of"]


@dataclass(frozen=True, slots=True)
class Sequence:
    """Queries `first_row` to `first_row + queries - 1` of q sit at the last `queries` positions of `length` tokens.

    bad: how many block ids (or a length that cannot be) make the sequence unreadable; 0 when it is sound.
    """

    index: int
    first_row: int
    queries: int
    length: int
    bad: int = 0

    def position(self, query: int) -> int:
        """The position of query `query` in the sequence."""
        return self.length - self.queries + query


def sequences_of(
    g: LayerGeometry, block_table: Tensor, seq_lens: Tensor, query_starts: Tensor, tokens: int, *, checked: bool
) -> list[Sequence]:
    """Every sequence of the call. checked: the first fault raises AddressError; else it is counted in `bad`.

    query_starts that do not ascend from 0 to at most `tokens` raise in both modes: no row could be trusted.
    """
    starts, lengths = query_starts.tolist(), seq_lens.tolist()
    if starts[0] != 0 or starts[-1] > tokens or any(b < a for a, b in itertools.pairwise(starts)):
        raise AddressError(
            f"query_starts must ascend from 0 to at most {tokens} (the rows of q); found {_short(starts)}: "
            "pass the prefix sums of the query lengths"
        )
    found = []
    for index, length in enumerate(lengths):
        sequence = Sequence(index, starts[index], starts[index + 1] - starts[index], length)
        fault = next(_faults(g, block_table, sequence), None)
        if fault is None:
            found.append(sequence)
            continue
        message, count = fault
        if checked:
            raise AddressError(f"sequence {index}: {message}: nothing was computed")
        found.append(Sequence(index, sequence.first_row, sequence.queries, 0, bad=count))
    return found


def first_key(g: LayerGeometry, position: int) -> int:
    """The first key position that a query at `position` sees."""
    return max(0, position - g.window + 1) if g.window else 0


def _faults(g: LayerGeometry, block_table: Tensor, of: Sequence) -> Iterator[tuple[str, int]]:
    capacity = block_table.shape[1] * g.block_size
    if of.length == 0:
        return
    if of.length < of.queries:
        yield f"seq_len {of.length} is less than its {of.queries} queries; seq_lens include the new tokens", 1
        return
    if of.length > capacity:
        yield f"seq_len {of.length} needs more blocks than its row of the block table has ({block_table.shape[1]})", 1
        return
    if of.queries == 0:
        return
    begin = first_key(g, of.position(0)) // g.block_size
    needed = block_table[of.index, begin : -(-of.length // g.block_size)]
    low, high = (int(bound) for bound in torch.aminmax(needed))
    if low < 0 or high >= g.num_blocks:
        bad = ((needed < 0) | (needed >= g.num_blocks)).nonzero().flatten()
        at = int(bad[0])
        message = (
            f"block table entry {begin + at} is {int(needed[at])}, outside 0 to {g.num_blocks - 1} "
            f"({bad.numel()} such entries); check the block table"
        )
        yield message, bad.numel()


def _short(values: list[int]) -> str:
    return repr(values) if len(values) <= 8 else f"{values[:4]!r} … {values[-2:]!r}"

"""Room in the workspace for contexts as fp16, which a chunk of a prompt reads many times. No torch, no triton.

A prompt's items all read the same keys and values, so converting codes in each of them costs more than converting once
(`stage`) and reading the result (`prefill`). How much fits is what the workspace has beyond what every attend needs;
sequences that do not fit are computed from the pages.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from kvhal.kernels.geometry import LayerGeometry, StoreGeometry
from kvhal.kernels.triton.constants import pow2
from kvhal.kernels.triton.tuning import Tile, Tuning

__all__ = ["Halves", "StagedPage", "Staging", "can_stage", "staging_bytes"]

ALIGNMENT = 64
STAGED_CHANNELS = 128
# What aligning the parts may take.
ROUNDED = 2 * ALIGNMENT


class Halves(NamedTuple):
    """Staged keys or values: fp16 rows of `dim` channels, padded with zeros to `block`."""

    encoding: str
    scaling: str
    dim: int
    width: int
    block: int

    @classmethod
    def of(cls, of: StoreGeometry) -> Halves:
        return cls("float16", of.scaling.value, of.head_dim, of.head_dim, max(16, pow2(of.head_dim)))


class StagedPage(NamedTuple):
    """What the prefill kernel is compiled for: nothing of the pages but their window and head sizes."""

    heads: int
    window: int
    k: Halves
    v: Halves

    @classmethod
    def of(cls, g: LayerGeometry) -> StagedPage:
        return cls(g.num_kv_heads, g.window, Halves.of(g.k), Halves.of(g.v))


@dataclass(frozen=True, slots=True)
class Staging:
    """Where staged contexts lie in the workspace, and how items over them are cut.

    Exponents int32 [kv heads][tiles][2] | keys fp16 [kv heads][tiles * tile.keys][block] | values alike. A code times
    its scale is the staged number times two to the tile's exponent. tokens: queries an item. least: the fewest queries
    of a sequence that is staged.
    """

    tile: Tile
    tokens: int
    least: int
    tiles: int
    exponents: int
    keys: int
    values: int

    @classmethod
    @lru_cache(maxsize=1024)
    def of(
        cls, g: LayerGeometry, num_q_heads: int, num_tokens: int, num_seqs: int, begin: int, end: int, tuning: Tuning
    ) -> Staging | None:
        """Between bytes `begin` and `end` of the workspace; None for a call of a shape that has nothing to stage."""
        group = num_q_heads // g.num_kv_heads
        tile = tuning.staged
        # By shape alone: where every other sequence has a query, is a prompt left?
        has_prompt = num_tokens >= num_seqs - 1 + tuning.staged_queries
        if not has_prompt or not can_stage(g) or not _is_worth(num_q_heads, num_tokens, tuning) or group > tile.rows:
            return None
        tiles = (end - begin - ROUNDED) // _bytes_a_tile(g, tile)
        if tiles < 1:
            return None
        exponents = -(-begin // ALIGNMENT) * ALIGNMENT
        page = StagedPage.of(g)
        keys = exponents + -(-8 * g.num_kv_heads * tiles // ALIGNMENT) * ALIGNMENT
        values = keys + 2 * g.num_kv_heads * tiles * tile.keys * page.k.block
        return cls(tile, tile.rows // group, tuning.staged_queries, tiles, exponents, keys, values)


def staging_bytes(g: LayerGeometry, num_q_heads: int, max_tokens: int, tuning: Tuning) -> int:
    """Bytes of workspace to set aside for calls of up to `max_tokens` queries: whole tiles, or none."""
    if (
        not can_stage(g)
        or num_q_heads // g.num_kv_heads > tuning.staged.rows
        or not _is_worth(num_q_heads, max_tokens, tuning)
    ):
        return 0
    each = _bytes_a_tile(g, tuning.staged)
    return tuning.staged_bytes // each * each + ROUNDED


def can_stage(g: LayerGeometry) -> bool:
    """Whether heads are small enough: with 256 channels the tiles need more shared memory than most arches have."""
    return max(g.k.head_dim, g.v.head_dim) <= STAGED_CHANNELS


def _is_worth(num_q_heads: int, num_tokens: int, tuning: Tuning) -> bool:
    """Whether a call has items enough for every multiprocessor, none of which shares its tiles with another."""
    return tuning.staged_bytes > 0 and num_tokens * num_q_heads >= tuning.staged_rows


def _bytes_a_tile(g: LayerGeometry, tile: Tile) -> int:
    page = StagedPage.of(g)
    return g.num_kv_heads * (8 + 2 * tile.keys * (page.k.block + page.v.block))

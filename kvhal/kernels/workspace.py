"""How `attend` cuts its work, and the bytes of scratch that takes. Pure arithmetic: no torch.

Keys are read a chunk at a time and queries a slice at a time, so the scratch depends on the shape of a page and on the
number of query heads, never on the context length. The planner counts these bytes and the kernel carves its scratch
from them; both come from `AttendShape`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from kvhal.kernels.geometry import LayerGeometry

__all__ = ["AttendShape", "attend_workspace_bytes"]

# fp32 bytes of one chunk of K or V, and of one slice's scores: large enough to pay torch's 5 us an operator, small
# enough for the L3 cache. Half and twice as much measured slower (Zen 5, two cores).
CHUNK_BYTES = 4 << 20
SCORE_BYTES = 4 << 20
MAX_CHUNK_TOKENS = 4096
ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class AttendShape:
    """How one `attend` call is cut.

    pages, tiles: a chunk of keys is `pages` whole pages, or `tiles` tiles of one page that is larger than a chunk.
    queries: query tokens a slice. page_bytes: bytes of a page that hold k, v and their words. parts: (name, offset,
    bytes) of each piece of scratch.
    """

    pages: int
    tiles: int
    tile_tokens: int
    queries: int
    page_bytes: int
    parts: tuple[tuple[str, int, int], ...]
    nbytes: int

    @classmethod
    @lru_cache(maxsize=1024)
    def of(cls, g: LayerGeometry, num_q_heads: int, tokens: int) -> AttendShape:
        """The cut for `tokens` query tokens. Bytes never shrink as `tokens` grows."""
        tile_tokens = g.v.codes.shape[2] * g.v.codes.shape[4]
        widest = max(g.k.head_dim, g.v.head_dim)
        wanted = min(MAX_CHUNK_TOKENS, max(tile_tokens, CHUNK_BYTES // (4 * g.num_kv_heads * widest)))
        pages, tiles = max(1, wanted // g.block_size), g.block_size // tile_tokens
        if g.block_size > wanted:
            tiles = wanted // tile_tokens
        keys = pages * tiles * tile_tokens
        queries = max(1, min(tokens, SCORE_BYTES // (4 * keys * num_q_heads)))
        page_bytes = _page_bytes(g)
        rows = num_q_heads * queries
        sizes = (
            ("pages", pages * page_bytes if pages > 1 else 0),
            ("wide", 4 * keys * g.num_kv_heads * widest),
            ("narrow", 4 * keys * g.num_kv_heads * widest),
            ("scores", 4 * rows * keys),
            ("hidden", queries * keys),
            ("query", 4 * rows * g.k.head_dim),
            ("product", 4 * rows * g.v.head_dim),
            ("sum", 4 * rows * g.v.head_dim),
        )
        parts, offset = [], 0
        for name, nbytes in sizes:
            parts.append((name, offset, nbytes))
            offset += -(-nbytes // ALIGNMENT) * ALIGNMENT
        return cls(pages, tiles, tile_tokens, queries, page_bytes, tuple(parts), offset)

    @property
    def keys(self) -> int:
        """Key tokens a chunk."""
        return self.pages * self.tiles * self.tile_tokens


def attend_workspace_bytes(
    geometry: LayerGeometry, num_q_heads: int, max_tokens: int, max_seqs: int | None = None
) -> int:
    """Bytes of `workspace` that `attend` needs on this layer for up to `max_tokens` query tokens, at any context.

    The number of sequences, which other kernels need, does not matter here: they are taken one after another.
    """
    del max_seqs
    return AttendShape.of(geometry, num_q_heads, max(1, max_tokens)).nbytes


def _page_bytes(g: LayerGeometry) -> int:
    end = 0
    for field in (g.k.codes, g.v.codes, g.k.words, g.v.words):
        if field is not None:
            last = sum((n - 1) * s for n, s in zip(field.shape, field.strides, strict=True))
            end = max(end, field.offset + last + field.itemsize)
    # The last page of a storage may end right after its content, so nothing beyond it may be read.
    return end

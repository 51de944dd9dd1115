"""Reading the cache a chunk of keys at a time, as fp32 matrices, into scratch.

Attention does not care in which order keys come, so a chunk of an interleaved field is read as (lo, page, tile, hi):
the four tokens that stand side by side become four matrices, and the inner loops of the copies stay long.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kvhal.kernels.geometry import LayerGeometry, StoreGeometry
from kvhal.kernels.quantize import CODE_DTYPES, decode_factor, decode_into, row_scales
from kvhal.kernels.workspace import AttendShape
from kvhal.modes import Scaling
from kvhal.page import Field

__all__ = ["Chunk", "ChunkReader"]


@dataclass(frozen=True, slots=True)
class Chunk:
    """Keys `first` to `last` of a sequence, in pages that start at byte `offset` of `source`, `stride` bytes apart.

    tile: the first tile of each page. positions: int32 [keys], where each key stands in its sequence, in reading order.
    """

    source: Tensor
    offset: int
    stride: int
    pages: int
    tile: int
    tiles: int
    first: int
    positions: Tensor

    @property
    def keys(self) -> int:
        return self.positions.shape[0]

    @property
    def last(self) -> int:
        return self.first + self.keys - 1


@dataclass(frozen=True, slots=True)
class ChunkReader:
    """Cuts one layer's pages into chunks and reads them. k_factor, v_factor: what `k` and `v` leave to the caller."""

    cache: Tensor
    g: LayerGeometry
    shape: AttendShape
    parts: dict[str, Tensor]
    k_factor: float
    v_factor: float

    @classmethod
    def of(cls, cache: Tensor, g: LayerGeometry, shape: AttendShape, parts: dict[str, Tensor]) -> ChunkReader:
        return cls(cache, g, shape, parts, _left_out(g.k), _left_out(g.v))

    def chunks(self, table: Tensor, begin: int, end: int) -> Iterator[Chunk]:
        """Chunks that cover keys [begin, end) of the sequence whose block ids are `table`."""
        size, tile_tokens = self.g.block_size, self.shape.tile_tokens
        whole = size // tile_tokens
        first_page, last_page = begin // size, (end - 1) // size + 1
        for page in range(first_page, last_page, self.shape.pages):
            ids = table[page : min(page + self.shape.pages, last_page)]
            if self.shape.tiles == whole:
                yield self._chunk(ids, page * size, 0, whole)
                continue
            for tile in range(0, whole, self.shape.tiles):
                first = page * size + tile * tile_tokens
                tiles = min(self.shape.tiles, whole - tile)
                if first < end and first + tiles * tile_tokens > begin:
                    yield self._chunk(ids, first, tile, tiles)

    def k(self, chunk: Chunk) -> tuple[Tensor, Tensor | None]:
        """(K fp32 [heads, keys, head_dim], scales fp32 [heads, keys] or None); valid until `v` is called."""
        return self._read(chunk, self.g.k)

    def v(self, chunk: Chunk) -> tuple[Tensor, Tensor | None]:
        """(V fp32 [heads, keys, head_dim_v], scales fp32 [heads, keys] or None); takes the place of K."""
        return self._read(chunk, self.g.v)

    def _chunk(self, ids: Tensor, first: int, tile: int, tiles: int) -> Chunk:
        blocks = ids.tolist()
        positions = self._positions(len(blocks), tiles, first)
        if blocks == list(range(blocks[0], blocks[0] + len(blocks))):
            offset = self.g.base + blocks[0] * self.g.block_stride
            return Chunk(self.cache, offset, self.g.block_stride, len(blocks), tile, tiles, first, positions)
        nbytes = self.shape.page_bytes
        unit = torch.int64 if math.gcd(self.g.base, self.g.block_stride, nbytes) % 8 == 0 else torch.int32
        typed, size = self.cache.view(unit), unit.itemsize
        pages = typed.as_strided(
            (self.g.num_blocks, nbytes // size),
            (self.g.block_stride // size, 1),
            typed.storage_offset() + self.g.base // size,
        )
        found = self.parts["pages"].view(unit)[: len(blocks) * nbytes // size].view(len(blocks), -1)
        torch.index_select(pages, 0, ids, out=found)
        return Chunk(self.parts["pages"], 0, nbytes, len(blocks), tile, tiles, first, positions)

    def _positions(self, pages: int, tiles: int, first: int) -> Tensor:
        lo = self.g.v.codes.shape[4]
        count = pages * tiles * self.shape.tile_tokens
        return torch.arange(first, first + count, dtype=torch.int32).view(-1, lo).t().flatten()

    def _read(self, chunk: Chunk, of: StoreGeometry) -> tuple[Tensor, Tensor | None]:
        dtype = torch.uint8 if of.encoding.bits < 16 else CODE_DTYPES[of.encoding.name]
        codes = self._field(chunk, of.codes, dtype)
        wide = self.parts["wide"].view(torch.float32)[: math.prod(codes.shape[:-1]) * of.head_dim]
        wide = wide.view(*codes.shape[:-1], of.head_dim)
        decode_into(wide, codes, of.encoding, self.parts["narrow"].view(torch.int16))
        matrix = wide.view(codes.shape[0], chunk.keys, of.head_dim)
        if of.words is None:
            return matrix, None
        raw = torch.int32 if of.encoding.bits == 4 else torch.float32
        words = self._field(chunk, of.words, raw).reshape(codes.shape[0], chunk.keys).contiguous()
        scale, zero = row_scales(words, of.encoding)
        if zero is not None:
            matrix.sub_(zero.unsqueeze(-1))
        factor = decode_factor(of.encoding)
        return matrix, scale * factor if factor != 1.0 else scale

    def _field(self, chunk: Chunk, field: Field, dtype: torch.dtype) -> Tensor:
        """The field of a chunk as [head, lo, page, tile, hi, channel], without copying."""
        typed, size = chunk.source.view(dtype), field.itemsize
        heads, _, his, items, los = field.shape
        head, tile, hi, channel, lo = (s // size for s in field.strides)
        want = self.g.v.codes.shape[4]
        if los != want:
            assert los == 1
            his, los, hi, lo = his // want, want, hi * want, hi
        return typed.as_strided(
            (heads, los, chunk.pages, chunk.tiles, his, items),
            (head, lo, chunk.stride // size, tile, hi, channel),
            typed.storage_offset() + (chunk.offset + field.offset) // size + chunk.tile * tile,
        )


def _left_out(of: StoreGeometry) -> float:
    """Row scales take the decoder's factor with them; otherwise the caller must multiply by it."""
    return 1.0 if of.scaling is Scaling.ROW else decode_factor(of.encoding)

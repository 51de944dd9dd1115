"""One page: which fields it has and where. The only arithmetic of the two named layouts. No torch.

A field is one array inside a page, with the same five axes in both named layouts::

    (head, tile, hi, channel, lo)      token in page = (tile * HI + hi) * LO + lo

    tiled    page[head][block_size/16]{K[16][C] | V[4][C][4 tokens] | k words[16] | v words[16]}
             tiles of 16 tokens; K: HI 16, LO 1; V: HI 4, LO 4 (four tokens of one channel stand together)
    inline   page[token][head]{K[C] | k word | V[C] | v word}          a tile is one token; HI 1, LO 1

C is head_dim elements of 16-bit modes, head_dim bytes of 8-bit modes, head_dim/2 bytes of int4. A row word is four
bytes: the fp32 scale, or for int4 the bf16 scale (high half) and fp16 zero (low half). Opaque stores follow, each
aligned to 16 bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from kvhal.choice import Choice
from kvhal.errors import ConfigError
from kvhal.modes import Scaling
from kvhal.spec import OPAQUE_ITEM_BYTES, CacheGroup, OpaqueStore, ScaledStore

__all__ = ["ALIGNMENT", "Field", "LayoutKind", "align", "content_bytes", "page_fields"]

ALIGNMENT = 16
TILE_TOKENS = 16
V_INTERLEAVE = 4
WORD_BYTES = 4


class LayoutKind(Choice):
    """The two named arrangements of a page."""

    TILED = "tiled"
    INLINE = "inline"


@dataclass(frozen=True, slots=True)
class Field:
    """One array inside a page: byte `offset`, `shape` and byte `strides` over (head, tile, hi, channel, lo)."""

    name: str
    dtype: str
    itemsize: int
    offset: int
    shape: tuple[int, int, int, int, int]
    strides: tuple[int, int, int, int, int]

    @property
    def span(self) -> int:
        """Bytes from the first item to the end of the last."""
        return sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True)) + self.itemsize

    def address(self, head: int, token: int, channel: int) -> int:
        """Byte offset in the page of one item (a code, two packed int4 codes, or a word with channel 0)."""
        _, _, hi, _, lo = self.shape
        tile, inside = divmod(token, hi * lo)
        index = (head, tile, inside // lo, channel, inside % lo)
        return self.offset + sum(i * s for i, s in zip(index, self.strides, strict=True))


def align(value: int, multiple: int) -> int:
    """`value` rounded up to a multiple."""
    return -(-value // multiple) * multiple


def page_fields(group: CacheGroup, kind: LayoutKind) -> tuple[Field, ...]:
    """The fields of a page of `group`. Raises ConfigError for a block size that the layout cannot hold."""
    if kind is LayoutKind.TILED and group.k is not None and group.block_size % TILE_TOKENS:
        raise ConfigError(
            f"group {group.name!r}: block_size {group.block_size} does not fit the tiled layout, whose tiles hold "
            f"{TILE_TOKENS} tokens; use a multiple of {TILE_TOKENS}, or layout 'inline'"
        )
    fields: list[Field] = []
    if group.k is not None and group.v is not None:
        place = _tiled_fields if kind is LayoutKind.TILED else _inline_fields
        fields.extend(place(group.k, group.v, group.block_size))
    for store in group.stores:
        if isinstance(store, OpaqueStore):
            fields.append(_opaque_field(store, group.block_size, align(content_bytes(fields), ALIGNMENT)))
    return tuple(fields)


def content_bytes(fields: Iterable[Field]) -> int:
    """Bytes from the start of the page to the end of its last field."""
    return max((f.offset + f.span for f in fields), default=0)


def _row(store: ScaledStore) -> tuple[str, int, int, int]:
    """dtype, bytes an item, items a row and bytes a row word of a store."""
    enc = store.encoding_
    itemsize = max(1, enc.bits // 8)
    word = WORD_BYTES if store.mode_.scaling is Scaling.ROW else 0
    dtype = enc.dtype if enc.bits == 16 else "uint8"
    return dtype, itemsize, enc.row_bytes(store.head_dim) // itemsize, word


def _word_dtype(store: ScaledStore) -> str:
    return "int32" if store.encoding_.bits == 4 else "float32"


def _tiled_fields(k: ScaledStore, v: ScaledStore, block_size: int) -> Iterable[Field]:
    heads, tiles = k.num_kv_heads, block_size // TILE_TOKENS
    rows = (_row(k), _row(v))
    tile = sum(TILE_TOKENS * (items * size + word) for _, size, items, word in rows)
    head = tiles * tile
    offset = 0
    for name, (dtype, size, items, _), lo in zip(("k", "v"), rows, (1, V_INTERLEAVE), strict=True):
        shape = (heads, tiles, TILE_TOKENS // lo, items, lo)
        yield Field(name, dtype, size, offset, shape, (head, tile, lo * items * size, lo * size, size))
        offset += TILE_TOKENS * items * size
    for store, (_, _, _, word) in zip((k, v), rows, strict=True):
        if word:
            shape = (heads, tiles, TILE_TOKENS, 1, 1)
            yield Field(f"{store.name}_word", _word_dtype(store), word, offset, shape, (head, tile, word, word, word))
            offset += TILE_TOKENS * word


def _inline_fields(k: ScaledStore, v: ScaledStore, block_size: int) -> Iterable[Field]:
    heads = k.num_kv_heads
    row = sum(items * size + word for _, size, items, word in (_row(k), _row(v)))
    offset = 0
    for store in (k, v):
        dtype, size, items, word = _row(store)
        strides = (row, heads * row, heads * row, size, size)
        yield Field(store.name, dtype, size, offset, (heads, block_size, 1, items, 1), strides)
        offset += items * size
        if word:
            strides = (row, heads * row, heads * row, word, word)
            yield Field(f"{store.name}_word", _word_dtype(store), word, offset, (heads, block_size, 1, 1, 1), strides)
            offset += word


def _opaque_field(store: OpaqueStore, block_size: int, offset: int) -> Field:
    size = OPAQUE_ITEM_BYTES[store.dtype]
    items = math.prod(store.shape)
    tokens = block_size if store.per == "token" else 1
    total = tokens * items * size
    return Field(
        store.name, store.dtype, size, offset, (1, 1, tokens, items, 1), (total, total, items * size, size, size)
    )

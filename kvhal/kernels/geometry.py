"""What a kernel must know of one layer's pages, and its form as the `str geometry` argument of the operators.

Derived from a `Layout` and never computed elsewhere. An operator takes the numbers rather than a handle so that
tracing, compiling and replaying see everything a call depends on; as one string, because torch's dispatcher takes a
list apart and together at every call. No torch here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from kvhal.errors import SpecMismatch
from kvhal.layout import Layout
from kvhal.modes import ENCODINGS, Encoding, Scaling
from kvhal.page import Field
from kvhal.spec import ScaledStore

__all__ = ["LayerGeometry", "PageGeometry", "StoreGeometry"]

_ENCODING_NAMES = tuple(ENCODINGS)
_SCALINGS = (Scaling.NONE, Scaling.STATIC, Scaling.ROW)
_NO_FIELD = Field("", "uint8", 0, -1, (0, 0, 0, 0, 0), (0, 0, 0, 0, 0))
_HEAD_INTS = 8
_STORE_INTS = 3 + 2 * 12


@dataclass(frozen=True, slots=True)
class StoreGeometry:
    """Keys or values of one layer: encoding, where the scales live, the code field and the row-word field (or None)."""

    encoding: Encoding
    scaling: Scaling
    head_dim: int
    codes: Field
    words: Field | None


@dataclass(frozen=True, slots=True)
class LayerGeometry:
    """One layer's pages: block b starts at byte `base + b * block_stride` of the storage.

    window: tokens a query sees, 0 for all. scales_offset: byte offset of this layer's fp32 (k, v) static scales, or -1.
    counters_offset: byte offset of int64 {nonfinite_rows, rejected_slots}.
    """

    base: int
    num_blocks: int
    block_stride: int
    block_size: int
    num_kv_heads: int
    window: int
    scales_offset: int
    counters_offset: int
    k: StoreGeometry
    v: StoreGeometry

    @classmethod
    def of(cls, layout: Layout, layer: int) -> LayerGeometry:
        """The geometry of `layer` (a sharer gets its source's pages). Raises SpecMismatch if it has no k and v."""
        placed = layout.group_of(layer)
        source = layout.spec.source_of(layer)
        k, v = placed.group.k, placed.group.v
        if k is None or v is None:
            names = [s.name for s in placed.group.stores]
            raise SpecMismatch(
                f"layer {layer} holds only opaque stores {names!r}; store, gather and attend need k and v: "
                "reach opaque stores through lease.view(name, layer)"
            )
        fields = {f.name: f for f in placed.fields}

        def store(of: ScaledStore) -> StoreGeometry:
            words = fields[f"{of.name}_word"] if of.mode_.scaling is Scaling.ROW else None
            return StoreGeometry(of.encoding_, of.mode_.scaling, of.head_dim, fields[of.name], words)

        return cls(
            base=placed.layer_offset(source),
            num_blocks=placed.num_blocks,
            block_stride=placed.block_stride,
            block_size=placed.group.block_size,
            num_kv_heads=k.num_kv_heads,
            window=placed.group.window or 0,
            scales_offset=-1 if layout.scales_offset is None else layout.scales_offset + source * 8,
            counters_offset=layout.counters_offset,
            k=store(k),
            v=store(v),
        )

    def pack(self) -> str:
        """The operator argument: whole numbers in decimal, with commas; `unpack` gives back an equal value."""
        head = [self.base, self.num_blocks, self.block_stride, self.block_size, self.num_kv_heads]
        head += [self.window, self.scales_offset, self.counters_offset]
        return ",".join(map(str, head + _pack_store(self.k) + _pack_store(self.v)))

    @staticmethod
    def unpack(packed: str) -> LayerGeometry:
        """The value that `pack` made, the same object for the same string. Raises SpecMismatch for any other string."""
        return _unpack(packed)


@dataclass(frozen=True, slots=True)
class PageGeometry:
    """One layer's pages as bytes, for movers: page b is `nbytes` at `base + b * block_stride`."""

    base: int
    nbytes: int
    block_stride: int
    num_blocks: int

    @classmethod
    def all_of(cls, layout: Layout, group: str | None = None) -> tuple[PageGeometry, ...]:
        """Every layer that owns pages, of all groups or of one."""
        chosen = layout.groups if group is None else (layout.group(group),)
        return tuple(
            cls(g.layer_offset(layer), g.page_bytes, g.block_stride, g.num_blocks)
            for g in chosen
            for layer in g.group.layers
        )

    def pack(self) -> list[int]:
        return [self.base, self.nbytes, self.block_stride, self.num_blocks]

    @classmethod
    def unpack(cls, packed: Sequence[int]) -> tuple[PageGeometry, ...]:
        return tuple(cls(*packed[i : i + 4]) for i in range(0, len(packed), 4))


def _pack_field(field: Field | None) -> list[int]:
    f = field or _NO_FIELD
    return [f.offset, f.itemsize, *f.shape, *f.strides]


def _pack_store(store: StoreGeometry) -> list[int]:
    head = [_ENCODING_NAMES.index(store.encoding.name), _SCALINGS.index(store.scaling), store.head_dim]
    return head + _pack_field(store.codes) + _pack_field(store.words)


@lru_cache(maxsize=4096)
def _unpack(given: str) -> LayerGeometry:
    packed = tuple(int(n) for n in given.split(",") if n.lstrip("-").isdecimal())
    if len(packed) != _HEAD_INTS + 2 * _STORE_INTS or ",".join(map(str, packed)) != given:
        raise SpecMismatch(f"geometry must be what LayerGeometry.pack made; found {given!r}: pack a layer's geometry")
    k = _unpack_store("k", packed[_HEAD_INTS : _HEAD_INTS + _STORE_INTS])
    v = _unpack_store("v", packed[_HEAD_INTS + _STORE_INTS : _HEAD_INTS + 2 * _STORE_INTS])
    base, num_blocks, block_stride, block_size, num_kv_heads, window, scales_offset, counters_offset = packed[
        :_HEAD_INTS
    ]
    return LayerGeometry(
        base, num_blocks, block_stride, block_size, num_kv_heads, window, scales_offset, counters_offset, k, v
    )


def _unpack_store(name: str, packed: tuple[int, ...]) -> StoreGeometry:
    enc, scaling = ENCODINGS[_ENCODING_NAMES[packed[0]]], _SCALINGS[packed[1]]
    codes = _unpack_field(name, enc.dtype if enc.bits == 16 else "uint8", packed[3:15])
    words = None
    if scaling is Scaling.ROW:
        words = _unpack_field(f"{name}_word", "int32" if enc.bits == 4 else "float32", packed[15:27])
    return StoreGeometry(enc, scaling, packed[2], codes, words)


def _unpack_field(name: str, dtype: str, packed: tuple[int, ...]) -> Field:
    a, b, c, d, e = packed[2:7]
    v, w, x, y, z = packed[7:12]
    return Field(name, dtype, packed[1], packed[0], (a, b, c, d, e), (v, w, x, y, z))

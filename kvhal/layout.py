"""Where every byte of a cache lives. The planner makes a `Layout`; nobody else computes a stride or a size. No torch.

Pages are padded to `page_align`; `page_bytes` is the content, `page_stride` the distance. What is inside one: page.py.

The storage is: the pages of every group | static scales fp32 [layers][2] if a mode needs them | counters int64 [2]
{nonfinite_rows, rejected_slots}.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from kvhal.choice import Choice
from kvhal.errors import ConfigError, SpecMismatch
from kvhal.modes import Scaling
from kvhal.page import ALIGNMENT, Field, LayoutKind, align, content_bytes, page_fields
from kvhal.spec import CacheGroup, CacheSpec, ScaledStore, is_count

__all__ = ["Field", "ForeignView", "GroupLayout", "Layout", "LayoutKind", "Order", "PageRange"]

LAYOUT_VERSION = 1
SCALE_BYTES = 4
COUNTERS = ("nonfinite_rows", "rejected_slots")
COUNTER_BYTES = 8


class Order(Choice):
    """Which index moves slowest in a group's pages."""

    LAYER_MAJOR = "layer_major"
    BLOCK_MAJOR = "block_major"


@dataclass(frozen=True, slots=True)
class GroupLayout:
    """One group's pages: page (layer, block) starts at offset + layer_index * layer_stride + block * block_stride."""

    group: CacheGroup
    num_blocks: int
    fields: tuple[Field, ...]
    page_bytes: int
    page_stride: int
    offset: int
    layer_stride: int
    block_stride: int

    @property
    def nbytes(self) -> int:
        """Bytes of all pages of this group, padding included."""
        return self.num_blocks * self.block_bytes

    @property
    def block_bytes(self) -> int:
        """Bytes one block takes over all layers of the group, padding included."""
        return len(self.group.layers) * self.page_stride

    @property
    def num_slots(self) -> int:
        return self.num_blocks * self.group.block_size

    def field(self, name: str) -> Field:
        """The field called `name`. Raises SpecMismatch if this group has none."""
        for field in self.fields:
            if field.name == name:
                return field
        raise SpecMismatch(f"group {self.group.name!r} has no field {name!r}; it has {[f.name for f in self.fields]!r}")

    def layer_offset(self, layer: int) -> int:
        """Byte offset in the storage of block 0 of `layer` (a layer that owns pages)."""
        return self.offset + self.group.layers.index(layer) * self.layer_stride


@dataclass(frozen=True, slots=True)
class PageRange:
    """The content bytes of one page in the storage."""

    group: str
    layer: int
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class ForeignView:
    """Shape and byte strides of an engine's own view of one layer's pages; `bind` compares them with the layout."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]


class StorageLike(Protocol):
    """What `bind` asks of foreign memory (torch.UntypedStorage has it)."""

    def nbytes(self) -> int: ...

    def data_ptr(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Layout:
    """The bytes of a whole cache, frozen. `nbytes` is the only byte formula of the project."""

    spec: CacheSpec
    kind: LayoutKind
    order: Order
    groups: tuple[GroupLayout, ...]
    scales_offset: int | None
    counters_offset: int

    @classmethod
    def of(
        cls,
        spec: CacheSpec,
        num_blocks: int | Mapping[str, int],
        *,
        kind: str = LayoutKind.TILED,
        order: str = Order.LAYER_MAJOR,
        page_align: int = ALIGNMENT,
        page_stride: int | None = None,
    ) -> Layout:
        """Lay out `spec` with `num_blocks` blocks a group (one number, or one by group name).

        page_stride: an engine's own page size in bytes, at least the content, a multiple of 16; None pads each page to
        `page_align`. Raises ConfigError for what cannot be laid out.
        """
        kind, order = LayoutKind(kind), Order(order)
        if not is_count(page_align) or page_align % ALIGNMENT:
            raise ConfigError(f"page_align is {page_align!r} bytes; it must be a multiple of {ALIGNMENT}")
        groups: list[GroupLayout] = []
        end = 0
        for group in spec.groups:
            blocks = _blocks_named(num_blocks, group.name) if isinstance(num_blocks, Mapping) else num_blocks
            if not is_count(blocks):
                raise ConfigError(f"group {group.name!r}: num_blocks is {blocks!r}; a cache needs 1 block or more")
            placed = _place_group(group, blocks, kind, order, page_align, page_stride, align(end, page_align))
            groups.append(placed)
            end = placed.offset + placed.nbytes
        end = align(end, ALIGNMENT)
        scales_offset = None
        if any(isinstance(s, ScaledStore) and s.mode_.scaling is Scaling.STATIC for g in spec.groups for s in g.stores):
            scales_offset = end
            end = align(end + spec.num_layers * 2 * SCALE_BYTES, ALIGNMENT)
        return cls(spec, kind, order, tuple(groups), scales_offset, end)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole storage: pages, padding, static scales, counters."""
        return self.counters_offset + len(COUNTERS) * COUNTER_BYTES

    @property
    def block_bytes(self) -> int:
        """Bytes that one more block in every group costs."""
        return sum(g.block_bytes for g in self.groups)

    @property
    def fixed_bytes(self) -> int:
        """Bytes that do not depend on the number of blocks (scales, counters, alignment between groups)."""
        return self.nbytes - sum(g.nbytes for g in self.groups)

    @property
    def fingerprint(self) -> str:
        """SHA-256 over `describe()`: equal exactly when blocks of two caches mean the same bytes."""
        text = json.dumps(self.describe(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def describe(self) -> dict[str, Any]:
        """What a block's bytes mean, for headers, connectors and comparison by field. Placement is left out.

        Not in it: the number of blocks, the order and the padding between pages, so caches of different size agree.
        """
        return {
            "layout_version": LAYOUT_VERSION,
            "layout": str(self.kind),
            "groups": [_describe_group(g) for g in self.groups],
            "shares": [list(pair) for pair in self.spec.shares],
        }

    def group(self, name: str) -> GroupLayout:
        """The group called `name`. Raises SpecMismatch if there is none."""
        for group in self.groups:
            if group.group.name == name:
                return group
        raise SpecMismatch(f"no group {name!r} in this cache; its groups are {[g.group.name for g in self.groups]!r}")

    def group_of(self, layer: int) -> GroupLayout:
        """The group whose pages `layer` reads."""
        return self.group(self.spec.group_of(layer).name)

    def ranges(self, block: int, group: str | None = None) -> tuple[PageRange, ...]:
        """The content bytes of `block` in every layer of every group (or of one), in storage order of the layers."""
        found: list[PageRange] = []
        for placed in self.groups if group is None else (self.group(group),):
            if not 0 <= block < placed.num_blocks:
                raise SpecMismatch(
                    f"block {block} is outside group {placed.group.name!r}, which has {placed.num_blocks} blocks"
                )
            for layer in placed.group.layers:
                start = placed.layer_offset(layer) + block * placed.block_stride
                found.append(PageRange(placed.group.name, layer, start, placed.page_bytes))
        return tuple(found)

    def view_of(self, layer: int) -> ForeignView:
        """The canonical byte view of one layer's pages that engines hold: what `bind` accepts.

        inline: (blocks, block_size, heads, row bytes); tiled: (blocks, heads, tiles, tile bytes).
        """
        placed = self.group_of(layer)
        k = placed.field("k")
        head, tile = k.strides[0], k.strides[1]
        heads, tiles = k.shape[0], k.shape[1]
        if self.kind is LayoutKind.INLINE:
            return ForeignView((placed.num_blocks, tiles, heads, head), (placed.block_stride, tile, head, 1))
        return ForeignView((placed.num_blocks, heads, tiles, tile), (placed.block_stride, head, tile, 1))

    def bind(
        self, storage: StorageLike, offset: int = 0, nbytes: int | None = None, view: ForeignView | None = None
    ) -> int:
        """Check that `nbytes` at `offset` of foreign memory can hold this layout; the bytes taken.

        view: the engine's own byte view of layer 0, if it has one; every dimension and stride must be the layout's.
        Raises SpecMismatch naming what does not fit; nothing is touched.
        """
        have = storage.nbytes() - offset if nbytes is None else nbytes
        if offset < 0 or have < 0 or offset + have > storage.nbytes():
            raise SpecMismatch(
                f"asked to bind {have} bytes at offset {offset}; the storage has {storage.nbytes()} bytes; "
                "pass a range inside it"
            )
        if (storage.data_ptr() + offset) % ALIGNMENT:
            raise SpecMismatch(
                f"memory at offset {offset} starts at an address that is {(storage.data_ptr() + offset) % ALIGNMENT} "
                f"past a multiple of {ALIGNMENT}; align the offset to {ALIGNMENT} bytes"
            )
        if have < self.nbytes:
            raise SpecMismatch(
                f"the layout needs {self.nbytes} bytes and the memory given has {have}; plan fewer blocks or give more"
            )
        if view is not None:
            _check_view(view, self.view_of(self.groups[0].group.layers[0]), self.kind)
        return self.nbytes

    def with_blocks(self, num_blocks: int) -> Layout:
        """The same layout with another number of blocks in every group, every stride derived anew."""
        if not is_count(num_blocks):
            raise ConfigError(f"num_blocks is {num_blocks!r}; a cache needs 1 block or more")
        groups: list[GroupLayout] = []
        shift = 0
        for old in self.groups:
            layer_stride = num_blocks * old.page_stride if self.order is Order.LAYER_MAJOR else old.layer_stride
            new = replace(old, num_blocks=num_blocks, layer_stride=layer_stride, offset=old.offset + shift)
            shift += new.nbytes - old.nbytes
            groups.append(new)
        scales = None if self.scales_offset is None else self.scales_offset + shift
        return replace(self, groups=tuple(groups), scales_offset=scales, counters_offset=self.counters_offset + shift)


def _blocks_named(num_blocks: Mapping[str, int], group: str) -> int:
    if group not in num_blocks:
        raise ConfigError(f"num_blocks names {sorted(num_blocks)!r} and not group {group!r}; give every group a number")
    return num_blocks[group]


def _place_group(
    group: CacheGroup, blocks: int, kind: LayoutKind, order: Order, page_align: int, page_stride: int | None, start: int
) -> GroupLayout:
    fields = page_fields(group, kind)
    end = content_bytes(fields)
    stride = align(end, page_align) if page_stride is None else page_stride
    if stride < end or stride % page_align:
        raise ConfigError(
            f"group {group.name!r}: page_stride {stride} does not hold a page of {end} bytes at a multiple of "
            f"page_align {page_align}; use at least {align(end, page_align)}"
        )
    by_layer = order is Order.LAYER_MAJOR
    return GroupLayout(
        group=group,
        num_blocks=blocks,
        fields=fields,
        page_bytes=end,
        page_stride=stride,
        offset=start,
        layer_stride=blocks * stride if by_layer else stride,
        block_stride=stride if by_layer else len(group.layers) * stride,
    )


def _describe_group(placed: GroupLayout) -> dict[str, Any]:
    group = placed.group
    return {
        "name": group.name,
        "layers": list(group.layers),
        "block_size": group.block_size,
        "page_bytes": placed.page_bytes,
        "stores": [
            {
                "name": s.name,
                "mode": s.mode,
                "encoding": s.encoding,
                "num_kv_heads": s.num_kv_heads,
                "head_dim": s.head_dim,
            }
            if isinstance(s, ScaledStore)
            else {"name": s.name, "dtype": s.dtype, "shape": list(s.shape), "per": s.per}
            for s in group.stores
        ],
        "fields": [
            {"name": f.name, "dtype": f.dtype, "offset": f.offset, "shape": list(f.shape), "strides": list(f.strides)}
            for f in placed.fields
        ],
    }


def _check_view(found: ForeignView, expected: ForeignView, kind: LayoutKind) -> None:
    names = (
        ("blocks", "block_size", "heads", "row bytes")
        if kind is LayoutKind.INLINE
        else ("blocks", "heads", "tiles", "tile bytes")
    )
    if len(found.shape) != len(expected.shape):
        raise SpecMismatch(
            f"the memory is a view of {len(found.shape)} dimensions {found.shape!r}; the {kind} layout has "
            f"{len(expected.shape)}: ({', '.join(names)}) = {expected.shape!r}"
        )
    wrong = [
        f"dimension {i} ({name}) is {found.shape[i]} with stride {found.strides[i]} bytes, the layout says "
        f"{expected.shape[i]} with stride {expected.strides[i]}"
        for i, name in enumerate(names)
        if (found.shape[i], found.strides[i]) != (expected.shape[i], expected.strides[i])
    ]
    if wrong:
        raise SpecMismatch(
            "the memory's shape is not this cache's: " + "; ".join(wrong) + "; plan with the engine's shape"
        )

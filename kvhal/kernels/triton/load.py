# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator,assignment"
# Triton's dialect: arguments have no Python types.
"""Tiles of codes and row words out of the pages, whatever their layout; `R` is a `constants.Rows`.

A tile's tokens come by units: 16 tokens with one page id where the block size allows it, else one.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["blocks_of", "load_keys", "load_values", "load_words", "place"]


@triton.jit
def blocks_of(i, table, first, last, num_blocks, BLOCK_SIZE: tl.constexpr, KEYS: tl.constexpr):
    """Ids of the blocks that hold tile i, kept between keys `first` and `last`: one a unit, or [KEYS] at once.

    A loop asks for those of its next tile: read when they are needed, they would hold up every load of the tile.
    """
    if BLOCK_SIZE % 16 == 0:
        blocks = ()
        for n in tl.static_range(KEYS // 16):
            blocks = blocks + (_block(i * (KEYS // 16) + n, table, first, last, num_blocks, BLOCK_SIZE, 16),)  # noqa: RUF005  # Triton unpacks none
    else:
        blocks = (_block(i * KEYS + tl.arange(0, KEYS), table, first, last, num_blocks, BLOCK_SIZE, 1),)
    return blocks


@triton.jit
def _block(unit, table, first, last, num_blocks, BLOCK_SIZE: tl.constexpr, UNIT: tl.constexpr):
    # Unsigned, or every division by a power of two would take four instructions.
    unit = tl.minimum(tl.maximum(unit, first // UNIT), last // UNIT).to(tl.uint32)
    block = tl.load(table + unit // (BLOCK_SIZE // UNIT)).to(tl.uint32, bitcast=True)
    # The schedule has checked the table; a table changed since must still not lead out of the cache.
    return tl.minimum(block, (num_blocks - 1).to(tl.uint32))


@triton.jit
def place(i, blocks, block_stride, BLOCK_SIZE: tl.constexpr, KEYS: tl.constexpr):
    """(byte offset of the page, token inside it) of each unit of tile i."""
    UNIT: tl.constexpr = 16 if BLOCK_SIZE % 16 == 0 else 1
    UNITS: tl.constexpr = BLOCK_SIZE // UNIT
    lane = tl.arange(0, KEYS // UNIT)
    page = blocks[0].to(tl.int64) * block_stride + tl.zeros([KEYS // UNIT], tl.int64)
    if UNIT > 1:
        for n in tl.static_range(1, KEYS // UNIT):
            page = tl.where(lane >= n, blocks[n].to(tl.int64) * block_stride, page)
    return page, (i * (KEYS // UNIT) + lane).to(tl.uint32) % UNITS * UNIT


@triton.jit
def load_keys(
    pages,
    page,
    inside,
    h,
    R: tl.constexpr,
    UNIT: tl.constexpr,
    UNITS: tl.constexpr,
    KEYS: tl.constexpr,
    SLICE: tl.constexpr = 0,
    SLICES: tl.constexpr = 1,
):
    """Codes [KEYS, block / SLICES] of one head's keys: slice SLICE of their channels."""
    WIDTH: tl.constexpr = R.block // SLICES
    STEP: tl.constexpr = R.hi if R.tile_tokens > 1 else R.tile
    SHIFT: tl.constexpr = R.size - 1
    channel = SLICE * WIDTH + tl.arange(0, WIDTH)
    token = tl.arange(0, UNIT)
    row = ((page + inside // R.tile_tokens * R.tile) >> SHIFT)[:, None, None] + (token * (STEP // R.size))[
        None, :, None
    ]
    pointers = _typed(pages + h * R.head + R.offset, R) + row + channel[None, None, :]
    if R.block == R.width:
        codes = tl.load(pointers)
    else:
        codes = tl.load(pointers, mask=(channel < R.width)[None, None, :], other=0)
    return tl.reshape(codes, [KEYS, WIDTH])


@triton.jit
def load_values(pages, page, inside, h, R: tl.constexpr, UNIT: tl.constexpr, UNITS: tl.constexpr, KEYS: tl.constexpr):
    """Codes of one head's values: [block, KEYS], or [KEYS, block] where they lie so (los 1)."""
    if R.los == 1:
        codes = load_keys(pages, page, inside, h, R, UNIT, UNITS, KEYS)
    else:
        GROUPS: tl.constexpr = UNIT // R.los
        item = tl.arange(0, R.block * R.los)
        group = tl.arange(0, GROUPS)
        SHIFT: tl.constexpr = R.size - 1
        row = ((page + inside // R.tile_tokens * R.tile) >> SHIFT)[:, None, None]
        row = row + (group * (R.hi // R.size))[None, :, None]
        pointers = _typed(pages + h * R.head + R.offset, R) + row + item[None, None, :]
        if R.block == R.width:
            codes = tl.load(pointers)
        else:
            codes = tl.load(pointers, mask=(item < R.width * R.los)[None, None, :], other=0)
        codes = tl.permute(tl.reshape(codes, [UNITS, GROUPS, R.block, R.los]), (2, 0, 1, 3))
        codes = tl.reshape(codes, [R.block, KEYS])
    return codes


@triton.jit
def load_words(pages, page, inside, h, R: tl.constexpr, UNIT: tl.constexpr, UNITS: tl.constexpr, KEYS: tl.constexpr):
    """Row words int32 [KEYS]."""
    W: tl.constexpr = R.words
    STEP: tl.constexpr = W.hi if R.tile_tokens > 1 else W.tile
    row = ((page + inside // R.tile_tokens * W.tile) >> 2)[:, None] + (tl.arange(0, UNIT) * (STEP // 4))[None, :]
    typed = (pages + h * W.head + W.offset).to(tl.pointer_type(tl.int32))
    return tl.reshape(tl.load(typed + row), [KEYS])


@triton.jit
def _typed(pointer, R: tl.constexpr):
    """A byte pointer as one to codes: cast before indexing, or the compiler no longer sees that they are contiguous."""
    if R.size == 1:
        typed = pointer
    else:
        typed = pointer.to(tl.pointer_type(tl.uint16))
    return typed

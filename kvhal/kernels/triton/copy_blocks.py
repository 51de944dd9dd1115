# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"
# Triton's dialect: arguments have no Python types.
"""copy_blocks: whole pages, by way of a strip of scratch, so that all copies read before any writes."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["move_kernel"]


@triton.jit(do_not_specialize=["start", "length", "column"])
def move_kernel(
    cache,
    pairs,
    strip,
    base: tl.int64,
    block_stride: tl.int64,
    start: tl.int64,
    length: tl.int32,
    column: tl.int32,
    BYTES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (pair, i): part of one page to the strip (column 0: the source), or back (column 1: the destination).

    start, length: the columns of a page in this strip; block_stride and all lengths count items of BYTES bytes.
    """
    pair = tl.program_id(0).to(tl.int64)
    item = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = item < length
    block = tl.load(pairs + pair * 2 + column)
    page = _items(cache, BYTES) + base + block * block_stride + start + item
    held = _items(strip, BYTES) + pair * length + item
    if column == 0:
        tl.store(held, tl.load(page, mask=mask, other=0), mask=mask)
    else:
        tl.store(page, tl.load(held, mask=mask, other=0), mask=mask)


@triton.jit
def _items(pointer, BYTES: tl.constexpr):
    if BYTES == 8:
        typed = pointer.to(tl.pointer_type(tl.int64))
    elif BYTES == 4:
        typed = pointer.to(tl.pointer_type(tl.int32))
    else:
        typed = pointer
    return typed

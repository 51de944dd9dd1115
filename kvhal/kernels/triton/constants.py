"""A `LayerGeometry` as the compile-time constants of the kernels. Pure arithmetic: no torch, no triton.

Whatever is not here (base, block_stride, offsets that move with the number of blocks, counts) is an argument at run
time, so that a cache of another size or another layer of the same cache is the same machine code.
"""

from __future__ import annotations

from typing import NamedTuple

from kvhal.kernels.geometry import LayerGeometry, StoreGeometry
from kvhal.modes import Scaling
from kvhal.page import Field

__all__ = ["Page", "Rows", "Words", "pow2"]


class Words(NamedTuple):
    """Where the row words of keys or values lie in a page, in bytes."""

    offset: int
    head: int
    tile: int
    hi: int


class Rows(NamedTuple):
    """Keys or values as a kernel sees them; byte strides as in `page.py`.

    width: items a row (head_dim, or head_dim/2 packed int4 codes). block: `width` rounded up to a power of two, at
    least what a matrix product must sum over: 32 for integer codes, 16 for the others. bias, mantissa: of an 8-bit
    float encoding, else 0. nan_code: canonical NaN of an 8-bit float, else 0.
    """

    encoding: str
    scaling: str
    dim: int
    width: int
    block: int
    size: int
    bias: int
    mantissa: int
    fnuz: bool
    qmax: float
    nan_code: int
    offset: int
    head: int
    tile: int
    hi: int
    channel: int
    lo: int
    tile_tokens: int
    los: int
    words: Words

    @property
    def is_float8(self) -> bool:
        return self.mantissa > 0


class Page(NamedTuple):
    """What every kernel over one layer's pages is compiled for."""

    block_size: int
    heads: int
    window: int
    k: Rows
    v: Rows

    @classmethod
    def of(cls, g: LayerGeometry) -> Page:
        return cls(g.block_size, g.num_kv_heads, g.window, _rows(g.k), _rows(g.v))


# Exponent bias and mantissa bits: OCP 8-bit floating point 1.0, and the FNUZ forms of the CDNA 3 instruction set.
_FLOAT8 = {"e4m3fn": (7, 3), "e4m3fnuz": (8, 3), "e5m2": (15, 2), "e5m2fnuz": (16, 2)}
_NO_WORDS = Words(0, 0, 0, 0)


def pow2(n: int) -> int:
    """The smallest power of two that is at least `n`."""
    return 1 << max(0, n - 1).bit_length()


def _rows(of: StoreGeometry) -> Rows:
    codes, encoding = of.codes, of.encoding
    bias, mantissa = _FLOAT8.get(encoding.name, (0, 0))
    head, tile, hi, channel, lo = codes.strides
    _, _, his, width, los = codes.shape
    return Rows(
        encoding=encoding.name,
        scaling=of.scaling.value,
        dim=of.head_dim,
        width=width,
        block=max(16 if mantissa or codes.itemsize > 1 else 32, pow2(width)),
        size=codes.itemsize,
        bias=bias,
        mantissa=mantissa,
        fnuz=encoding.is_fnuz,
        qmax=encoding.qmax,
        nan_code=encoding.nan_code or 0,
        offset=codes.offset,
        head=head,
        tile=tile,
        hi=hi,
        channel=channel,
        lo=lo,
        tile_tokens=his * los,
        los=los,
        words=_NO_WORDS if of.scaling is not Scaling.ROW or of.words is None else _words(of.words),
    )


def _words(field: Field) -> Words:
    head, tile, hi, _, _ = field.strides
    return Words(field.offset, head, tile, hi)

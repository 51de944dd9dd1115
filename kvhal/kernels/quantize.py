"""The numerics of a scaled cache: the specification every other kernel is compared with, bit for bit.

All arithmetic is fp32, elementwise, one IEEE operation at a time (nothing contracts into an fma). "round" is to
nearest, ties to even. D is the number of elements of a row; a row is one token of one head.

Symmetric rows (int8, e4m3fn, e4m3fnuz; qmax 127, 448, 224)::

    scale = max(amax, 448 * 2^-126) * fp32(1/qmax)      one multiplication; amax = largest |x| of the row
    inv   = 1 / scale                                    one division
    code  = round(clamp(x * inv, -qmax, qmax))           value = code * scale;  row word = scale, fp32

int4 rows (asymmetric), with c = fp32(1/15)::

    s     = bf16_round_up(max(max*c - min*c, amax * 2^-11, 2^-126));  inv = 1 / s
    z     = fp16(-(min + 0) * inv)                       min + 0: a minimum of -0 counts as +0, so z is -0 then
    code  = round(clamp(x * inv + z, 0, 15))             value = (code - z) * s
    row word = bf16 s (high half) | fp16 z (low half); byte d = channel d (low nibble) | channel d + D/2 (high)

Magnitudes up to 2^127 read back finite; beyond, the last fraction of the fp32 range may round up to infinity.
A row with NaN or infinity: codes 0, row word the quiet NaN 0x7FC00000 (int4: 0x7FC07E00), so it reads back as NaN.

Static scales (per tensor): inv = 1/scale; code = round(clamp(x * inv, -qmax, qmax)); a NaN or infinite element
becomes the canonical NaN code of the encoding and touches no neighbour.

16-bit encodings: the IEEE cast; a NaN becomes the canonical quiet NaN (bfloat16 0x7FC0, float16 0x7E00) because casts
keep different NaN payloads on different stacks; infinity stays.

FNUZ encodings have no negative zero: -0 and negative underflow give 0x00, since 0x80 is their NaN. The clamp comes
before the cast because casts differ on overflow (torch 2.13 CPU saturates e4m3fn, gives NaN for e4m3fnuz; older ones
give NaN for both).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from kvhal.modes import Encoding, Scaling

__all__ = [
    "CODE_DTYPES",
    "Encoded",
    "Scratch",
    "decode",
    "decode_factor",
    "decode_into",
    "dequantize_rows",
    "dequantize_static",
    "encode",
    "quantize_rows",
    "quantize_static",
    "row_scales",
]

AMAX_FLOOR = 448.0 * 2.0**-126
NAN_WORD = 0x7FC00000
INT4_NAN_WORD = 0x7FC07E00
CODE_DTYPES: dict[str, torch.dtype] = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "e4m3fn": torch.float8_e4m3fn,
    "e4m3fnuz": torch.float8_e4m3fnuz,
    "e5m2": torch.float8_e5m2,
    "e5m2fnuz": torch.float8_e5m2fnuz,
    "int8": torch.int8,
    "int4": torch.uint8,
}
# An e4m3 byte moved up seven bits is an fp16 whose exponent bias is too large by 8 (fn) or 7 (fnuz).
_HALF_FACTORS = {"e4m3fn": 256.0, "e4m3fnuz": 128.0}
_QUIET_NAN_16 = {"bfloat16": 0x7FC0, "float16": 0x7E00}


class Encoded(NamedTuple):
    """Rows ready to be stored.

    codes: uint8 [..., C], or the 16-bit dtype [..., D]. words: fp32 (int4: int32) [...], or None without row scales.
    nonfinite_rows: how many rows hold NaN or infinity (16-bit modes: after the cast).
    """

    codes: Tensor
    words: Tensor | None
    nonfinite_rows: int


class Scratch(NamedTuple):
    """Where one piece of work at a time is converted: fresh memory costs more than the arithmetic (page faults).

    wide: fp32 [elements]. codes: int16 [2 * elements]; what `encode` returns may lie in it (or be the input itself).
    """

    wide: Tensor
    codes: Tensor

    @classmethod
    def of(cls, elements: int) -> Scratch:
        """Scratch for pieces of up to `elements` elements."""
        return cls(torch.empty(elements), torch.empty(2 * elements, dtype=torch.int16))

    def carve(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The beginning of `codes` as a contiguous tensor."""
        return self.codes.view(dtype)[: math.prod(shape)].view(shape)


def quantize_rows(x: Tensor, encoding: Encoding) -> tuple[Tensor, Tensor]:
    """Quantize fp32 rows [..., D] with a scale a row: (codes uint8 [..., C], words [...] fp32, int4: int32)."""
    found = encode(x, encoding, Scaling.ROW)
    assert found.words is not None
    return found.codes, found.words


def quantize_static(x: Tensor, scale: float | Tensor, encoding: Encoding) -> Tensor:
    """Quantize fp32 [..., D] with one scale (fp32, finite, positive; a number or a one-element tensor): uint8 codes."""
    return encode(x, encoding, Scaling.STATIC, scale).codes


def encode(
    x: Tensor,
    encoding: Encoding,
    scaling: Scaling,
    scale: float | Tensor | None = None,
    scratch: Scratch | None = None,
) -> Encoded:
    """Encode rows [..., D] of any float dtype as a store with `scaling` keeps them (`scale` for static modes)."""
    scratch = scratch or Scratch.of(x.numel())
    if scaling is Scaling.NONE:
        return _cast_rows(x, encoding, scratch)
    wide = scratch.wide[: x.numel()].view(x.shape)
    wide.copy_(x)
    if scaling is Scaling.STATIC:
        assert scale is not None
        return _static_rows(wide, scale, encoding, scratch)
    return _int4_rows(wide, scratch) if encoding.bits == 4 else _symmetric_rows(wide, encoding, scratch)


def dequantize_rows(codes: Tensor, words: Tensor, encoding: Encoding) -> Tensor:
    """The fp32 values [..., D] of rows that `quantize_rows` made: code * scale, or (code - zero) * scale for int4."""
    scale, zero = row_scales(words, encoding)
    value = decode(codes, encoding)
    if zero is not None:
        value.sub_(zero.unsqueeze(-1))
    return value.mul_(scale.unsqueeze(-1))


def dequantize_static(codes: Tensor, scale: float | Tensor, encoding: Encoding) -> Tensor:
    """The fp32 values [..., D] of codes with one scale: code * scale."""
    return decode(codes, encoding).mul_(scale)


def row_scales(words: Tensor, encoding: Encoding) -> tuple[Tensor, Tensor | None]:
    """(scale, zero) fp32 of row words; zero is None unless the encoding has one. `words` must be contiguous."""
    if encoding.bits != 4:
        return words, None
    halves = (*words.shape, 2)
    scale = words.view(torch.bfloat16).view(halves)[..., 1].to(torch.float32)
    return scale, words.view(torch.float16).view(halves)[..., 0].to(torch.float32)


def decode(codes: Tensor, encoding: Encoding) -> Tensor:
    """The exact fp32 value of every code, without any scale: uint8 [..., C] (or 16-bit [..., D]) -> fp32 [..., D]."""
    width = 2 * codes.shape[-1] if encoding.bits == 4 else codes.shape[-1]
    out = torch.empty((*codes.shape[:-1], width))
    decode_into(out, codes, encoding, torch.empty(2 * codes.numel(), dtype=torch.int16))
    factor = decode_factor(encoding)
    return out if factor == 1.0 else out.mul_(factor)


def decode_factor(encoding: Encoding) -> float:
    """What `decode_into` leaves out: value = decoded * factor (a power of two, so exact)."""
    return _HALF_FACTORS.get(encoding.name, 1.0)


def decode_into(out: Tensor, codes: Tensor, encoding: Encoding, scratch: Tensor) -> None:
    """Write value / `decode_factor` of every code into fp32 `out`, allocating nothing large.

    codes: uint8 or the 16-bit dtype, any strides. scratch: int16 [at least 2 * codes.numel()].
    """
    if encoding.name in _HALF_FACTORS:
        _decode_by_half(out, codes, encoding, scratch)
    elif encoding.bits == 4:
        low = scratch.view(torch.uint8)[: codes.numel()].view(codes.shape)
        half = codes.shape[-1]
        out[..., :half].copy_(torch.bitwise_and(codes, 15, out=low))
        out[..., half:].copy_(torch.bitwise_right_shift(codes, 4, out=low))
    else:
        out.copy_(codes.view(CODE_DTYPES[encoding.name]))


def _decode_by_half(out: Tensor, codes: Tensor, encoding: Encoding, scratch: Tensor) -> None:
    # Six cheap int16 passes: torch's own cast takes ten times as long (1.3 ns an element against 0.13, Zen 5).
    bits = scratch[: codes.numel()].view(codes.shape)
    bits.copy_(codes.view(torch.int8))
    bits.bitwise_left_shift_(7).bitwise_and_(0xBF80 - 0x10000)
    if encoding.is_fnuz:
        bits.masked_fill_(bits == -0x8000, 0x7E00)
    else:
        # Only the NaN codes (all magnitude bits set) carry into bit 14; that bit makes them fp16 NaNs.
        carry = scratch[codes.numel() : 2 * codes.numel()].view(codes.shape)
        torch.add(bits, 0x80, out=carry)
        bits.bitwise_or_(carry.bitwise_and_(0x4000))
    out.copy_(bits.view(torch.float16))


def _symmetric_rows(x: Tensor, encoding: Encoding, scratch: Scratch) -> Encoded:
    amax = _amax(x)
    scale = amax.clamp(min=AMAX_FLOOR).mul_(_fp32(1.0 / encoding.qmax))
    inv = scale.reciprocal()
    bad = amax.isfinite().logical_not_()
    count = int(bad.sum())
    if count:
        x.masked_fill_(bad.unsqueeze(-1), 0.0)
        inv.masked_fill_(bad, 0.0)
        scale.view(torch.int32).masked_fill_(bad, NAN_WORD)
    return Encoded(_symmetric_codes(x.mul_(inv.unsqueeze(-1)), encoding, scratch), scale, count)


def _symmetric_codes(y: Tensor, encoding: Encoding, scratch: Scratch) -> Tensor:
    """round(clamp(y)) as uint8 codes; `y` is used up."""
    y.clamp_(-encoding.qmax, encoding.qmax)
    if encoding.name == "int8":
        y.round_()
    codes = scratch.carve(y.shape, CODE_DTYPES[encoding.name]).copy_(y).view(torch.uint8)
    return codes.masked_fill_(codes == 0x80, 0) if encoding.is_fnuz else codes


def _static_rows(x: Tensor, scale: float | Tensor, encoding: Encoding, scratch: Scratch) -> Encoded:
    assert encoding.nan_code is not None
    count = int(_amax(x).isfinite().logical_not_().sum())
    bad = x.isfinite().logical_not_() if count else None
    inv = torch.as_tensor(scale, dtype=torch.float32).reciprocal()
    codes = _symmetric_codes(x.mul_(inv), encoding, scratch)
    if bad is not None:
        codes.masked_fill_(bad, encoding.nan_code)
    return Encoded(codes, None, count)


def _int4_rows(x: Tensor, scratch: Scratch) -> Encoded:
    c = _fp32(1.0 / 15.0)
    high, low = x.amax(-1), x.amin(-1).add_(0.0)
    amax = torch.maximum(high, -low)
    span = torch.maximum(high * c - low * c, amax * 2.0**-11).clamp_(min=2.0**-126)
    bad = amax.isfinite().logical_not_()
    count = int(bad.sum())
    if count:
        x.masked_fill_(bad.unsqueeze(-1), 0.0)
        span.masked_fill_(bad, 1.0)
        low.masked_fill_(bad, 0.0)
    top = span.view(torch.int32).add_(0xFFFF).bitwise_right_shift_(16).bitwise_left_shift_(16)
    inv = top.view(torch.float32).reciprocal()
    zero = low.neg_().mul_(inv).to(torch.float16)
    x.mul_(inv.unsqueeze(-1)).add_(zero.to(torch.float32).unsqueeze(-1)).clamp_(0.0, 15.0).round_()
    half = x.shape[-1] // 2
    packed, upper = scratch.carve((2, *x.shape[:-1], half), torch.uint8)
    packed.copy_(x[..., :half])
    packed.bitwise_or_(upper.copy_(x[..., half:]).bitwise_left_shift_(4))
    word = top.bitwise_or_(zero.view(torch.int16).to(torch.int32).bitwise_and_(0xFFFF))
    return Encoded(packed, word.masked_fill_(bad, INT4_NAN_WORD), count)


def _cast_rows(x: Tensor, encoding: Encoding, scratch: Scratch) -> Encoded:
    dtype = CODE_DTYPES[encoding.name]
    codes = x if x.dtype is dtype and x.is_contiguous() else scratch.carve(x.shape, dtype).copy_(x)
    exponent = 0x7F80 if encoding.name == "bfloat16" else 0x7C00
    magnitude = scratch.wide.view(torch.int16)[: x.numel()].view(x.shape)
    torch.bitwise_and(codes.view(torch.int16), 0x7FFF, out=magnitude)
    count = int((magnitude.amax(-1) >= exponent).sum())
    if count:
        codes = scratch.carve(x.shape, dtype).copy_(x)
        codes.view(torch.int16).masked_fill_(magnitude > exponent, _QUIET_NAN_16[encoding.name])
    return Encoded(codes, None, count)


def _amax(x: Tensor) -> Tensor:
    # Two reductions over the input take half the time of |x| and one reduction; NaN passes through all three.
    return torch.maximum(x.amax(-1), x.amin(-1).neg_())


def _fp32(value: float) -> float:
    return float(torch.tensor(value, dtype=torch.float32))

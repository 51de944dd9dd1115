# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"
# Triton's dialect: arguments have no Python types.
"""Codes as operands of a matrix product: exact, and up to a power of two that the caller folds into a scale.

CONVERSION says how (the numbers are the same): "asm" is CUDA's cheapest (1.25 instructions an element, measured on
sm_90), "cast" is AMD's for int8 (a cast is one instruction there; for int4, whose codes must be cut out first, it took
4 to 11 % more instructions a token than arithmetic, compiled for five arches), "arithmetic" runs everywhere.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = [
    "float_operand",
    "half_of_infinity",
    "int4_nibbles",
    "int8_operand",
    "nibble_operands",
    "operand_factor",
    "pinned",
    "settled",
]


@triton.jit
def float_operand(codes, R: tl.constexpr, HARDWARE: tl.constexpr, FULL: tl.constexpr, FINITE: tl.constexpr):
    """Codes of a float encoding -> fp16 (bfloat16: unchanged; FULL: fp32). Times `operand_factor` it is the value.

    A row that holds NaN has a NaN row word and clean codes, so with row words a NaN code is memory nobody wrote.
    FINITE: it must become any finite number, since it is multiplied with a weight of zero; products with keys are
    selected out. Without row words it must stay NaN.
    """
    if R.encoding == "bfloat16":
        if FULL:
            value = (codes.to(tl.int32) << 16).to(tl.float32, bitcast=True)
        else:
            value = codes.to(tl.bfloat16, bitcast=True)
    elif R.encoding == "float16":
        value = codes.to(tl.float16, bitcast=True)
    elif HARDWARE and R.encoding == "e4m3fn":
        value = codes.to(tl.float8e4nv, bitcast=True).to(tl.float16)
        if FINITE and R.scaling == "row":
            value = tl.minimum(value, tl.full([1, 1], 448.0, tl.float16))
    elif HARDWARE and R.encoding == "e4m3fnuz":
        value = codes.to(tl.float8e4b8, bitcast=True).to(tl.float16)
        if FINITE and R.scaling == "row":
            value = tl.minimum(value, tl.full([1, 1], 448.0, tl.float16))
    elif R.encoding == "e5m2":
        value = (codes.to(tl.uint16) << 8).to(tl.float16, bitcast=True)
    elif R.encoding == "e5m2fnuz":
        # An e5m2 byte moved up eight bits, the exponent one less: its bias is 16. Below 8 that is an fp16 subnormal.
        magnitude = (codes & 0x7F).to(tl.uint16)
        bits = tl.where(magnitude < 8, magnitude << 7, (magnitude << 8) - 0x400) | ((codes & 0x80).to(tl.uint16) << 8)
        value = tl.where(codes == 0x80, 0x7E00, bits).to(tl.uint16).to(tl.float16, bitcast=True)
    else:
        # An e4m3 byte moved up seven bits is an fp16 whose exponent bias is too large by 8 (fn) or 7 (fnuz).
        bits = ((codes.to(tl.uint16) << 8).to(tl.int16, bitcast=True) >> 1) & -16385
        if R.scaling != "row":
            if R.fnuz:
                bits = tl.where(codes == 0x80, 0x7E00, bits).to(tl.int16)
            else:
                # Only NaN codes (all magnitude bits set) carry into bit 14, which makes an fp16 NaN of them.
                bits = bits | ((bits + 0x80) & 0x4000)
        value = bits.to(tl.float16, bitcast=True)
    return value


@triton.jit
def int8_operand(codes, CONVERSION: tl.constexpr):
    """int8 codes (as uint8) -> fp16."""
    if CONVERSION == "asm":
        value = tl.inline_asm_elementwise(
            """{
            .reg .b32 u, m;
            mov.b32 m, 0x64806480;
            xor.b32 u, $2, 0x80808080;
            prmt.b32 $0, u, 0x64646464, 0x4140;
            prmt.b32 $1, u, 0x64646464, 0x4342;
            sub.f16x2 $0, $0, m;
            sub.f16x2 $1, $1, m;
            }""",
            "=&r,=&r,r",
            [codes],
            dtype=tl.float16,
            is_pure=True,
            pack=4,
        )
    elif CONVERSION == "cast":
        value = codes.to(tl.int8, bitcast=True).to(tl.float16)
    else:
        # 0x6400 is 1024, whose last place is 1.
        value = ((codes ^ 0x80).to(tl.uint16) | 0x6400).to(tl.float16, bitcast=True) - 1152.0
    return value


@triton.jit
def nibble_operands(codes, CONVERSION: tl.constexpr):
    """The low and the high four bits n of packed codes -> two of fp16 n - 8.

    Centred, because the product with the zero point is subtracted from the product with the codes, and what both have
    in common is lost in the accumulator.
    """
    if CONVERSION == "asm":
        # A byte on 0x6400 is 1024 + 16 high + low. With low made 8 it gives the high half, the difference the low one.
        low, high = tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b, m, n;
            mov.b32 m, 0x2c002c00;
            mov.b32 n, 0xd488d488;
            prmt.b32 a, $4, 0x64646464, 0x4140;
            prmt.b32 b, $4, 0x64646464, 0x4342;
            lop3.b32 $2, a, 0xfff0fff0, 0x00080008, 0xea;
            lop3.b32 $3, b, 0xfff0fff0, 0x00080008, 0xea;
            sub.f16x2 $0, a, $2;
            sub.f16x2 $1, b, $3;
            fma.rn.f16x2 $2, $2, m, n;
            fma.rn.f16x2 $3, $3, m, n;
            }""",
            "=&r,=&r,=&r,=&r,r",
            [codes],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=4,
        )
    else:
        low = ((codes & 15).to(tl.uint16) | 0x6400).to(tl.float16, bitcast=True) - 1032.0
        high = ((codes >> 4).to(tl.uint16) | 0x6400).to(tl.float16, bitcast=True) - 1032.0
    return low, high


@triton.jit
def int4_nibbles(codes, HIGH: tl.constexpr, CONVERSION: tl.constexpr):
    """The low or high four bits of packed codes -> int8 0 to 15."""
    if CONVERSION == "asm":
        if HIGH:
            value = tl.inline_asm_elementwise(
                "{.reg .b32 t; shr.u32 t, $1, 4; and.b32 $0, t, 0x0f0f0f0f;}",
                "=r,r",
                [codes],
                dtype=tl.int8,
                is_pure=True,
                pack=4,
            )
        else:
            value = tl.inline_asm_elementwise(
                "and.b32 $0, $1, 0x0f0f0f0f;", "=r,r", [codes], dtype=tl.int8, is_pure=True, pack=4
            )
    else:
        value = ((codes >> 4) if HIGH else (codes & 15)).to(tl.int8, bitcast=True)
    return value


@triton.jit
def settled(values, R: tl.constexpr, CONVERSION: tl.constexpr):
    """Operands of 8-bit or packed codes, made before they change places.

    The compiler moves conversions behind a change of layout, so that bytes change places one by one in registers; with
    side effects, which an instruction that only copies pretends to have, it cannot.
    """
    if CONVERSION == "asm" and R.size == 1:
        values = tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [values], dtype=values.dtype, is_pure=False, pack=2
        )
    return values


@triton.jit
def pinned(values):
    """16-bit operands, made where this stands and nowhere else (AMD): an empty instruction claims side effects.

    The compiler would make them in every warp that reads them, after they changed places, and in front of a loop that
    does not change them.
    """
    return tl.inline_asm_elementwise("", "=v,0", [values], dtype=values.dtype, is_pure=False, pack=2)


@triton.jit
def half_of_infinity(mask, FULL: tl.constexpr):
    """A mask as an operand: true times true is more than fp32 holds, anything else 0 (bfloat16; FULL: fp32)."""
    value = tl.where(mask, 2.0**100, 0.0)
    if not FULL:
        value = value.to(tl.bfloat16)
    return value


@triton.jit
def operand_factor(R: tl.constexpr, HARDWARE: tl.constexpr):
    """What the operand of a code must be multiplied with to be its value."""
    factor = 1.0
    if R.encoding == "e4m3fn" and not HARDWARE:
        factor = 256.0
    elif R.encoding == "e4m3fnuz" and not HARDWARE:
        factor = 128.0
    return factor

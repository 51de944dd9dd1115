# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"
# Triton's dialect: arguments have no Python types.
"""Codes from numbers and numbers from codes, in integer arithmetic: the same bits on every vendor and when interpreted.

`quantize.py` is the specification. Hardware conversions are an optimisation, taken only when HARDWARE is set, which
the host does where they are proven equal. Kernels that call `encode` are launched with `enable_fp_fusion=False`: every
operation is one IEEE operation. `R` is a `constants.Rows`.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = [
    "as_float",
    "bf16_bits",
    "decode",
    "encode_int4",
    "encode_rows",
    "f16_bits",
    "int4_scale",
    "int4_zero",
    "load_float",
    "load_raw",
]

NAN_WORD = tl.constexpr(0x7FC00000)
INT4_NAN_WORD = tl.constexpr(0x7FC07E00)
AMAX_FLOOR = tl.constexpr(448.0 * 2.0**-126)
TINY = tl.constexpr(2.0**-126)
# Adding 1.5 * 2^23 leaves round-half-even(x) in the low bits of the sum's mantissa, for |x| < 2^22.
MAGIC = tl.constexpr(12582912.0)
INFINITY = tl.constexpr(0x7F800000)
MAGNITUDE = tl.constexpr(0x7FFFFFFF)


@triton.jit
def encode_rows(x, static_scale, R: tl.constexpr, HARDWARE: tl.constexpr, PACKED: tl.constexpr):
    """Encode fp32 rows [n, block] (zeros in the padding): (codes [n, block], words int32 [n], bad bool [n]).

    PACKED: four int8 codes are made at a time (CUDA), with the same results.
    """
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & MAGNITUDE
    top = tl.max(magnitude, axis=1)
    bad = top >= INFINITY
    words = top
    if R.scaling == "row":
        amax = top.to(tl.float32, bitcast=True)
        scale = tl.maximum(amax, AMAX_FLOOR) * (1.0 / R.qmax)
        inv = tl.where(bad, 0.0, tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale))
        words = tl.where(bad, NAN_WORD, scale.to(tl.int32, bitcast=True))
        # No clamp: three roundings keep |x * inv| below qmax * (1 + 2^-22), which rounds to qmax in every encoding.
        y = tl.where(bad[:, None], 0.0, x) * inv[:, None]
        if PACKED and R.encoding == "int8":
            codes = _pack_int8(_rounded(y))
        else:
            codes = _encode(y, R, HARDWARE)
    elif R.scaling == "static":
        inv = tl.div_rn(tl.full([1], 1.0, tl.float32), static_scale)
        y = tl.minimum(tl.maximum(x * inv[:, None], -R.qmax), R.qmax)
        finite = magnitude < INFINITY
        codes = tl.where(finite, _encode(tl.where(finite, y, 0.0), R, HARDWARE), R.nan_code).to(tl.uint8)
    elif R.encoding == "bfloat16":
        codes = bf16_bits(x)
        bad = tl.max((codes & 0x7FFF).to(tl.int32), axis=1) >= 0x7F80
    else:
        codes = f16_bits(x)
        bad = tl.max((codes & 0x7FFF).to(tl.int32), axis=1) >= 0x7C00
    return codes, words, bad


@triton.jit
def encode_int4(low_half, high_half, ok, R: tl.constexpr, PACKED: tl.constexpr):
    """Encode fp32 rows given as two halves [n, block]: (packed codes [n, block], words int32 [n], bad bool [n]).

    ok: bool [1, block], False in the padding. PACKED: extremes that keep NaN, and four codes at a time, clamped two by
    two (CUDA from sm_90), with the same results.
    """
    if PACKED:
        larger = tl.maximum(low_half, high_half, propagate_nan=tl.PropagateNan.ALL)
        smaller = tl.minimum(low_half, high_half, propagate_nan=tl.PropagateNan.ALL)
        high = tl.reduce(tl.where(ok, larger, float("-inf")), 1, _maximum)
        low = tl.reduce(tl.where(ok, smaller, float("inf")), 1, _minimum) + 0.0
        bad = tl.maximum(high, -low, propagate_nan=tl.PropagateNan.ALL).to(tl.int32, bitcast=True) >= INFINITY
        high = tl.where(bad, 0.0, high)
        low = tl.where(bad, 0.0, low)
    else:
        low_bits = low_half.to(tl.int32, bitcast=True) & MAGNITUDE
        high_bits = high_half.to(tl.int32, bitcast=True) & MAGNITUDE
        bad = tl.max(tl.maximum(low_bits, high_bits), axis=1) >= INFINITY
        larger = tl.where(bad[:, None], 0.0, tl.maximum(low_half, high_half))
        smaller = tl.where(bad[:, None], 0.0, tl.minimum(low_half, high_half))
        high = tl.max(tl.where(ok, larger, float("-inf")), axis=1)
        low = tl.min(tl.where(ok, smaller, float("inf")), axis=1) + 0.0
    amax = tl.maximum(high, -low)
    span = tl.maximum(high * (1.0 / 15.0) - low * (1.0 / 15.0), amax * (2.0**-11))
    span = tl.where(bad, 1.0, tl.maximum(span, TINY))
    # bfloat16, rounded up
    top = (span.to(tl.int32, bitcast=True) + 0xFFFF) & -65536
    inv = tl.div_rn(tl.full(span.shape, 1.0, tl.float32), top.to(tl.float32, bitcast=True))
    # Not -low * inv: Triton negates by subtracting from zero, and then a zero minimum loses its sign.
    zero = (low * -inv).to(tl.float16)
    wide_zero = zero.to(tl.float32)[:, None]
    first = tl.where(bad[:, None], 0.0, low_half) * inv[:, None] + wide_zero
    second = tl.where(bad[:, None], 0.0, high_half) * inv[:, None] + wide_zero
    word = top | (zero.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF)
    if PACKED:
        codes = _pack_int4(_rounded(first), _rounded(second))
    else:
        codes = (_round_int4(first) | (_round_int4(second) << 4)).to(tl.uint8)
    return codes, tl.where(bad, INT4_NAN_WORD, word), bad


@triton.jit
def _maximum(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _minimum(a, b):
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _rounded(y):
    """round(y) in the low bits of an int32, for |y| < 2^22; anything else where y is not finite."""
    return (y + MAGIC).to(tl.int32, bitcast=True)


@triton.jit
def _pack_int8(codes):
    """The low bytes of int32 codes.

    Four elements that a thread holds side by side need not be of one row, so an operand that is the same for a row
    must not be read from the first of them alone.
    """
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 a, b;
        prmt.b32 a, $1, $2, 0x0040;
        prmt.b32 b, $3, $4, 0x0040;
        prmt.b32 $0, a, b, 0x5410;
        }""",
        "=r,r,r,r,r",
        [codes],
        dtype=tl.uint8,
        is_pure=True,
        pack=4,
    )


@triton.jit
def _pack_int4(first, second):
    """int32 codes whose low 16 bits are signed, clamped to 0 to 15, as first | second << 4."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 a, b, c, d, m;
        mov.b32 m, 0x000f000f;
        prmt.b32 a, $1, $2, 0x5410;
        prmt.b32 b, $3, $4, 0x5410;
        prmt.b32 c, $5, $6, 0x5410;
        prmt.b32 d, $7, $8, 0x5410;
        min.s16x2.relu a, a, m;
        min.s16x2.relu b, b, m;
        min.s16x2.relu c, c, m;
        min.s16x2.relu d, d, m;
        mad.lo.u32 a, c, 16, a;
        mad.lo.u32 b, d, 16, b;
        prmt.b32 $0, a, b, 0x6420;
        }""",
        "=r,r,r,r,r,r,r,r,r",
        [first, second],
        dtype=tl.uint8,
        is_pure=True,
        pack=4,
    )


@triton.jit
def load_float(pointers, mask):
    """Rows of any float dtype as fp32, zeros where masked."""
    return as_float(load_raw(pointers, mask))


@triton.jit
def load_raw(pointers, mask):
    """Rows of any float dtype as they are, zeros where masked; bfloat16 as its bits."""
    if pointers.dtype.element_ty == tl.bfloat16:
        # The interpreter's cast is wrong for subnormals.
        raw = tl.load(pointers.to(tl.pointer_type(tl.uint16)), mask=mask, other=0)
    else:
        raw = tl.load(pointers, mask=mask, other=0.0)
    return raw


@triton.jit
def as_float(raw):
    """What `load_raw` gave as fp32."""
    if raw.dtype == tl.uint16:
        value = (raw.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        value = raw.to(tl.float32)
    return value


@triton.jit
def bf16_bits(x):
    """fp32 -> bfloat16 bits (uint16), ties to even, every NaN the canonical one."""
    bits = x.to(tl.int32, bitcast=True)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) & 0xFFFF
    return tl.where((bits & MAGNITUDE) > INFINITY, 0x7FC0, rounded).to(tl.uint16)


@triton.jit
def f16_bits(x):
    """fp32 -> float16 bits (uint16), ties to even, every NaN the canonical one."""
    bits = x.to(tl.float16).to(tl.uint16, bitcast=True)
    return tl.where(x != x, 0x7E00, bits.to(tl.int32)).to(tl.uint16)


@triton.jit
def int4_scale(word):
    """The scale in a row word (int32) of int4."""
    return (word & -65536).to(tl.float32, bitcast=True)


@triton.jit
def int4_zero(word):
    """The zero point in a row word (int32) of int4, fp32."""
    return (word & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def decode(codes, R: tl.constexpr):
    """The exact fp32 value of uint8 or uint16 codes, without any scale (for int4: of one nibble)."""
    if R.encoding == "int8":
        value = codes.to(tl.int8, bitcast=True).to(tl.float32)
    elif R.encoding == "int4":
        value = codes.to(tl.float32)
    elif R.encoding == "bfloat16":
        value = (codes.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    elif R.encoding == "float16":
        value = codes.to(tl.float16, bitcast=True).to(tl.float32)
    else:
        value = _decode_float8(codes.to(tl.int32), R)
    return value


@triton.jit
def _decode_float8(code, R: tl.constexpr):
    magnitude = code & 0x7F
    normal = ((magnitude << (23 - R.mantissa)) + ((127 - R.bias) << 23)).to(tl.float32, bitcast=True)
    tiny = magnitude.to(tl.float32) * (2.0 ** (1 - R.bias - R.mantissa))
    value = tl.where(magnitude < (1 << R.mantissa), tiny, normal)
    if R.encoding == "e5m2":
        value = tl.where(magnitude == 0x7C, float("inf"), value)
    value = value * tl.where(code >= 0x80, -1.0, 1.0)
    if R.encoding == "e4m3fn":
        value = tl.where(magnitude == 0x7F, float("nan"), value)
    elif R.encoding == "e5m2":
        value = tl.where(magnitude > 0x7C, float("nan"), value)
    else:
        value = tl.where(code == 0x80, float("nan"), value)
    return value


@triton.jit
def _encode(y, R: tl.constexpr, HARDWARE: tl.constexpr):
    """round(y) as uint8 codes; |y| <= qmax (or a rounding error above it)."""
    if R.encoding == "int8":
        codes = ((y + MAGIC).to(tl.int32, bitcast=True) & 0xFF).to(tl.uint8)
    elif HARDWARE and R.encoding == "e4m3fn":
        codes = y.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    elif HARDWARE and R.encoding == "e4m3fnuz":
        # The instruction has no negative zero to give: the format's 0x80 is NaN.
        codes = y.to(tl.float8e4b8).to(tl.uint8, bitcast=True)
    else:
        codes = _encode_float8(y, R)
    return codes


@triton.jit
def _encode_float8(y, R: tl.constexpr):
    SHIFT: tl.constexpr = 23 - R.mantissa
    # Adding this number leaves round-half-even(magnitude / smallest subnormal) in the low bits.
    UNIT: tl.constexpr = 2.0 ** (24 - R.bias - R.mantissa)
    UNIT_BITS: tl.constexpr = (151 - R.bias - R.mantissa) << 23
    bits = y.to(tl.int32, bitcast=True)
    magnitude = bits & MAGNITUDE
    even = (magnitude >> SHIFT) & 1
    normal = ((magnitude + ((1 << (SHIFT - 1)) - 1) + even) >> SHIFT) - ((127 - R.bias) << R.mantissa)
    tiny = (magnitude.to(tl.float32, bitcast=True) + UNIT).to(tl.int32, bitcast=True) - UNIT_BITS
    code = tl.where(magnitude < ((128 - R.bias) << 23), tiny, normal)
    sign = (bits >> 24) & 0x80
    if R.fnuz:
        sign = tl.where(code == 0, 0, sign)
    return (code | sign).to(tl.uint8)


@triton.jit
def _round_int4(y):
    y = tl.minimum(tl.maximum(y, 0.0), 15.0)
    return (y + MAGIC).to(tl.int32, bitcast=True) & 15

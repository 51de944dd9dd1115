# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"
# Triton's dialect: arguments have no Python types.
"""stage: contexts out of the pages as fp16, once for all items of a prompt.

Each tile has one power of two, so that its largest finite number is just below 2^15: fp16 keeps 11 bits of everything
down to 2^-29 of that, and what it cannot keep is as far below what the tile's scores and results are rounded to.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvhal.kernels.triton.codec import int4_scale, int4_zero
from kvhal.kernels.triton.convert import float_operand, int8_operand, nibble_operands, operand_factor
from kvhal.kernels.triton.load import blocks_of, load_keys, load_values, load_words, place
from kvhal.kernels.triton.schedule import staged_tiles

__all__ = ["stage_kernel"]

INFINITY = tl.constexpr(0x7F800000)
MAGNITUDE = tl.constexpr(0x7FFFFFFF)
HEADROOM = tl.constexpr(14)


@triton.jit(do_not_specialize=["num_blocks", "num_seqs", "tiles"])
def stage_kernel(
    cache,
    block_table,
    workspace,
    base: tl.int64,
    block_stride: tl.int64,
    table_stride: tl.int64,
    num_blocks: tl.int32,
    num_seqs: tl.int32,
    tiles: tl.int32,
    sequences_at: tl.int64,
    exponents_at: tl.int64,
    keys_at: tl.int64,
    values_at: tl.int64,
    P: tl.constexpr,
    S: tl.constexpr,
    KEYS: tl.constexpr,
    CHUNK: tl.constexpr,
    CONVERSION: tl.constexpr,
    HARDWARE_K: tl.constexpr,
    HARDWARE_V: tl.constexpr,
):
    """Program (t, kv head): staged tile t, if a sequence's context lies there."""
    K: tl.constexpr = P.k
    V: tl.constexpr = P.v
    K_TO: tl.constexpr = S.k
    V_TO: tl.constexpr = S.v
    BLOCK_SIZE: tl.constexpr = P.block_size
    UNIT: tl.constexpr = 16 if BLOCK_SIZE % 16 == 0 else 1
    UNITS: tl.constexpr = KEYS // UNIT
    t = tl.program_id(0)
    h = tl.program_id(1).to(tl.int64)
    entries = (workspace + sequences_at).to(tl.pointer_type(tl.int32))
    lane = tl.arange(0, CHUNK)
    b = t * 0 - 1
    for start in range(0, num_seqs, CHUNK):
        at = tl.load(entries + (start + lane) * 8 + 6, mask=start + lane < num_seqs, other=-1)
        b = tl.maximum(b, tl.max(tl.where((at >= 0) & (at <= t), start + lane, -1), axis=0))
    if b >= 0:
        entry = entries + b * 8
        length = tl.load(entry + 2)
        first, low, high = staged_tiles(tl.load(entry + 1), length, KEYS, P.window)
        i = low + t - tl.load(entry + 6)
        if i < high:
            pages = cache + base
            table = block_table + b.to(tl.int64) * table_stride
            blocks = blocks_of(i, table, first, length - 1, num_blocks, BLOCK_SIZE, KEYS)
            page, inside = place(i, blocks, block_stride, BLOCK_SIZE, KEYS)
            token = tl.arange(0, KEYS)
            key = i * KEYS + token
            seen = (key >= first) & (key < length)
            at = (h * tiles + t) * KEYS + token
            exponents = (workspace + exponents_at).to(tl.pointer_type(tl.int32)) + (h * tiles + t) * 2
            k = load_keys(pages, page, inside, h, K, UNIT, UNITS, KEYS)
            words = seen
            if P.k.scaling == "row":
                words = load_words(pages, page, inside, h, K, UNIT, UNITS, KEYS)
            to = (workspace + keys_at).to(tl.pointer_type(tl.float16)) + (at * S.k.block)[:, None]
            _write(to, exponents, k, words, seen, K, K_TO, CONVERSION, HARDWARE_K)
            # Turned, so that both are [tokens, channels] from here on.
            v = load_values(pages, page, inside, h, V, UNIT, UNITS, KEYS)
            if P.v.los > 1:
                v = tl.trans(v)
            if P.v.scaling == "row":
                words = load_words(pages, page, inside, h, V, UNIT, UNITS, KEYS)
            to = (workspace + values_at).to(tl.pointer_type(tl.float16)) + (at * S.v.block)[:, None]
            _write(to, exponents + 1, v, words, seen, V, V_TO, CONVERSION, HARDWARE_V)


@triton.jit
def _write(
    to,
    exponent_to,
    codes,
    words,
    seen,
    R: tl.constexpr,
    H: tl.constexpr,
    CONVERSION: tl.constexpr,
    HARDWARE: tl.constexpr,
):
    """Codes [tokens, R.block] and their words as numbers [tokens, H.block], zero where there is no token or channel."""
    channel = tl.arange(0, R.block)
    inside = seen[:, None] & (channel < R.width)[None, :]
    if R.encoding == "int4":
        zero = (int4_zero(words) - 8.0)[:, None]
        scale = int4_scale(words)[:, None]
        low, high = nibble_operands(codes, CONVERSION)
        low = tl.where(inside, (low.to(tl.float32) - zero) * scale, 0.0)
        high = tl.where(inside, (high.to(tl.float32) - zero) * scale, 0.0)
        up, down = _exponent(tl.maximum(_largest(low), _largest(high)))
        tl.store(to + channel[None, :], (low * down).to(tl.float16), mask=(channel < R.width)[None, :])
        tl.store(to + R.width + channel[None, :], (high * down).to(tl.float16), mask=(channel < R.width)[None, :])
        if H.dim < H.block:
            wide = tl.arange(0, H.block)
            rest = (seen[:, None] | True) & (wide >= H.dim)[None, :]
            tl.store(to + wide[None, :], tl.zeros(rest.shape, tl.float16), mask=rest)
    else:
        if R.encoding == "int8":
            value = int8_operand(codes, CONVERSION).to(tl.float32)
        else:
            value = float_operand(codes, R, HARDWARE, False, True).to(tl.float32) * operand_factor(R, HARDWARE)
        if R.scaling == "row":
            value = value * words.to(tl.float32, bitcast=True)[:, None]
        value = tl.where(inside, value, 0.0)
        up, down = _exponent(_largest(value))
        value = (value * down).to(tl.float16)
        if R.block == H.block:
            tl.store(to + channel[None, :], value)
        else:
            tl.store(to + channel[None, :], value, mask=(channel < H.block)[None, :])
    tl.store(exponent_to, up)


@triton.jit
def _largest(x):
    """Bits of the largest finite magnitude."""
    bits = x.to(tl.int32, bitcast=True) & MAGNITUDE
    return tl.max(tl.max(tl.where(bits < INFINITY, bits, 0), axis=1), axis=0)


@triton.jit
def _exponent(bits):
    """(biased exponent of the power of two that undoes it, that which brings numbers of such bits below 2^15)."""
    up = tl.minimum(tl.maximum((bits >> 23) - HEADROOM, 1), 240)
    return up, ((254 - up) << 23).to(tl.float32, bitcast=True)

"""What is right, from the definitions: numpy and float64, sharing no code with kvhal's kernels.

The reference kernels are the specification that other kernels are compared with bit for bit; this is what they, and the
CPU platform that runs them, are compared with. Only finite values: what a NaN does is tested by its effect.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvhal.modes import Scaling
from kvhal.spec import ScaledStore

__all__ = ["Rows", "attention", "rows"]

Array = npt.NDArray[Any]
F = np.float32


class Rows(NamedTuple):
    """codes: the bytes [..., bytes a row]. words: uint32 [...], or None for a mode without row words."""

    codes: Array
    words: Array | None


class _Float8(NamedTuple):
    """exponent, mantissa: bits. bias: of the exponent. is_fnuz: one NaN (0x80), no negative zero."""

    exponent: int
    mantissa: int
    bias: int
    largest: float
    is_fnuz: bool = False


_FLOAT8 = {
    "e4m3fn": _Float8(4, 3, 7, 448.0),
    "e4m3fnuz": _Float8(4, 3, 8, 224.0, is_fnuz=True),
    "e5m2": _Float8(5, 2, 15, 57344.0),
    "e5m2fnuz": _Float8(5, 2, 16, 28672.0, is_fnuz=True),
}


def rows(x: Tensor, store: ScaledStore, scale: float) -> Rows:
    """Finite rows [..., D] as `store` keeps them; scale: the static one."""
    wide = x.detach().cpu().float().numpy()
    encoding = store.encoding
    if encoding == "int4":
        return _int4(wide)
    if store.mode_.scaling is Scaling.NONE:
        return Rows(_sixteen(wide, encoding), None)
    if store.mode_.scaling is Scaling.STATIC:
        return Rows(_codes((wide * (F(1.0) / F(scale))).astype(F), encoding), None)
    largest = F(127.0 if encoding == "int8" else _FLOAT8[encoding].largest)
    amax = np.abs(wide).max(-1).astype(F)
    word = (np.maximum(amax, F(448.0 * 2.0**-126)) * F(1.0 / float(largest))).astype(F)
    inverse = (F(1.0) / word).astype(F)
    return Rows(_codes((wide * inverse[..., None]).astype(F), encoding), word.view(np.uint32))


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(out, lse) in float64 of q [n, q heads, dim], the last n positions, over k and v [length, kv heads, dim]."""
    count, heads, _ = q.shape
    length, share = k.shape[0], heads // k.shape[1]
    keys, values = (t.double().cpu().repeat_interleave(share, dim=1) for t in (k, v))
    scores = torch.einsum("nhd,lhd->hnl", q.double().cpu(), keys) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    at = length - count + torch.arange(count).unsqueeze(1)
    key = torch.arange(length).unsqueeze(0)
    hidden = key > at
    if window is not None:
        hidden |= key <= at - window
    scores = scores.masked_fill(hidden, float("-inf"))
    logits = scores
    if sinks is not None:
        logits = torch.cat([scores, sinks.double().cpu().view(-1, 1, 1).expand(-1, count, 1)], dim=-1)
    lse = logits.logsumexp(-1)
    weights = (scores - lse.unsqueeze(-1)).exp()
    # What is not seen is left out, so its values, NaN included, cannot matter.
    out = torch.einsum("hnl,lhd->nhd", weights, values.nan_to_num())
    return out, lse.transpose(0, 1)


def _sixteen(x: Array, encoding: str) -> Array:
    if encoding == "float16":
        with np.errstate(over="ignore"):
            return np.asarray(x.astype(np.float16).view(np.uint8))
    bits = x.astype(F).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16
    return np.asarray(rounded.astype(np.uint16).view(np.uint8))


def _codes(y: Array, encoding: str) -> Array:
    if encoding == "int8":
        return np.asarray(np.rint(np.clip(y, F(-127), F(127))).astype(np.int8).view(np.uint8))
    kind = _FLOAT8[encoding]
    values = _values(kind)
    size = np.minimum(np.abs(y.astype(np.float64)), kind.largest)
    above: Array = np.searchsorted(values, size).clip(0, len(values) - 1)
    below = np.maximum(above - 1, 0)
    up, down = values[above] - size, size - values[below]
    # Codes of one sign ascend with their values, so an even code is an even mantissa.
    code = np.where((up < down) | ((up == down) & (above % 2 == 0)), above, below).astype(np.uint8)
    signed = np.where(np.signbit(y), code | 0x80, code).astype(np.uint8)
    return np.where(code == 0, np.uint8(0), signed) if kind.is_fnuz else signed


def _values(kind: _Float8) -> Array:
    """The value of every non-negative code up to the largest one."""
    found = []
    for code in range(128):
        exponent, mantissa = code >> kind.mantissa, code & ((1 << kind.mantissa) - 1)
        fraction = mantissa / (1 << kind.mantissa)
        value = 2.0 ** (exponent - kind.bias) * (1 + fraction) if exponent else 2.0 ** (1 - kind.bias) * fraction
        if value > kind.largest:
            break
        found.append(value)
    return np.asarray(found)


def _int4(x: Array) -> Rows:
    c = F(1.0 / 15.0)
    high, low, amax = x.max(-1), x.min(-1), np.abs(x).max(-1)
    span = np.maximum(np.maximum((high * c).astype(F) - (low * c).astype(F), amax * F(2.0**-11)), F(2.0**-126))
    bits = span.astype(F).view(np.uint32)
    top = np.where(bits & 0xFFFF, (bits >> 16) + 1, bits >> 16).astype(np.uint32)
    inverse = (F(1.0) / (top << 16).astype(np.uint32).view(F)).astype(F)
    zero = (-((low + F(0.0)) * inverse).astype(F)).astype(np.float16)
    y = ((x * inverse[..., None]).astype(F) + zero.astype(F)[..., None]).astype(F)
    code = np.rint(np.clip(y, F(0), F(15))).astype(np.uint8)
    half = x.shape[-1] // 2
    packed = (code[..., :half] | (code[..., half:] << 4)).astype(np.uint8)
    return Rows(packed, ((top << 16) | zero.view(np.uint16).astype(np.uint32)).astype(np.uint32))

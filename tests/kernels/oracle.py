"""What is right, computed without kvhal's kernels: numpy, ml_dtypes and float64 over the raw bytes.

Addresses come from the layout's fields (`tests/test_layout.py` and the golden pages hold those); codes, scales and
attention share nothing with the code under test.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvhal.kernels.geometry import LayerGeometry, PageGeometry
from kvhal.kernels.workspace import attend_workspace_bytes
from kvhal.layout import Layout
from kvhal.spec import CacheSpec

Array = npt.NDArray[Any]
F = np.float32
MODES = (
    ("bfloat16", None),
    ("float16", None),
    ("fp8_e4m3", "e4m3fn"),
    ("fp8_e4m3", "e4m3fnuz"),
    ("fp8_e5m2", "e5m2"),
    ("fp8_e5m2", "e5m2fnuz"),
    ("int8_per_token_head", None),
    ("fp8_per_token_head", "e4m3fn"),
    ("fp8_per_token_head", "e4m3fnuz"),
    ("int4_per_token_head", None),
)
ROW_QMAX = {"int8": 127.0, "e4m3fn": 448.0, "e4m3fnuz": 224.0}
TYPES = {
    "bfloat16": ml_dtypes.bfloat16,
    "float16": np.float16,
    "e4m3fn": ml_dtypes.float8_e4m3fn,
    "e4m3fnuz": ml_dtypes.float8_e4m3fnuz,
    "e5m2": ml_dtypes.float8_e5m2,
    "e5m2fnuz": ml_dtypes.float8_e5m2fnuz,
    "int8": np.int8,
}
POISON = 0xFF


def quantize_rows(x: Array, encoding: str) -> tuple[Array, Array]:
    """Codes uint8 and words uint32 of finite rows, by the rules of design.md, section 6."""
    if encoding == "int4":
        return _int4(x)
    q = F(ROW_QMAX[encoding])
    amax = np.abs(x).max(-1).astype(F)
    scale = (np.maximum(amax, F(448.0 * 2.0**-126)) * F(1.0 / float(q))).astype(F)
    inv = (F(1.0) / scale).astype(F)
    return cast((x * inv[..., None]).astype(F), encoding, float(q)), scale.view(np.uint32)


def cast(y: Array, encoding: str, qmax: float) -> Array:
    """round(clamp(y)) as codes uint8; no code is the negative zero of a FNUZ format."""
    clamped: Array = np.clip(y, F(-qmax), F(qmax))
    if encoding == "int8":
        return np.asarray(np.rint(clamped).astype(np.int8).view(np.uint8))
    codes: Array = clamped.astype(TYPES[encoding]).view(np.uint8)
    return np.where(codes == 0x80, np.uint8(0), codes) if encoding.endswith("uz") else codes


def _int4(x: Array) -> tuple[Array, Array]:
    c = F(1.0 / 15.0)
    high, low, amax = x.max(-1), x.min(-1), np.abs(x).max(-1)
    span = np.maximum(np.maximum((high * c).astype(F) - (low * c).astype(F), amax * F(2.0**-11)), F(2.0**-126))
    bits = span.astype(F).view(np.uint32)
    bits = np.where(bits & 0xFFFF, (bits >> 16) + 1, bits >> 16).astype(np.uint32)
    inv = (F(1.0) / (bits << 16).astype(np.uint32).view(F)).astype(F)
    zero = (-(low * inv).astype(F)).astype(np.float16)
    y = ((x * inv[..., None]).astype(F) + zero.astype(F)[..., None]).astype(F)
    codes = np.rint(np.clip(y, F(0), F(15))).astype(np.uint8)
    half = x.shape[-1] // 2
    return codes[..., :half] | (codes[..., half:] << 4), (bits << 16) | zero.view(np.uint16).astype(np.uint32)


@dataclass
class Cache:
    """A poisoned cache of one spec, built by hand: payload 0xFF, words NaN, static scales set, counters zero."""

    layout: Layout
    layer: int = 0
    data: Tensor = field(init=False)
    geometry: LayerGeometry = field(init=False)

    def __post_init__(self) -> None:
        self.geometry = LayerGeometry.of(self.layout, self.layer)
        self.data = torch.full((self.layout.nbytes,), POISON, dtype=torch.uint8)
        self.reset_tail()

    def reset_tail(self) -> None:
        """Write the static scales and zero the counters."""
        scales, offset = self.layout.spec.static_scales, self.layout.scales_offset
        if scales is not None and offset is not None:
            table = self.data[offset : offset + 8 * self.layout.spec.num_layers].view(torch.float32).view(-1, 2)
            for index, values in enumerate((scales.k, scales.v)):
                if values:
                    table[:, index] = torch.tensor(values)
        self.data[self.layout.counters_offset :] = 0

    @property
    def packed(self) -> str:
        return self.geometry.pack()

    @property
    def pages(self) -> list[int]:
        return [n for page in PageGeometry.all_of(self.layout) for n in page.pack()]

    @property
    def counters(self) -> tuple[int, int]:
        """(nonfinite_rows, rejected_slots)"""
        nonfinite, rejected = self.data[self.layout.counters_offset :].view(torch.int64).tolist()[:2]
        return nonfinite, rejected

    def workspace(self, num_q_heads: int, tokens: int) -> Tensor:
        return torch.full((attend_workspace_bytes(self.geometry, num_q_heads, tokens),), POISON, dtype=torch.uint8)

    def addresses(self, name: str, slots: list[int]) -> Array:
        """Byte addresses int64 [slots, heads, items] of a field."""
        placed = self.layout.group_of(self.layer)
        found = placed.field(name)
        _, _, hi, items, lo = found.shape
        at = np.asarray(slots, dtype=np.int64)
        block, token = at // placed.group.block_size, at % placed.group.block_size
        tile, inside = token // (hi * lo), token % (hi * lo)
        strides = found.strides
        base = self.geometry.base + block * placed.block_stride + found.offset
        base = base + tile * strides[1] + inside // lo * strides[2] + inside % lo * strides[4]
        heads = np.arange(found.shape[0], dtype=np.int64)[None, :, None] * strides[0]
        return base[:, None, None] + heads + np.arange(items, dtype=np.int64)[None, None, :] * strides[3]

    def raw(self, name: str, slots: list[int]) -> Array:
        """The bytes [slots, heads, items * itemsize] of a field, gathered one by one."""
        size = self.layout.group_of(self.layer).field(name).itemsize
        at = self.addresses(name, slots)
        return self.data.numpy()[(at[..., None] + np.arange(size)).reshape(*at.shape[:2], at.shape[2] * size)]

    def written(self, slots: list[int]) -> Array:
        """True for every byte that rows of `slots` own."""
        mask = np.zeros(self.layout.nbytes, dtype=bool)
        for each in self.layout.group_of(self.layer).fields:
            if each.name in ("k", "v", "k_word", "v_word"):
                at = self.addresses(each.name, slots)
                mask[(at[..., None] + np.arange(each.itemsize)).ravel()] = True
        return mask

    def values(self, name: str, slots: list[int]) -> Array:
        """float64 values [slots, heads, dim] of k or v, from the raw bytes."""
        store = self.layout.group_of(self.layer).group.scaled(name)
        assert store is not None
        raw = self.raw(name, slots)
        if store.encoding == "int4":
            words = self.raw(f"{name}_word", slots).copy()
            scale = words.view(ml_dtypes.bfloat16)[..., 1:].astype(np.float64)
            zero = words.view(np.float16)[..., :1].astype(np.float64)
            return np.asarray((np.concatenate([raw & 15, raw >> 4], -1) - zero) * scale)
        code = raw.copy().view(TYPES[store.encoding]).astype(np.float64)
        if f"{name}_word" in [f.name for f in self.layout.group_of(self.layer).fields]:
            return np.asarray(code * self.raw(f"{name}_word", slots).copy().view(F).astype(np.float64))
        scales = self.layout.spec.static_scales
        if "fp8" in store.mode and scales is not None:
            return np.asarray(code * float(F(scales.of(name)[self.layer])))
        return np.asarray(code)


def make(
    mode: str = "int8_per_token_head",
    encoding: str | None = None,
    *,
    blocks: int = 4,
    kind: str = "tiled",
    order: str = "layer_major",
    layer: int = 0,
    heads: int = 2,
    dim: int = 32,
    dim_v: int | None = None,
    block_size: int = 16,
    layers: int = 1,
    q_heads: int | None = None,
    window: int | None = None,
    page_stride: int | None = None,
    page_align: int = 16,
    k_scale: float = 0.037,
    v_scale: float = 0.011,
) -> Cache:
    static = mode.startswith("fp8_e")
    spec = CacheSpec.uniform(
        mode=mode,
        encoding=encoding,
        num_layers=layers,
        num_kv_heads=heads,
        head_dim=dim,
        head_dim_v=dim_v,
        num_q_heads=q_heads,
        block_size=block_size,
        window=window,
        k_scale=k_scale if static else None,
        v_scale=v_scale if static else None,
    )
    layout = Layout.of(spec, blocks, kind=kind, order=order, page_stride=page_stride, page_align=page_align)
    return Cache(layout, layer)


def attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Array | None = None,
) -> tuple[Array, Array]:
    """float64 attention of q [n, q heads, d], the last n positions, over k, v [length, kv heads, d]: (out, lse)."""
    n, heads, _ = q.shape
    length, kv_heads, _ = k.shape
    keys, values = (np.repeat(x, heads // kv_heads, axis=1).astype(np.float64) for x in (k, v))
    out = np.zeros((n, heads, v.shape[-1]))
    lse = np.full((n, heads), -np.inf)
    for i in range(n):
        position = length - n + i
        seen = slice(max(0, position - window + 1) if window else 0, max(0, position + 1))
        scores = np.einsum("hd,jhd->hj", q[i].astype(np.float64), keys[seen]) * scale
        if softcap:
            scores = softcap * np.tanh(scores / softcap)
        logits = scores if sinks is None else np.concatenate([scores, sinks.astype(np.float64)[:, None]], 1)
        if logits.shape[1] == 0:
            continue
        top = logits.max(1, keepdims=True)
        lse[i] = (top + np.log(np.exp(logits - top).sum(1, keepdims=True)))[:, 0]
        out[i] = np.einsum("hj,jhd->hd", np.exp(scores - lse[i][:, None]), values[seen])
    return out, lse


def relative(found: Tensor, right: Array) -> float:
    """Relative L2 distance."""
    return float(np.linalg.norm(found.double().numpy() - right) / np.linalg.norm(right))

"""A second opinion in float64: what a cache holds and what attention over it is. Shares no code with the kernels.

Codes are read through the lease's views and decoded from their definitions, so an error in a kernel's addressing,
decoding or arithmetic shows as a difference.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvhal.lease import CacheLease
from kvhal.modes import Scaling
from kvhal.spec import ScaledStore

__all__ = ["attention", "read_rows", "relative_l2"]


def relative_l2(found: Tensor, wanted: Tensor) -> float:
    """|found - wanted| / |wanted| over all elements, in float64; infinity if only `wanted` is all zeros."""
    wide = wanted.double()
    error, size = float((found.double() - wide).norm()), float(wide.norm())
    if size == 0.0:
        return 0.0 if error == 0.0 else float("inf")
    return error / size


def attention(q: Tensor, k: Tensor, v: Tensor, *, first: int, scale: float, window: int | None) -> Tensor:
    """Causal attention in float64 of q [n, q heads, dim], row i at position `first + i`, over k and v [length, ...].

    window: how many tokens a query sees, itself included. Returns [n, q heads, dim of v].
    """
    share = q.shape[1] // k.shape[1]
    keys, values = (t.double().repeat_interleave(share, dim=1) for t in (k, v))
    scores = torch.einsum("nhd,lhd->hnl", q.double(), keys) * scale
    at = first + torch.arange(q.shape[0], device=q.device).unsqueeze(1)
    key = torch.arange(k.shape[0], device=q.device).unsqueeze(0)
    hidden = key > at
    if window is not None:
        hidden |= key <= at - window
    weights = scores.masked_fill(hidden, float("-inf")).softmax(dim=-1)
    return torch.einsum("hnl,lhd->nhd", weights, values)


def read_rows(lease: CacheLease, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
    """k and v of `slots` (none of them padding), [n, heads, dim] in float64, decoded from the bytes of the cache."""
    group = lease.layout.group_of(layer).group
    scales = lease.layout.spec.stored_scales(lease.layout.spec.source_of(layer))
    assert group.k is not None
    assert group.v is not None
    return (
        _read(lease, layer, group.k, slots, group.block_size, scales[0]),
        _read(lease, layer, group.v, slots, group.block_size, scales[1]),
    )


def _read(lease: CacheLease, layer: int, store: ScaledStore, slots: Tensor, block_size: int, static: float) -> Tensor:
    codes = _values(_rows(lease, layer, store.name, slots, block_size), store)
    if store.mode_.scaling is not Scaling.ROW:
        return codes * static
    words = _rows(lease, layer, f"{store.name}_word", slots, block_size)
    if store.encoding_.bits != 4:
        return codes * words.double()
    # int4: bf16 scale in the high half of the word, fp16 zero in the low half.
    scale = (words & -65536).view(torch.float32).double()
    zero = (words << 16 >> 16).to(torch.int16).view(torch.float16).double()
    return (codes - zero) * scale


def _rows(lease: CacheLease, layer: int, field: str, slots: Tensor, block_size: int) -> Tensor:
    """The field's items at each slot, [n, heads, channels]; a copy."""
    view = lease.view(field, layer).tensor()
    hi, lo = view.shape[3], view.shape[5]
    block, token = slots // block_size, slots % block_size
    return view[block, :, token // (hi * lo), token % (hi * lo) // lo, :, token % lo].contiguous()


def _values(codes: Tensor, store: ScaledStore) -> Tensor:
    encoding = store.encoding_
    if encoding.bits == 4:
        return torch.cat((codes & 15, codes >> 4), dim=-1).double()
    return codes.view(getattr(torch, encoding.dtype)).float().double()

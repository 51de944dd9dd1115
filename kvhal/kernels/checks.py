"""What a call's tensors must look like, checked before any byte is read or written.

Messages have three parts: what was asked, what was found, what to do.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kvhal.errors import AddressError, SpecMismatch
from kvhal.kernels.geometry import LayerGeometry, StoreGeometry

__all__ = ["CheckedSlots", "check_cache", "check_floats", "check_integers", "check_rows", "check_slots"]

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
INTEGERS = (torch.int32, torch.int64)
NAMED_OFFENDERS = 5


class CheckedSlots(NamedTuple):
    """slots: int64, -1 for padding and for rejected ones. rejected: positions of bad slots, or None if all are good."""

    slots: Tensor
    rejected: Tensor | None


def check_cache(cache: Tensor, end: int) -> None:
    """`cache` must be contiguous bytes that reach at least to `end`."""
    if cache.dtype is not torch.uint8 or cache.dim() != 1 or not cache.is_contiguous() or cache.numel() < end:
        raise SpecMismatch(
            f"the cache must be {end} or more contiguous bytes (uint8, one dimension); found {cache.dtype} "
            f"{tuple(cache.shape)!r} with strides {cache.stride()!r}: pass the whole storage of the lease"
        )
    if cache.storage_offset() % 16 or cache.numel() % 16:
        raise SpecMismatch(
            f"the cache is {cache.numel()} bytes, {cache.storage_offset()} bytes into its storage; both must be "
            "multiples of 16: adopt an aligned range"
        )


def check_rows(name: str, rows: Tensor, tokens: int, g: LayerGeometry, store: StoreGeometry) -> None:
    """`rows` (k, v or a gather's output) must be [tokens, num_kv_heads, head_dim], float, contiguous channels."""
    wanted = (tokens, g.num_kv_heads, store.head_dim)
    check_floats(name, rows, wanted, "the cache declares num_kv_heads and head_dim, the slots give tokens")
    _check_place(name, rows)


def check_floats(name: str, tensor: Tensor, shape: tuple[int, ...], why: str) -> None:
    """`tensor` must be a float tensor of `shape`; `why` ends the message."""
    if tuple(tensor.shape) != shape:
        raise SpecMismatch(f"{name} must have shape {shape!r}; found {tuple(tensor.shape)!r}: {why}")
    if tensor.dtype not in FLOATS:
        raise SpecMismatch(f"{name} must be float32, bfloat16 or float16; found {tensor.dtype}: convert it first")


def check_integers(name: str, tensor: Tensor, dim: int, dtypes: tuple[torch.dtype, ...] = INTEGERS) -> None:
    """`tensor` must be an integer tensor on the CPU with `dim` dimensions."""
    if tensor.dtype not in dtypes or tensor.dim() != dim:
        wanted = " or ".join(str(d) for d in dtypes)
        raise SpecMismatch(
            f"{name} must be {wanted} with {dim} dimension(s); found {tensor.dtype} {tuple(tensor.shape)!r}: convert it"
        )
    _check_device(name, tensor)


def check_slots(slots: Tensor, num_slots: int, *, checked: bool, unique: bool) -> CheckedSlots:
    """Split good slots from bad ones. checked: raise AddressError for a bad slot, or (unique) for one named twice.

    Only -1 is padding; any other value outside [0, num_slots) is bad.
    """
    wide = slots.to(torch.int64)
    if wide.numel() == 0:
        return CheckedSlots(wide, None)
    low, high = (int(bound) for bound in torch.aminmax(wide))
    rejected = None
    if low < -1 or high >= num_slots:
        bad = ((wide < -1) | (wide >= num_slots)).nonzero().flatten()
        if checked:
            raise AddressError(
                f"slots must be -1 (padding) or 0 to {num_slots - 1}; found {_named(wide, bad)}: "
                "nothing was touched; check the block table and block size the slots were made from"
            )
        wide = wide.index_fill(0, bad, -1)
        rejected = bad
    if unique and checked:
        _refuse_twins(wide)
    return CheckedSlots(wide, rejected)


def _refuse_twins(slots: Tensor) -> None:
    # Slots of one prefill ascend, and then there is nothing to sort.
    if bool((slots[1:] > slots[:-1]).all()):
        return
    values, order = torch.sort(slots, stable=True)
    twins = order[1:][(values[1:] == values[:-1]) & (values[1:] >= 0)]
    if twins.numel():
        raise AddressError(
            f"each slot may be stored once a call; named again: {_named(slots, twins.sort().values)}: "
            "nothing was written; drop the duplicates or store them in separate calls"
        )


def _named(slots: Tensor, positions: Tensor) -> str:
    first = [f"slot {int(slots[p])} at position {int(p)}" for p in positions[:NAMED_OFFENDERS]]
    more = positions.numel() - len(first)
    return ", ".join(first) + (f" and {more} more" if more else "")


def _check_place(name: str, tensor: Tensor) -> None:
    _check_device(name, tensor)
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise SpecMismatch(
            f"{name} must have a contiguous last dimension; found strides {tensor.stride()!r}: call .contiguous()"
        )


def _check_device(name: str, tensor: Tensor) -> None:
    if tensor.device.type != "cpu":
        raise SpecMismatch(f"{name} must be on the cache's device, cpu; found {tensor.device}: move it first")

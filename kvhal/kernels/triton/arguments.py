"""What the tensors of a call must look like on a GPU: beyond what `checks.py` asks, that they are all there.

The checks of values wait for the device, so only checked addressing makes them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvhal.errors import SpecMismatch
from kvhal.kernels.checks import check_floats, check_slots
from kvhal.kernels.geometry import LayerGeometry, StoreGeometry
from kvhal.kernels.reference import check_geometry

__all__ = ["check_attend", "check_rows", "check_store", "check_where"]

INTEGERS = (torch.int32, torch.int64)


def check_where(name: str, tensor: Tensor, cache: Tensor) -> None:
    """`tensor` must be on the device of `cache`."""
    if tensor.device != cache.device:
        raise SpecMismatch(
            f"{name} must be on the cache's device, {cache.device}; found {tensor.device}: move it first"
        )


def check_integers(name: str, tensor: Tensor, dim: int, cache: Tensor) -> None:
    """`tensor` must hold integers, in `dim` dimensions, side by side in the last, on the cache's device."""
    if tensor.dtype not in INTEGERS or tensor.dim() != dim:
        raise SpecMismatch(
            f"{name} must be torch.int32 or torch.int64 with {dim} dimension(s); found {tensor.dtype} "
            f"{tuple(tensor.shape)!r}: convert it"
        )
    check_where(name, tensor, cache)
    _check_contiguous(name, tensor)


def check_rows(name: str, rows: Tensor, tokens: int, g: LayerGeometry, of: StoreGeometry, cache: Tensor) -> None:
    """`rows` (k, v or an output of gather) must be floats [tokens, num_kv_heads, head_dim] on the cache's device."""
    wanted = (tokens, g.num_kv_heads, of.head_dim)
    check_floats(name, rows, wanted, "the cache declares num_kv_heads and head_dim, the slots give tokens")
    check_where(name, rows, cache)
    _check_contiguous(name, rows)


def check_store(
    cache: Tensor, rows: tuple[tuple[str, Tensor], tuple[str, Tensor]], slots: Tensor, g: LayerGeometry
) -> None:
    """The arguments of store and gather: rows are ((name, k), (name, v))."""
    check_geometry(cache, g)
    check_integers("slots", slots, 1, cache)
    for (name, tensor), of in zip(rows, (g.k, g.v), strict=True):
        check_rows(name, tensor, slots.shape[0], g, of, cache)


def refuse_bad_slots(slots: Tensor, g: LayerGeometry, *, unique: bool) -> None:
    """Raise AddressError for a slot outside the cache, or (unique) for one named twice. Waits for the device."""
    check_slots(slots, g.num_blocks * g.block_size, checked=True, unique=unique)


def check_attend(
    cache: Tensor,
    q: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_starts: Tensor,
    sinks: Tensor | None,
    out: Tensor,
    lse: Tensor | None,
    g: LayerGeometry,
) -> None:
    """The arguments of attend, but for the workspace."""
    check_geometry(cache, g)
    if q.dim() != 3 or q.shape[1] == 0 or q.shape[1] % g.num_kv_heads:
        raise SpecMismatch(
            f"q must be [tokens, num_q_heads, head_dim] with num_q_heads a multiple of {g.num_kv_heads} kv heads; "
            f"found {tuple(q.shape)!r}: reshape it"
        )
    tokens, heads, _ = q.shape
    check_floats("q", q, (tokens, heads, g.k.head_dim), "the cache declares head_dim")
    check_floats("out", out, (tokens, heads, g.v.head_dim), "out has q's rows and heads and the head_dim of v")
    check_integers("block_table", block_table, 2, cache)
    check_integers("seq_lens", seq_lens, 1, cache)
    check_integers("query_starts", query_starts, 1, cache)
    counts = (block_table.shape[0], seq_lens.shape[0], query_starts.shape[0] - 1)
    if len(set(counts)) != 1:
        raise SpecMismatch(
            "block_table, seq_lens and query_starts must agree on the number of sequences (query_starts has one more "
            f"entry); found {counts!r}: pass them from one batch"
        )
    for name, rows in (("q", q), ("out", out)):
        check_where(name, rows, cache)
        _check_contiguous(name, rows)
    for name, tensor, shape in (("sinks", sinks, (heads,)), ("lse", lse, (tokens, heads))):
        if tensor is None:
            continue
        if tensor.dtype is not torch.float32 or tuple(tensor.shape) != shape:
            raise SpecMismatch(
                f"{name} must be float32 {shape!r}; found {tensor.dtype} {tuple(tensor.shape)!r}: convert it"
            )
        check_where(name, tensor, cache)
    if sinks is not None:
        _check_contiguous("sinks", sinks)


def check_workspace(workspace: Tensor, nbytes: int, cache: Tensor) -> None:
    """`workspace` must be at least `nbytes` aligned bytes on the cache's device."""
    if workspace.dtype is not torch.uint8 or workspace.dim() != 1 or not workspace.is_contiguous():
        raise SpecMismatch(
            f"workspace must be contiguous bytes (uint8, one dimension); found {workspace.dtype} "
            f"{tuple(workspace.shape)!r}: allocate what the plan says"
        )
    check_where("workspace", workspace, cache)
    if workspace.numel() < nbytes or workspace.data_ptr() % 16:
        raise SpecMismatch(
            f"workspace must have {nbytes} bytes at an address that is a multiple of 16; found {workspace.numel()} "
            f"bytes at {workspace.data_ptr() % 16} past one: plan with the max_tokens and max_seqs of this call"
        )


def _check_contiguous(name: str, tensor: Tensor) -> None:
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise SpecMismatch(
            f"{name} must have a contiguous last dimension; found strides {tensor.stride()!r}: call .contiguous()"
        )

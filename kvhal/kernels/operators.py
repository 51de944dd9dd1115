"""The torch operators `torch.ops.kvhal.{store, gather, attend, copy_blocks}`: schemas, fakes and the CPU kernels.

Importing this module registers them, once a process. The cache is an argument that the operator mutates, so tracing,
functionalisation and compilation see every store; geometry travels as numbers (`LayerGeometry.pack`,
`PageGeometry.pack`). Other devices register for their own dispatch key. What each does stands in `reference.py` and
`attention.py`. prepared: an attend over another layer of the same group has checked these very arrays and left its
schedule in `workspace`, for as many tokens and query heads of the same dtype; kernels that make none ignore it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.library import Library, register_fake

from kvhal.kernels import attention, reference
from kvhal.kernels.geometry import LayerGeometry, PageGeometry

__all__ = ["LIBRARY", "SCHEMAS"]

SCHEMAS = {
    "store": "(Tensor(a!) cache, Tensor k, Tensor v, Tensor slots, str geometry, bool checked) -> ()",
    "gather": (
        "(Tensor(a!) cache, Tensor slots, Tensor(b!) k_out, Tensor(c!) v_out, str geometry, bool checked) -> ()"
    ),
    "attend": (
        "(Tensor(a!) cache, Tensor q, Tensor block_table, Tensor seq_lens, Tensor query_starts, Tensor? sinks, "
        "Tensor(b!) workspace, Tensor(c!) out, Tensor(d!)? lse, str geometry, float scale, float softcap, "
        "bool checked, bool prepared=False) -> ()"
    ),
    "copy_blocks": "(Tensor(a!) cache, Tensor pairs, int[] pages, bool checked) -> ()",
}


def _store(cache: Tensor, k: Tensor, v: Tensor, slots: Tensor, geometry: str, checked: bool) -> None:
    reference.store(cache, k, v, slots, LayerGeometry.unpack(geometry), checked=checked)


def _gather(cache: Tensor, slots: Tensor, k_out: Tensor, v_out: Tensor, geometry: str, checked: bool) -> None:
    reference.gather(cache, slots, k_out, v_out, LayerGeometry.unpack(geometry), checked=checked)


def _attend(
    cache: Tensor,
    q: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_starts: Tensor,
    sinks: Tensor | None,
    workspace: Tensor,
    out: Tensor,
    lse: Tensor | None,
    geometry: str,
    scale: float,
    softcap: float,
    checked: bool,
    prepared: bool = False,
) -> None:
    del prepared
    attention.attend(
        cache,
        q,
        block_table,
        seq_lens,
        query_starts,
        sinks,
        workspace,
        out,
        lse,
        LayerGeometry.unpack(geometry),
        scale=scale,
        softcap=softcap,
        checked=checked,
    )


def _copy_blocks(cache: Tensor, pairs: Tensor, pages: list[int], checked: bool) -> None:
    reference.copy_blocks(cache, pairs, PageGeometry.unpack(pages), checked=checked)


def _fake(*_arguments: object) -> None:
    """Every operator writes into its arguments and returns nothing, so a fake has nothing to make."""


def _register() -> Library:
    library = Library("kvhal", "DEF")
    kernels: dict[str, Callable[..., None]] = {
        "store": _store,
        "gather": _gather,
        "attend": _attend,
        "copy_blocks": _copy_blocks,
    }
    for name, schema in SCHEMAS.items():
        library.define(name + schema, tags=(torch.Tag.needs_fixed_stride_order,))
        library.impl(name, kernels[name], "CPU")
        register_fake(f"kvhal::{name}", _fake, lib=library)
    return library


# Registrations live as long as this object, so the module keeps it.
LIBRARY = _register()

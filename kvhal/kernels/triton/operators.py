"""Registers the Triton kernels as `torch.ops.kvhal.*` for GPU tensors (CUDA and ROCm share torch's "CUDA" key).

Importing this module registers them, once a process; an adapter imports it when it allocates. Schemas and fakes are
those of `kvhal.kernels.operators`.
"""

from __future__ import annotations

from torch import Tensor
from torch.library import Library

from kvhal.kernels import operators
from kvhal.kernels.geometry import LayerGeometry, PageGeometry
from kvhal.kernels.triton import launch

__all__ = ["LIBRARY"]


def _store(cache: Tensor, k: Tensor, v: Tensor, slots: Tensor, geometry: str, checked: bool) -> None:
    launch.store(cache, k, v, slots, LayerGeometry.unpack(geometry), checked=checked)


def _gather(cache: Tensor, slots: Tensor, k_out: Tensor, v_out: Tensor, geometry: str, checked: bool) -> None:
    launch.gather(cache, slots, k_out, v_out, LayerGeometry.unpack(geometry), checked=checked)


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
    launch.attend(
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
        prepared=prepared,
    )


def _copy_blocks(cache: Tensor, pairs: Tensor, pages: list[int], checked: bool) -> None:
    del checked
    launch.copy_blocks(cache, pairs, PageGeometry.unpack(pages))


def _register() -> Library:
    # The schemas must exist before an implementation can be added to them.
    assert operators.LIBRARY is not None
    library = Library("kvhal", "IMPL")
    for name, kernel in (("store", _store), ("gather", _gather), ("attend", _attend), ("copy_blocks", _copy_blocks)):
        library.impl(name, kernel, "CUDA")
    return library


# Registrations live as long as this object, so the module keeps it.
LIBRARY = _register()

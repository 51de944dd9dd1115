"""The bytes of a plan by group and field, for reports. Every figure is from the Layout; the parts sum to its total."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvhal.layout import COUNTER_BYTES, COUNTERS, GroupLayout
from kvhal.page import WORD_BYTES
from kvhal.plan import Plan

__all__ = ["FieldBytes", "GroupBytes", "PlanBytes", "plan_bytes"]


@dataclass(frozen=True, slots=True)
class FieldBytes:
    """One field: where it starts in a page, its bytes in a page, and its bytes in the whole cache."""

    name: str
    dtype: str
    offset: int
    bytes_a_page: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class GroupBytes:
    """One group's pages. padding_bytes: bytes of its pages in no field. step_bytes: one step, 0 without k and v.

    scratch_bytes: the part of the step that is the kernels' scratch.
    """

    name: str
    layers: tuple[int, ...]
    window: int | None
    block_size: int
    num_blocks: int
    page_bytes: int
    page_stride: int
    layer_stride: int
    block_stride: int
    fields: tuple[FieldBytes, ...]
    nbytes: int
    padding_bytes: int
    step_bytes: int
    scratch_bytes: int


@dataclass(frozen=True, slots=True)
class PlanBytes:
    """nbytes = payload + words + opaque + padding + scales + counters: exactly what `allocate` takes for the cache.

    workspace_bytes: one step a group. block_bytes: one more block in every group. fixed_bytes: what no block adds.
    """

    layout: str
    order: str
    fingerprint: str
    num_blocks: int
    block_bytes: int
    fixed_bytes: int
    payload_bytes: int
    word_bytes: int
    opaque_bytes: int
    padding_bytes: int
    scales_bytes: int
    counters_bytes: int
    nbytes: int
    workspace_bytes: int
    total_bytes: int
    max_tokens: int
    max_seqs: int
    max_blocks: int
    groups: tuple[GroupBytes, ...]


def plan_bytes(plan: Plan) -> PlanBytes:
    """The plan's bytes, named."""
    layout = plan.layout
    groups = tuple(_group(plan, g) for g in layout.groups)
    fields = [f for g in groups for f in g.fields]
    payload = sum(f.nbytes for f in fields if f.name in ("k", "v"))
    words = sum(f.nbytes for f in fields if f.name in ("k_word", "v_word"))
    scales = 0 if layout.scales_offset is None else layout.spec.num_layers * 2 * WORD_BYTES
    counters = len(COUNTERS) * COUNTER_BYTES
    fielded = sum(f.nbytes for f in fields)
    return PlanBytes(
        layout=str(layout.kind),
        order=str(layout.order),
        fingerprint=layout.fingerprint,
        num_blocks=max(g.num_blocks for g in layout.groups),
        block_bytes=layout.block_bytes,
        fixed_bytes=layout.fixed_bytes,
        payload_bytes=payload,
        word_bytes=words,
        opaque_bytes=fielded - payload - words,
        padding_bytes=layout.nbytes - fielded - scales - counters,
        scales_bytes=scales,
        counters_bytes=counters,
        nbytes=layout.nbytes,
        workspace_bytes=plan.workspace_bytes,
        total_bytes=plan.total_bytes,
        max_tokens=plan.step.max_tokens,
        max_seqs=plan.step.max_seqs,
        max_blocks=plan.step.max_blocks,
        groups=groups,
    )


def _group(plan: Plan, placed: GroupLayout) -> GroupBytes:
    pages = placed.num_blocks * len(placed.group.layers)
    fields = tuple(
        FieldBytes(f.name, f.dtype, f.offset, math.prod(f.shape) * f.itemsize, math.prod(f.shape) * f.itemsize * pages)
        for f in placed.fields
    )
    step = plan.step_layout(placed) if placed.group.k is not None else None
    return GroupBytes(
        name=placed.group.name,
        layers=placed.group.layers,
        window=placed.group.window,
        block_size=placed.group.block_size,
        num_blocks=placed.num_blocks,
        page_bytes=placed.page_bytes,
        page_stride=placed.page_stride,
        layer_stride=placed.layer_stride,
        block_stride=placed.block_stride,
        fields=fields,
        nbytes=placed.nbytes,
        padding_bytes=placed.nbytes - sum(f.nbytes for f in fields),
        step_bytes=0 if step is None else step.nbytes,
        scratch_bytes=0 if step is None else step.workspace_bytes,
    )

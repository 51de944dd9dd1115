"""A plan: layout x step shape x decision, frozen. It says every byte before one is taken. No torch, no device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from kvhal.choice import Choice
from kvhal.errors import ConfigError
from kvhal.kernels.geometry import LayerGeometry
from kvhal.layout import GroupLayout, Layout, Order
from kvhal.page import LayoutKind
from kvhal.policy import SpecDecision
from kvhal.spec import CacheSpec, is_count

__all__ = ["Addressing", "OnLeak", "Plan", "StepLayout", "StepShape", "make_plan"]

_STEP_ALIGNMENT = 64


class Addressing(Choice):
    """checked: a bad slot or block raises before a byte moves (synchronises). counted: it is skipped and counted."""

    CHECKED = "checked"
    COUNTED = "counted"


class OnLeak(Choice):
    """What close() does about tensors others still hold. Both revoke them; raise then raises LeakedView."""

    REVOKE = "revoke"
    RAISE = "raise"


@dataclass(frozen=True, slots=True)
class StepShape:
    """The most a step may hold: tokens (rows of q, k, v), sequences, and blocks a sequence."""

    max_tokens: int
    max_seqs: int
    max_blocks: int

    def __post_init__(self) -> None:
        for name, value in (
            ("max_tokens", self.max_tokens),
            ("max_seqs", self.max_seqs),
            ("max_blocks", self.max_blocks),
        ):
            if not is_count(value):
                raise ConfigError(f"{name} is {value!r}; a step needs 1 or more")


@dataclass(frozen=True, slots=True)
class StepLayout:
    """Byte offsets of a step's arrays in its own storage.

    slots int64 [max_tokens] | block_table int32 [max_seqs][max_blocks] | seq_lens int32 [max_seqs] |
    query_starts int32 [max_seqs + 1] | workspace uint8 [workspace_bytes]; each aligned to 64 bytes.
    """

    shape: StepShape
    slots: int
    block_table: int
    seq_lens: int
    query_starts: int
    workspace: int
    workspace_bytes: int

    @classmethod
    def of(cls, shape: StepShape, workspace_bytes: int) -> StepLayout:
        """Lay out a step of `shape` with `workspace_bytes` of kernel scratch."""
        sizes = (
            8 * shape.max_tokens,
            4 * shape.max_seqs * shape.max_blocks,
            4 * shape.max_seqs,
            4 * shape.max_seqs + 4,
        )
        ends = accumulate(-(-size // _STEP_ALIGNMENT) * _STEP_ALIGNMENT for size in sizes)
        table, lengths, starts, workspace = ends
        return cls(shape, 0, table, lengths, starts, workspace, workspace_bytes)

    @property
    def nbytes(self) -> int:
        return self.workspace + self.workspace_bytes


@dataclass(frozen=True, slots=True)
class Plan:
    """What an allocation will be. Immutable; threads share it and processes may be sent it.

    workspaces: the scratch formulas of the kernels in use, each (geometry, num_q_heads, max_tokens, max_seqs) ->
    bytes.
    """

    layout: Layout
    decision: SpecDecision
    step: StepShape
    workspaces: tuple[Callable[..., int], ...]
    addressing: Addressing = Addressing.CHECKED
    on_leak: OnLeak = OnLeak.REVOKE

    @property
    def spec(self) -> CacheSpec:
        return self.layout.spec

    @property
    def nbytes(self) -> int:
        """Bytes of the cache's storage, exactly what `allocate` takes for it."""
        return self.layout.nbytes

    @property
    def workspace_bytes(self) -> int:
        """Bytes of one step of the planned shape for every group with k and v."""
        return sum(self.step_layout(g).nbytes for g in self.layout.groups if g.group.k is not None)

    @property
    def total_bytes(self) -> int:
        """Cache and one step a group."""
        return self.nbytes + self.workspace_bytes

    def workspace(self, geometry: LayerGeometry, num_q_heads: int, max_tokens: int, max_seqs: int) -> int:
        """Bytes of scratch that `attend` needs on a layer of this geometry: the most any of the kernels in use asks."""
        return max(formula(geometry, num_q_heads, max_tokens, max_seqs) for formula in self.workspaces)

    def step_layout(self, group: GroupLayout, shape: StepShape | None = None) -> StepLayout:
        """The arrays of a step of `shape` (the planned one if None) over `group`."""
        of = shape or self.step
        geometry = LayerGeometry.of(self.layout, group.group.layers[0])
        return StepLayout.of(of, self.workspace(geometry, group.group.num_q_heads, of.max_tokens, of.max_seqs))

    def with_blocks(self, num_blocks: int) -> Plan:
        """The same plan with `num_blocks` blocks in every group; the step shape stays."""
        return replace(self, layout=self.layout.with_blocks(num_blocks))


def make_plan(
    decision: SpecDecision,
    num_blocks: int | Mapping[str, int],
    workspaces: Sequence[Callable[..., int]],
    *,
    max_seqs: int = 64,
    max_tokens: int | None = None,
    max_context: int | None = None,
    layout: str = LayoutKind.TILED,
    order: str = Order.LAYER_MAJOR,
    page_align: int = 16,
    page_stride: int | None = None,
    addressing: str = Addressing.CHECKED,
    on_leak: str = OnLeak.REVOKE,
) -> Plan:
    """The plan of a decision; `Hal.plan` says what the sizes mean. Needs no adapter and no torch.

    workspaces: the scratch formulas of the kernels in use; a step is sized for the largest. Raises UnsupportedMode if
    the decision is a refusal, ConfigError for what cannot be laid out.
    """
    decision.raise_if_refused()
    laid = Layout.of(
        decision.effective_spec, num_blocks, kind=layout, order=order, page_align=page_align, page_stride=page_stride
    )
    blocks = max(g.num_blocks if max_context is None else -(-max_context // g.group.block_size) for g in laid.groups)
    shape = StepShape(max_seqs if max_tokens is None else max_tokens, max_seqs, blocks)
    return Plan(laid, decision, shape, tuple(workspaces), Addressing(addressing), OnLeak(on_leak))

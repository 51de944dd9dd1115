"""A decode or prefill step: slots, block table, lengths and workspace at fixed addresses, made once and refilled."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import TYPE_CHECKING

import torch

from kvhal.errors import SpecMismatch, StaleView
from kvhal.plan import StepLayout
from kvhal.region import Region, RegionRelease

if TYPE_CHECKING:
    from kvhal.lease import CacheLease

__all__ = ["Step", "check_buffers"]


class Step:
    """The arrays of one step over one group; `LayerCache.store` and `attend` of every layer of the group read it.

    slots int64 [max_tokens], block_table int32 [max_seqs, max_blocks], seq_lens int32 [max_seqs], query_starts int32
    [max_seqs + 1], workspace uint8. Unused places hold -1 (slots) and 0, which every kernel skips. Freed with the
    lease. A graph over this step that is replayed between two layers of an eager pass leaves another schedule in the
    workspace: call `update` after it.
    """

    def __init__(
        self, lease: CacheLease, group: str, layout: StepLayout, region: Region, bound: Mapping[str, torch.Tensor]
    ) -> None:
        self.group = group
        self.layout = layout
        self.nbytes = region.nbytes
        self._lease = lease
        self._region = region
        self._scheduled: tuple[Hashable, ...] | None = None
        self._served: set[int] = set()
        self._first_slots: torch.Tensor | None = None
        # Kept rather than made on each use: compiled code needs the same tensors, and store and attend make nothing.
        self._tensors = {"workspace": region.tensor("uint8", layout.workspace, (layout.workspace_bytes,), (1,))}
        for name, (dtype, offset, shape, strides) in _arrays(layout).items():
            if name in bound:
                self._tensors[name] = bound[name]
            else:
                self._tensors[name] = region.tensor(dtype, offset, shape, strides)
                self._tensors[name].fill_(-1 if name == "slots" else 0)

    @property
    def slots(self) -> torch.Tensor:
        return self._array("slots")

    def slots_of(self, tokens: int) -> torch.Tensor:
        """The first `tokens` slots, or all if there are fewer: made once for the layers of a step, not for each."""
        slots = self._array("slots")
        if tokens >= slots.shape[0]:
            return slots
        if torch.compiler.is_compiling():
            return slots[:tokens]
        if self._first_slots is None or self._first_slots.shape[0] != tokens:
            self._first_slots = slots[:tokens]
        return self._first_slots

    @property
    def block_table(self) -> torch.Tensor:
        return self._array("block_table")

    @property
    def seq_lens(self) -> torch.Tensor:
        return self._array("seq_lens")

    @property
    def query_starts(self) -> torch.Tensor:
        return self._array("query_starts")

    @property
    def workspace(self) -> torch.Tensor:
        """Scratch of the kernels, uint8 [workspace_bytes]."""
        return self._array("workspace")

    def release(self) -> RegionRelease:
        """Give the step's memory back; a bound buffer stays its engine's. Only the lease calls this."""
        self._first_slots = None
        self._tensors.clear()
        return self._region.release()

    def update(
        self,
        *,
        slots: torch.Tensor | None = None,
        block_table: torch.Tensor | None = None,
        seq_lens: torch.Tensor | None = None,
        query_lens: torch.Tensor | None = None,
    ) -> None:
        """Refill on the current stream, without waiting for the device. What is not given stays.

        slots [n <= max_tokens], block_table [s, b], seq_lens [s], query_lens [s] (default with new seq_lens: 1 each).
        Not for several threads at once. Raises SpecMismatch for what does not fit.
        """
        self._lease.check_open()
        self.forget_schedule()
        if slots is not None:
            self._fill("slots", slots, -1)
        if block_table is not None:
            self._fill_table(block_table)
        if seq_lens is not None:
            self._fill("seq_lens", seq_lens, 0)
        if query_lens is None and seq_lens is not None:
            query_lens = torch.ones_like(seq_lens)
        if query_lens is not None:
            self._fill_starts(query_lens)

    def serves(self, layer: int, call: tuple[Hashable, ...]) -> bool:
        """Whether the schedule in the workspace is for this attend. call: all it depends on but the step's arrays.

        It serves each layer of the group once: a layer that comes again is the next step, whose arrays may have been
        refilled through a bound buffer or before a replay. Only `LayerCache.attend` calls this.
        """
        return self._scheduled == call and layer not in self._served

    def served(self, layer: int, call: tuple[Hashable, ...], *, anew: bool) -> None:
        """Note that `layer` has attended, and (anew) made the schedule for the layers that follow."""
        if anew:
            self._scheduled = call
            self._served.clear()
        self._served.add(layer)

    def forget_schedule(self) -> None:
        """The next attend makes its own."""
        self._scheduled = None

    def _array(self, name: str) -> torch.Tensor:
        if name not in self._tensors:
            raise StaleView("a step of a closed KV cache was used; allocate a new lease and make a new step")
        return self._tensors[name]

    def _fill(self, name: str, values: torch.Tensor, padding: int) -> None:
        target = self._array(name)
        _check_fits(name, values, target)
        target[: values.shape[0]].copy_(values)
        target[values.shape[0] :].fill_(padding)

    def _fill_table(self, values: torch.Tensor) -> None:
        target = self._array("block_table")
        _check_fits("block_table", values, target)
        rows, columns = values.shape
        target[:rows, :columns].copy_(values)
        target[rows:].fill_(0)
        target[:rows, columns:].fill_(0)

    def _fill_starts(self, query_lens: torch.Tensor) -> None:
        starts = self._array("query_starts")
        count = query_lens.shape[0]
        _check_fits("query_lens", query_lens, starts[1:])
        ends = starts[1 : count + 1]
        ends.copy_(query_lens)
        torch.cumsum(ends, 0, dtype=torch.int32, out=ends)
        if count:
            starts[count + 1 :].copy_(ends[-1:].expand(starts.shape[0] - count - 1))
        else:
            starts.zero_()


def check_buffers(bound: Mapping[str, torch.Tensor], layout: StepLayout, device: torch.device) -> None:
    """Check an engine's persistent buffers against the step's arrays. Raises SpecMismatch naming the first misfit."""
    for name, tensor in bound.items():
        dtype, _, shape, _ = _arrays(layout)[name]
        found = (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), tensor.device)
        if found != (dtype, shape, device) or not tensor.is_contiguous():
            kind = "contiguous" if tensor.is_contiguous() else "strided"
            raise SpecMismatch(
                f"buffer {name!r} is {kind} {found[0]} {found[1]!r} on {found[2]}; "
                f"a step needs it contiguous, {dtype} {shape!r} on {device}"
            )


def _arrays(layout: StepLayout) -> dict[str, tuple[str, int, tuple[int, ...], tuple[int, ...]]]:
    shape = layout.shape
    table = (shape.max_seqs, shape.max_blocks)
    return {
        "slots": ("int64", layout.slots, (shape.max_tokens,), (8,)),
        "block_table": ("int32", layout.block_table, table, (4 * shape.max_blocks, 4)),
        "seq_lens": ("int32", layout.seq_lens, (shape.max_seqs,), (4,)),
        "query_starts": ("int32", layout.query_starts, (shape.max_seqs + 1,), (4,)),
    }


def _check_fits(name: str, values: torch.Tensor, target: torch.Tensor) -> None:
    fits = values.dim() == target.dim() and all(v <= t for v, t in zip(values.shape, target.shape, strict=False))
    if not fits or values.is_floating_point():
        raise SpecMismatch(
            f"{name} is {values.dtype} {tuple(values.shape)!r}; this step holds integers up to "
            f"{tuple(target.shape)!r}; make the step larger, or update in parts"
        )

"""The lease: one owner for payload and scales. Everybody else holds views and asks them for tensors where needed.

`close()` gives every byte back and measures that it did. Work goes to the current stream; ordering across streams is
the caller's. store and attend may run from several threads on disjoint slots; step updates and close need quiescence.
"""

from __future__ import annotations

import os
import sys
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, NoReturn, Self

import torch

from kvhal import movement
from kvhal.contract import Release
from kvhal.detection.probe import DeviceFacts
from kvhal.errors import CacheError, CaptureActive, ForkedLease, LeakedView, SpecMismatch, StaleView
from kvhal.kernels.geometry import LayerGeometry, PageGeometry
from kvhal.layer import LayerCache
from kvhal.layout import COUNTERS, GroupLayout
from kvhal.plan import Addressing, OnLeak, Plan, StepShape
from kvhal.region import Region, RegionRelease
from kvhal.step import Step, check_buffers
from kvhal.view import CacheView

if TYPE_CHECKING:
    from kvhal.contract import Platform

__all__ = ["CacheLease", "Counters", "live_leases"]


class _State(Enum):
    LIVE = "live"
    CLOSED = "closed"
    FORKED = "forked"


@dataclass(frozen=True, slots=True)
class Counters:
    """What went wrong without raising since allocation: rows with NaN or inf stored, slots or blocks refused."""

    nonfinite_rows: int
    rejected_slots: int


_LIVE: weakref.WeakSet[CacheLease] = weakref.WeakSet()


class CacheLease:
    """A live cache. A context manager; `release` holds the measured result once it is closed.

    Made by `Platform.allocate`, never directly.
    """

    _state = _State.CLOSED

    def __init__(self, platform: Platform, plan: Plan, device: DeviceFacts, region: Region, owner: str) -> None:
        self.plan = plan
        self.layout = plan.layout
        self.device = device
        self.owner = owner
        self.release: Release | None = None
        self.is_checked = plan.addressing is Addressing.CHECKED
        self.torch_device = platform.torch_device(device)
        self.site = _allocation_site()
        self._platform = platform
        self._region = region
        self._geometry: dict[int, tuple[LayerGeometry, str, str, int]] = {}
        self._drops: list[tuple[str, Callable[[], object]]] = []
        self._steps: list[Step] = []
        self._write_fixed_fields()
        self._state = _State.LIVE
        _LIVE.add(self)

    def __enter__(self) -> Self:
        self.check_open()
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        if self._state is _State.LIVE:
            warnings.warn(
                f"a KV cache lease of {self.layout.nbytes} bytes allocated at {self.site} was never closed; "
                "use it in a with statement or call close()",
                ResourceWarning,
                stacklevel=2,
                source=self,
            )

    def __reduce__(self) -> NoReturn:
        raise CacheError(
            "a lease was asked to be copied or pickled; it is the one owner of its bytes: share the lease itself, copy "
            "blocks with copy_blocks, or move them with export_blocks"
        )

    def __repr__(self) -> str:
        return (
            f"CacheLease({self.layout.nbytes} bytes on {self.device.platform}:{self.device.index}, {self._state.value})"
        )

    @property
    def is_open(self) -> bool:
        return self._state is _State.LIVE

    def close(self) -> Release:
        """Give every byte back and say what was measured. A second call returns the first result.

        Raises CaptureActive during a capture (nothing is freed), and LeakedView after the release if `on_leak` is
        RAISE and somebody still held the memory. In a forked child it touches no device.
        """
        if self.release is None:
            self.release = self._platform.cleanup(self)
            if self.plan.on_leak is OnLeak.RAISE and self.release.holders:
                raise LeakedView(
                    f"a lease of {self.layout.nbytes} bytes was closed while somebody still held its memory: "
                    + "; ".join(f"{h.description} ({h.action})" for h in self.release.holders)
                    + "; hold a CacheView instead and call .tensor() where it is used"
                )
        return self.release

    def layer(self, layer: int) -> LayerCache:
        """The cache of one layer: store, gather, attend. Raises ConfigError for a layer that is not in the spec."""
        self.check_open()
        if layer not in self._geometry:
            geometry = LayerGeometry.of(self.layout, layer)
            group, source = self.layout.group_of(layer).group.name, self.layout.spec.source_of(layer)
            self._geometry[layer] = (geometry, geometry.pack(), group, source)
        return LayerCache(self, layer, *self._geometry[layer])

    def view(self, name: str, layer: int) -> CacheView:
        """A handle on one field ("k", "v", "k_word", "v_word", or an opaque store) of one layer; see CacheView."""
        placed = self.layout.group_of(layer)
        field = placed.field(name)
        base = placed.layer_offset(self.layout.spec.source_of(layer))
        return CacheView(self, name, field, base, placed.num_blocks, placed.block_stride)

    def step(
        self,
        max_tokens: int | None = None,
        max_seqs: int | None = None,
        max_blocks: int | None = None,
        *,
        group: str | None = None,
        slots: torch.Tensor | None = None,
        block_table: torch.Tensor | None = None,
        seq_lens: torch.Tensor | None = None,
        query_starts: torch.Tensor | None = None,
    ) -> Step:
        """A step over one group: slots, block table, lengths and workspace at fixed addresses, freed with the lease.

        Sizes default to the plan's. An engine's own persistent buffers may be bound instead of ours; their dtypes are
        int64 for slots and int32 for the others. Raises CaptureActive during a capture.
        """
        self.check_open()
        self.check_not_capturing("a step allocates memory")
        placed = self._group(group)
        planned = self.plan.step
        shape = StepShape(
            max_tokens or planned.max_tokens, max_seqs or planned.max_seqs, max_blocks or planned.max_blocks
        )
        layout = self.plan.step_layout(placed, shape)
        bound = {"slots": slots, "block_table": block_table, "seq_lens": seq_lens, "query_starts": query_starts}
        given = {name: tensor for name, tensor in bound.items() if tensor is not None}
        check_buffers(given, layout, self.torch_device)
        region = Region.own(self._platform.reserve(layout.nbytes, self.device), layout.nbytes)
        try:
            step = Step(self, placed.group.name, layout, region, given)
        except BaseException:
            region.release()
            raise
        self._steps.append(step)
        return step

    def counters(self) -> Counters:
        """The fault counters; waits for queued work."""
        self.check_open()
        self._platform.synchronize(self.device)
        nonfinite, rejected = self.bytes_at("int64", self.layout.counters_offset, (len(COUNTERS),), (8,)).tolist()
        return Counters(nonfinite, rejected)

    def poison(self) -> None:
        """Fill every page with 0xFF: NaN or worst-case codes, NaN row words. A debugging aid: reads of slots that were
        never stored then show. Scales and counters stay.
        """
        for placed in self.layout.groups:
            self.bytes_at("uint8", placed.offset, (placed.nbytes,), (1,)).fill_(0xFF)

    def copy_blocks(self, pairs: Iterable[tuple[int, int]] | torch.Tensor, group: str | None = None) -> None:
        """Copy whole blocks (source, destination) in every layer of a group, as if all at once.

        Payload, row words and opaque stores move together. Raises AddressError for a block outside the group or a
        destination named twice; then nothing has moved.
        """
        wanted = (
            pairs if isinstance(pairs, torch.Tensor) else torch.tensor(list(pairs), dtype=torch.int64).reshape(-1, 2)
        )
        placed = self._group(group)
        pages = [n for page in PageGeometry.all_of(self.layout, placed.group.name) for n in page.pack()]
        if wanted.is_floating_point():
            raise SpecMismatch(f"pairs are {wanted.dtype}; block ids are integers: pass int64 [n, 2]")
        wanted = wanted.to(self.torch_device, torch.int64)
        torch.ops.kvhal.copy_blocks(self.cache_tensor(), wanted, pages, self.is_checked)

    def export_blocks(self, blocks: Sequence[int], group: str | None = None) -> movement.Blocks:
        """The content of `blocks` with a header that is the full layout and encoding; see `movement.Blocks`."""
        return movement.export_blocks(self, self._group(group), blocks)

    def import_blocks(self, moved: movement.Blocks | bytes, blocks: Sequence[int], group: str | None = None) -> None:
        """Write exported blocks into `blocks` of this lease. SpecMismatch names every field that differs; then nothing
        has been written.
        """
        movement.import_blocks(self, self._group(group), moved, blocks)

    def bind_drop(self, name: str, drop: Callable[[], object]) -> None:
        """Bind something that holds raw pointers into this lease (a captured graph, an IPC handle): `drop` is called
        by close before any byte is given back, newest first.
        """
        self.check_open()
        self._drops.append((name, drop))

    def run_drops(self) -> None:
        """Call what was bound, newest first; every one runs, the first error is raised after. Platforms call this."""
        errors: list[Exception] = []
        while self._drops:
            name, drop = self._drops.pop()
            try:
                drop()
            except Exception as exc:  # noqa: BLE001  # foreign code: the other drops must run before it is raised
                exc.add_note(f"raised by the drop bound to the lease as {name!r}")
                errors.append(exc)
        if errors:
            raise errors[0]

    def relinquish(self) -> RegionRelease:
        """Drop the storages and deal with whoever still holds them. Only `Platform.cleanup` calls this."""
        self._state = _State.CLOSED
        parts = [step.release() for step in self._steps]
        self._steps.clear()
        parts.append(self._region.release())
        return RegionRelease(
            sum(p.returned for p in parts), sum(p.pinned for p in parts), tuple(h for p in parts for h in p.holders)
        )

    @property
    def asked_bytes(self) -> int:
        """Bytes this lease took from the device: the cache (unless adopted) and its steps."""
        cache = 0 if self._region.is_adopted else self._region.nbytes
        return cache + sum(step.nbytes for step in self._steps)

    @property
    def is_adopted(self) -> bool:
        return self._region.is_adopted

    @property
    def is_forked(self) -> bool:
        return self._state is _State.FORKED

    @property
    def is_capturing(self) -> bool:
        """Whether a graph is being captured on the current stream."""
        return self._platform.is_capturing(self.device)

    def check_not_capturing(self, action: str) -> None:
        """Raise CaptureActive if a graph is being captured on the current stream."""
        if self.is_capturing:
            raise CaptureActive(f"{action} and a graph is being captured; do that before the capture")

    def cache_tensor(self) -> torch.Tensor:
        """The whole cache as uint8 [nbytes], for operators. Keep it in the smallest scope; StaleView once closed."""
        cache = self._region.cache
        if self._state is not _State.LIVE or cache is None:
            self.check_open()
            raise StaleView("this KV cache lease is being closed; stop using it before close()")
        return cache

    def bytes_at(self, dtype: str, offset: int, shape: Sequence[int], strides: Sequence[int]) -> torch.Tensor:
        """A tensor over cache bytes (byte offset and byte strides, both from the Layout). StaleView once closed."""
        self.check_open()
        return self._region.tensor(dtype, offset, shape, strides)

    def check_open(self) -> None:
        """Raise StaleView after close, ForkedLease in a forked child."""
        if self._state is _State.FORKED:
            raise ForkedLease(
                f"a KV cache lease of process {os.getppid()} (or an ancestor) was used in a forked child, process "
                f"{os.getpid()}; allocate in the child instead: planning before the fork is safe"
            )
        if self._state is _State.CLOSED:
            raise StaleView(
                f"a KV cache lease of {self.layout.nbytes} bytes, allocated at {self.site}, was used after it was "
                "closed; allocate a new one"
            )

    def _group(self, name: str | None) -> GroupLayout:
        if name is not None:
            return self.layout.group(name)
        if len(self.layout.groups) > 1:
            names = [g.group.name for g in self.layout.groups]
            raise SpecMismatch(f"this cache has several groups {names!r}; say which with group=…")
        return self.layout.groups[0]

    def _write_fixed_fields(self) -> None:
        """Counters to zero and static scales from the spec, which stays their source of truth."""
        self._region.tensor("int64", self.layout.counters_offset, (len(COUNTERS),), (8,)).zero_()
        if self.layout.scales_offset is None:
            return
        spec = self.layout.spec
        rows = torch.tensor([spec.stored_scales(layer) for layer in range(spec.num_layers)], dtype=torch.float32)
        self._region.tensor("float32", self.layout.scales_offset, tuple(rows.shape), (8, 4)).copy_(rows)


def _allocation_site() -> str:
    frame = sys._getframe(1)
    while frame.f_back is not None and str(frame.f_globals.get("__name__", "")).startswith(("kvhal", "contextlib")):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def live_leases() -> list[CacheLease]:
    """Every lease of this process that still exists."""
    return list(_LIVE)


def _mark_forked() -> None:
    for lease in live_leases():
        if lease._state is _State.LIVE:
            lease._state = _State.FORKED


os.register_at_fork(after_in_child=_mark_forked)

"""Launches a compiled kernel again at little cost: everything but the pointers is bound once.

`kernel[grid]` spends some 20 us of host time a call on finding the compiled kernel for its arguments. Here a key and a
comparison with the tensors of an earlier call (shapes, strides, dtypes, devices, alignment) say that all a check or a
specialisation depends on is as it was, and Triton's own generated launcher is called directly, which packs the
arguments anew each time and is thus safe in threads. Its arguments are private to Triton, so this is on for the
versions it was run with (TESTED) where the tuning row says so (`direct`), and off elsewhere; the results are the same.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from functools import reduce
from operator import or_
from typing import Any, Protocol

import torch
import triton
from torch import Tensor

__all__ = ["Bound", "Launches", "guard_of"]

TESTED = ("3.6.",)
MOST_KEYS = 4096
# Calls kept under one key, the latest first.
MOST_ALIKE = 8
ALIGNED = 16

# (stream, pointers) -> None
Bound = Callable[..., None]


def _public_stream_of(device: int) -> int:
    return int(torch.cuda.current_stream(device).cuda_stream)


# torch's public functions ask more, at 0.3 us each. A build without GPU has only those, and keeps no launch.
_current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
_stream_of: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", _public_stream_of)


class Guard(Protocol):
    """Whether tensors have the shapes, strides, dtypes and devices of those it was made of."""

    def check(self, *tensors: Tensor) -> bool: ...


class Launches:
    """Bound kernels by key and tensors. Emptied when it is full, and when the tuning changes."""

    def __init__(self) -> None:
        self._known: dict[Hashable, tuple[tuple[Guard, int, tuple[Bound, ...], object], ...]] = {}
        self._lock = threading.Lock()
        self.enabled = False

    def find(
        self, key: Hashable, tensors: Sequence[Tensor], pointers: Sequence[int]
    ) -> tuple[int, tuple[Bound, ...]] | None:
        """The current stream and what was kept under `key` for tensors like these, at aligned addresses.

        None too where another device is current, and while a profiler wants to see launches.
        """
        for guard, device, bound, _ in self._known.get(key, ()):
            if guard.check(*tensors):
                if reduce(or_, pointers) % ALIGNED or _current_device() != device:
                    return None
                return None if triton.knobs.runtime.launch_enter_hook.calls else (_stream_of(device), bound)
        return None

    def keep(
        self,
        key: Hashable,
        tensors: Sequence[Tensor],
        pointers: Sequence[int],
        owner: object,
        launched: Sequence[tuple[Any, tuple[int, ...], Sequence[Any]]],
    ) -> None:
        """Bind (compiled kernel, grid, values of the parameters after the pointers) for `key` and tensors like these.

        owner lives as long as the entry: whatever the key names by its id. Addresses that are not aligned keep nothing.
        """
        if not self.enabled or reduce(or_, pointers) % ALIGNED:
            return
        bound = tuple(one for one in (_bind(*each) for each in launched) if one is not None)
        if len(bound) < len(launched):
            return
        entry = guard_of(tensors), tensors[0].get_device(), bound, owner
        with self._lock:
            if key not in self._known and len(self._known) >= MOST_KEYS:
                self._known.clear()
            # A call went the long way although it is known while a profiler looked on or another device was current.
            others = [kept for kept in self._known.get(key, ()) if not kept[0].check(*tensors)]
            self._known[key] = (entry, *others[: MOST_ALIKE - 1])

    def reset(self, *, direct: bool) -> None:
        """Forget every kernel; keep new ones if `direct` and this Triton is one that was tested."""
        with self._lock:
            self._known.clear()
        self.enabled = direct and triton.__version__.startswith(TESTED)


def guard_of(tensors: Sequence[Tensor]) -> Guard:
    """torch's own comparison where it serves (0.2 us for seven tensors instead of 2.3 in Python), else ours."""
    try:
        from torch._C._dynamo.guards import TensorGuards
    except ImportError:
        return _Described(tensors)
    # Concrete numbers, which torch's stubs do not know of.
    sizes: Any = [list(x.shape) for x in tensors]
    strides: Any = [list(x.stride()) for x in tensors]
    found: Guard = TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
    # It refuses a tensor given twice, which is no difference.
    return found if found.check(*tensors) else _Described(tensors)


class _Described:
    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._described = _description(tensors)

    def check(self, *tensors: Tensor) -> bool:
        return _description(tensors) == self._described


def _description(tensors: Sequence[Tensor]) -> list[tuple[object, ...]]:
    return [(x.shape, x.stride(), x.dtype, x.device) for x in tensors]


def _bind(compiled: Any, grid: tuple[int, ...], values: Sequence[Any]) -> Bound | None:
    run = compiled.run
    if run.global_scratch_size or run.profile_scratch_size:
        return None
    launch, tail = run.launch, tuple(values)
    x, y, z = (*grid, 1, 1)[:3]
    function = compiled.function
    # Cooperative and dependent launch, two scratch pointers; then what the launcher hands to hooks.
    options = (run.launch_cooperative_grid, run.launch_pdl, None, None, compiled.packed_metadata, None, None, None)

    def call(stream: int, *pointers: int) -> None:
        launch(x, y, z, stream, function, *options, *pointers, *tail)

    return call

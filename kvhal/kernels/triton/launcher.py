"""Launches a compiled kernel again at little cost: everything but the pointers is bound once.

`kernel[grid]` spends some 20 us of host time a call on finding the compiled kernel for its arguments. Here the caller
says by a key that they are the same as before (shapes, strides, dtypes, alignment: all that a check or a
specialisation depends on), and Triton's own generated launcher is called directly, which packs the arguments anew each
time and is thus safe in threads. Its arguments are private to Triton, so this is on for the versions it was run with
(TESTED) where the tuning row says so (`direct`), and off elsewhere; the results are the same.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import triton

__all__ = ["ALIGNED", "Bound", "Launches"]

TESTED = ("3.6.",)
MOST_KEYS = 4096
ALIGNED = 16

# (stream, pointers) -> None
Bound = Callable[..., None]


class Launches:
    """Bound kernels by key. Emptied when it is full, and when the tuning changes."""

    def __init__(self) -> None:
        self._known: dict[Hashable, tuple[object, tuple[Bound, ...]]] = {}
        self._lock = threading.Lock()
        self.enabled = False

    def find(self, key: Hashable) -> tuple[Bound, ...] | None:
        """What was kept under `key`; None too while a profiler wants to see launches."""
        found = self._known.get(key)
        if found is None or not self.enabled or triton.knobs.runtime.launch_enter_hook.calls:
            return None
        return found[1]

    def keep(
        self, key: Hashable, owner: object, launched: Sequence[tuple[Any, tuple[int, ...], Sequence[Any]]]
    ) -> None:
        """Bind (compiled kernel, grid, values of the parameters after the pointers) and keep them under `key`.

        owner lives as long as the entry: whatever the key names by its id.
        """
        if not self.enabled:
            return
        bound = [_bind(*one) for one in launched]
        with self._lock:
            if len(self._known) >= MOST_KEYS:
                self._known.clear()
            if all(one is not None for one in bound):
                self._known[key] = owner, tuple(one for one in bound if one is not None)

    def reset(self, *, direct: bool) -> None:
        """Forget every kernel; keep new ones if `direct` and this Triton is one that was tested."""
        with self._lock:
            self._known.clear()
        self.enabled = direct and triton.__version__.startswith(TESTED)


def _bind(compiled: Any, grid: tuple[int, ...], values: Sequence[Any]) -> Bound | None:
    run = compiled.run
    if run.global_scratch_size or run.profile_scratch_size:
        return None
    launch, tail = run.launch, tuple(values)
    x, y, z = (*grid, 1, 1)[:3]
    function = compiled.function
    # Cooperative and dependent launch, two scratch pointers; then what the launcher hands to hooks.
    options = (run.launch_cooperative_grid, run.launch_pdl, None, None, compiled.packed_metadata, None, None, None)

    def call(stream: int, *pointers: int | None) -> None:
        launch(x, y, z, stream, function, *options, *pointers, *tail)

    return call

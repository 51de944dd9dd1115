"""Allocating and closing a lease of a large model through the public API, and what comes back.

allocate        of memory that has been free for REST_S
allocate, again of memory that was given back at this moment, which a GPU's driver has still to clear
close           nobody holds a tensor of the cache: no scan is needed
close, held     somebody kept one, so that close must collect garbage, find it among all objects and revoke it; its
                target is close's plus the time of the garbage collector
"""

from __future__ import annotations

import gc
import logging
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from bench.results import Case, Label
from bench.timing import Timing
from kvhal.contract import Release
from kvhal.errors import BudgetError
from kvhal.hal import Hal
from kvhal.plan import Plan
from kvhal.readings import Known
from kvhal.spec import CacheSpec

__all__ = ["ALLOCATE_LIMIT_US", "CLOSE_LIMIT_US", "default_bytes", "measure"]

GPU_BYTES, CPU_BYTES = 100 << 30, 1 << 30
# Of the memory that is free, where the default does not fit.
FREE_SHARE = 0.9
LAYERS, KV_HEADS, Q_HEADS, HEAD_DIM = 80, 8, 64, 128
ALLOCATE_LIMIT_US, CLOSE_LIMIT_US = 250e3, 150e3
# An H200 clears 100 GiB in 0.3 s.
REST_S = 1.0


@dataclass(frozen=True, slots=True)
class _Cycle:
    """One lease from allocate to close, microseconds. gc_us: of close, what garbage collections took."""

    allocate_us: float
    close_us: float
    gc_us: float
    release: Release


@dataclass(slots=True)
class _Collector:
    """Microseconds spent in garbage collections since it was put into `gc.callbacks`."""

    total_us: float = 0.0
    _started: float = 0.0

    def __call__(self, phase: str, _info: object) -> None:
        if phase == "start":
            self._started = time.perf_counter()
        else:
            self.total_us += (time.perf_counter() - self._started) * 1e6


def default_bytes(hal: Hal) -> int:
    """Bytes of the cache: the default of the platform's kind, or what is free if that is less."""
    wanted = CPU_BYTES if hal.platform.torch_device(hal.device).type == "cpu" else GPU_BYTES
    free = hal.memory().free
    return min(wanted, int(FREE_SHARE * free.value)) if isinstance(free, Known) else wanted


def measure(hal: Hal, nbytes: int | None, rounds: int) -> tuple[list[Case], dict[str, Label]]:
    """The cases and the facts. nbytes: None for the default. Raises BudgetError if that is less than one block."""
    one = _plan(hal)
    # The first lease opens the context and registers the operators.
    _cycle(hal, one, hold=True)
    size = default_bytes(hal) if nbytes is None else nbytes
    if size < one.layout.nbytes:
        raise BudgetError(f"a lease of {size} bytes was asked for; one block takes {one.layout.nbytes}: ask for more")
    plan = one.with_blocks((size - one.layout.fixed_bytes) // one.layout.block_bytes)
    found = [(_cycle(hal, plan, hold=False, rest_s=REST_S), _cycle(hal, plan, hold=True)) for _ in range(rounds)]
    free, held = ([pair[index] for pair in found] for index in (0, 1))
    gc_us = statistics.median(cycle.gc_us for cycle in held)
    cases = [
        _case("allocate", plan, [cycle.allocate_us for cycle in free], ALLOCATE_LIMIT_US),
        _case("allocate, again", plan, [cycle.allocate_us for cycle in held], ALLOCATE_LIMIT_US),
        _case("close", plan, [cycle.close_us for cycle in free], CLOSE_LIMIT_US, free),
        _case("close, held", plan, [cycle.close_us for cycle in held], CLOSE_LIMIT_US + gc_us, held),
    ]
    last, last_held = free[-1].release, held[-1].release
    facts: dict[str, Label] = {
        "gc_us": round(gc_us),
        "asked_bytes": last.asked,
        "returned_bytes": last.returned,
        "returned_bytes_held": last_held.returned,
        "revoked": sum(holder.action == "revoked" for holder in last_held.holders),
        "confirmed_by": last.confirmation.method,
    }
    return cases, facts


def _plan(hal: Hal) -> Plan:
    # Unscaled, so that it is decided to run wherever kvhal runs; allocating does not look at the mode.
    spec = CacheSpec.uniform(
        mode="bfloat16", num_layers=LAYERS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, num_q_heads=Q_HEADS
    )
    return hal.plan(spec, num_blocks=1)


def _case(name: str, plan: Plan, samples: Sequence[float], limit_us: float, closed: Sequence[_Cycle] = ()) -> Case:
    timing = Timing.of(samples)
    exact = all(cycle.release.is_complete for cycle in closed) if closed else None
    labels: dict[str, Label] = {"kind": "lifecycle", "layers": LAYERS}
    return Case(name, timing.us, timing.spread_us, labels, nbytes=plan.nbytes, limit_us=limit_us, exact=exact)


def _cycle(hal: Hal, plan: Plan, *, hold: bool, rest_s: float = 0.0) -> _Cycle:
    """hold: keep a tensor of the cache while it is closed. rest_s: seconds that the memory is left free before."""
    time.sleep(rest_s)
    start = time.perf_counter()
    lease = hal.allocate(plan)
    allocated = time.perf_counter() - start
    kept = lease.view("k", 0).tensor() if hold else None
    with _collections() as collector, _without_warnings():
        start = time.perf_counter()
        release = lease.close()
        closed = time.perf_counter() - start
    del kept
    return _Cycle(allocated * 1e6, closed * 1e6, collector.total_us, release)


@contextmanager
def _collections() -> Iterator[_Collector]:
    collector = _Collector()
    gc.callbacks.append(collector)
    try:
        yield collector
    finally:
        gc.callbacks.remove(collector)


@contextmanager
def _without_warnings() -> Iterator[None]:
    """The tensor is held on purpose; kvhal's warning about it would be taken for a leak of this benchmark."""
    log = logging.getLogger("kvhal")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)

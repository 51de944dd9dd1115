"""How long a call takes on a GPU and on the host. Every figure is a median with the spread of its samples."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

__all__ = ["ROTATE_BYTES", "Call", "Timer", "Timing", "graph_timing", "host_timing", "rotations"]

Call = Callable[[], object]
Timer = Callable[[Sequence[Call]], "Timing"]

# Twelve times an H200's L2 cache (50 MB): no input is still there when its turn comes again.
ROTATE_BYTES = 600 << 20
REPLAYS = 11
# Long enough that starting a graph (some 10 us) does not show.
GRAPH_US = 4000.0
MAX_REPEATS = 200
# Without rest 256 sequences of 1024 tokens took 160 us for 145 on an H200, after a peer's products (its power cap then
# lowers the clock, which is the likely cause).
REST_S = 0.15
HOST_SAMPLES, HOST_CALLS, HOST_WARM_UP = 9, 100, 20


@dataclass(frozen=True, slots=True)
class Timing:
    """us: median microseconds of one call. spread_us: distance of the quartiles of the samples."""

    us: float
    spread_us: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> Timing:
        """The timing of at least two samples, in microseconds a call."""
        low, middle, high = statistics.quantiles(samples, n=4, method="inclusive")
        return cls(middle, high - low)


def rotations(nbytes: int) -> int:
    """How many inputs of `nbytes` are needed so that none is in the L2 cache when it is read again."""
    return max(1, -(-ROTATE_BYTES // nbytes))


def graph_timing(calls: Sequence[Call]) -> Timing:
    """One call's time on the current GPU: replays of one CUDA graph in which `calls` follow each other many times.

    The calls must not wait for the device and must write to fixed addresses.
    """
    for call in calls:
        call()
    torch.cuda.synchronize()
    probe = _graph_of(calls, len(calls))
    _replay_us(probe)
    count = len(calls) * max(1, min(MAX_REPEATS, int(GRAPH_US / max(1.0, _replay_us(probe)))))
    graph = _graph_of(calls, count)
    time.sleep(REST_S)
    _replay_us(graph)
    return Timing.of([_replay_us(graph) / count for _ in range(REPLAYS)])


def _graph_of(calls: Sequence[Call], count: int) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(count):
            calls[i % len(calls)]()
    return graph


def _replay_us(graph: torch.cuda.CUDAGraph) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    graph.replay()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) * 1e3


def host_timing(calls: Sequence[Call], synchronize: Call) -> Timing:
    """The host's time for one call that queues work and returns.

    A sample is HOST_CALLS calls in a row, few enough that the device's queue (about 1000 launches) never fills, and
    `synchronize` empties it before the next.
    """
    for i in range(HOST_WARM_UP):
        calls[i % len(calls)]()
    samples = []
    for _ in range(HOST_SAMPLES):
        synchronize()
        start = time.perf_counter()
        for i in range(HOST_CALLS):
            calls[i % len(calls)]()
        samples.append((time.perf_counter() - start) / HOST_CALLS * 1e6)
    synchronize()
    return Timing.of(samples)

"""How long a call takes on the device: one graph of many calls, so that launching costs nothing, and its median."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import torch

__all__ = ["microseconds"]

REPLAYS = 7
# Long against what an event resolves (half a microsecond), short against the time of a compile.
GRAPH_US = 4000.0
MOST_ROUNDS = 200


def microseconds(calls: Sequence[Callable[[], object]]) -> float:
    """Microseconds a call, on the current device. calls: the same work on different memory, larger than the L2 cache.

    They run twice before anything is captured, which compiles them, shows what cannot be launched, and says how often
    they fit into GRAPH_US.
    """

    def all_once() -> None:
        for call in calls:
            call()

    all_once()
    rounds = max(1, min(MOST_ROUNDS, int(GRAPH_US / max(1.0, _elapsed_us(all_once)))))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            all_once()
    _elapsed_us(graph.replay)
    return statistics.median(_elapsed_us(graph.replay) for _ in range(REPLAYS)) / (rounds * len(calls))


def _elapsed_us(work: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    work()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) * 1e3

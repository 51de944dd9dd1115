"""The host's time for one call of the torch operators, outside of a graph: what an eager step pays for each layer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import torch

from bench.cases import INT8, AttendCase, HostCase
from bench.decode import Attend
from bench.results import Case, Failure
from bench.timing import Call, Timing

__all__ = ["call_of", "run"]


def run(
    cases: Iterable[HostCase], device: torch.device, timer: Callable[[Sequence[Call]], Timing]
) -> Iterator[Case | Failure]:
    """Measure each case. One that raises is a failure; the others still run."""
    for case in cases:
        try:
            timing = timer([call_of(case, device)])
            yield Case(case.name, timing.us, timing.spread_us, case.labels)
        except Exception as exc:  # noqa: BLE001  # whatever one case raises, the device time of the others is not lost
            yield Failure(case.name, f"{type(exc).__name__}: {exc}")


def call_of(case: HostCase, device: torch.device) -> Call:
    """The call that is timed: int8, 32 query heads over 8 kv heads, one new token a sequence."""
    setup = Attend.of(AttendCase("decode", INT8, case.seqs, case.length), device, sets=1)
    packed = setup.geometry.pack()
    if case.operator != "store":
        setup.prepare()
        return partial(
            torch.ops.kvhal.attend, setup.pool.data, setup.q, setup.tables[0], setup.lengths, setup.starts, None,
            setup.workspace, setup.out, None, packed, setup.scale, 0.0, False, case.operator == "attend-prepared",
        )  # fmt: skip
    g = setup.geometry
    k, v = (
        torch.randn(case.seqs, g.num_kv_heads, of.head_dim, device=device, dtype=torch.bfloat16) for of in (g.k, g.v)
    )
    slots = torch.arange(case.seqs, device=device)
    return partial(torch.ops.kvhal.store, setup.pool.data, k, v, slots, packed, False)

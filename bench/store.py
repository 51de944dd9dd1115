"""store on a GPU: the time of quantising and scattering one layer's new tokens, and whether every byte is right.

Small calls cannot be rotated past the L2 cache: their K and V come from there, as they do behind a projection.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from bench.cases import BLOCK_SIZE, StoreCase
from bench.pools import CacheShape, Pool
from bench.results import COPY, Case, Ceiling, Failure, floor_us
from bench.timing import Call, Timer, rotations
from kvhal.kernels import reference
from kvhal.kernels.triton import launch

__all__ = ["equals_reference", "measure", "moved_bytes", "run"]

# Calls up to so many tokens are decode steps, one token a sequence; larger ones fill whole pages.
SCATTERED_TOKENS = 256
MAX_SETS, MAX_PAGE_SETS, MIN_BLOCKS = 128, 16, 2048
INPUT_BYTES = 2
POISON = 0xFF


def run(
    cases: Iterable[StoreCase], device: torch.device, timer: Timer, ceilings: Sequence[Ceiling]
) -> Iterator[Case | Failure]:
    """Measure each case. One that raises is a failure; the others still run."""
    for case in cases:
        try:
            yield measure(case, device, timer, ceilings)
        except Exception as exc:  # noqa: BLE001  # whatever one case raises, the device time of the others is not lost
            yield Failure(case.name, f"{type(exc).__name__}: {exc}")


def measure(case: StoreCase, device: torch.device, timer: Timer, ceilings: Sequence[Ceiling]) -> Case:
    """One case."""
    nbytes = moved_bytes(case)
    timing = timer(_calls(case, device))
    return Case(
        name=case.name,
        us=timing.us,
        spread_us=timing.spread_us,
        labels=case.labels,
        nbytes=nbytes,
        floor_us=floor_us(ceilings, COPY, nbytes),
        exact=equals_reference(case, device),
    )


def moved_bytes(case: StoreCase) -> int:
    """Bytes of K and V read and bytes of the cache written."""
    read = 2 * case.kv_heads * case.head_dim * INPUT_BYTES
    return case.tokens * (read + _shape(case).token_bytes)


def equals_reference(case: StoreCase, device: torch.device) -> bool:
    """Whether a poisoned cache holds, after one call, the bytes that the CPU reference leaves in its copy."""
    torch.manual_seed(1)
    pool = Pool.empty(_shape(case), -(-case.tokens // BLOCK_SIZE) + MIN_BLOCKS // BLOCK_SIZE, device, POISON)
    right = pool.data.to("cpu", copy=True)
    k, v = _rows(case, device)
    slots = _slots(case, pool.geometry.num_blocks, device)
    launch.store(pool.data, k, v, slots, pool.geometry, checked=False)
    reference.store(right, k.cpu(), v.cpu(), slots.cpu(), pool.geometry, checked=False)
    return torch.equal(pool.data.cpu(), right)


def _calls(case: StoreCase, device: torch.device) -> list[Call]:
    torch.manual_seed(0)
    sets = max(2, min(MAX_SETS, rotations(moved_bytes(case))))
    blocks = max(MIN_BLOCKS, -(-case.tokens // BLOCK_SIZE) * min(sets, MAX_PAGE_SETS))
    pool = Pool.empty(_shape(case), blocks, device)
    calls: list[Call] = []
    for _ in range(sets):
        k, v = _rows(case, device)
        slots = _slots(case, blocks, device)
        calls.append(partial(launch.store, pool.data, k, v, slots, pool.geometry, checked=False))
    return calls


def _rows(case: StoreCase, device: torch.device) -> tuple[Tensor, Tensor]:
    k, v = (
        torch.randn(case.tokens, case.kv_heads, case.head_dim, device=device, dtype=torch.bfloat16) for _ in range(2)
    )
    return k, v


def _slots(case: StoreCase, blocks: int, device: torch.device) -> Tensor:
    """Distinct slots: single random ones, or random pages filled from their start."""
    if case.tokens <= SCATTERED_TOKENS:
        return torch.randperm(blocks * BLOCK_SIZE, device=device)[: case.tokens]
    pages = torch.randperm(blocks, device=device)[: -(-case.tokens // BLOCK_SIZE)]
    return (pages[:, None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE, device=device)).flatten()[: case.tokens]


def _shape(case: StoreCase) -> CacheShape:
    return CacheShape(case.mode, case.kv_heads, case.head_dim)

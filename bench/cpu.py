"""The CPU platform's kernels against plain torch on the same tensors.

store    8192 tokens x 8 heads x 128 in bf16, against a torch copy of the same K and V
attend   decode of 8 sequences x 4096 tokens, 32 query heads over 8 kv heads, D 128, against torch's attention over
         tensors already dequantised plus the time of dequantising them
close    a lease of 1 GiB whose every page was written, against allocating it
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

import kvhal
from bench.report import Figure, paired
from kvhal.kernels import operators
from kvhal.kernels.geometry import LayerGeometry
from kvhal.kernels.workspace import attend_workspace_bytes
from kvhal.layout import Layout
from kvhal.spec import CacheSpec

__all__ = ["measure"]

KV_HEADS, Q_HEADS, DIM, BLOCK_SIZE = 8, 32, 128, 16
STORE_TOKENS, SEQUENCES, CONTEXT = 8192, 8, 4096
MIN_STORE_RATE, MAX_ATTEND_TIME, MAX_CLOSE_MS = 0.05, 2.0, 50.0
LEASE_BYTES = 1 << 30
SCALED_MODES = ("int8_per_token_head", "fp8_per_token_head")
assert operators.SCHEMAS


@dataclass(frozen=True, slots=True)
class _Cache:
    """A cache whose blocks are handed out in a random order, and K and V for all of it."""

    data: Tensor
    geometry: LayerGeometry
    blocks: Tensor
    slots: Tensor
    k: Tensor
    v: Tensor

    @classmethod
    def of(cls, mode: str, tokens: int, kind: str = "tiled") -> _Cache:
        spec = CacheSpec.uniform(
            mode=mode, num_layers=1, num_kv_heads=KV_HEADS, head_dim=DIM, num_q_heads=Q_HEADS, block_size=BLOCK_SIZE
        )
        layout = Layout.of(spec, tokens // BLOCK_SIZE, kind=kind)
        blocks = torch.randperm(tokens // BLOCK_SIZE)
        slots = (blocks.unsqueeze(1) * BLOCK_SIZE + torch.arange(BLOCK_SIZE)).flatten()
        k, v = (torch.randn(tokens, KV_HEADS, DIM).to(torch.bfloat16) for _ in range(2))
        data = torch.zeros(layout.nbytes, dtype=torch.uint8)
        return cls(data, LayerGeometry.of(layout, 0), blocks, slots, k, v)

    def store(self) -> None:
        torch.ops.kvhal.store(self.data, self.k, self.v, self.slots, self.geometry.pack(), True)

    def gather(self, k: Tensor, v: Tensor) -> None:
        torch.ops.kvhal.gather(self.data, self.slots, k, v, self.geometry.pack(), True)


def measure(rounds: int) -> list[Figure]:
    """Every figure of this benchmark. Another figure is another function in MEASUREMENTS."""
    torch.manual_seed(0)
    return [figure for measurement in MEASUREMENTS for figure in measurement(rounds)]


def _stores(rounds: int) -> Iterator[Figure]:
    for mode in ("bfloat16", *SCALED_MODES):
        cache = _Cache.of(mode, STORE_TOKENS)
        copies = torch.empty_like(cache.k), torch.empty_like(cache.v)
        ours, copy = paired(cache.store, _copier(cache, copies), rounds)
        rate = copy / ours
        limit = f"rate >= {MIN_STORE_RATE:g} of the copy's"
        yield Figure(f"store {mode}", ours, "copy of K and V", copy, rate, limit, rate >= MIN_STORE_RATE)


def _copier(cache: _Cache, copies: tuple[Tensor, Tensor]) -> Callable[[], None]:
    def copy() -> None:
        copies[0].copy_(cache.k)
        copies[1].copy_(cache.v)

    return copy


def _attends(rounds: int) -> Iterator[Figure]:
    for mode in SCALED_MODES:
        cache = _Cache.of(mode, SEQUENCES * CONTEXT)
        cache.store()
        q = torch.randn(SEQUENCES, Q_HEADS, DIM)
        ours, theirs = paired(_attender(cache, q), _dequantise_and_attend(cache, q), rounds)
        ratio = ours / theirs
        limit = f"time <= {MAX_ATTEND_TIME:g} of it"
        holds = ratio <= MAX_ATTEND_TIME
        yield Figure(f"attend {mode}", ours, "gather, then torch's attention", theirs, ratio, limit, holds)


def _attender(cache: _Cache, q: Tensor) -> Callable[[], None]:
    table = cache.blocks.view(SEQUENCES, -1).to(torch.int32)
    lengths = torch.full((SEQUENCES,), CONTEXT, dtype=torch.int32)
    starts = torch.arange(SEQUENCES + 1, dtype=torch.int32)
    scratch = torch.empty(attend_workspace_bytes(cache.geometry, Q_HEADS, SEQUENCES), dtype=torch.uint8)
    out, packed = torch.empty_like(q), cache.geometry.pack()

    def attend() -> None:
        torch.ops.kvhal.attend(
            cache.data, q, table, lengths, starts, None, scratch, out, None, packed, DIM**-0.5, 0.0, True
        )

    return attend


def _dequantise_and_attend(cache: _Cache, q: Tensor) -> Callable[[], None]:
    k, v = (torch.empty(SEQUENCES * CONTEXT, KV_HEADS, DIM) for _ in range(2))
    keys, values = (x.view(SEQUENCES, CONTEXT, KV_HEADS, DIM).transpose(1, 2) for x in (k, v))
    # Query heads of one kv head as rows: torch is twice as fast so as with enable_gqa=True.
    grouped = q.view(SEQUENCES, KV_HEADS, Q_HEADS // KV_HEADS, DIM)

    def run() -> None:
        cache.gather(k, v)
        torch.nn.functional.scaled_dot_product_attention(grouped, keys, values)

    return run


def _leases(rounds: int) -> Iterator[Figure]:
    hal = kvhal.get("cpu")
    spec = CacheSpec.uniform(
        mode="int8_per_token_head", num_layers=32, num_kv_heads=KV_HEADS, head_dim=DIM, num_q_heads=Q_HEADS
    )
    one = hal.plan(spec, num_blocks=1)
    plan = one.with_blocks(LEASE_BYTES // one.layout.block_bytes)
    opening: list[float] = []
    closing: list[float] = []
    for _ in range(rounds):
        start = time.perf_counter()
        lease = hal.allocate(plan)
        opened = time.perf_counter()
        lease.close()
        closing.append((time.perf_counter() - opened) * 1e3)
        opening.append((opened - start) * 1e3)
    ours = statistics.median(closing)
    yardstick = statistics.median(opening)
    limit = f"time <= {MAX_CLOSE_MS:g} ms"
    yield Figure(
        "close a lease of 1 GiB", ours, "allocate it", yardstick, ours / yardstick, limit, ours <= MAX_CLOSE_MS
    )


MEASUREMENTS: tuple[Callable[[int], Iterator[Figure]], ...] = (_stores, _attends, _leases)

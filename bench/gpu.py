"""Times store and attend on the GPU of this machine: `python -m bench.gpu [--quick]`.

Every figure is the median of replays of one CUDA graph of many calls whose inputs rotate past the L2 cache, with the
result of one sequence checked against float64. The read ceiling is measured in the same run.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvhal.kernels import operators
from kvhal.kernels.geometry import LayerGeometry
from kvhal.kernels.triton import launch
from kvhal.kernels.triton.tuning import load_tunings
from kvhal.kernels.triton.workspace import triton_workspace_bytes
from kvhal.layout import Layout
from kvhal.spec import CacheSpec

assert operators.SCHEMAS
ROOT = Path(__file__).parents[1]
ROTATE_BYTES = 600 << 20
HEADS, DIM, BLOCK = 8, 128, 16
MODES = ("int8_per_token_head", "fp8_per_token_head", "int4_per_token_head", "bfloat16")
SHAPES = ((1, 1024), (1, 8192), (1, 32768), (8, 1024), (8, 8192), (64, 1024), (64, 8192), (256, 1024), (64, 32768))
STORES = (1, 32, 256, 2048, 8192, 32768)


@dataclass
class Pool:
    """A cache filled with random rows, and page tables that scatter its blocks."""

    layout: Layout
    g: LayerGeometry
    data: Tensor
    packed: list[int]

    @classmethod
    def of(cls, mode: str, blocks: int, kind: str = "tiled", dim: int = DIM, heads: int = HEADS) -> Pool:
        spec = CacheSpec.uniform(mode=mode, num_layers=1, num_kv_heads=heads, head_dim=dim, block_size=BLOCK)
        layout = Layout.of(spec, blocks, kind=kind)
        data = torch.zeros(layout.nbytes, dtype=torch.uint8, device="cuda")
        g = LayerGeometry.of(layout, 0)
        pool = cls(layout, g, data, g.pack())
        piece = min(blocks, 1024) * BLOCK
        k, v = (torch.randn(piece, heads, dim, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        for start in range(0, blocks * BLOCK, piece):
            count = min(piece, blocks * BLOCK - start)
            launch.store(
                data, k[:count], v[:count], torch.arange(start, start + count, device="cuda"), g, checked=False
            )
        return pool


def timed(calls: Sequence[Callable[[], object]], replays: int = 9) -> float:
    """Microseconds a call: one graph of all calls, repeated until it lasts a few milliseconds."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def graph_of(count: int) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for i in range(count):
                calls[i % len(calls)]()
        return graph

    def replay(graph: torch.cuda.CUDAGraph) -> float:
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        return float(start.elapsed_time(end)) * 1e3

    probe = graph_of(len(calls))
    replay(probe)
    count = len(calls) * max(1, min(200, int(4000 / max(1.0, replay(probe)))))
    graph = graph_of(count)
    replay(graph)
    return statistics.median(replay(graph) for _ in range(replays)) / count


def reading(nbytes: int) -> float:
    """Microseconds to read `nbytes` once (a sum of int32), the ceiling of any reader."""
    sets = max(1, min(8, ROTATE_BYTES // nbytes))
    xs = [torch.zeros(nbytes // 4, dtype=torch.int32, device="cuda").view(-1, 1024) for _ in range(sets)]
    out = torch.empty(xs[0].shape[0], dtype=torch.int64, device="cuda")
    return timed([partial(torch.sum, x, 1, out=out) for x in xs])


def decode(mode: str, seqs: int, length: int, group: int = 4, queries: int = 1, kind: str = "tiled", dim: int = DIM,
           lengths: Tensor | None = None) -> dict[str, Any]:  # fmt: skip
    """One decode step of one layer; schedule built before, as a step does."""
    per = -(-length // BLOCK)
    page = Layout.of(
        CacheSpec.uniform(mode=mode, num_layers=1, num_kv_heads=HEADS, head_dim=dim, block_size=BLOCK), 1, kind=kind
    ).groups[0].page_bytes  # fmt: skip
    nbytes = seqs * per * page
    sets = max(1, min(8, ROTATE_BYTES // nbytes))
    pool = Pool.of(mode, seqs * per * sets, kind, dim)
    tables = torch.randperm(seqs * per * sets, device="cuda").int().view(sets, seqs, per)
    lens = torch.full((seqs,), length, dtype=torch.int32, device="cuda") if lengths is None else lengths
    read = nbytes if lengths is None else int(lens.sum()) * page // BLOCK
    starts = torch.arange(seqs + 1, dtype=torch.int32, device="cuda") * queries
    q = torch.randn(seqs * queries, HEADS * group, dim, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(q)
    tuning = launch.tuning_of(q.device)
    size = triton_workspace_bytes(pool.g, HEADS * group, seqs * queries, seqs, tuning)
    work = torch.full((size,), 0xFF, dtype=torch.uint8, device="cuda")

    def prepare(table: Tensor) -> None:
        launch.prepare(
            pool.data, HEADS * group, q.dtype, q.shape[0], table, lens, starts, work, pool.g, checked=False
        )  # fmt: skip

    def attend(table: Tensor) -> None:
        launch.attend(
            pool.data, q, table, lens, starts, None, work, out, None, pool.g, scale=dim**-0.5, softcap=0.0,
            checked=False, prepared=True,
        )  # fmt: skip

    prepare(tables[0])
    took = timed([partial(attend, t) for t in tables])
    schedule = timed([partial(prepare, t) for t in tables])
    prepare(tables[0])
    attend(tables[0])
    error = wrong(pool, q, out, tables[0], lens, group, queries)
    return {"us": round(took, 2), "gb_s": round(read / took / 1e3), "error": error, "schedule_us": round(schedule, 2)}


def wrong(pool: Pool, q: Tensor, out: Tensor, table: Tensor, lens: Tensor, group: int, queries: int) -> float:
    """Relative L2 error of the last sequence against float64 over the gathered values."""
    b, n = table.shape[0] - 1, int(lens[-1])
    slots = (table[b].long()[:, None] * BLOCK + torch.arange(BLOCK, device="cuda")).flatten()[:n]
    k, v = (torch.empty(n, HEADS, q.shape[2], device="cuda") for _ in range(2))
    launch.gather(pool.data, slots, k, v, pool.g, checked=False)
    x = q[b * queries : (b + 1) * queries].double().view(queries, HEADS, group, -1)
    scores = torch.einsum("qhgd,nhd->qhgn", x, k.double()) * q.shape[2] ** -0.5
    for i in range(queries):
        scores[i, :, :, n - queries + i + 1 :] = float("-inf")
    right = torch.einsum("qhgn,nhd->qhgd", scores.softmax(-1), v.double())
    found = out[b * queries : (b + 1) * queries].double().view_as(right)
    return float(f"{float((found - right).norm() / right.norm()):.2e}")


def stores(mode: str, count: int, kind: str = "tiled") -> dict[str, Any]:
    """Quantise and scatter `count` tokens: single random slots up to 256, whole pages above."""
    sets = max(2, min(128, ROTATE_BYTES // (count * HEADS * DIM * 4)))
    blocks = max(2048, -(-count // BLOCK) * min(sets, 16))
    pool = Pool.of(mode, blocks, kind)
    calls: list[Callable[[], None]] = []
    for _ in range(sets):
        k, v = (torch.randn(count, HEADS, DIM, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        if count <= 256:
            slots = torch.randperm(blocks * BLOCK, device="cuda")[:count]
        else:
            pages = torch.randperm(blocks, device="cuda")[: count // BLOCK]
            slots = (pages[:, None] * BLOCK + torch.arange(BLOCK, device="cuda")).flatten()
        calls.append(partial(launch.store, pool.data, k, v, slots, pool.g, checked=False))
    took = timed(calls)
    moved = count * (HEADS * DIM * 4 + pool.layout.groups[0].page_bytes // BLOCK)
    return {"us": round(took, 2), "gb_s": round(moved / took / 1e3)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    arch = "sm_{}{}".format(*torch.cuda.get_device_capability())
    known = load_tunings(ROOT / "platforms/kvhal_cuda/tuning.yaml")
    if torch.version.hip is None and arch in known:
        launch.set_tuning(0, known[arch])
    print(json.dumps({"device": torch.cuda.get_device_name(), "arch": arch, "torch": torch.__version__}))
    for nbytes in (69 << 20, 277 << 20, 1107 << 20):
        took = reading(nbytes)
        print(f"read {nbytes >> 20} MiB: {took:.1f} us {nbytes / took / 1e3:.0f} GB/s", flush=True)
    shapes = SHAPES[:7] if quick else SHAPES
    for mode in MODES:
        for seqs, length in shapes:
            print("decode", mode, f"{seqs}x{length}", decode(mode, seqs, length), flush=True)
    for mode in MODES[:1] if quick else MODES[:3]:
        print("inline", mode, "64x8192", decode(mode, 64, 8192, kind="inline"), flush=True)
        print("verify4", mode, "64x8192", decode(mode, 64, 8192, queries=4), flush=True)
        print("verify8", mode, "64x8192", decode(mode, 64, 8192, queries=8), flush=True)
    for group in (1, 8, 16):
        print("group", group, "int8 64x8192", decode(MODES[0], 64, 8192, group=group), flush=True)
    for dim in (64, 256):
        print("dim", dim, "int8 64x4096", decode(MODES[0], 64, 4096, dim=dim), flush=True)
    rng = np.random.default_rng(0)
    ragged = torch.tensor(rng.integers(1, 16384, 64), dtype=torch.int32, device="cuda")
    print("ragged int8 64x<=16k", decode(MODES[0], 64, 16384, lengths=ragged), flush=True)
    for mode in MODES[:3]:
        for count in STORES:
            print("store", mode, count, stores(mode, count), flush=True)


if __name__ == "__main__":
    main()

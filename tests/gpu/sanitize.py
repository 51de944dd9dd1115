"""Every kernel once on tiny shapes, for compute-sanitizer.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 9 \
        python -m tests.gpu.sanitize [--raw] [mode …]

The same for --tool racecheck and --tool initcheck. Without caching every tensor is its own allocation, so memcheck sees
the end of each. --raw leaves the cache as it was allocated; a reader loads whole tiles and hides what no token wrote,
which initcheck then reports.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from typing import Any

# Before torch is imported, which reads it once.
os.environ.setdefault("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")

import torch

import kvhal
from kvhal import CacheSpec, Policy
from kvhal.hal import Hal
from tests.kernels import staged
from tests.kernels.oracle import make
from tests.kernels.test_attend import Batch

MODES = ("int8_per_token_head", "int4_per_token_head", "fp8_per_token_head")
KINDS = ("tiled", "inline")
HEADS, QUERY_HEADS, DIM, SIZE = 2, 4, 64, 16
# Each length has a last block that is not full; the prompts are longer than what counts as decode (8 queries).
LENGTHS = (13, 40)
TABLE = ((3, 0, 0), (5, 1, 6))


def run(hal: Hal, mode: str, kind: str, *, is_raw: bool) -> None:
    """Store the prompts and attend to them, decode one token more, gather and copy."""
    scales: dict[str, Any] = {"k_scale": 0.02, "v_scale": 0.02} if mode.startswith("fp8_e") else {}
    spec = CacheSpec.uniform(
        mode=mode, num_layers=1, num_kv_heads=HEADS, head_dim=DIM, num_q_heads=QUERY_HEADS, block_size=SIZE, **scales
    )
    tokens = sum(LENGTHS)
    plan = hal.plan(
        spec, 8, max_seqs=2, max_tokens=tokens, layout=kind, addressing="counted", policy=Policy(experimental=True)
    )
    with hal.allocate(plan) as lease:
        if not is_raw:
            lease.poison()
        layer, step = lease.layer(0), lease.step()
        slots = [row[t // SIZE] * SIZE + t % SIZE for row, n in zip(TABLE, LENGTHS, strict=True) for t in range(n)]
        after = [row[n // SIZE] * SIZE + n % SIZE for row, n in zip(TABLE, LENGTHS, strict=True)]
        for where, queries, lengths in ((slots, LENGTHS, LENGTHS), (after, (1, 1), [n + 1 for n in LENGTHS])):
            rows = sum(queries)
            shape = (rows, HEADS, DIM)
            k, v = (torch.randn(shape, dtype=torch.bfloat16, device=lease.torch_device) for _ in range(2))
            q = torch.randn(rows, QUERY_HEADS, DIM, dtype=torch.bfloat16, device=lease.torch_device)
            step.update(
                slots=torch.tensor(where),
                block_table=torch.tensor(TABLE),
                seq_lens=torch.tensor(lengths),
                query_lens=torch.tensor(queries),
            )
            layer.store(k, v, step)
            out = layer.attend(q, step)
            if not bool(out.isfinite().all()):
                raise SystemExit(f"{mode} {kind}: attend of {rows} rows gave NaN or infinity")
        pairs = [(3, 4), (5, 2)] if not is_raw else [(5, 2)]
        lease.copy_blocks(pairs)
        at = torch.arange(SIZE, device=lease.torch_device)
        source, copied = (layer.gather(at + SIZE * block) for block in pairs[-1])
        if not all(torch.equal(a, b) for a, b in zip(source, copied, strict=True)):
            raise SystemExit(f"{mode} {kind}: the copied block differs")
        torch.cuda.synchronize()
    if lease.release is None or lease.release.pinned:
        raise SystemExit(f"{mode} {kind}: {lease.release}")
    sys.stdout.write(f"{mode} {kind}: store, attend (prefill, decode), copy_blocks, gather ran\n")


def run_staged(hal: Hal, mode: str, kind: str) -> None:
    """A prompt over its staged context, one that does not fit beside it, and a decode step, under the arch's tile."""
    tuning = hal.platform.tuning(hal.device.arch)  # type: ignore[attr-defined]  # both GPU adapters have it
    one = Batch(make(mode, kind=kind, blocks=24, dim=DIM), [90, 60, 70], [70, 1, 66], q_heads=QUERY_HEADS)
    tuning = staged.with_room(one, 3, replace(tuning, staged_rows=1))
    out, _, places = staged.attend(one, torch.device("cuda"), tuning)
    if places != [0, -1, -1] or not bool(out.isfinite().all()):
        raise SystemExit(f"{mode} {kind}: staged attend gave NaN, infinity, or other places: {places}")
    sys.stdout.write(f"{mode} {kind}: stage, prefill ran\n")


def main(arguments: list[str]) -> None:
    hal = kvhal.get("rocm" if torch.version.hip else "cuda")
    for mode in [a for a in arguments if not a.startswith("-")] or MODES:
        for kind in KINDS:
            run(hal, mode, kind, is_raw="--raw" in arguments)
            run_staged(hal, mode, kind)


if __name__ == "__main__":
    main(sys.argv[1:])

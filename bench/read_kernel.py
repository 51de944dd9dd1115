# mypy: disable-error-code="no-untyped-def,misc,untyped-decorator,attr-defined"
# ruff: noqa: ANN001, ANN201, N803
# Triton's dialect: arguments have no Python types, constants are upper-case.
"""Reading memory and nothing else: the most that any kernel that reads a cache can reach."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["read_kernel"]


@triton.jit
def read_kernel(words, sums, blocks: tl.int32, BLOCK: tl.constexpr):
    """Sum int32 words [blocks * BLOCK]: program p adds up blocks p, p + programs, … (modulo 2^32) into sums[p]."""
    program = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    start = program.to(tl.int64) * BLOCK
    total = tl.zeros([BLOCK], tl.int32)
    for _ in range(program, blocks, tl.num_programs(0)):
        total += tl.load(words + start + lane)
        start += tl.num_programs(0) * BLOCK
    tl.store(sums + program, tl.sum(total, axis=0))

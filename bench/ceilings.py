"""The rates that no kernel of this run can pass: reading memory once, and copying it.

Both are measured at three sizes, since a short read pays for starting and ending; a case takes the ceiling nearest in
size as its floor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from bench.read_kernel import read_kernel
from bench.results import COPY, READ, Ceiling
from bench.timing import Call, Timer, Timing, rotations

__all__ = ["SIZES", "VARIANTS", "ReadVariant", "launch_read", "measure"]

# What decode reads of int8 rows (264 bytes a token and head, 8 heads) at 32 768, 131 072 and 524 288 tokens.
SIZES = (69_206_016, 276_824_064, 1_107_296_256)


@dataclass(frozen=True, slots=True)
class ReadVariant:
    """How the read kernel is launched. block: int32 words read at a time. programs: most a multiprocessor."""

    block: int
    num_warps: int
    programs: int


# Every size of SIZES is a multiple of both blocks. The fastest at a size is the ceiling there.
VARIANTS = tuple(
    ReadVariant(block, warps, programs) for block, warps in ((4096, 4), (2048, 4)) for programs in (4, 8, 16, 32)
)


def launch_read(words: Tensor, sums: Tensor, variant: ReadVariant) -> None:
    """Read `words` int32 [n] once; n must be a multiple of the block. sums: int32, one for each program."""
    read_kernel[(sums.shape[0],)](
        words, sums, words.shape[0] // variant.block, BLOCK=variant.block, num_warps=variant.num_warps
    )


def measure(timer: Timer, device: torch.device, sizes: Sequence[int] = SIZES) -> Iterator[Ceiling]:
    """The read and the copy ceiling at each size, in bytes moved: a copy of half as much moves `size` bytes."""
    for nbytes in sizes:
        words = [torch.zeros(nbytes // 4, dtype=torch.int32, device=device) for _ in range(rotations(nbytes))]
        best = min((timer(_reads(words, variant)) for variant in VARIANTS), key=lambda timing: timing.us)
        yield _ceiling(READ, nbytes, best)
        copies: list[Call] = []
        for source in words:
            half = source.shape[0] // 2
            copies.append(partial(source[half : 2 * half].copy_, source[:half]))
        yield _ceiling(COPY, nbytes, timer(copies))


def _reads(words: Sequence[Tensor], variant: ReadVariant) -> list[Call]:
    programs = min(words[0].shape[0] // variant.block, variant.programs * _processors(words[0].device))
    sums = torch.empty(programs, dtype=torch.int32, device=words[0].device)
    return [partial(launch_read, each, sums, variant) for each in words]


def _ceiling(kind: str, nbytes: int, timing: Timing) -> Ceiling:
    return Ceiling(kind, nbytes, timing.us, timing.spread_us)


def _processors(device: torch.device) -> int:
    # The interpreter has one thread; two programs show that they share the work.
    return 2 if device.type == "cpu" else int(torch.cuda.get_device_properties(device).multi_processor_count)

"""How many cycles the shared memory of CUDA takes for what a compiled kernel reads there, from Triton's own layouts.

A child process, like every compilation: `python -m tests.triton.shared_memory FILE.yaml` reads jobs as JSON lines and
writes for each of them the loads of three dimensions (values; keys and words have one or two more readers).
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections import defaultdict
from pathlib import Path

from kvhal.kernels.aot import Job
from kvhal.kernels.triton.compile import compiled_for
from kvhal.kernels.triton.tuning import load_tunings

BANKS, BANK_BYTES = 32, 4
ITEMSIZE = {"i8": 1, "i16": 2, "f16": 2, "bf16": 2, "i32": 4}
LINEAR = re.compile(r"^(#linear\d*) = #ttg.linear<\{register = (.*?), lane = (.*?), warp =", re.MULTILINE)
SHARED = re.compile(
    r"^(#shared\d*) = #ttg.swizzled_shared<\{vec = 1, perPhase = 1, maxPhase = 1, order = (\[.*?\])\}>", re.MULTILINE
)
LOAD = re.compile(r"ttg.local_load .*? : !ttg.memdesc<([0-9x]+)x(\w+), (#shared\d*),.*?-> tensor<[^,]*, (#linear\d*)>")
DIMENSIONS = 3


def cycles(text: str) -> list[tuple[list[int], int]]:
    """(shape, cycles of one load instruction) of each load of an unswizzled three-dimensional buffer."""
    layouts = {m[1]: (ast.literal_eval(m[2]), ast.literal_eval(m[3])) for m in LINEAR.finditer(text)}
    orders = {m[1]: ast.literal_eval(m[2]) for m in SHARED.finditer(text)}
    found = []
    for shape_, kind, shared, linear in set(LOAD.findall(text)):
        shape = [int(n) for n in shape_.split("x")]
        if len(shape) != DIMENSIONS or shared not in orders or linear not in layouts:
            continue
        strides, size = [0] * len(shape), ITEMSIZE[kind]
        for dimension in orders[shared]:
            strides[dimension], size = size, size * shape[dimension]
        registers, lanes = ([sum(map(int.__mul__, base, strides)) for base in part] for part in layouts[linear])
        width = ITEMSIZE[kind]
        while width in registers and width < BANK_BYTES:
            width *= 2
        banks = defaultdict(set)
        for lane in range(32):
            offset = sum(base for bit, base in enumerate(lanes) if lane >> bit & 1)
            banks[offset // BANK_BYTES % BANKS].add(offset // BANK_BYTES)
        found.append((shape, max(map(len, banks.values()))))
    return found


if __name__ == "__main__":
    tunings = load_tunings(Path(sys.argv[1]))
    for line in sys.stdin:
        job = Job(**json.loads(line))
        print(json.dumps(cycles(compiled_for(job, tunings[job.arch]).asm["ttgir"])), flush=True)  # noqa: T201

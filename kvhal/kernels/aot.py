"""What the kernels become on an arch that is not here: compiled ahead of time, their machine code read.

`compile_all` needs triton installed and no GPU. Each job runs in a child process, because Triton aborts the process on
some targets; a child that dies fails its own job only. The parent imports neither torch nor triton.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

from kvhal.kernels.geometry import LayerGeometry
from kvhal.kernels.listing import NO_LOOP, LoopCount
from kvhal.kernels.triton.tuning import DEFAULT, PHASES, Tuning
from kvhal.kernels.triton.workspace import AttendCut
from kvhal.layout import Layout
from kvhal.spec import CacheSpec

__all__ = [
    "ARCHES",
    "CODELESS",
    "KERNELS",
    "PHASES",
    "Compiled",
    "Job",
    "compile_all",
    "cut_of",
    "geometry_of",
    "jobs_of",
    "shared_limit",
    "tokens_of",
]

NVIDIA = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
AMD = ("gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201")
ARCHES = NVIDIA + AMD
KERNELS = ("store", "gather", "attend", "stage", "prefill", "reduce", "sequences", "schedule", "move")
# Those that read no codes: one compile serves every mode.
CODELESS = ("prefill", "reduce", "sequences", "schedule", "move")
MODES = (
    ("bfloat16", "bfloat16"),
    ("float16", "float16"),
    ("fp8_e4m3", "e4m3fn"),
    ("fp8_e4m3", "e4m3fnuz"),
    ("fp8_e5m2", "e5m2"),
    ("fp8_e5m2", "e5m2fnuz"),
    ("int8_per_token_head", "int8"),
    ("fp8_per_token_head", "e4m3fn"),
    ("fp8_per_token_head", "e4m3fnuz"),
    ("int4_per_token_head", "int4"),
)
# Bytes of shared memory (LDS) a program may use: CUDA C++ Programming Guide, compute capabilities; AMD's ISA documents.
_SHARED = {
    "sm_80": 163 << 10,
    "sm_86": 99 << 10,
    "sm_89": 99 << 10,
    "sm_90": 227 << 10,
    "sm_100": 227 << 10,
    "sm_120": 99 << 10,
    "gfx950": 160 << 10,
}
_AMD_SHARED = 64 << 10
# Query tokens a sequence: one, four to verify, a chunk of a prompt.
_TOKENS = {"decode": 1, "verify": 4, "prefill": 64}
_SEQUENCES = 64


@dataclass(frozen=True, slots=True)
class Job:
    """One kernel to compile.

    phase: one of `tuning.PHASES`; for store: one token or sixteen.
    """

    kernel: str
    mode: str
    encoding: str
    arch: str
    layout: str = "tiled"
    phase: str = "decode"
    dtype: str = "bfloat16"
    head_dim: int = 128
    group: int = 4
    softcap: bool = False


@dataclass(frozen=True, slots=True)
class Compiled:
    """What a job's machine code holds, or why there is none.

    scratch: bytes a thread of memory for spilled registers. wide_loads, wide_stores: instructions that move 16 bytes.
    matrix: matrix instructions. conversions: 8-bit float conversion instructions. loop: of attend, one turn of the loop
    that most tiles of keys go through (`cut.keys` of them a turn), in each of the program's warps.
    """

    job: Job
    ok: bool
    error: str = ""
    seconds: float = 0.0
    registers: int = 0
    scratch: int = 0
    shared: int = 0
    instructions: int = 0
    wide_loads: int = 0
    wide_stores: int = 0
    matrix: int = 0
    conversions: int = 0
    loop: LoopCount = NO_LOOP

    @property
    def loop_instructions(self) -> int:
        """Instructions of one turn of the hot loop in one warp; 0 where there is none."""
        return self.loop.instructions


def jobs_of(
    arches: Iterable[str] = ARCHES,
    modes: Iterable[tuple[str, str]] = MODES,
    layouts: Iterable[str] = ("tiled", "inline"),
    kernels: Iterable[str] = KERNELS,
    phases: Iterable[str] = PHASES,
    head_dims: Iterable[int] = (128,),
) -> Iterator[Job]:
    """Every kernel for every mode, layout, phase, head size and arch given; those that read no codes for one mode."""
    asked, sizes = tuple(phases), tuple(head_dims)
    for arch in arches:
        for kernel in kernels:
            if kernel in CODELESS:
                shapes = product(asked, sizes) if kernel == "reduce" else [("decode", 128)]
                for phase, size in shapes:
                    yield Job(kernel, "int8_per_token_head", "int8", arch, phase=phase, head_dim=size)
                continue
            has = {"store": ("decode", "prefill"), "gather": ("decode",), "attend": PHASES, "stage": ("prefill",)}[
                kernel
            ]
            for mode, encoding in modes:
                for layout in layouts:
                    # Staging has no other phase than prompts, so it is asked for whatever the phases of attend.
                    for phase in (p for p in has if p in asked or kernel == "stage"):
                        for head_dim in sizes:
                            yield Job(kernel, mode, encoding, arch, layout, phase, head_dim=head_dim)


def compile_all(jobs: Iterable[Job], tunings: Mapping[str, Tuning] | None = None) -> Iterator[Compiled]:
    """Compile jobs one after another, in child processes. tunings: by arch; the default's row for those not in it."""
    known = tunings or {}
    left = list(jobs)
    while left:
        done = 0
        for found in _child(left, known):
            done += 1
            yield found
        if done < len(left):
            yield Compiled(left[done], ok=False, error="the compiler ended the process")
            done += 1
        left = left[done:]


def shared_limit(arch: str) -> int:
    """Bytes of shared memory a program may use on `arch`."""
    return _SHARED.get(arch, _AMD_SHARED)


def geometry_of(job: Job) -> LayerGeometry:
    """A layer of 8 kv heads in the job's mode."""
    static = job.mode.startswith("fp8_e")
    spec = CacheSpec.uniform(
        mode=job.mode,
        encoding=job.encoding,
        num_layers=1,
        num_kv_heads=8,
        head_dim=job.head_dim,
        num_q_heads=8 * job.group,
        k_scale=1.0 if static else None,
        v_scale=1.0 if static else None,
    )
    return LayerGeometry.of(Layout.of(spec, 4, kind=job.layout), 0)


def cut_of(job: Job, tuning: Tuning) -> AttendCut:
    """How the attend of a job is cut: of 64 sequences, with the queries its phase says."""
    g = geometry_of(job)
    return AttendCut.of(g, job.group * g.num_kv_heads, tokens_of(job), _SEQUENCES, job.dtype, tuning)


def tokens_of(job: Job) -> int:
    """Query tokens of a job's call."""
    return _SEQUENCES * _TOKENS[job.phase]


def _child(jobs: list[Job], tunings: Mapping[str, Tuning]) -> Iterator[Compiled]:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    lines = [json.dumps({"job": asdict(job), "tuning": tunings.get(job.arch, DEFAULT).plain()}) for job in jobs]
    with subprocess.Popen(
        [sys.executable, "-m", "kvhal.kernels.triton.compile"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environment,
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        for line, job in zip(lines, jobs, strict=True):
            try:
                child.stdin.write(line + "\n")
                child.stdin.flush()
            except BrokenPipeError:
                return
            answer = child.stdout.readline()
            if not answer:
                return
            values: dict[str, Any] = json.loads(answer)
            values.pop("job")
            values["loop"] = LoopCount(**values.pop("loop", {}))
            yield Compiled(job, **values)
        child.stdin.close()

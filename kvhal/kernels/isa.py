"""What must hold of a kernel's machine code on an arch, whatever it computes. No torch, no triton."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from kvhal.kernels.aot import CODELESS, Compiled, Job, cut_of, shared_limit
from kvhal.kernels.triton.tuning import Tuning
from kvhal.modes import ENCODINGS

__all__ = ["covers", "job_name", "problems", "worst"]

# Tokens of a gather program and warps of a stage program; the same as in `launch`.
_GATHER_TOKENS = 4
_STAGE_WARPS = 4
_WIDE_BYTES = 16


def problems(found: Compiled, tuning: Tuning, inline: Compiled | None = None) -> tuple[str, ...]:
    """What is wrong with a compiled kernel; () if nothing is.

    inline: the same job over inline pages, where it was compiled: it says how many loads of 16 bytes are not of codes.
    """
    return tuple(_problems(found, tuning, inline))


def job_name(job: Job) -> str:
    """A job in one line, its arch left out."""
    if job.kernel in CODELESS:
        return f"{job.kernel} {job.phase} head_dim {job.head_dim}" if job.kernel == "reduce" else job.kernel
    return f"{job.kernel} {job.phase} {job.encoding} {job.layout} head_dim {job.head_dim}"


def covers(jobs: Iterable[Job]) -> tuple[str, ...]:
    """Every job, those that differ in layout and head_dim alone in one line."""
    lines: dict[str, dict[str, list[str]]] = {}
    for job in jobs:
        if job.kernel in CODELESS:
            lines.setdefault(job.kernel, {})
            continue
        head = f"{job.kernel} {job.phase} {job.encoding} (q {job.dtype}, {job.group} query heads a kv head)"
        lines.setdefault(head, {}).setdefault(job.layout, []).append(str(job.head_dim))
    return tuple(
        ": ".join([head, *(["; ".join(f"{k} head_dim {' '.join(v)}" for k, v in of.items())] if of else [])])
        for head, of in lines.items()
    )


def worst(found: Iterable[Compiled]) -> dict[str, float | None]:
    """The largest figures of kernels that compiled."""
    compiled = [f for f in found if f.ok]
    return {
        "bytes of scratch a thread": float(max((f.scratch for f in compiled), default=0)),
        "bytes of shared memory": float(max((f.shared for f in compiled), default=0)),
        "registers": float(max((f.registers for f in compiled), default=0)),
    }


def _problems(found: Compiled, tuning: Tuning, inline: Compiled | None) -> Iterator[str]:
    job = found.job
    if not found.ok:
        yield f"it does not compile: {found.error}"
        return
    if found.scratch:
        yield f"it spills {found.scratch} bytes a thread to memory"
    if found.shared > shared_limit(job.arch):
        yield f"it needs {found.shared} bytes of shared memory and {job.arch} has {shared_limit(job.arch)}"
    if found.wide_loads < (least := _least_wide_loads(job, tuning, inline)):
        yield f"{found.wide_loads} loads of 16 bytes were found; with those of codes there are at least {least}"
    if job.kernel in ("attend", "prefill") and not found.matrix:
        yield "no matrix instruction was found"
    if job.kernel in ("store", "attend", "stage") and job.encoding in tuning.hardware and not found.conversions:
        yield f"no conversion instruction of {job.encoding} was found, which the tuning row leaves to the hardware"


def _least_wide_loads(job: Job, tuning: Tuning, inline: Compiled | None) -> int:
    """Loads of 16 bytes there must be if they read codes: where pages are tiled and a lane's share is as much."""
    if job.layout != "tiled" or job.kernel not in ("gather", "attend", "stage"):
        return 0
    tokens, warps = _tile(job, tuning)
    lanes = warps * (64 if job.arch.startswith("gfx9") else 32)
    # One tile of K or V; queries are read wide as well, so this alone is weak where a tile is small.
    least = tokens * ENCODINGS[job.encoding].row_bytes(job.head_dim) // (_WIDE_BYTES * lanes)
    # Inline rows lie beside their words, aligned for no wide load; without words both pages are alike.
    if least and job.mode.endswith("per_token_head") and inline is not None and inline.ok:
        return max(least, inline.wide_loads + 1)
    return least


def _tile(job: Job, tuning: Tuning) -> tuple[int, int]:
    """(tokens, warps) of a program that reads codes."""
    if job.kernel == "gather":
        return _GATHER_TOKENS, 1
    if job.kernel == "stage":
        return tuning.staged.keys, _STAGE_WARPS
    cut = cut_of(job, tuning)
    return cut.keys, cut.num_warps

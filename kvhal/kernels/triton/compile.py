"""Compiles kernels for an arch that need not be here and reads the machine code: the child process of `aot.py`.

Triton may abort the process on a target it does not support, so this never runs in the process that asks. Reads jobs as
JSON lines on stdin, writes one JSON line a job on stdout.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kvhal.kernels.aot import Job, cut_of, geometry_of, tokens_of
from kvhal.kernels.listing import amd_loop, amd_names, nvidia_loop, nvidia_names
from kvhal.kernels.triton import launch, specialise
from kvhal.kernels.triton.attend import attend_kernel
from kvhal.kernels.triton.constants import Page
from kvhal.kernels.triton.copy_blocks import move_kernel
from kvhal.kernels.triton.gather import gather_kernel
from kvhal.kernels.triton.prefill import prefill_kernel
from kvhal.kernels.triton.reduce import reduce_kernel
from kvhal.kernels.triton.schedule import schedule_kernel, sequences_kernel
from kvhal.kernels.triton.stage import stage_kernel
from kvhal.kernels.triton.store import store_kernel
from kvhal.kernels.triton.tuning import Tuning

__all__ = ["compile_job", "main"]

POINTERS = {
    "cache": "*u8",
    "workspace": "*u8",
    "strip": "*u8",
    "slots": "*i64",
    "pairs": "*i64",
    "block_table": "*i32",
    "seq_lens": "*i32",
    "query_starts": "*i32",
    "sinks": "*fp32",
    "lse": "*fp32",
}
# Eight bytes a layer, so only every second one is aligned.
UNALIGNED = ("scales_offset",)
TYPES = {"bfloat16": "*bf16", "float16": "*fp16", "float32": "*fp32"}
WAVE_64 = "gfx9"


def compile_job(job: Job, tuning: Tuning) -> dict[str, Any]:
    """Compile one kernel and say what its machine code holds."""
    kernel, constants, options = _source(job, tuning)
    signature: dict[str, str] = {}
    values: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}
    for index, parameter in enumerate(kernel.params):
        if parameter.is_constexpr:
            signature[parameter.name], values[index,] = "constexpr", constants[parameter.name]
            continue
        kind = parameter.annotation_type or POINTERS.get(parameter.name, TYPES[job.dtype])
        signature[parameter.name] = kind
        if not parameter.do_not_specialize and parameter.name not in UNALIGNED:
            attributes[index,] = [["tt.divisibility", 16]]
    started = time.perf_counter()
    compiled = triton.compile(
        ASTSource(kernel, signature, values, attributes), target=_target(job.arch), options=options
    )
    found: dict[str, Any] = {"seconds": round(time.perf_counter() - started, 2), "shared": compiled.metadata.shared}
    if job.arch.startswith("gfx"):
        return found | _read_amd(compiled.asm["amdgcn"])
    return found | _read_nvidia(compiled.asm["cubin"])


def main() -> None:
    """Work through the jobs on stdin."""
    for line in sys.stdin:
        given = json.loads(line)
        job, tuning = Job(**given["job"]), Tuning.parse(given["tuning"])
        try:
            found = {"ok": True} | compile_job(job, tuning)
        except Exception as exc:  # noqa: BLE001  # any failure is this job's result
            cause: BaseException = exc
            while cause.__cause__ is not None:
                cause = cause.__cause__
            found = {"ok": False, "error": f"{type(cause).__name__}: {str(cause)[-400:]}"}
        print(json.dumps({"job": asdict(job)} | found), flush=True)  # noqa: T201  # the protocol


def _source(job: Job, tuning: Tuning) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    g = geometry_of(job)
    page = Page.of(g)
    if job.kernel == "move":
        return move_kernel, {"BYTES": 8, "BLOCK": launch.MOVE_ITEMS}, {"num_warps": 4}
    if job.kernel == "store":
        tokens = 1 if job.phase == "decode" else specialise.STORE_TOKENS
        constants = {"P": page, "TOKENS": tokens, **specialise.hardware_of(g, tuning), "PACKED": tuning.packed}
        return store_kernel, constants, specialise.store_options(g, tokens, tuning)
    if job.kernel == "gather":
        return gather_kernel, {"P": page, "TOKENS": 4}, specialise.EXACT | {"num_warps": 1}
    if job.kernel == "stage":
        return (
            stage_kernel,
            {"P": page} | specialise.stage_constants(g, tuning.staged, tuning),
            specialise.stage_options(tuning.staged),
        )
    if job.kernel == "prefill":
        constants = specialise.prefill_constants(g, job.group, tuning.staged, softcap=job.softcap)
        return prefill_kernel, constants, specialise.tile_options(tuning.staged)
    cut = cut_of(job, tuning)
    common = {"P": page, "TOKENS": cut.tokens, "KEYS": cut.keys, "PROLOGUE": tuning.prologue}
    if job.kernel == "sequences":
        return sequences_kernel, common | {"CHUNK": launch.SEQUENCE_CHUNK}, {"num_warps": 1}
    if job.kernel == "schedule":
        shape = {"CHUNK": specialise.SCHEDULE_CHUNK, "STAGE_KEYS": tuning.staged.keys}
        return schedule_kernel, common | shape, {"num_warps": 1}
    if job.kernel == "reduce":
        shape = specialise.reduce_constants(
            g, job.group * g.num_kv_heads, cut, tokens_of(job), cut.slots // 2, tuning, is_prompt=cut.prefill
        )
        return reduce_kernel, {"P": page} | shape, specialise.reduce_options(shape)
    constants = specialise.attend_constants(g, job.group, cut, tuning, softcap=job.softcap)
    return attend_kernel, {"P": page} | constants, specialise.tile_options(cut)


def _target(arch: str) -> GPUTarget:
    if arch.startswith("gfx"):
        return GPUTarget("hip", arch, 64 if arch.startswith(WAVE_64) else 32)
    return GPUTarget("cuda", int(arch.removeprefix("sm_")), 32)


def _read_nvidia(cubin: bytes) -> dict[str, Any]:
    tools = Path(triton.__file__).parent / "backends/nvidia/bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = _run(tools / "cuobjdump", "--dump-resource-usage", file.name)
        listing = _run(tools / "nvdisasm", "-c", file.name)
    figures = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", usage)
    assert figures is not None, usage
    names = nvidia_names(listing)
    return {
        "registers": int(figures[1]),
        "scratch": int(figures[2]) + int(figures[3]),
        "instructions": len(names),
        "wide_loads": _count(names, r"^(LDGSTS|LDG).*\.128"),
        "wide_stores": _count(names, r"^STG.*\.128"),
        "matrix": _count(names, r"MMA"),
        "conversions": _count(names, r"^F2FP.*E4M3|^F2F?P?\.F16\.E4M3|E4M3"),
        "loop": asdict(nvidia_loop(listing)),
    }


def _read_amd(text: str) -> dict[str, Any]:
    def figure(name: str) -> int:
        found = re.search(rf"\.{name}:\s+(\d+)", text)
        return int(found[1]) if found else 0

    names = amd_names(text)
    return {
        "registers": figure("vgpr_count"),
        "scratch": figure("private_segment_fixed_size"),
        "instructions": len(names),
        "wide_loads": _count(names, r"^(global|buffer|flat)_load_(dwordx4|b128)"),
        "wide_stores": _count(names, r"^(global|buffer|flat)_store_(dwordx4|b128)"),
        "matrix": _count(names, r"^v_(mfma|wmma|smfmac)"),
        "conversions": _count(names, r"^v_cvt_.*(fp8|bf8)"),
        "loop": asdict(amd_loop(text)),
    }


def _count(names: list[str], pattern: str) -> int:
    return sum(n for name, n in Counter(names).items() if re.search(pattern, name))


def _run(tool: Path, *arguments: str) -> str:
    # Our own two tools, out of the triton package.
    return subprocess.run([str(tool), *arguments], capture_output=True, text=True, check=True).stdout  # noqa: S603


if __name__ == "__main__":
    main()

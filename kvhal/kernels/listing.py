"""Machine code as text: which instructions a kernel's hot loop holds. No torch, no triton."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

__all__ = ["LoopCount", "amd_loop", "amd_names", "count_loop", "nvidia_loop", "nvidia_names"]


@dataclass(frozen=True, slots=True)
class LoopCount:
    """Instructions of one warp in one turn of a loop, by the unit that executes them.

    matrix8: matrix instructions over 8-bit and 4-bit integers; matrix: all others. slow: those of `vector` that run at a
    quarter of its rate (exponents, reciprocals, products of 32-bit integers). memory: of global memory; shared: of shared
    memory (LDS). other: waits, barriers and branches. All zero where no loop holds matrix instructions.
    """

    vector: int = 0
    slow: int = 0
    matrix: int = 0
    matrix8: int = 0
    memory: int = 0
    shared: int = 0
    scalar: int = 0
    other: int = 0

    @property
    def instructions(self) -> int:
        """All of them; `slow` is a part of `vector`."""
        return sum(getattr(self, f.name) for f in fields(self)) - self.slow


_Kind = tuple[tuple[str, str], ...]
# The first pattern that a name matches says its kind.
_AMD: _Kind = (
    ("matrix8", r"v_(mfma|smfmac|wmma|swmmac)_i32_"),
    ("matrix", r"v_(mfma|smfmac|wmma|swmmac)_"),
    ("slow", r"v_(exp|log|rcp|rsq|sqrt|sin|cos)_|v_mul_(lo|hi)_[iu]32|v_mad_(u64_u32|i64_i32)"),
    ("vector", r"v_"),
    ("memory", r"(global|buffer|flat|scratch)_"),
    ("shared", r"ds_"),
    ("other", r"s_(wait|nop|delay|barrier|c?branch|sleep|sched|setprio|clause|inst_prefetch|set_inst_prefetch)"),
    ("scalar", r"s_"),
)
_NVIDIA: _Kind = (
    ("matrix8", r"IMMA"),
    ("matrix", r"[A-Z]*MMA|HGMMA|[A-Z]*GMMA"),
    ("slow", r"MUFU|F2I|I2F|POPC|FLO"),
    ("shared", r"LDS|STS|ATOMS"),
    ("other", r"BAR|BRA|NOP|DEPBAR|LDGDEPBAR|SYNCS|BSSY|BSYNC|WARPSYNC|EXIT|YIELD|ACQ|UBLK|ERRBAR|MEMBAR|CCTL"),
    ("memory", r"LD|ST|ATOM|RED"),
    ("scalar", r"U[A-Z]|R2UR|S2UR|S2R|CS2R"),
    ("vector", r""),
)
_AMD_LINE = re.compile(r"^(?:\t(?P<name>[a-z][a-z0-9_]+)(?P<rest>[^;\n]*)|(?P<label>\.LBB[0-9_]+):)", re.MULTILINE)
_AMD_BRANCH = re.compile(r"(\.LBB[0-9_]+)")
_NVIDIA_LINE = re.compile(
    r"^(?:\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P[0-9T]+\s+)?(?P<name>[A-Z0-9_.]+)(?P<rest>[^;\n]*)|(?P<label>\.L_x_[0-9]+):)",
    re.MULTILINE,
)
_NVIDIA_BRANCH = re.compile(r"`\((\.L_x_[0-9]+)\)")


def amd_names(text: str) -> list[str]:
    """The instructions of an amdgcn listing, in order."""
    return _read(text, _AMD_LINE, _AMD_BRANCH)[0]


def nvidia_names(text: str) -> list[str]:
    """The instructions of an `nvdisasm -c` listing, in order."""
    return _read(text, _NVIDIA_LINE, _NVIDIA_BRANCH)[0]


def amd_loop(text: str) -> LoopCount:
    """The hot loop of an amdgcn listing."""
    return count_loop(*_read(text, _AMD_LINE, _AMD_BRANCH), _AMD)


def nvidia_loop(text: str) -> LoopCount:
    """The hot loop of an `nvdisasm -c` listing."""
    return count_loop(*_read(text, _NVIDIA_LINE, _NVIDIA_BRANCH), _NVIDIA)


def count_loop(names: Sequence[str], backward: Iterable[tuple[int, int]], kinds: _Kind) -> LoopCount:
    """The shortest of the innermost loops that hold matrix instructions. backward: (first, last instruction) of loops.

    An attend kernel has one loop over tiles of keys, or two: then the longer one masks, and few tiles need it.
    """
    kind_of = {name: next(kind for kind, pattern in kinds if re.match(pattern, name)) for name in set(names)}
    ends: dict[int, int] = {}
    for first, last in backward:
        if any(kind_of[name] in ("matrix", "matrix8") for name in names[first : last + 1]):
            ends[first] = max(last, ends.get(first, last))
    loops = ends.items()
    inner = [
        (first, last)
        for first, last in loops
        if not any((a, z) != (first, last) and first <= a and z <= last for a, z in loops)
    ]
    if not inner:
        return LoopCount()
    first, last = min(inner, key=lambda loop: loop[1] - loop[0])
    counts = dict.fromkeys((f.name for f in fields(LoopCount)), 0)
    for name in names[first : last + 1]:
        counts[kind_of[name]] += 1
    counts["vector"] += counts["slow"]
    return LoopCount(**counts)


def _read(text: str, line: re.Pattern[str], branch: re.Pattern[str]) -> tuple[list[str], list[tuple[int, int]]]:
    """(instructions, (first, last) of every backward branch)."""
    names: list[str] = []
    labels: dict[str, int] = {}
    backward: list[tuple[int, int]] = []
    for found in line.finditer(text):
        if found["label"] is not None:
            labels[found["label"]] = len(names)
            continue
        target = branch.search(found["rest"])
        if target is not None and target[1] in labels:
            backward.append((labels[target[1]], len(names)))
        names.append(found["name"])
    return names, backward

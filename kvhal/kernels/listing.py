"""Machine code as text: which instructions a kernel's hot loop holds. No torch, no triton."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from heapq import heappop, heappush

__all__ = ["NO_LOOP", "LoopCount", "amd_loop", "amd_names", "nvidia_loop", "nvidia_names"]


@dataclass(frozen=True, slots=True)
class LoopCount:
    """Instructions of one warp in one turn of a loop, by the unit that executes them.

    matrix8: matrix instructions over 8-bit integers; matrix: all others. slow: those of `vector` that run at a quarter
    of its rate (exponents, reciprocals, products of 32-bit integers). memory: of global memory; shared: of LDS. other:
    waits, barriers and branches. All zero where no loop holds matrix instructions.
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
        products = self.matrix + self.matrix8
        return self.vector + products + self.memory + self.shared + self.scalar + self.other


NO_LOOP = LoopCount()

_Kinds = tuple[tuple[str, str], ...]
# The first pattern that a name matches says its kind.
_AMD: _Kinds = (
    ("matrix8", r"v_(mfma|smfmac|wmma|swmmac)_i32_"),
    ("matrix", r"v_(mfma|smfmac|wmma|swmmac)_"),
    ("slow", r"v_(exp|log|rcp|rsq|sqrt|sin|cos)_|v_mul_(lo|hi)_[iu]32|v_mad_(u64_u32|i64_i32)"),
    ("vector", r"v_"),
    ("memory", r"(global|buffer|flat|scratch)_"),
    ("shared", r"ds_"),
    ("other", r"s_(wait|nop|delay|barrier|c?branch|sleep|sched|setprio|clause|inst_prefetch|set_inst_prefetch)"),
    ("scalar", r"s_"),
)
_NVIDIA: _Kinds = (
    ("matrix8", r"IMMA"),
    ("matrix", r"[A-Z]*MMA|HGMMA|[A-Z]*GMMA"),
    ("slow", r"MUFU|F2I|I2F|POPC|FLO"),
    ("shared", r"LDS|STS|ATOMS"),
    ("other", r"BAR|BRA|NOP|DEPBAR|LDGDEPBAR|SYNCS|BSSY|BSYNC|WARPSYNC|EXIT|YIELD|ACQ|UBLK|ERRBAR|MEMBAR|CCTL"),
    ("memory", r"LD|ST|ATOM|RED"),
    ("scalar", r"U[A-Z]|R2UR|S2UR|S2R|CS2R"),
    ("vector", r""),
)
_AMD_LINE = re.compile(
    r"^(?:(?P<label>\.LBB[0-9_]+):|\t(?P<guard>)(?P<name>[a-z][a-z0-9_]+)(?P<rest>[^;\n]*))", re.MULTILINE
)
_NVIDIA_LINE = re.compile(
    r"^(?:(?P<label>\.L_x_[0-9]+):"
    r"|\s+/\*[0-9a-f]+\*/\s+(?P<guard>@!?U?P[0-9T]+\s+)?(?P<name>[A-Z0-9_.]+)(?P<rest>[^;\n]*))",
    re.MULTILINE,
)
_TARGET = re.compile(r"\.(?:LBB|L_x_)[0-9_]+")
_JUMP = re.compile(r"s_branch$|s_cbranch_|BRA")
_NEVER_FALLS_THROUGH = re.compile(r"s_branch$|s_endpgm$|s_setpc|BRA|EXIT$|RET")


def amd_names(text: str) -> list[str]:
    """The instructions of an amdgcn listing, in order."""
    return [name for block in _blocks(text, _AMD_LINE) for name in block.names]


def nvidia_names(text: str) -> list[str]:
    """The instructions of an `nvdisasm -c` listing, in order."""
    return [name for block in _blocks(text, _NVIDIA_LINE) for name in block.names]


def amd_loop(text: str) -> LoopCount:
    """The hot loop of an amdgcn listing."""
    return _count(_blocks(text, _AMD_LINE), _AMD)


def nvidia_loop(text: str) -> LoopCount:
    """The hot loop of an `nvdisasm -c` listing."""
    return _count(_blocks(text, _NVIDIA_LINE), _NVIDIA)


@dataclass(slots=True)
class _Block:
    """Instructions that run one after another. jumps: the label it may go to; falls: or to the next."""

    names: list[str]
    label: str | None = None
    jumps: str | None = None
    falls: bool = True


def _blocks(text: str, line: re.Pattern[str]) -> list[_Block]:
    blocks = [_Block([])]
    for found in line.finditer(text):
        if found["label"] is not None:
            blocks.append(_Block([], found["label"]))
            continue
        block = blocks[-1]
        block.names.append(found["name"])
        target = _TARGET.search(found["rest"]) if _JUMP.match(found["name"]) else None
        ends = _NEVER_FALLS_THROUGH.match(found["name"]) is not None and not found["guard"]
        if target is not None or ends:
            block.jumps = target[0] if target is not None else None
            block.falls = not ends
            blocks.append(_Block([]))
    return blocks


def _count(blocks: Sequence[_Block], kinds: _Kinds) -> LoopCount:
    """The shortest way around one of the innermost loops that hold matrix instructions.

    An attend kernel has one loop over tiles of keys, or two: then the longer one masks, and few tiles need it. What a
    turn may skip (rescaling, masks in a single loop) few turns need either.
    """
    at = {block.label: i for i, block in enumerate(blocks) if block.label is not None}
    follows: dict[int, set[int]] = {i: set() for i in range(len(blocks))}
    for i, block in enumerate(blocks):
        if block.falls and i + 1 < len(blocks):
            follows[i].add(i + 1)
        if block.jumps in at:
            follows[i].add(at[block.jumps])
    names = {name for block in blocks for name in block.names}
    kind_of = {name: next(kind for kind, pattern in kinds if re.match(pattern, name)) for name in names}
    has_product = {i for i, b in enumerate(blocks) if any(kind_of[name].startswith("matrix") for name in b.names)}
    inner = list(_innermost(frozenset(follows), follows, has_product))
    if not inner:
        return NO_LOOP
    sizes = [len(block.names) for block in blocks]
    turns = [_shortest_turn(loop, follows, sizes, has_product) for loop in inner]
    loop = min(turns, key=lambda of: sum(sizes[i] for i in of))
    counts = dict.fromkeys((f.name for f in fields(LoopCount)), 0)
    for i in loop:
        for name in blocks[i].names:
            counts[kind_of[name]] += 1
    counts["vector"] += counts["slow"]
    return LoopCount(**counts)


def _innermost(nodes: frozenset[int], follows: Mapping[int, set[int]], wanted: set[int]) -> Iterator[frozenset[int]]:
    """The innermost loops among `nodes` with a wanted node: what stays connected in a circle without the first node."""
    for loop in _circles(nodes, follows):
        if not loop & wanted:
            continue
        before = {i for i in follows if i not in loop and follows[i] & loop}
        entries = {j for i in before for j in follows[i] & loop}
        inner = list(_innermost(loop - {min(entries or loop)}, follows, wanted))
        if inner:
            yield from inner
        else:
            yield loop


def _shortest_turn(
    loop: frozenset[int], follows: Mapping[int, set[int]], sizes: Sequence[int], wanted: set[int]
) -> frozenset[int]:
    """The blocks of the shortest circle through the most wanted ones that a circle of `loop` can pass."""
    start = min(loop & wanted)
    # (fewer wanted blocks missed, then instructions) of the best way to each block, and the way.
    best: dict[int, tuple[int, int, frozenset[int]]] = {}
    waiting: list[tuple[int, int, int, frozenset[int]]] = [(0, sizes[start], start, frozenset({start}))]
    while waiting:
        _, length, block, way = heappop(waiting)
        for after in follows[block] & loop:
            if after == start:
                found = (-len(way & wanted), length, way)
                best[start] = min(best.get(start, found), found, key=lambda of: of[:2])
            elif after not in way:
                key = (-len((way | {after}) & wanted), length + sizes[after])
                if after not in best or key < best[after][:2]:
                    best[after] = (*key, way | {after})
                    heappush(waiting, (*key, after, way | {after}))
    return best[start][2] if start in best else loop


def _circles(nodes: frozenset[int], follows: Mapping[int, set[int]]) -> Iterator[frozenset[int]]:
    """The strongly connected sets of more than one node, or of one that follows itself."""
    reach = {i: _reach(i, nodes, follows) for i in nodes}
    left = set(nodes)
    while left:
        i = min(left)
        circle = frozenset(j for j in reach[i] if i in reach[j])
        left -= circle | {i}
        if circle:
            yield circle


def _reach(start: int, nodes: frozenset[int], follows: Mapping[int, set[int]]) -> set[int]:
    """What can be reached from `start` in one step or more."""
    found: set[int] = set()
    left = [start]
    while left:
        new = (follows[left.pop()] & nodes) - found
        found |= new
        left += new
    return found

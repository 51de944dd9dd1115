"""Which decode and store cases there are. No torch and no triton, so that they can be listed anywhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from bench.results import Label
from kvhal.errors import ConfigError

__all__ = [
    "ATTEND_CASES",
    "BF16",
    "BLOCK_SIZE",
    "FP8",
    "HOST_CASES",
    "INT4",
    "INT8",
    "STORE_CASES",
    "AttendCase",
    "HostCase",
    "StoreCase",
    "choose",
]

BLOCK_SIZE = 16
INT8, FP8, INT4, BF16 = "int8_per_token_head", "fp8_per_token_head", "int4_per_token_head", "bfloat16"
SHAPES = (
    (1, 1024),
    (1, 8192),
    (1, 32768),
    (8, 1024),
    (8, 8192),
    (8, 32768),
    (64, 1024),
    (64, 8192),
    (64, 32768),
    (256, 1024),
    (256, 8192),
)


class Named(Protocol):
    """What can be chosen from a list of cases."""

    @property
    def is_quick(self) -> bool: ...

    @property
    def name(self) -> str: ...


_N = TypeVar("_N", bound=Named)


@dataclass(frozen=True)
class AttendCase:
    """One attend call. kind: decode, verify, prefill, ragged, window or schedule (`launch.prepare` alone).

    seqs sequences of `length` cached tokens (the most, if is_ragged), the `queries` new ones of each included.
    """

    kind: str
    mode: str
    seqs: int
    length: int
    q_heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    queries: int = 1
    layout: str = "tiled"
    window: int | None = None
    is_ragged: bool = False
    is_quick: bool = False

    @property
    def shape(self) -> str:
        return f"{self.seqs}x{self.length}"

    @property
    def name(self) -> str:
        parts = [self.kind, self.mode, self.shape, f"q{self.q_heads}"]
        parts += [f"kv{self.kv_heads}"] if self.kv_heads != 8 else []
        parts += [f"d{self.head_dim}"] if self.head_dim != 128 else []
        parts += [f"new{self.queries}"] if self.queries != 1 else []
        parts += [self.layout] if self.layout != "tiled" else []
        parts += [f"window{self.window}"] if self.window else []
        return " ".join(parts)

    @property
    def labels(self) -> dict[str, Label]:
        return {
            "kind": self.kind,
            "mode": self.mode,
            "shape": self.shape,
            "q_heads": self.q_heads,
            "kv_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "queries": self.queries,
            "layout": self.layout,
            "window": self.window or 0,
        }


@dataclass(frozen=True)
class StoreCase:
    """One store call of `tokens` tokens."""

    mode: str
    tokens: int
    kv_heads: int = 8
    head_dim: int = 128
    is_quick: bool = False

    @property
    def name(self) -> str:
        return f"store {self.mode} {self.tokens}"

    @property
    def labels(self) -> dict[str, Label]:
        return {
            "kind": "store",
            "mode": self.mode,
            "shape": str(self.tokens),
            "kv_heads": self.kv_heads,
            "head_dim": self.head_dim,
        }


@dataclass(frozen=True)
class HostCase:
    """The host's time for one call of a torch operator on `seqs` sequences of `length` tokens.

    operator: store, attend (which builds its schedule) or attend-prepared (whose step has built it). Contexts are
    short: the device must be done before the host, or its queue would be timed.
    """

    operator: str
    seqs: int
    length: int
    is_quick: bool = True

    @property
    def name(self) -> str:
        return f"host {self.operator} {self.seqs}"

    @property
    def labels(self) -> dict[str, Label]:
        return {"kind": "host", "mode": INT8, "shape": str(self.seqs), "operator": self.operator}


def choose(cases: Sequence[_N], *, quick: bool, substring: str) -> list[_N]:
    """The quick cases or all of them, whose names contain `substring`. Raises ConfigError if none is left."""
    offered = [case for case in cases if case.is_quick or not quick]
    chosen = [case for case in offered if substring in case.name]
    if not chosen:
        raise ConfigError(f"no case's name contains {substring!r}; the cases are: {'; '.join(c.name for c in offered)}")
    return chosen


def _attend_cases() -> tuple[AttendCase, ...]:
    quick = {(1, 8192), (64, 1024), (64, 8192)}
    found = [
        AttendCase("decode", mode, *shape, q_heads=heads, is_quick=heads == 32 and shape in quick)
        for heads in (32, 64)
        for mode in (INT8, FP8, INT4, BF16)
        for shape in SHAPES
    ]
    big = AttendCase("decode", INT8, 64, 8192)
    found += [
        replace(big, kind="verify", mode=mode, queries=queries, is_quick=mode == INT8)
        for mode in (INT8, FP8, INT4)
        for queries in (4, 8)
    ]
    found += [replace(big, kind="ragged", mode=mode, length=16384, is_ragged=True) for mode in (INT8, FP8, INT4, BF16)]
    found += [replace(big, layout="inline")]
    # A group of 8 is the case with 64 query heads above.
    found += [replace(big, q_heads=8), replace(big, q_heads=128)]
    found += [replace(big, head_dim=dim, kv_heads=heads, q_heads=4 * heads) for dim, heads in ((64, 8), (256, 4))]
    found += [replace(big, head_dim=dim) for dim in (80, 96)]
    found += [replace(big, kind="window", window=4096)]
    found += [
        replace(big, kind="prefill", mode=mode, seqs=1, length=8192 + 2048, queries=2048, is_quick=mode == INT8)
        for mode in (INT8, FP8, INT4, BF16)
    ]
    found += [AttendCase("schedule", INT8, *shape, is_quick=True) for shape in ((1, 8192), (64, 8192), (256, 8192))]
    return tuple(found)


ATTEND_CASES = _attend_cases()
STORE_CASES = tuple(
    StoreCase(mode, tokens, is_quick=tokens in (1, 256, 8192))
    for mode in (INT8, FP8, INT4)
    for tokens in (1, 32, 256, 2048, 8192, 32768)
)
HOST_CASES = tuple(
    HostCase(operator, seqs, length)
    for operator in ("store", "attend", "attend-prepared")
    for seqs, length in ((1, 1000), (64, 128))
)

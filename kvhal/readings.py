"""Figures that may be unknown, and what a memory reading consists of.

A driver may not report a total, lag behind a free, or hide other users. Such a figure is `Unknown` with a reason,
never 0 and never None, so that no arithmetic can use it by accident.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Figure", "Known", "MemoryReading", "Unknown"]


@dataclass(frozen=True, slots=True)
class Known:
    """A figure in bytes and the source it was read from."""

    value: int
    source: str


@dataclass(frozen=True, slots=True)
class Unknown:
    """A figure that could not be read, and why."""

    reason: str


Figure = Known | Unknown


@dataclass(frozen=True, slots=True)
class MemoryReading:
    """One reading of a device's memory, all figures in bytes.

    total: what this process may use at most (the slice's or the container's, not the parent's).
    free: what is free for it now. own: what this process uses now. peak: the most it used since the last reset.
    """

    total: Figure
    free: Figure
    own: Figure
    peak: Figure

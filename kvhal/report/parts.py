"""The parts that pages are made of: titles, steps, tables, facts and sizes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from rich import box
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from kvhal.readings import Figure, Known
from kvhal.source.sizes import UNITS

if TYPE_CHECKING:
    from kvhal.decision import Decision

__all__ = [
    "NO_MODE",
    "as_exact",
    "as_figure",
    "decision_row",
    "facts_grid",
    "human",
    "new_table",
    "step_row",
    "title_line",
]

NO_MODE = "no scaled mode: this cache holds opaque stores only"
_STYLES = {"run": "green", "fallback": "yellow", "refuse": "red"}
_BINARY = ("TiB", "GiB", "MiB", "KiB")


def human(nbytes: int) -> str:
    """`67108864` as `64.0 MiB`."""
    for unit in _BINARY:
        if abs(nbytes) >= UNITS[unit]:
            return f"{nbytes / UNITS[unit]:.1f} {unit}"
    return f"{nbytes} B"


def title_line(text: str) -> RenderableType:
    return Text(text, style="bold", overflow="fold")


def step_row(name: str, *lines: str, below: RenderableType | None = None) -> RenderableType:
    """A step's name on the left, what it found on the right."""
    grid = Table.grid(padding=(0, 2, 0, 0), expand=True)
    grid.add_column(width=9, style="bold cyan", overflow="fold")
    grid.add_column(ratio=1, overflow="fold")
    parts: list[RenderableType] = [Text(line, overflow="fold") for line in lines]
    if below is not None:
        parts.append(below)
    grid.add_row(name, Group(*parts))
    return Padding(grid, (1, 0, 0, 0))


def new_table(*columns: str, right: Iterable[str] = ("bytes",)) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), show_edge=False, header_style="dim")
    for name in columns:
        is_number = name in right
        table.add_column(name, justify="right" if is_number else "left", no_wrap=is_number, overflow="fold")
    return table


def facts_grid(rows: Iterable[tuple[str, str]]) -> Table:
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(style="cyan", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in rows:
        grid.add_row(name, escape(value))
    return grid


def as_figure(figure: Figure) -> str:
    if isinstance(figure, Known):
        return f"{human(figure.value)} ({figure.value:,} bytes, {figure.source})"
    return f"unknown: {figure.reason}"


def as_exact(nbytes: int) -> str:
    return f"{human(nbytes)} ({nbytes:,} bytes)"


def decision_row(d: Decision) -> tuple[str, Text, str, str]:
    """Mode, verdict, path and encoding of a decision."""
    verdict = {"run": d.support.value, "fallback": f"falls back to {d.effective}", "refuse": "refused"}[d.action.value]
    path = "none" if d.path is None else d.path.value
    return d.requested, Text(verdict, style=_STYLES[d.action.value]), path, d.encoding

"""The matrix as a page: rows are modes and operations, columns archs, in as many parts as the width asks for."""

from __future__ import annotations

from collections.abc import Iterator

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvhal.answers.matrix import Answer, PlatformMatrix, counts
from kvhal.capability.cells import OPERATIONS, Support
from kvhal.modes import MODES
from kvhal.report.matrix_marks import legend, mark
from kvhal.report.parts import title_line

__all__ = ["matrix_page"]

_COLOURS = {Support.RUN: "green", Support.EXPERIMENTAL: "yellow", Support.BROKEN: "red", Support.REFUSED: "dim"}
_NAMES = max(map(len, (*MODES, *OPERATIONS)))


def matrix_page(matrices: tuple[PlatformMatrix, ...]) -> RenderableType:
    """Every platform, its counts, and what the signs mean."""
    answers = [a for m in matrices for a in m.answers]
    parts: list[RenderableType] = []
    for matrix in matrices:
        parts += [title_line(f"{matrix.platform} ({matrix.table.source})"), *map(Text, _facts(matrix))]
        parts += ["", _Columns(matrix), ""]
    parts += [Text(line) for line in legend(answers)]
    parts.append(
        Text("why: kvhal explain MODE --platform P --arch A; every reason: docs/CAPABILITIES.md, or --markdown")
    )
    return Group(*parts)


def _facts(matrix: PlatformMatrix) -> Iterator[str]:
    known = [f"{d} {v} ({matrix.sources.get(d, 'given')})" for d, v in matrix.versions.known.items()]
    assumed = [f"{d} {v} (assumed)" for d, v in matrix.table.assume.known.items() if d not in matrix.versions.known]
    if known or assumed:
        yield f"at {', '.join((*known, *assumed))}"
    for what, answers in (("modes", matrix.cells), ("operations", matrix.operations)):
        said = ", ".join(f"{n} {support.value}" for support, n in counts(answers.values()).items())
        yield f"{what} x archs: {len(answers)} answers: {said}"


class _Columns:
    """The table, cut into parts of whole columns that each fit the width it is printed at."""

    def __init__(self, matrix: PlatformMatrix) -> None:
        self.matrix = matrix

    def __rich_console__(self, _console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        for i, archs in enumerate(_fitting(self.matrix.archs, options.max_width - _NAMES)):
            if i:
                yield ""
            yield self._part(archs)

    def _part(self, archs: tuple[str, ...]) -> Table:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=0, show_edge=False, header_style="dim")
        table.add_column("", width=_NAMES, no_wrap=True)
        for arch in archs:
            table.add_column(arch, no_wrap=True)
        for mode in MODES:
            table.add_row(mode, *(_sign(self.matrix.cells[mode, arch]) for arch in archs))
        table.add_section()
        for name in OPERATIONS:
            table.add_row(name, *(_sign(self.matrix.operations[name, arch]) for arch in archs))
        return table


def _sign(answer: Answer) -> Text:
    return Text(mark(answer), style=_COLOURS[answer.support])


def _fitting(archs: tuple[str, ...], width: int) -> list[tuple[str, ...]]:
    """The archs in parts of about equal number, as few as fit `width`; one arch a part if none fits."""
    for count in range(1, len(archs) + 1):
        size = -(-len(archs) // count)
        parts = [archs[i : i + size] for i in range(0, len(archs), size)]
        # A column is as wide as its arch, or as the longest mark, and is set apart by a blank.
        if all(sum(max(len(arch), 4) + 1 for arch in part) <= width for part in parts):
            return parts
    return [(arch,) for arch in archs]

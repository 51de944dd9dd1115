"""The matrix as Markdown: docs/CAPABILITIES.md. Nothing in it depends on the machine that writes it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby

from kvhal.answers.matrix import Answer, PlatformMatrix, Reason, counts, reasons
from kvhal.capability.cells import OPERATIONS, Cell
from kvhal.capability.proof import Status
from kvhal.modes import MODES
from kvhal.report.matrix_marks import SUPPORT, legend, mark

__all__ = ["matrix_markdown"]

_HEAD = """# Capabilities

What runs where. Written by `kvhal matrix --markdown` from the tables of the installed platforms
(`platforms/*/capabilities.yaml`) and the evidence shipped with them; do not edit. For your own versions, shapes and
policy ask `kvhal explain MODE --platform P --arch A`; [policy.md](policy.md) says how a decision is made.

A number leads to the [reason](#reasons)."""


def matrix_markdown(matrices: tuple[PlatformMatrix, ...]) -> str:
    """The whole document, with every reason once."""
    every = reasons(matrices)
    numbers = {reason.text: reason.number for reason in every}
    answers = [a for m in matrices for a in m.answers]
    parts = [_HEAD, "\n".join(f"- {_escaped(line)}" for line in legend(answers))]
    for matrix in matrices:
        parts += _platform(matrix, numbers)
    parts.append("## Reasons")
    archs = {m.platform: m.archs for m in matrices}
    parts += [_reason(reason, archs) for reason in every]
    return "\n\n".join(parts) + "\n"


def _platform(matrix: PlatformMatrix, numbers: Mapping[str, int]) -> Iterator[str]:
    yield f"## {matrix.platform}"
    assumed = ", ".join(f"{d} {v}" for d, v in matrix.table.assume.known.items())
    at = f", answered for {assumed}" if assumed else ""
    said = [
        f"{what}: {', '.join(f'{n} {s.value}' for s, n in counts(answers.values()).items())}"
        for what, answers in (("modes", matrix.cells), ("operations", matrix.operations))
    ]
    yield f"`{matrix.table.source}`{at}. {'; '.join(said)}."
    yield _table(matrix.archs, tuple(MODES), matrix.cells, numbers)
    yield _table(matrix.archs, tuple(OPERATIONS), matrix.operations, numbers)
    yield _evidence(matrix)


def _table(
    archs: tuple[str, ...],
    names: tuple[str, ...],
    answers: Mapping[tuple[str, str], Answer],
    numbers: Mapping[str, int],
) -> str:
    rows = [f"| arch | {' | '.join(f'`{name}`' for name in names)} |", f"|---|{'---|' * len(names)}"]
    rows += [f"| `{a}` | {' | '.join(_cell(answers[name, a], numbers) for name in names)} |" for a in archs]
    return "\n".join(rows)


def _cell(answer: Answer, numbers: Mapping[str, int]) -> str:
    number = numbers.get(answer.reason)
    return mark(answer) if number is None else f"{mark(answer)} [{number}](#reason-{number})"


def _evidence(matrix: PlatformMatrix) -> str:
    """Which files the cells stand on: one line a file and status."""
    proved = [c for c in matrix.cells.values() if c.proof.status is not Status.NONE]
    if not proved:
        return "Evidence: none is shipped; `kvhal verify` on the device makes it."
    lines = [
        f"- `{arch}`: {', '.join(f'`{c.mode}`' for c in cells)}: {summary}"
        for (arch, summary), cells in _grouped(proved)
    ]
    return "\n".join(["Evidence:", "", *lines])


def _grouped(cells: Iterable[Cell]) -> Iterator[tuple[tuple[str, str], list[Cell]]]:
    def key(cell: Cell) -> tuple[str, str]:
        return cell.arch, cell.proof.summary

    for found, group in groupby(sorted(cells, key=key), key=key):
        yield found, list(group)


def _reason(reason: Reason, archs: Mapping[str, tuple[str, ...]]) -> str:
    lines = [f'<a id="reason-{reason.number}"></a>**{reason.number}.** {_escaped(reason.text)}', ""]
    lines += [f"- {_row(platform, answers, archs[platform])}" for platform, answers in reason.rows]
    lines += [f"- evidence: {_escaped(text)}" for text in reason.evidence]
    lines += [f"- {link}" for link in reason.links]
    return "\n".join(lines)


def _row(platform: str, answers: tuple[Answer, ...], every: tuple[str, ...]) -> str:
    """Where a row holds and what it answers. every: the archs of the platform."""
    names = dict.fromkeys(a.mode if isinstance(a, Cell) else a.name for a in answers)
    archs = tuple(dict.fromkeys(a.arch for a in answers))
    where = "every arch" if len(every) > 1 and archs == every else ", ".join(f"`{arch}`" for arch in archs)
    first = answers[0]
    said = [f"{SUPPORT[first.support]} {first.support.value}"]
    if isinstance(first, Cell):
        stored = dict.fromkeys(", ".join(f"`{e}`" for e in a.encodings) for a in answers if isinstance(a, Cell))
        said += [] if first.path is None else [first.path.value, f"stored as {' or '.join(stored)}"]
    when = f", at {first.when}" if first.when.texts else ""
    return f"{platform}, {where}: {', '.join(f'`{n}`' for n in names)}{_escaped(when)}: {', '.join(said)}"


def _escaped(text: str) -> str:
    """Signs that Markdown would read as its own."""
    return "".join(f"\\{sign}" if sign in "\\*_<>|[]`" else sign for sign in text)

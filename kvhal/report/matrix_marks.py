"""The signs of a matrix and what they mean, the same in the terminal and in Markdown."""

from __future__ import annotations

from collections.abc import Iterable

from kvhal.answers.matrix import Answer
from kvhal.capability.cells import Cell, Path, Support
from kvhal.capability.proof import Status
from kvhal.modes import MODES

__all__ = ["SUPPORT", "legend", "mark", "path_letter"]

SUPPORT = {Support.RUN: "✓", Support.EXPERIMENTAL: "~", Support.BROKEN: "✗", Support.REFUSED: "–"}
_SUPPORT_MEANS = {
    Support.RUN: "runs",
    Support.EXPERIMENTAL: "experimental: needs an opt-in, or proof",
    Support.BROKEN: "broken: expected to fail, a debt",
    Support.REFUSED: "refused: cannot, for ever",
}
_PATHS = {Path.NATIVE: "n", Path.EMULATED: "e", Path.EMULATED_SLOW: "s"}
_PATH_MEANS = {
    Path.NATIVE: "in the arch's own instructions",
    Path.EMULATED: "in software",
    Path.EMULATED_SLOW: "in software, at a cost that shows",
}
_STALE, _OTHER = "!", "*"


def mark(answer: Answer) -> str:
    """One answer in at most four signs: support, path, another encoding than the mode's first, stale evidence."""
    if not isinstance(answer, Cell):
        return SUPPORT[answer.support]
    other = _OTHER if _is_other(answer) else ""
    stale = _STALE if answer.proof.status is Status.STALE else ""
    return f"{SUPPORT[answer.support]}{path_letter(answer)}{other}{stale}"


def path_letter(cell: Cell) -> str:
    """n, e or s; "" where there is no path."""
    return "" if cell.path is None else _PATHS[cell.path]


def legend(answers: Iterable[Answer]) -> tuple[str, ...]:
    """What the signs that these answers use mean, a line each for supports, paths and flags."""
    found = tuple(answers)
    cells = [a for a in found if isinstance(a, Cell)]
    supports = [f"{SUPPORT[s]} {means}" for s, means in _SUPPORT_MEANS.items() if any(a.support is s for a in found)]
    paths = [f"{_PATHS[p]} {means}" for p, means in _PATH_MEANS.items() if any(c.path is p for c in cells)]
    flags = [f"{_OTHER} stored as {', '.join(others)}"] if (others := _others(cells)) else []
    if any(c.proof.status is Status.STALE for c in cells):
        flags.append(f"{_STALE} its evidence is for other kernels or versions")
    return tuple("; ".join(line) for line in (supports, paths, flags) if line)


def _is_other(cell: Cell) -> bool:
    return cell.path is not None and cell.encoding != MODES[cell.mode].encodings[0]


def _others(cells: Iterable[Cell]) -> list[str]:
    found = dict.fromkeys((c.encoding, MODES[c.mode].encodings[0]) for c in cells if _is_other(c))
    return [f"{stored} instead of {usual}" for stored, usual in found]

"""The page of `kvhal explain`: one mode in full, several as a table, and an arch that has no row."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.text import Text

from kvhal.capability.cells import Cell, Limits, Path, Support
from kvhal.decision import Action
from kvhal.modes import MODES, Scaling
from kvhal.policy import sources
from kvhal.report.parts import NO_MODE, decision_row, facts_grid, new_table, title_line

if TYPE_CHECKING:
    from kvhal.answers.explanation import Explanation, NoRow
    from kvhal.decision import Decision

__all__ = ["explain_page", "no_row_page"]


def explain_page(explanation: Explanation) -> RenderableType:
    """A decision in full for one mode, a table for several."""
    title = title_line(f"{explanation.platform}, {explanation.arch} ({explanation.chosen}; {explanation.table})")
    if len(explanation.decisions) == 1:
        (decision,), (cell,) = explanation.decisions, explanation.cells
        return Group(title, facts_grid(_facts(explanation, decision, cell)))
    table = new_table("mode", "verdict", "path", "encoding", "rule", "reason")
    for d in explanation.decisions:
        table.add_row(*decision_row(d), _rule(d.rule, explanation), escape(d.reason))
    parts: list[RenderableType] = [title, table if explanation.decisions else Text(NO_MODE)]
    if explanation.operations:
        operations = new_table("operation", "verdict", "rule", "reason")
        for o in explanation.operations:
            operations.add_row(o.name, o.support.value, _rule(o.rule, explanation), escape(o.reason))
        parts += ["", operations]
    return Group(*parts)


def no_row_page(found: NoRow) -> RenderableType:
    """An arch without a row: what is nearest, and how to add it. Nothing is guessed."""
    look = f"kvhal explain --platform {found.platform} --arch"
    rows = [
        ("verdict", f"refused: {found.table} has no row for {found.arch!r}, and no other arch's is used in its place"),
        ("known", ", ".join(found.known)),
        ("nearest", f"{found.near}; `{look} {found.near}` says what holds there" if found.near else "none is near"),
        ("to add it", f"1. put {found.arch!r} into `archs` of {found.file}"),
        ("", f"2. `{look} {found.arch}` names every answer that is missing, with file:line"),
        ("", "3. give each a row: refused or broken with a reason, else run, which is experimental until proved"),
        ("", f"4. `kvhal verify --platform {found.platform}` on the device proves it"),
    ]
    return Group(title_line(f"{found.platform}, {found.arch}: unknown arch"), facts_grid(rows))


def _rule(rule: str, explanation: Explanation) -> str:
    """The rule, without the table's name that the title already says."""
    return rule.replace(f"{explanation.table}:", "line ")


def _facts(explanation: Explanation, d: Decision, cell: Cell) -> Iterator[tuple[str, str]]:
    yield "mode", d.requested
    yield "verdict", _verdict(d)
    yield "path", "none" if d.path is None else d.path.value
    yield "encoding", _encodings(cell) if d.effective in (None, d.requested) else d.encoding
    yield "rule", d.rule if d.rule == cell.rule else f"{d.rule}, over {cell.rule}"
    if d.when:
        yield "holds for", d.when
    yield "versions", _versions(explanation, d)
    if reason := d.reason.replace(sources(cell), "").removeprefix(f"{cell.support.value}: "):
        yield "reason", reason
    for name, limits in (("head_dim", cell.head_dim), ("block_size", cell.block_size)):
        if text := _limits(limits):
            yield name, text
    yield "evidence", _evidence(d)
    if cell.evidence:
        yield "row rests on", cell.evidence
    for i, link in enumerate(d.links):
        yield "" if i else "links", link
    if d.action is Action.REFUSE:
        for i, name in enumerate(d.alternatives):
            yield "" if i else "instead", name
        for i, way in enumerate(d.ways_out):
            yield "" if i else "what to do", way


def _verdict(d: Decision) -> str:
    match d.action:
        case Action.RUN:
            return "runs" if d.support is Support.RUN else f"runs ({d.support.value}, and the policy allows that)"
        case Action.FALLBACK:
            return f"falls back to {d.effective}"
        case Action.REFUSE:
            return f"refused ({_why_refused(d)})"


def _why_refused(d: Decision) -> str:
    match d.support:
        case Support.BROKEN:
            return "broken: a debt, and its row goes the day it works"
        case Support.REFUSED:
            return "by the table: the hardware or the stack cannot"
        case Support.EXPERIMENTAL | Support.RUN if d.rule == "policy.experimental":
            return "experimental: it needs an opt-in, or proof"
        case Support.EXPERIMENTAL | Support.RUN if d.rule.startswith("policy."):
            return "by the policy; the table lets it run"
        case Support.EXPERIMENTAL | Support.RUN:
            return "outside what its row allows"


def _encodings(cell: Cell) -> str:
    """The default first, and what each other one costs."""
    first, *others = cell.encodings
    if not others or cell.path is None:
        return ", ".join(cell.encodings)
    return f"{first}; also {', '.join(f'{e} ({_path(cell.path_of((e,)))})' for e in others)}"


def _path(path: Path | None) -> str:
    return "none" if path is None else path.value


def _versions(explanation: Explanation, d: Decision) -> str:
    known = [f"{name} {text} ({explanation.sources[name]})" for name, text in explanation.versions.items()]
    assumed = [f"{text} (assumed by the table)" for text in d.assumed]
    return ", ".join((*known, *assumed)) or "none matter here"


def _limits(limits: Limits) -> str:
    said = (("at least", limits.min), ("at most", limits.max), ("a multiple of", limits.multiple_of))
    return ", ".join(f"{what} {value}" for what, value in said if value is not None)


def _evidence(d: Decision) -> str:
    if MODES[d.effective or d.requested].scaling is Scaling.NONE and d.proof.level is None:
        return "none, and a plain 16-bit mode needs none"
    return str(d.proof)

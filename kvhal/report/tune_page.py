"""What `kvhal tune` found: as a page for people and as one JSON document."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.text import Text

from kvhal.report.document import REPORT_VERSION, plain
from kvhal.report.parts import new_table, title_line
from kvhal.tune.search import End, Found, Verdict
from kvhal.tune.space import numbers

if TYPE_CHECKING:
    from kvhal.tune.flow import TuneReport

__all__ = ["tune_document", "tune_page"]

_STYLES = {Verdict.FASTER: "green", Verdict.SHIPPED: "dim", Verdict.FAILED: "red", Verdict.UNREACHED: "yellow"}


def tune_document(report: TuneReport) -> dict[str, Any]:
    """One document. Times are in microseconds a call; `ok` is false if a shipped row is wrong or cannot be run."""
    return {
        "kvhal_report": REPORT_VERSION,
        "kind": "tune",
        "ok": report.is_ok,
        "device": plain(report.device),
        "tuned": plain(report.tuned),
        "end": report.end.value,
        "dry_run": report.is_dry_run,
        "path": None if report.path is None else str(report.path),
        "seconds": report.seconds,
        "targets": [_target(report, found) for found in report.found],
    }


def tune_page(report: TuneReport) -> RenderableType:
    """One line a target, what was refused below, and where the overlay lies."""
    device, tuned = report.device, report.tuned
    where = f"{device.platform}:{device.index} {device.name} ({device.arch})"
    title = f"{where}, torch {tuned.torch}, triton {tuned.triton}"
    table = new_table("target", "result", "numbers", "time", "tried", "refused", right=("time", "tried", "refused"))
    for found in report.found:
        verdict = Text(found.verdict.value, style=_STYLES[found.verdict])
        time = f"{found.ratio - 1:+.1%}" if found.verdict is Verdict.FASTER else ""
        table.add_row(
            str(found.target), verdict, _numbers(report, found), time, str(found.tried), str(len(found.refused))
        )
    return Group(title_line(title), table, *(Text(line, overflow="fold") for line in _lines(report)))


def _lines(report: TuneReport) -> list[str]:
    lines: list[str] = []
    for found in report.found:
        if found.why:
            lines.append(f"{found.target}: {found.why}")
        if found.refused:
            first = found.refused[0]
            said = ", ".join(f"{name} {value}" for name, value in first.numbers.items())
            more = f" (and {len(found.refused) - 1} more: --json)" if len(found.refused) > 1 else ""
            lines.append(f"{found.target}: refused {said}: {first.reason}{more}")
    cut = [str(f.target) for f in report.found if f.end is End.TIME]
    if cut:
        lines.append(f"the time was up before everything was tried: {', '.join(cut)}; give more with --seconds")
    return [*lines, f"{_where(report)} ({report.seconds:.0f} s)"]


def _where(report: TuneReport) -> str:
    if report.path is not None:
        return f"overlay: {report.path}; new processes use it, and `kvhal verify` proves it"
    if report.is_dry_run:
        return "nothing was written: this was a dry run"
    return "nothing was written: no other numbers are faster"


def _numbers(report: TuneReport, found: Found) -> str:
    """The numbers that differ from the shipped row's."""
    before, after = numbers(report.shipped, found.target), numbers(found.row, found.target)
    return ", ".join(f"{name} {before[name]} -> {value}" for name, value in after.items() if value != before[name])


def _target(report: TuneReport, found: Found) -> dict[str, Any]:
    return {
        "phase": found.target.phase,
        "family": found.target.family,
        "result": found.verdict.value,
        "end": found.end.value,
        "shipped": numbers(report.shipped, found.target),
        "numbers": numbers(found.row, found.target),
        "ratio": found.ratio,
        "timings": [plain(timing) for timing in found.timings],
        "tried": found.tried,
        "refused": [{"numbers": dict(each.numbers), "reason": each.reason} for each in found.refused],
        "why": found.why,
    }

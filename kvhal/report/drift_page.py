"""The page of `kvhal matrix --check-drift`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.text import Text

from kvhal.report.parts import title_line

if TYPE_CHECKING:
    from kvhal.answers.drift import Drift, Finding

__all__ = ["drift_page"]


def drift_page(drift: Drift) -> RenderableType:
    """Every result in a line, what is denied last, and the verdict."""
    lines = [
        *(Text(f"agrees     {_line(f)}") for f in drift.agreed),
        *(Text(f"set aside  {_line(f)}", style="yellow") for f in drift.set_aside),
        *(Text(f"DRIFT      {_line(f)}", style="bold red") for f in drift.denied),
    ]
    return Group(title_line(f"{len(drift.files)} evidence file(s) in {drift.folder}"), *lines, _verdict(drift))


def _line(finding: Finding) -> str:
    where = " ".join(part for part in (finding.platform, finding.arch, finding.mode) if part)
    return f"{where}: {finding.text}" + (f" [{finding.rule}]" if finding.rule else "")


def _verdict(drift: Drift) -> Text:
    if drift.denied:
        return Text(f"FAILED: {len(drift.denied)} claim(s) differ from what was found", style="bold red")
    if not drift.agreed:
        return Text("ok: nothing was compared, and no runner owes evidence")
    return Text(f"ok: {len(drift.agreed)} claim(s) hold", style="bold green")

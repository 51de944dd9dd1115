"""What `kvhal verify --compile-only` found: as a page for people and as one JSON document."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.text import Text

from kvhal.capability.evidence import SCHEMA
from kvhal.report.document import REPORT_VERSION, plain
from kvhal.report.parts import new_table, title_line

if TYPE_CHECKING:
    from kvhal.capability.evidence import CellResult
    from kvhal.compile_only import ArchResult

__all__ = ["compile_document", "compile_page"]

_SHOWN = 5
_NUMBERS = ("kernels", "registers", "shared", "spilled")


def compile_document(found: Sequence[ArchResult]) -> dict[str, Any]:
    """One document; `evidence` of an arch is the content of the file that was written."""
    return {
        "kvhal_report": REPORT_VERSION,
        "kind": "compile_only",
        "ok": all(each.is_ok for each in found),
        "seconds": sum(each.seconds for each in found),
        "arches": [_arch(each) for each in found],
    }


def compile_page(found: Sequence[ArchResult]) -> RenderableType:
    """One line a cell, what failed below, and where the evidence lies."""
    table = new_table("arch", "mode", "encodings", "result", *_NUMBERS, right=_NUMBERS)
    for each in found:
        for cell in each.evidence.cells:
            verdict = Text("sound", style="green") if cell.passed else Text("FAILED", style="red")
            table.add_row(each.evidence.arch, cell.mode, ", ".join(cell.encodings), verdict, *_figures(cell))
        for mode in each.refused:
            table.add_row(each.evidence.arch, mode, "", Text("refused", style="dim"), "", "", "", "")
    versions = found[0].evidence.versions
    title = f"compiled with triton {versions.triton}, and the machine code read; nothing was run"
    return Group(title_line(title), table, *(Text(line, overflow="fold") for line in _lines(found)))


def _lines(found: Sequence[ArchResult]) -> list[str]:
    lines: list[str] = []
    for each in found:
        wrong = list(dict.fromkeys(f for cell in each.evidence.cells for f in cell.failed))
        lines += [f"{each.evidence.arch}: {text}" for text in wrong[:_SHOWN]]
        if len(wrong) > _SHOWN:
            lines.append(f"{each.evidence.arch}: and {len(wrong) - _SHOWN} more; --json has all")
        lines += [f"note: {note}" for note in each.notes]
    for each in found:
        how = "fewer shapes" if each.evidence.quick else "full"
        kept = "nothing to keep: the table refuses every mode asked for" if each.path is None else str(each.path)
        lines.append(f"{each.evidence.arch} evidence (isa, {how}, {each.seconds:.0f} s): {kept}")
    return lines


def _figures(cell: CellResult) -> tuple[str, ...]:
    worst = {name: f"{value:.0f}" for name, value in cell.worst.items() if value is not None}
    return (
        str(cell.tests),
        worst["registers"],
        worst["bytes of shared memory"],
        worst["bytes of scratch a thread"],
    )


def _arch(each: ArchResult) -> dict[str, Any]:
    evidence = each.evidence
    return {
        "platform": evidence.platform,
        "arch": evidence.arch,
        "ok": each.is_ok,
        "path": None if each.path is None else str(each.path),
        "refused": list(each.refused),
        "notes": list(each.notes),
        "seconds": each.seconds,
        "evidence": {
            "schema": SCHEMA,
            "date": evidence.date.isoformat(),
            "level": evidence.level.value,
            "quick": evidence.quick,
            "versions": plain(evidence.versions),
            "cells": plain(evidence.cells),
        },
        "kernels": [asdict(compiled) | {"problems": list(wrong)} for compiled, wrong in each.compiled],
    }

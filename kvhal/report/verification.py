"""What `kvhal verify` proved: as lines for people and as one JSON document."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvhal.capability.evidence import SCHEMA
from kvhal.report.document import REPORT_VERSION, plain

if TYPE_CHECKING:
    from kvhal.capability.evidence import CellResult
    from kvhal.verify import Verification

__all__ = ["verify_document", "verify_lines"]


def verify_document(found: Verification) -> dict[str, Any]:
    """One document; `evidence` is the content of the file that was written."""
    said = {"device": plain(found.device), "path": None if found.path is None else str(found.path)}
    evidence = found.evidence
    return (
        {"kvhal_report": REPORT_VERSION, "kind": "verify", "ok": found.is_ok}
        | said
        | {
            "refused": list(found.refused),
            "seconds": found.seconds,
            "evidence": {
                "schema": SCHEMA,
                "date": evidence.date.isoformat(),
                "level": evidence.level.value,
                "quick": evidence.quick,
                "masquerade": evidence.masquerade,
                "versions": plain(evidence.versions),
                "cells": plain(evidence.cells),
            },
            "output": found.output,
        }
    )


def verify_lines(found: Verification) -> list[str]:
    """Device, one line a mode, and where the evidence lies."""
    device, versions, evidence = found.device, found.evidence.versions, found.evidence
    lines = [
        f"{device.platform}:{device.index} {device.name} ({device.arch}), torch {versions.torch}"
        + (f", triton {versions.triton}" if versions.triton else "")
    ]
    lines += [_line(cell) for cell in evidence.cells]
    lines += [
        f"{'refused':<8}{name}: not accepted here, and it refuses before any allocation" for name in found.refused
    ]
    lines += [found.output] if found.output else []
    how = "quick" if evidence.quick else "full"
    if evidence.masquerade:
        lines.append("this was a masquerade: it never counts as evidence")
    if found.path is None:
        lines.append(f"no mode in question is accepted here, so there is no evidence to keep ({found.seconds:.0f} s)")
    else:
        lines.append(f"evidence ({how}, {found.seconds:.0f} s): {found.path}")
    return lines


def _line(cell: CellResult) -> str:
    encodings = f" as {', '.join(cell.encodings)}" if len(cell.encodings) > 1 else ""
    if not cell.passed:
        more = f" and {len(cell.failed) - 3} more" if len(cell.failed) > 3 else ""
        return f"{'FAILED':<8}{cell.mode}{encodings}: {', '.join(cell.failed[:3])}{more}"
    attend = cell.worst.get("attend: relative L2")
    return (
        f"{'passed':<8}{cell.mode}{encodings}: {cell.tests} tests, same bytes as the reference, attend within {attend}"
    )

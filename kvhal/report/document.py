"""Results as one JSON document. `kvhal_report` is the version of its shape; `kind` says which command made it.

A figure is {"bytes": n, "source": text}, or {"bytes": null, "unknown": reason}. A number that is not finite is its name
in a string, since JSON has none. Sizes are in bytes and times in seconds.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping
from enum import Enum
from typing import TYPE_CHECKING, Any

from kvhal.errors import ConfigError
from kvhal.readings import Known, Unknown

if TYPE_CHECKING:
    from kvhal.answers.drift import Drift
    from kvhal.answers.environment import Environment
    from kvhal.answers.explanation import Explanation, NoRow
    from kvhal.answers.matrix import PlatformMatrix
    from kvhal.answers.outline import Outline
    from kvhal.contract import Release
    from kvhal.decision import Decision
    from kvhal.run.check import Check
    from kvhal.run.flow import ProfileRun, RunReport

__all__ = [
    "REPORT_VERSION",
    "drift_document",
    "error_document",
    "explain_document",
    "matrix_document",
    "no_row_document",
    "plain",
    "plan_document",
    "probe_document",
    "run_document",
    "to_json",
]

REPORT_VERSION = 1


def to_json(document: Mapping[str, Any]) -> str:
    """The text of a document."""
    return json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False)


def run_document(report: RunReport) -> dict[str, Any]:
    """What `kvhal run` found. `ok` is true only if every check holds."""
    return _head("run", ok=report.is_ok) | {
        "deployment": report.deployment,
        "platform": plain(report.platform),
        "decision": _decisions(report.decisions),
        "profile": _profile(report.profile),
        "budget": plain(report.budget),
        "blocks_from": report.blocks_from,
        "plan": plain(report.plan),
        "allocation": plain(report.allocation),
        "groups": [{k: v for k, v in plain(group).items() if k != "checks"} for group in report.groups],
        "not_run": plain(report.not_run),
        "checks": [_check(check) for check in report.checks],
        "release": _release(report.release),
        "seconds": report.seconds,
    }


def plan_document(outline: Outline) -> dict[str, Any]:
    """What `kvhal plan` says."""
    said = _fields(outline)
    del said["decisions"]
    return _head("plan", ok=True) | said | {"decision": _decisions(outline.decisions)}


def explain_document(explanation: Explanation) -> dict[str, Any]:
    """What `kvhal explain` says; `ok` is false if a mode is refused. cells: the row of each decision's mode."""
    said = _fields(explanation)
    return _head("explain", ok=explanation.is_accepted) | said | {"decisions": _decisions(explanation.decisions)}


def no_row_document(found: NoRow) -> dict[str, Any]:
    """What `kvhal explain` says of an arch without a row: no decisions, and which archs there are."""
    said = {"platform": found.platform, "arch": found.arch, "table": found.table, "decisions": []}
    return _head("explain", ok=False) | said | {"unknown_arch": _fields(found)}


def matrix_document(matrices: Iterable[PlatformMatrix]) -> dict[str, Any]:
    """What `kvhal matrix` says: every answer of every platform at the versions named, and how many of each support."""
    return _head("matrix", ok=True) | {"platforms": [_matrix(matrix) for matrix in matrices]}


def drift_document(drift: Drift) -> dict[str, Any]:
    """What `kvhal matrix --check-drift` found; `ok` is false if evidence denies a claim."""
    return _head("drift", ok=drift.is_ok) | _fields(drift)


def probe_document(environment: Environment) -> dict[str, Any]:
    """What `kvhal probe` found; `ok` is false if no platform can be chosen."""
    return _head("probe", ok=environment.is_usable) | _fields(environment)


def error_document(error: BaseException, exit_code: int) -> dict[str, Any]:
    """An error in the place of a result. problems: every one of a configuration, each with its place."""
    problems = error.problems if isinstance(error, ConfigError) else ()
    said: dict[str, Any] = {
        "type": type(error).__name__,
        "message": str(error),
        "exit_code": exit_code,
        "problems": [plain(problem) for problem in problems],
    }
    return _head("error", ok=False) | {"error": said}


def _fields(value: object) -> dict[str, Any]:
    """The fields of a dataclass as JSON types."""
    assert dataclasses.is_dataclass(value)
    return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}


def plain(value: object) -> Any:
    """Dataclasses, enums, tuples, mappings and figures as JSON types."""
    match value:
        case Known():
            return {"bytes": value.value, "source": value.source}
        case Unknown():
            return {"bytes": None, "unknown": value.reason}
        case Enum():
            return value.value
        case float() if not math.isfinite(value):
            return str(value)
        case None | bool() | int() | float() | str():
            return value
        case Mapping():
            return {str(key): plain(item) for key, item in value.items()}
        case tuple() | list():
            return [plain(item) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _fields(value)
    raise TypeError(f"{value!r} has no place in a report document")


def _head(kind: str, *, ok: bool) -> dict[str, Any]:
    return {"kvhal_report": REPORT_VERSION, "kind": kind, "ok": ok}


def _decisions(decisions: Iterable[Decision]) -> list[dict[str, Any]]:
    return [_fields(decision) | {"refused": decision.refused, "message": decision.message} for decision in decisions]


def _matrix(matrix: PlatformMatrix) -> dict[str, Any]:
    from kvhal.answers.matrix import counts

    return {
        "platform": matrix.platform,
        "table": matrix.table.source,
        "archs": list(matrix.archs),
        "versions": matrix.versions.known,
        "sources": plain(matrix.sources),
        "assumed": matrix.table.assume.known,
        "counts": {
            "modes": {support.value: n for support, n in counts(matrix.cells.values()).items()},
            "operations": {support.value: n for support, n in counts(matrix.operations.values()).items()},
        },
        "cells": [plain(cell) for cell in matrix.cells.values()],
        "operations": [plain(operation) for operation in matrix.operations.values()],
    }


def _check(check: Check) -> dict[str, Any]:
    return _fields(check) | {"ok": check.is_ok}


def _profile(run: ProfileRun) -> dict[str, Any]:
    said = _fields(run)
    measured = said.pop("measured")
    return said | {
        "trial_bytes": run.measured.trial_bytes,
        "workload_bytes": plain(run.measured.workload_bytes),
        "phases": measured["phases"],
        "release": _release(run.measured.release),
    }


def _release(release: Release) -> dict[str, Any]:
    return {
        "complete": release.is_complete,
        "bytes_asked": release.asked,
        "bytes_returned": release.returned,
        "bytes_pinned": release.pinned,
        "holders": [plain(holder) for holder in release.holders],
        "seconds": release.seconds,
        "ours": release.ours,
        "owner": release.owner,
        "confirmation": plain(release.confirmation),
    }

"""Declared against found: evidence files compared with what the tables themselves say, for the last job of a CI run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvhal.answers.matrix import platforms
from kvhal.answers.runners import Runners
from kvhal.capability.cells import Cell, Support
from kvhal.capability.evidence import CellResult, EvidenceFile, read_file
from kvhal.capability.proof import Level
from kvhal.capability.table import CapabilityTable, UnknownArch
from kvhal.capability.tables import capability_table, current_keys
from kvhal.capability.versions import UnknownVersion, Versions
from kvhal.errors import ConfigError, Problem
from kvhal.modes import MODES

__all__ = ["Drift", "Finding", "check_drift"]

_Named = tuple[str, EvidenceFile]


@dataclass(frozen=True, slots=True)
class Finding:
    """Something about one arch, or one mode of it ("" for the whole arch). rule: "file:line" of the row, or ""."""

    platform: str
    arch: str
    mode: str
    text: str
    rule: str = ""


@dataclass(frozen=True, slots=True)
class Drift:
    """What the comparison found. agreed: claims that hold. denied: what is declared and not found, or the reverse.

    set_aside: results that say nothing about these tables (another commit's kernels, a masquerade), and why.
    """

    folder: str
    files: tuple[str, ...]
    agreed: tuple[Finding, ...]
    denied: tuple[Finding, ...]
    set_aside: tuple[Finding, ...]

    @property
    def is_ok(self) -> bool:
        return not self.denied


def check_drift(folder: Path, runners: Runners | None = None, platform: str | None = None) -> Drift:
    """Compare every evidence file below `folder` with the tables of the installed platforms, or of `platform` alone.

    runners: each arch that has one, and claims a mode, must have evidence. Raises ConfigError for a folder that is not
    there and for files that cannot be read.
    """
    asked = platforms(platform)
    files = [(name, file) for name, file in _read(folder) if platform is None or file.platform == platform]
    agreed: list[Finding] = []
    denied: list[Finding] = []
    set_aside: list[Finding] = []
    counted: dict[tuple[str, str], list[_Named]] = {}
    for name, file in files:
        if why := _set_aside(file):
            set_aside.append(Finding(file.platform, file.arch, "", f"{name}: {why}"))
        elif file.platform not in asked:
            denied.append(Finding(file.platform, file.arch, "", f"{name} is of a platform that is not installed"))
        else:
            counted.setdefault((file.platform, file.arch), []).append((name, file))
    for (of, arch), found in counted.items():
        table = capability_table(of)
        for name, file in found:
            for cell in file.cells:
                kind, finding = _judge(table, name, file, cell)
                {"agreed": agreed, "denied": denied, "set_aside": set_aside}[kind].append(finding)
        denied += _untested(table, arch, found)
    denied += [f for f in _without_evidence(runners or Runners(), asked) if (f.platform, f.arch) not in counted]
    return Drift(str(folder), tuple(name for name, _ in files), tuple(agreed), tuple(denied), tuple(set_aside))


def _read(folder: Path) -> list[_Named]:
    """Every evidence file below a folder: each artifact of a CI run may have a folder of its own."""
    if not folder.is_dir():
        raise ConfigError(Problem("asked to compare the evidence of a folder, and there is none", str(folder)))
    found: list[_Named] = []
    problems: list[Problem] = []
    for path in sorted(folder.rglob("*.json")):
        try:
            found.append((str(path.relative_to(folder)), read_file(path)))
        except ConfigError as exc:
            problems.extend(exc.problems)
    if problems:
        raise ConfigError(*problems)
    return found


def _set_aside(file: EvidenceFile) -> str:
    """Why a whole file says nothing about the tables, or ""."""
    if file.masquerade:
        return "made under a masquerade, which never counts"
    if file.level is not Level.HARDWARE:
        return f"of level {file.level.value}; only what ran on the arch is compared"
    return ""


def _judge(table: CapabilityTable, name: str, file: EvidenceFile, result: CellResult) -> tuple[str, Finding]:
    """Whether a result agrees with its row, denies it or says nothing of it."""
    versions = file.versions.conditions
    try:
        cell = table.cell(result.mode, file.arch, versions)
    except UnknownArch:
        text = f"{name} is of an arch that {table.source} does not list; add its rows"
        return "denied", Finding(table.platform, file.arch, result.mode, text)
    except UnknownVersion as exc:
        return "set_aside", Finding(table.platform, file.arch, result.mode, f"{name}: {exc}")

    def finding(text: str) -> Finding:
        return Finding(table.platform, file.arch, result.mode, f"{text} ({name})", cell.rule)

    declared = cell.support.value
    if changed := current_keys(table, versions)(result.mode, file.arch).changes_since(result.key):
        return "set_aside", finding(f"made for {changed}")
    if not result.passed and cell.support.is_accepted:
        return "denied", finding(f"declared {declared} and failed: {', '.join(result.failed) or 'no test ran'}")
    if result.passed and not cell.support.is_accepted:
        remedy = "delete the debt" if cell.support is Support.BROKEN else "correct the row"
        return "denied", finding(f"declared {declared} and passed {result.tests} tests; {remedy}")
    if cell.support.is_accepted and (missing := [e for e in cell.encodings if e not in result.encodings]):
        return "denied", finding(f"declared to be stored as {', '.join(missing)} too, which was not tested")
    return "agreed", finding(f"declared {declared}, {'passed' if result.passed else 'failed'}, {result.tests} tests")


def _untested(table: CapabilityTable, arch: str, found: list[_Named]) -> Iterator[Finding]:
    """Claims of an arch that none of its files has a result for."""
    tested = {cell.mode for _, file in found for cell in file.cells}
    files = ", ".join(name for name, _ in found)
    for cell in _claims(table, arch, found[0][1].versions.conditions):
        if cell.mode not in tested:
            text = f"declared {cell.support.value} and not tested ({files})"
            yield Finding(table.platform, arch, cell.mode, text, cell.rule)


def _without_evidence(runners: Runners, asked: tuple[str, ...]) -> Iterator[Finding]:
    """Every arch that has a runner and claims a mode: its evidence must be there."""
    for platform, arch in runners.of:
        if platform in asked:
            claimed = [cell.mode for cell in _claims(capability_table(platform), arch, Versions())]
            if claimed:
                text = f"it has a runner and claims {', '.join(claimed)}, and there is no evidence of it"
                yield Finding(platform, arch, "", text)


def _claims(table: CapabilityTable, arch: str, versions: Versions) -> Iterator[Cell]:
    """The cells of an arch that the table accepts; nothing is claimed that hangs on an unknown version."""
    for mode in MODES if arch in table.archs else ():
        try:
            cell = table.cell(mode, arch, versions)
        except UnknownVersion:
            continue
        if cell.support.is_accepted:
            yield cell

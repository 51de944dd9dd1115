"""Evidence: files that say what was proved where, and what a table becomes in their light. No torch.

A scaled mode runs on proof alone: a `run` cell without hardware evidence for its arch answers `experimental`, whatever
the table's file says. Evidence for another key (older kernels, another Triton minor, another tuning row) is stale: it
still counts, and says so. Plain 16-bit modes need none. A newer result for the same key replaces an older one, a
failure included, and what was made under a masquerade never counts.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import AwareDatetime, ConfigDict, TypeAdapter, ValidationError

from kvhal.capability.cells import Cell, Support
from kvhal.capability.proof import Key, Level, Origin, Proof, Status, verify_command
from kvhal.capability.table import CapabilityTable
from kvhal.capability.versions import Conditions, Versions
from kvhal.errors import ConfigError, Problem
from kvhal.modes import MODES, Scaling
from kvhal.source.textfile import read_text
from kvhal.source.user_folder import user_folder

__all__ = [
    "SCHEMA",
    "CellResult",
    "Evidence",
    "EvidenceFile",
    "EvidenceVersions",
    "apply_evidence",
    "read_file",
    "read_folder",
    "site_folder",
    "write_file",
]

SCHEMA = "kvhal.evidence/1"
_STRICT = ConfigDict(extra="forbid", strict=True)


@dataclass(frozen=True, slots=True)
class EvidenceVersions:
    """What was installed where the evidence was made; None where there is no such thing or it could not be read."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    kvhal: str
    python: str
    torch: str
    triton: str | None
    cuda: str | None
    rocm: str | None
    driver: str | None

    @property
    def conditions(self) -> Versions:
        """Those that rows of a table may put conditions on."""
        return Versions(self.torch, self.triton, self.cuda, self.rocm, self.driver)


@dataclass(frozen=True, slots=True)
class CellResult:
    """What the suite found of one mode, stored in each of `encodings`.

    worst: the largest measured error by check, or figure of machine code; None is one that is no number. failed: the
    tests that did not pass. covers: of isa evidence, the kernels that were compiled; what is not named there was not.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    mode: str
    encodings: tuple[str, ...]
    key: Key
    passed: bool
    tests: int
    worst: dict[str, float | None]
    failed: tuple[str, ...]
    covers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class EvidenceFile:
    """One run of the suite on one device. masquerade: made on another vendor's device, to test calls; never counts."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    schema: Literal["kvhal.evidence/1"]
    platform: str
    arch: str
    device: str
    date: AwareDatetime
    level: Level
    quick: bool
    masquerade: bool
    versions: EvidenceVersions
    cells: tuple[CellResult, ...]


_ADAPTER = TypeAdapter(EvidenceFile)


@dataclass(frozen=True, slots=True)
class _Result:
    """One cell of one file, and where it comes from."""

    file: EvidenceFile
    cell: CellResult
    origin: Origin
    source: str

    @property
    def age(self) -> tuple[datetime, bool]:
        """Sorts by date; of the same moment the site's own comes last."""
        return self.file.date, self.origin is Origin.SITE

    def proof(self, status: Status, why: str = "", settle: str = "") -> Proof:
        day = self.file.date.date().isoformat()
        return Proof(status, self.file.level, self.origin, self.source, day, why, settle)


@dataclass(frozen=True, slots=True)
class Evidence:
    """The results that count for one platform."""

    platform: str
    results: tuple[_Result, ...] = field(default=())

    def with_files(self, files: Iterable[tuple[str, EvidenceFile]], origin: Origin) -> Evidence:
        """These results and those of `files` (name, content). Files of other platforms and masquerades add nothing."""
        found = (
            _Result(file, cell, origin, name)
            for name, file in files
            if file.platform == self.platform and not file.masquerade
            for cell in file.cells
        )
        return replace(self, results=(*self.results, *found))

    def status(
        self,
        mode: str,
        arch: str,
        key: Key,
        *,
        level: Level = Level.HARDWARE,
        encodings: tuple[str, ...] = (),
        when: Conditions | None = None,
    ) -> Proof:
        """Where `mode` on `arch` stands by evidence of this level for `key`.

        encodings: those that must have been tested, else it is stale. when: only evidence made at such versions.
        """
        settle = verify_command(mode, arch) if level is Level.HARDWARE else ""
        found = sorted(
            (
                r
                for r in self.results
                if (r.cell.mode, r.file.arch, r.file.level) == (mode, arch, level) and _holds(when, r.file.versions)
            ),
            key=lambda r: r.age,
            reverse=True,
        )
        exact = [r for r in found if r.cell.key == key and set(encodings) <= set(r.cell.encodings)]
        if exact:
            newest = exact[0]
            if newest.cell.passed:
                return newest.proof(Status.CURRENT)
            return newest.proof(Status.FAILED, f"failed: {', '.join(newest.cell.failed)}", settle)
        covering = (r for r in found if r.cell.key.kernel == key.kernel and set(encodings) <= set(r.cell.encodings))
        same = next(covering, None)
        if same is not None and not same.cell.passed:
            # The last that was seen of these kernels, under another Triton or tuning row, is that they failed.
            why = f"made for {key.changes_since(same.cell.key)}, failed: {', '.join(same.cell.failed)}"
            return same.proof(Status.FAILED, why, settle)
        for older in (r for r in found if r.cell.passed):
            missing = [e for e in encodings if e not in older.cell.encodings]
            what = key.changes_since(older.cell.key) or f"without the encoding {', '.join(missing)}"
            return older.proof(Status.STALE, f"made for {what}" if not missing else f"made {what}", settle)
        return Proof(Status.NONE, settle=settle)


def apply_evidence(table: CapabilityTable, evidence: Evidence, keys: Callable[[str, str], Key]) -> CapabilityTable:
    """The table as the evidence lets it stand: every cell with its `proof`, and no support that is not proved.

    keys(mode, arch): the key of the kernels that would run now. Pure: the table given stays as it is.
    """
    rows: dict[tuple[str, str], tuple[Cell, ...]] = {
        (mode, arch): tuple(_judged(cell, evidence, keys(mode, arch)) for cell in cells)
        for (mode, arch), cells in table.mode_rows.items()
    }
    return replace(table, mode_rows=rows)


def _judged(cell: Cell, evidence: Evidence, key: Key) -> Cell:
    proof = _proof(cell, evidence, key)
    match cell.support:
        case Support.REFUSED:
            return cell
        case Support.BROKEN:
            return cell if cell.until is None else _lifted(cell, proof, _proof(cell, evidence, key, cell.until))
        case Support.EXPERIMENTAL:
            # The row itself asks for an opt-in, so no proof would settle it.
            return replace(cell, proof=replace(proof, settle=""))
        case Support.RUN:
            if MODES[cell.mode].scaling is Scaling.NONE or proof.has_passed:
                return replace(cell, proof=proof)
            found = "nothing has proved it yet" if proof.status is Status.NONE else f"its tests {proof.summary}"
            reason = f"It should run on {cell.arch} and {found}; {proof.settle} settles it. {cell.reason}".strip()
            return replace(cell, proof=proof, support=Support.EXPERIMENTAL, reason=reason)


def _lifted(cell: Cell, hardware: Proof, promised: Proof) -> Cell:
    """A broken cell whose row waits for evidence of a level, once that is there for the kernels of now.

    What has failed on hardware stays broken, whatever was compiled.
    """
    if hardware.has_passed:
        reason = f"It has passed on hardware since its row was written, which said: {cell.reason}"
        return replace(cell, support=Support.RUN, proof=hardware, reason=reason)
    if hardware.status is Status.FAILED or promised.status is not Status.CURRENT:
        found = (
            f"its evidence is {hardware.summary}" if hardware.status is Status.FAILED else "nothing has proved it yet"
        )
        return replace(cell, proof=hardware, reason=f"On {cell.arch} {found}. {cell.reason}")
    level = "no" if promised.level is None else promised.level.value
    reason = f"There is {level} evidence and no more; {hardware.settle} settles it. {cell.reason}"
    return replace(cell, support=Support.EXPERIMENTAL, proof=replace(promised, settle=hardware.settle), reason=reason)


def _proof(cell: Cell, evidence: Evidence, key: Key, level: Level = Level.HARDWARE) -> Proof:
    return evidence.status(cell.mode, cell.arch, key, level=level, encodings=cell.encodings, when=cell.when)


def _holds(when: Conditions | None, versions: EvidenceVersions) -> bool:
    """Whether evidence made at these versions is about a row with these conditions; an unknown version is not."""
    if when is None:
        return True
    at = versions.conditions.releases
    return all(dimension in at for dimension in when.dimensions) and when.hold(at)


def site_folder(env: Mapping[str, str] = os.environ) -> Path:
    """The user's own evidence: `evidence` in their folder."""
    return user_folder(env) / "evidence"


def read_folder(folder: Path, label: str | None = None, *, is_optional: bool = False) -> list[tuple[str, EvidenceFile]]:
    """(name, content) of every `*.json` in a folder, by name. label: what the folder is called in reports.

    Raises ConfigError with the problems of every file, and for a folder that does not exist unless it may be missing.
    """
    if not folder.is_dir():
        if is_optional and not folder.exists():
            return []
        raise ConfigError(
            Problem(
                "asked to read evidence from a folder, and there is none", str(folder), hint="`kvhal verify` makes one"
            )
        )
    found: list[tuple[str, EvidenceFile]] = []
    problems: list[Problem] = []
    for path in sorted(folder.glob("*.json")):
        name = f"{label}/{path.name}" if label else str(path)
        try:
            found.append((name, read_file(path)))
        except ConfigError as exc:
            problems.extend(exc.problems)
    if problems:
        raise ConfigError(*problems)
    return found


def read_file(path: Path) -> EvidenceFile:
    """The content of an evidence file. Raises ConfigError with every problem and the file's path."""
    text, hint = read_text(path, str(path)), "make it anew with `kvhal verify`, or remove it"
    try:
        version = json.loads(text, parse_constant=_no_number)["schema"]
    except (ValueError, TypeError, KeyError) as exc:
        raise ConfigError(Problem(f"this is no evidence file: {_said(exc)}", str(path), hint=hint)) from exc
    if version != SCHEMA:
        message = f"evidence of schema {version!r} was found and this kvhal reads {SCHEMA!r}"
        raise ConfigError(Problem(message, str(path), hint=hint))
    try:
        file = _ADAPTER.validate_json(text)
    except ValidationError as exc:
        found = (f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in exc.errors())
        raise ConfigError(*(Problem(f"evidence: {f}", str(path), hint=hint) for f in found)) from exc
    problems = list(_problems(file))
    if problems:
        raise ConfigError(*(Problem(f"evidence: {p}", str(path), hint=hint) for p in problems))
    return file


def write_file(file: EvidenceFile, path: Path) -> None:
    """Write an evidence file, whole or not at all; missing folders are made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(json.dumps(_plain(file), indent=2, allow_nan=False) + "\n", encoding="utf-8")
    partial.replace(path)


def _problems(file: EvidenceFile) -> Iterable[str]:
    for name in (c.mode for c in file.cells if c.mode not in MODES):
        yield f"mode {name!r} is unknown; known: {', '.join(MODES)}"
    named = [c.mode for c in file.cells]
    if len(set(named)) != len(named):
        yield f"a mode is answered twice: {named!r}"
    for cell in file.cells:
        if cell.key.arch != file.arch:
            yield f"{cell.mode}: its key is for arch {cell.key.arch!r} and the file for {file.arch!r}"
        if cell.passed and (cell.failed or cell.tests < 1):
            yield f"{cell.mode}: it passed with {cell.tests} tests, of which {len(cell.failed)} failed"
    try:
        _ = file.versions.conditions
    except ConfigError as exc:
        yield from (f"versions.{p.message}" for p in exc.problems)


def _plain(file: EvidenceFile) -> dict[str, Any]:
    written: dict[str, Any] = asdict(file)
    written["level"] = file.level.value
    written["date"] = file.date.isoformat().replace("+00:00", "Z")
    for cell in written["cells"]:
        cell["worst"] = {k: v if v is not None and math.isfinite(v) else None for k, v in cell["worst"].items()}
        if not cell["covers"]:
            del cell["covers"]
    return written


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is no JSON number")


def _said(exc: Exception) -> str:
    return "it has no key 'schema'" if isinstance(exc, (KeyError, TypeError)) else str(exc)

"""The whole table of a platform: every mode and operation on every arch, and every reason once. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from kvhal.answers.target import table_of
from kvhal.capability.cells import OPERATIONS, Cell, Operation, Support
from kvhal.capability.table import CapabilityTable
from kvhal.capability.tables import as_shipped, capability_table
from kvhal.capability.versions import Versions
from kvhal.detection.registry import names
from kvhal.modes import MODES

__all__ = ["Answer", "PlatformMatrix", "Reason", "counts", "declared", "known_here", "platforms", "reasons"]

Answer = Cell | Operation


@dataclass(frozen=True, slots=True)
class PlatformMatrix:
    """A platform's table in the light of evidence, read at `versions`; the rest is as the table assumes.

    cells: by mode and arch, mode by mode. operations: likewise. sources: where each version is known from.
    """

    table: CapabilityTable
    versions: Versions
    sources: Mapping[str, str]
    cells: Mapping[tuple[str, str], Cell]
    operations: Mapping[tuple[str, str], Operation]

    @classmethod
    def read(
        cls, table: CapabilityTable, versions: Versions | None = None, sources: Mapping[str, str] | None = None
    ) -> PlatformMatrix:
        """Raises UnknownVersion where an answer hangs on a version that is neither known nor assumed."""
        at = versions or Versions()
        cells = {(mode, arch): table.cell(mode, arch, at) for mode in MODES for arch in table.archs}
        operations = {(name, arch): table.operation(name, arch, at) for name in OPERATIONS for arch in table.archs}
        return cls(table, at, sources or {}, cells, operations)

    @property
    def platform(self) -> str:
        return self.table.platform

    @property
    def archs(self) -> tuple[str, ...]:
        return self.table.archs

    @property
    def answers(self) -> tuple[Answer, ...]:
        return (*self.cells.values(), *self.operations.values())


@dataclass(frozen=True, slots=True)
class Reason:
    """One reason of any number of rows, with what those rows rest on. number: from 1, in the order of the tables."""

    number: int
    text: str
    evidence: tuple[str, ...]
    links: tuple[str, ...]
    rows: tuple[tuple[str, tuple[Answer, ...]], ...]


def platforms(asked: str | None) -> tuple[str, ...]:
    """The platform asked for, or every installed one: the CPU first, which is the reference, then by name."""
    return (asked,) if asked is not None else tuple(sorted(names(), key=lambda name: (name != "cpu", name)))


def declared(platform: str) -> PlatformMatrix:
    """By what is shipped alone, at assumed versions: the same on every machine."""
    return PlatformMatrix.read(as_shipped(capability_table(platform)))


def known_here(platform: str, given: Versions | None = None, evidence: Iterable[Path] = ()) -> PlatformMatrix:
    """By all evidence there is, at the versions given or installed: what `kvhal explain` answers from."""
    return PlatformMatrix.read(*table_of(platform, given, evidence))


def counts(answers: Iterable[Answer]) -> dict[Support, int]:
    """How many answers there are of each support, in the order of `Support`; none of zero."""
    found = [answer.support for answer in answers]
    return {support: found.count(support) for support in Support if support in found}


def reasons(matrices: Iterable[PlatformMatrix]) -> tuple[Reason, ...]:
    """Every reason of every row, whatever versions it holds for, once each. rows: (platform, answers of one row)."""
    found: dict[str, list[tuple[str, tuple[Answer, ...]]]] = {}
    for matrix in matrices:
        for rows in (matrix.table.mode_rows, matrix.table.operation_rows):
            together: dict[tuple[str, str], list[Answer]] = {}
            for answers in rows.values():
                for answer in answers:
                    if answer.reason:
                        together.setdefault((answer.reason, answer.rule), []).append(answer)
            for (reason, _), answers_of_row in together.items():
                found.setdefault(reason, []).append((matrix.platform, tuple(answers_of_row)))
    return tuple(_reason(i, text, rows) for i, (text, rows) in enumerate(found.items(), 1))


def _reason(number: int, text: str, rows: list[tuple[str, tuple[Answer, ...]]]) -> Reason:
    answers = [answer for _, of_row in rows for answer in of_row]
    evidence = dict.fromkeys(a.evidence for a in answers if isinstance(a, Cell) and a.evidence)
    links = dict.fromkeys(link for a in answers for link in a.links)
    return Reason(number, text, tuple(evidence), tuple(links), tuple(rows))

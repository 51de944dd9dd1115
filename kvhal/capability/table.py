"""What runs where: one table a platform, total over every mode and operation x every arch of its file.

A table answers exactly or not at all: an arch it does not list is refused, never likened to another, and a version it
needs and neither knows nor assumes is asked for. It is read from YAML and checked as a whole; a missing, doubled or
meaningless answer fails at load, with file:line.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path as FilePath
from types import MappingProxyType
from typing import TypeVar

from kvhal import modes
from kvhal.capability.cells import OPERATIONS, Cell, Limits, Operation, Path, Shapes, Support
from kvhal.capability.rows import arch_token, read
from kvhal.capability.versions import UnknownVersion, Versions, samples
from kvhal.errors import ConfigError, UnsupportedMode
from kvhal.source.spelling import nearest
from kvhal.source.textfile import read_text
from kvhal.source.yaml_source import parse

__all__ = [
    "OPERATIONS",
    "CapabilityTable",
    "Cell",
    "Limits",
    "Operation",
    "Path",
    "Shapes",
    "Support",
    "UnknownArch",
    "UnknownVersion",
    "Versions",
    "arch_token",
]

A = TypeVar("A", Cell, Operation)
_ANY = Versions()


class UnknownArch(UnsupportedMode):
    """A platform's table lists no such arch. arch: its token. near: the known arch to read about first, or None."""

    def __init__(self, message: str, platform: str, arch: str, near: str | None) -> None:
        super().__init__(message)
        self.platform = platform
        self.arch = arch
        self.near = near


@dataclass(frozen=True, slots=True, eq=False)
class CapabilityTable:
    """Every mode and operation x every arch of one platform. Build it with `load` or `from_text`.

    assume: the versions it answers for where one is not known. mode_rows and operation_rows: every answer, one of which
    holds at any combination of versions; `cell` and `operation` find it. kernels: the functions that evidence is about,
    by dotted names; () is the reference.
    """

    platform: str
    archs: tuple[str, ...]
    source: str
    mode_rows: Mapping[tuple[str, str], tuple[Cell, ...]]
    operation_rows: Mapping[tuple[str, str], tuple[Operation, ...]]
    assume: Versions = field(default=_ANY)
    kernels: tuple[str, ...] = ()

    @classmethod
    def load(cls, path: FilePath | str, *, platform: str | None = None) -> CapabilityTable:
        """The table in a file; `platform` is the name it must be for. Raises ConfigError with every problem."""
        file = FilePath(path)
        # Folder and file: the same rule reads the same in every report, wherever the wheel is installed.
        return cls.from_text(read_text(file, str(file)), f"{file.parent.name}/{file.name}", platform=platform)

    @classmethod
    def from_text(cls, text: str, name: str, *, platform: str | None = None) -> CapabilityTable:
        """The table in a YAML text; `name` stands for the file in rules and problems. Raises as `load` does."""
        rows = read(parse(text, name), platform)
        cells, operations = MappingProxyType(rows.cells), MappingProxyType(rows.operations)
        return cls(rows.platform, rows.archs, name, cells, operations, rows.assume, rows.kernels)

    @property
    def cells(self) -> Mapping[tuple[str, str], Cell]:
        """The answer for every mode on every arch at the assumed versions. Raises UnknownVersion as `cell` does."""
        return {key: self.cell(*key) for key in self.mode_rows}

    @property
    def operations(self) -> Mapping[tuple[str, str], Operation]:
        """The answer for every operation on every arch at the assumed versions. Raises as `cells` does."""
        return {key: self.operation(*key) for key in self.operation_rows}

    def cell(self, mode: str, arch: str, versions: Versions = _ANY) -> Cell:
        """The answer for a mode (canonical or alias). Versions that are not given are as the table assumes them.

        Raises ConfigError for an unknown mode, UnsupportedMode for an arch that the table does not list, UnknownVersion
        if the answer depends on a version that is neither given nor assumed.
        """
        asked = f"mode {mode!r}"
        rows = self.mode_rows[modes.mode(mode).name, self.known_arch(arch, asked)]
        return self._answer(rows, versions, asked)

    def operation(self, name: str, arch: str, versions: Versions = _ANY) -> Operation:
        """The answer for an operation. Raises as `cell` does."""
        if name not in OPERATIONS:
            raise ConfigError(f"operation {name!r} is unknown; known: {', '.join(OPERATIONS)}")
        asked = f"operation {name!r}"
        return self._answer(self.operation_rows[name, self.known_arch(arch, asked)], versions, asked)

    def known_arch(self, arch: str, asked: str) -> str:
        """The token of `arch` if the table lists exactly it. Raises UnsupportedMode naming what was `asked`."""
        token = arch_token(arch)
        if token in self.archs:
            return token
        near, how = _nearest_arch(token, self.archs)
        closest = f"nearest in {how}: {near!r}" if near else f"none is near; an arch is written like {self.archs[0]!r}"
        raise UnknownArch(
            f"{asked} was asked on platform {self.platform!r}, arch {arch!r}; {self.source} has no row for arch "
            f"{token!r} and no other arch's is used in its place (known: {', '.join(self.archs)}; "
            f"{closest}); add {token!r} to 'archs' there, with a row for each mode and "
            "operation (experimental until its own hardware has proved it), or use a device of a known arch",
            self.platform,
            token,
            near,
        )

    def _answer(self, rows: tuple[A, ...], given: Versions, asked: str) -> A:
        """The row that holds. Where a version is unknown, the one that holds whatever it is, if there is one."""
        needed = dict.fromkeys(d for row in rows for d in row.when.dimensions)
        if not needed:
            return rows[0]
        at = given.or_else(self.assume).releases
        unknown = [d for d in needed if d not in at]
        points = samples((row.when for row in rows), unknown) if unknown else iter([{}])
        found = {id(row): row for point in points for row in rows if row.when.hold(at | point)}
        if len(found) > 1:
            answers = "; ".join(f"{row.when}: {row.support.value} ({row.rule})" for row in found.values())
            raise UnknownVersion(
                f"{asked} was asked on platform {self.platform!r}, arch {rows[0].arch!r}; the answer depends on the "
                f"version of {' and '.join(unknown)}, which is not known ({answers}); say which version, or add it to "
                f"'assume' in {self.source}",
                tuple(unknown),
            )
        (row,) = found.values()
        known, assumed = given.known, self.assume.known
        return replace(row, assumed=tuple(f"{d} {assumed[d]}" for d in needed if d not in known and d in assumed))


def _nearest_arch(token: str, archs: tuple[str, ...]) -> tuple[str | None, str]:
    """The known arch to read about first, and how it is near: in number within its family, else in spelling."""
    number = _number(token)
    if number is not None:
        family = {abs(n[1] - number[1]): a for a in archs if (n := _number(a)) is not None and n[0] == number[0]}
        if family:
            return family[min(family)], "number"
    return nearest(token, archs), "spelling"


def _number(token: str) -> tuple[str, int] | None:
    """Family and number of a GPU arch: sm_ numbers are decimal, gfx numbers hexadecimal below their generation."""
    if found := re.fullmatch(r"sm_?(\d+)[a-z]?", token.lower()):
        return "sm", int(found[1])
    if found := re.fullmatch(r"gfx(\d+)([0-9a-f]{2})", token.lower()):
        return "gfx", int(found[1]) * 256 + int(found[2], 16)
    return None

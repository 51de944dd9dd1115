"""What runs where: one table a platform, total over every mode and operation x every arch of its file.

A table answers exactly or not at all: an arch it does not list is refused, never likened to another. It is read from
YAML and checked as a whole; a missing, doubled or meaningless answer fails at load, with file:line.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path as FilePath
from types import MappingProxyType

from kvhal import modes
from kvhal.capability_rows import arch_token, read
from kvhal.cells import OPERATIONS, Cell, Limits, Operation, Path, Shapes, Support
from kvhal.errors import ConfigError, UnsupportedMode
from kvhal.spelling import nearest
from kvhal.textfile import read_text
from kvhal.yaml_source import parse

__all__ = [
    "OPERATIONS",
    "CapabilityTable",
    "Cell",
    "Limits",
    "Operation",
    "Path",
    "Shapes",
    "Support",
    "arch_token",
]


@dataclass(frozen=True, slots=True, eq=False)
class CapabilityTable:
    """Every mode and operation x every arch of one platform. Build it with `load` or `from_text`."""

    platform: str
    archs: tuple[str, ...]
    source: str
    cells: Mapping[tuple[str, str], Cell]
    operations: Mapping[tuple[str, str], Operation]

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
        return cls(rows.platform, rows.archs, name, cells, operations)

    def cell(self, mode: str, arch: str) -> Cell:
        """The answer for a mode (canonical or alias).

        Raises ConfigError for an unknown mode, UnsupportedMode for an arch that the table does not list.
        """
        return self.cells[modes.mode(mode).name, self.known_arch(arch, f"mode {mode!r}")]

    def operation(self, name: str, arch: str) -> Operation:
        """The answer for an operation. Raises as `cell` does."""
        if name not in OPERATIONS:
            raise ConfigError(f"operation {name!r} is unknown; known: {', '.join(OPERATIONS)}")
        return self.operations[name, self.known_arch(arch, f"operation {name!r}")]

    def known_arch(self, arch: str, asked: str) -> str:
        """The token of `arch` if the table lists exactly it. Raises UnsupportedMode naming what was `asked`."""
        token = arch_token(arch)
        if token in self.archs:
            return token
        near = nearest(token, self.archs)
        hint = f"; nearest in spelling: {near!r}" if near else ""
        raise UnsupportedMode(
            f"{asked} was asked on platform {self.platform!r}, arch {arch!r}; {self.source} has no row for arch "
            f"{token!r} and no other arch's is used in its place (known: {', '.join(self.archs)}{hint}); "
            f"add {token!r} to 'archs' there, with a row for each mode and operation, or use a device of a known arch"
        )

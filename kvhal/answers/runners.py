"""Which machine of a CI has which arch: a small YAML, from a file or from a repository's variable.

::

    kvhal_runners: 1
    table: {runs_on: [ubuntu-24.04]}                # archs without a machine of their own: the table alone is checked
    platforms:
      cuda:
        sm_90:
          runs_on: [self-hosted, h200]              # GitHub's labels
          torch: --index-url https://download.pytorch.org/whl/cu130 torch     # arguments of `pip install`
          container: {image: "nvcr.io/nvidia/pytorch:26.10-py3", options: --gpus all}

Every key but `runs_on` may be left out; a blank text names no runner at all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kvhal.capability.table import arch_token
from kvhal.source.textfile import read_text
from kvhal.source.yaml_fields import FieldReader, Node
from kvhal.source.yaml_source import parse

__all__ = ["Container", "Runner", "Runners"]

VERSION = 1


@dataclass(frozen=True, slots=True)
class Container:
    """The image that a job runs in, and docker's options for it ("--gpus all")."""

    image: str
    options: str = ""


@dataclass(frozen=True, slots=True)
class Runner:
    """A machine by its labels. torch: the arguments of the `pip install` that brings torch; "" if it is there."""

    runs_on: tuple[str, ...]
    torch: str = ""
    container: Container | None = None


@dataclass(frozen=True, slots=True)
class Runners:
    """The runner of each (platform, arch) that has one. table: of the archs that have none; None if there is none."""

    of: Mapping[tuple[str, str], Runner] = field(default_factory=dict)
    table: Runner | None = None

    @classmethod
    def load(cls, path: Path) -> Runners:
        """The runners in a file. Raises ConfigError with every problem."""
        return cls.from_text(read_text(path, str(path)), str(path))

    @classmethod
    def from_text(cls, text: str, name: str) -> Runners:
        """The runners in a text; `name` stands for it in problems. Raises as `load` does."""
        if not text.strip():
            return cls()
        reader = FieldReader(parse(text, name))
        fields = reader.mapping(reader.root, "runners", required=("kvhal_runners",), optional=("table", "platforms"))
        found = fields or {}
        if "kvhal_runners" in found and found["kvhal_runners"].value != VERSION:
            reader.problem(found["kvhal_runners"], f"kvhal_runners must be {VERSION}, the version of this form")
        table = _runner(reader, found["table"], "table") if "table" in found else None
        of = _platforms(reader, found["platforms"]) if "platforms" in found else {}
        reader.finish()
        return cls(of, table)


def _platforms(reader: FieldReader, node: Node) -> dict[tuple[str, str], Runner]:
    from kvhal.answers.matrix import platforms
    from kvhal.capability.tables import capability_table

    found: dict[tuple[str, str], Runner] = {}
    for platform, archs in (reader.mapping(node, "platforms", optional=platforms(None)) or {}).items():
        known = capability_table(platform).archs
        for arch, runner in (reader.mapping(archs, f"platform {platform!r}", optional=known) or {}).items():
            read = _runner(reader, runner, f"{platform}.{arch_token(arch)}")
            if read is not None:
                found[platform, arch] = read
    return found


def _runner(reader: FieldReader, node: Node, what: str) -> Runner | None:
    fields = reader.mapping(node, what, required=("runs_on",), optional=("torch", "container"))
    if fields is None or "runs_on" not in fields:
        return None
    labels = reader.strings(fields["runs_on"], f"{what}.runs_on")
    if not labels:
        reader.problem(fields["runs_on"], f"{what}.runs_on names no label; list those that the machine has")
    torch = (reader.string(fields["torch"], f"{what}.torch") or "") if "torch" in fields else ""
    container = _container(reader, fields["container"], what) if "container" in fields else None
    return Runner(labels, torch, container)


def _container(reader: FieldReader, node: Node, what: str) -> Container | None:
    fields = reader.mapping(node, f"{what}.container", required=("image",), optional=("options",))
    if fields is None or "image" not in fields:
        return None
    options = (reader.string(fields["options"], "options") or "") if "options" in fields else ""
    return Container(reader.string(fields["image"], "image") or "", options)

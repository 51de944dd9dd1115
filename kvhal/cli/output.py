"""What the commands share: exit codes, the session, and how a page or a document reaches stdout."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import RenderableType

    from kvhal.capability.versions import Versions

__all__ = [
    "BUG",
    "CHECK_FAILED",
    "DEVICE",
    "INTERRUPTED",
    "OK",
    "PAGE_WIDTH",
    "PIPE_CLOSED",
    "REFUSED",
    "USAGE",
    "AsJson",
    "EvidenceFolders",
    "Session",
    "emit_json",
    "emit_page",
    "version_option",
    "versions_given",
]

OK, CHECK_FAILED, USAGE, REFUSED, DEVICE, BUG, INTERRUPTED, PIPE_CLOSED = 0, 1, 2, 3, 4, 70, 130, 141
PAGE_WIDTH = 100


@dataclass(slots=True)
class Session:
    """One call. as_json: asked for on the command line, or by the deployment's `report.format`.

    `main` looks for --json before typer does, so that a usage error is a document as well.
    """

    as_json: bool


def _asked_for_json(ctx: typer.Context, is_asked: bool) -> bool:
    ctx.obj.as_json = ctx.obj.as_json or is_asked
    return is_asked


AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document.", callback=_asked_for_json)]
EvidenceFolders = Annotated[
    list[Path] | None,
    typer.Option("--evidence", metavar="DIR", help="A further folder of evidence files. Repeatable."),
]


def version_option(dimension: str) -> Any:
    """The option `--torch V`, `--triton V` and so on."""
    return typer.Option(f"--{dimension}", metavar="V", help=f"Answer for this version of {dimension}.")


def versions_given(given: Mapping[str, str | None]) -> Versions:
    """The versions that options named, by dimension. Raises ConfigError for every text that is no version."""
    from kvhal.capability.versions import Versions

    return Versions(**{dimension: text for dimension, text in given.items() if text is not None})


def emit_json(document: Mapping[str, Any]) -> None:
    """The document on stdout."""
    from kvhal.report.document import to_json

    typer.echo(to_json(document))


def emit_page(page: RenderableType) -> None:
    """The page on stdout: as wide as a terminal, else PAGE_WIDTH, and without colour or trailing spaces."""
    from rich.console import Console

    is_terminal = sys.stdout.isatty()
    console = Console(width=None if is_terminal or "COLUMNS" in os.environ else PAGE_WIDTH, highlight=False)
    with console.capture() as captured:
        console.print(page)
    text = captured.get()
    if not is_terminal:
        # Rich pads lines to the width; a file or a pipe needs no such spaces.
        text = "\n".join(line.rstrip() for line in text.split("\n"))
    typer.echo(text, nl=False, color=is_terminal)

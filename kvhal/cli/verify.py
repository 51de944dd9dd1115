"""`kvhal verify`: prove what the table claims on this machine. Errors are raised; the main CLI maps them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvhal.cli.output import CHECK_FAILED, OK, AsJson, emit_json

__all__ = ["verify"]

_Platform = Annotated[str | None, typer.Option("--platform", metavar="NAME", help="The platform; default: detected.")]
_Device = Annotated[int, typer.Option("--device", metavar="N", min=0, help="Its device, by logical index.")]
_Modes = Annotated[list[str] | None, typer.Option("--mode", metavar="MODE", help="Only this mode. Repeatable.")]
_Quick = Annotated[bool, typer.Option("--quick", help="Fewer shapes; under a minute.")]
_Folder = Annotated[Path | None, typer.Option("--evidence", metavar="DIR", help="Where to write; default: yours.")]


def verify(
    platform: _Platform = None,
    device: _Device = 0,
    mode: _Modes = None,
    quick: _Quick = False,
    evidence: _Folder = None,
    as_json: AsJson = False,
) -> int:
    """Run the compliance suite on this machine's device and keep the result as evidence. Exit 1 if a test failed."""
    from kvhal.report.verification import verify_document, verify_lines
    from kvhal.verify import verify as run

    found = run(
        platform,
        device=device,
        only=mode or (),
        quick=quick,
        folder=evidence,
        progress=lambda text: typer.echo(text, err=True),
    )
    if as_json:
        emit_json(verify_document(found))
    else:
        typer.echo("\n".join(verify_lines(found)))
    return OK if found.is_ok else CHECK_FAILED

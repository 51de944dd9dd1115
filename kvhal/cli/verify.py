"""`kvhal verify`: prove what the table claims on this machine. Errors are raised; the main CLI maps them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from kvhal.cli.output import CHECK_FAILED, OK, AsJson, emit_json, emit_page
from kvhal.errors import ConfigError

__all__ = ["verify"]

_Platform = Annotated[str | None, typer.Option("--platform", metavar="NAME", help="The platform; default: detected.")]
_Device = Annotated[int, typer.Option("--device", metavar="N", min=0, help="Its device, by logical index.")]
_Modes = Annotated[list[str] | None, typer.Option("--mode", metavar="MODE", help="Only this mode. Repeatable.")]
_Quick = Annotated[bool, typer.Option("--quick", help="Fewer shapes; under a minute, and so an arch if compiled.")]
_Folder = Annotated[Path | None, typer.Option("--evidence", metavar="DIR", help="Where to write; default: yours.")]
_CompileOnly = Annotated[
    bool, typer.Option("--compile-only", help="No device: compile the kernels, read the machine code.")
]
_Arches = Annotated[
    list[str] | None,
    typer.Option("--arch", metavar="ARCH", help="With --compile-only: for this arch, such as sm_90. Repeatable."),
]
_HeadDims = Annotated[
    list[int] | None,
    typer.Option("--head-dim", metavar="D", min=1, help="With --compile-only: for this head size. Repeatable."),
]


def verify(
    platform: _Platform = None,
    device: _Device = 0,
    mode: _Modes = None,
    quick: _Quick = False,
    evidence: _Folder = None,
    compile_only: _CompileOnly = False,
    arch: _Arches = None,
    head_dim: _HeadDims = None,
    as_json: AsJson = False,
) -> int:
    """Run the compliance suite on this machine's device and keep the result as evidence. Exit 1 if a test failed.

    With --compile-only no device is needed: the kernels are compiled for other arches and their machine code is read.
    """
    if compile_only:
        return _compile_only(platform, arch or (), mode or (), head_dim or (), quick, evidence, as_json)
    if arch or head_dim:
        raise ConfigError("--arch and --head-dim were given and only --compile-only reads them; add it, or leave them")
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


def _compile_only(
    platform: str | None,
    arches: Sequence[str],
    only: Sequence[str],
    head_dims: Sequence[int],
    is_quick: bool,
    folder: Path | None,
    as_json: bool,
) -> int:
    from kvhal.compile_only import compile_only
    from kvhal.report.compile_page import compile_document, compile_page

    found = list(
        compile_only(
            platform,
            arches=arches,
            only=only,
            head_dims=head_dims,
            quick=is_quick,
            folder=folder,
            progress=lambda text: typer.echo(text, err=True),
        )
    )
    if as_json:
        emit_json(compile_document(found))
    else:
        emit_page(compile_page(found))
    return OK if all(each.is_ok for each in found) else CHECK_FAILED

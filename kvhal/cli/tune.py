"""`kvhal tune`: search the numbers of this machine's GPU. Errors are raised; the main CLI maps them."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import typer

from kvhal.cli.output import CHECK_FAILED, DEVICE, INTERRUPTED, OK, AsJson, emit_json, emit_page

__all__ = ["tune"]

_Platform = Annotated[str | None, typer.Option("--platform", metavar="NAME", help="The platform; default: detected.")]
_Device = Annotated[int, typer.Option("--device", metavar="N", min=0, help="Its device, by logical index.")]
_Families = Annotated[
    list[str] | None,
    typer.Option("--family", metavar="FAMILY", help="Only these codes: int8, float8, int4, static, wide. Repeatable."),
]
_Phases = Annotated[
    list[str] | None,
    typer.Option("--phase", metavar="PHASE", help="Only this: decode, verify, prefill, staged, store. Repeatable."),
]
_Seconds = Annotated[float, typer.Option("--seconds", metavar="S", help="Start no candidate after so long.")]
_Out = Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Where to write; default: your overlay.")]
_DryRun = Annotated[bool, typer.Option("--dry-run", help="Measure, and write nothing.")]


def tune(
    platform: _Platform = None,
    device: _Device = 0,
    family: _Families = None,
    phase: _Phases = None,
    seconds: _Seconds = 300.0,
    out: _Out = None,
    dry_run: _DryRun = False,
    as_json: AsJson = False,
) -> int:
    """Search this GPU's tuning row and keep what is right and faster in an overlay. Exit 1 if a shipped row is wrong.

    Ctrl-C ends it early and keeps what was found. KVHAL_TUNING=shipped runs without the overlay, KVHAL_TUNING=FILE with
    another.
    """
    from kvhal.detection.host import HostFacts
    from kvhal.tune.space import asked_for

    asked_for(family or (), phase or ())
    # A torch that cannot be imported is a fact about the machine (exit 4), and no bug of ours.
    HostFacts.read()
    from kvhal.report.tune_page import tune_document, tune_page
    from kvhal.tune.flow import tune as run
    from kvhal.tune.search import End

    with _bar(seconds) as progress:
        report = run(
            platform,
            device=device,
            families=family or (),
            phases=phase or (),
            seconds=seconds,
            out=out,
            dry_run=dry_run,
            progress=progress,
        )
    if report.end is End.INTERRUPTED:
        kept = "nothing was faster so far" if report.path is None else f"what was found so far is in {report.path}"
        typer.echo(f"interrupted: {kept}", err=True)
    if as_json:
        emit_json(tune_document(report))
    else:
        emit_page(tune_page(report))
    codes = {End.INTERRUPTED: INTERRUPTED, End.LOST: DEVICE}
    return codes.get(report.end, OK if report.is_ok else CHECK_FAILED)


@contextlib.contextmanager
def _bar(seconds: float) -> Iterator[Callable[[str, float], None] | None]:
    """A bar on stderr that fills with the time, if somebody is looking."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(bar_width=20), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("starting", total=seconds)

        def update(text: str, passed: float) -> None:
            bar.update(task, description=text, completed=min(passed, seconds))

        yield update

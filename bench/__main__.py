"""The benchmarks' command line."""

from __future__ import annotations

from typing import Annotated

import typer

from bench import cpu, startup
from bench.report import show

app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__)


@app.callback()
def benchmarks() -> None:
    """Measure kvhal on this machine."""


@app.command("cpu")
def run_cpu(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of a table.")] = False,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds a figure; medians are printed.")] = 15,
) -> None:
    """The CPU platform's kernels against plain torch on the same tensors."""
    show("cpu", cpu.measure(rounds), as_json=as_json)


@app.command("startup")
def run_startup(
    repeat: Annotated[int, typer.Option(min=1, help="Processes a command; the best is printed.")] = 5,
) -> None:
    """CPU seconds of each command that must answer at once."""
    raise typer.Exit(startup.run(repeat))


app()

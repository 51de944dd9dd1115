"""`kvhal matrix`: every mode and operation on every arch, for people, documents, programs and CI. No torch."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvhal.cli.output import (
    CHECK_FAILED,
    OK,
    AsJson,
    EvidenceFolders,
    emit_json,
    emit_page,
    version_option,
    versions_given,
)
from kvhal.errors import ConfigError

if TYPE_CHECKING:
    from kvhal.answers.runners import Runners

__all__ = ["matrix"]

_STDIN = Path("-")


def matrix(
    ctx: typer.Context,
    platform: Annotated[str | None, typer.Option("--platform", metavar="NAME", help="Only this platform.")] = None,
    torch: Annotated[str | None, version_option("torch")] = None,
    triton: Annotated[str | None, version_option("triton")] = None,
    cuda: Annotated[str | None, version_option("cuda")] = None,
    rocm: Annotated[str | None, version_option("rocm")] = None,
    driver: Annotated[str | None, version_option("driver")] = None,
    evidence: EvidenceFolders = None,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Print docs/CAPABILITIES.md.")] = False,
    for_github: Annotated[bool, typer.Option("--github", help="Print a job matrix for fromJSON.")] = False,
    runners: Annotated[
        Path | None, typer.Option("--runners", metavar="FILE", help="Which runner has which arch; - reads stdin.")
    ] = None,
    drift: Annotated[
        Path | None, typer.Option("--check-drift", metavar="DIR", help="Compare the evidence in DIR with the tables.")
    ] = None,
    _as_json: AsJson = False,
) -> int:
    """Show what runs where: every mode and operation on every arch of every installed platform. Needs no device.

    --markdown, --github and --check-drift answer by what is shipped, at the versions the tables assume: the same on
    every machine. Exit 1 if --check-drift finds a claim that the evidence denies.
    """
    given = versions_given({"torch": torch, "triton": triton, "cuda": cuda, "rocm": rocm, "driver": driver})
    forms = {"--markdown": as_markdown, "--github": for_github, "--check-drift": drift is not None}
    chosen = [name for name, is_chosen in forms.items() if is_chosen]
    chosen += ["--json"] if ctx.obj.as_json and (as_markdown or for_github) else []
    if len(chosen) > 1:
        raise ConfigError(f"{' and '.join(chosen)} were given together; each is an answer of its own, so give one")
    if chosen and (given.known or evidence):
        raise ConfigError(
            f"{chosen[0]} answers by what is shipped at assumed versions; leave versions and --evidence out"
        )
    if runners is not None and not (for_github or drift):
        raise ConfigError("--runners belongs to --github or --check-drift; give one of them with it")
    if drift is not None:
        return _check_drift(ctx, drift, runners, platform)
    if for_github:
        from kvhal.answers.ci_jobs import jobs

        # One line, as $GITHUB_OUTPUT takes it.
        typer.echo(json.dumps({"include": jobs(_runners(runners), platform)}, separators=(",", ":")))
        return OK
    from kvhal.answers.matrix import declared, known_here, platforms

    if as_markdown:
        from kvhal.report.matrix_markdown import matrix_markdown

        typer.echo(matrix_markdown(tuple(declared(name) for name in platforms(platform))), nl=False)
        return OK
    found = tuple(known_here(name, given, evidence or ()) for name in platforms(platform))
    if ctx.obj.as_json:
        from kvhal.report.document import matrix_document

        emit_json(matrix_document(found))
    else:
        from kvhal.report.matrix_page import matrix_page

        emit_page(matrix_page(found))
    return OK


def _runners(path: Path | None) -> Runners:
    """The runners of a file, of stdin for "-", or none."""
    from kvhal.answers.runners import Runners

    if path is None:
        return Runners()
    if path == _STDIN:
        return Runners.from_text(sys.stdin.read(), "stdin")
    return Runners.load(path)


def _check_drift(ctx: typer.Context, folder: Path, runners: Path | None, platform: str | None) -> int:
    from kvhal.answers.drift import check_drift

    found = check_drift(folder, _runners(runners), platform)
    if ctx.obj.as_json:
        from kvhal.report.document import drift_document

        emit_json(drift_document(found))
    else:
        from kvhal.report.drift_page import drift_page

        emit_page(drift_page(found))
    return OK if found.is_ok else CHECK_FAILED

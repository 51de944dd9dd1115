"""The command line. Results on stdout (a page, or one JSON document), everything else on stderr.

Exit codes: 0 ok, 1 a check failed, 2 usage or configuration, 3 refused by policy, 4 device or driver, 70 a bug of ours,
130 interrupted, 141 the reader of stdout went away. A command imports what it needs: only `run` and `probe` load torch.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from kvhal import __version__
from kvhal.cli import config as cli_config
from kvhal.cli import matrix as cli_matrix
from kvhal.cli import tune as cli_tune
from kvhal.cli import verify as cli_verify
from kvhal.cli.output import (
    BUG,
    CHECK_FAILED,
    DEVICE,
    INTERRUPTED,
    OK,
    PIPE_CLOSED,
    REFUSED,
    USAGE,
    AsJson,
    EvidenceFolders,
    Session,
    emit_json,
    emit_page,
    version_option,
    versions_given,
)
from kvhal.errors import ConfigError, KvhalError

if TYPE_CHECKING:
    from kvhal.answers.explanation import NoRow
    from kvhal.config.deployment import Deployment

__all__ = ["app", "main"]

_BUG_REPORT = "this is a bug of kvhal: please report it with the lines above and the output of `kvhal probe --json`"
# The base of every usage error; typer has had click's own and, since 0.26, a copy of it.
_UsageError: Any = typer.BadParameter.__mro__[2]


class _Group(TyperGroup):
    """Answers that a shell expects, whichever command is running."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as exc:
            raise _Interrupted from exc
        except BrokenPipeError:
            # Python would fail once more when it flushes stdout at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return PIPE_CLOSED


class _Interrupted(Exception):
    """Ctrl-C, out of reach of typer, which would print and exit by itself."""


app = typer.Typer(
    name="kvhal",
    cls=_Group,
    help="Scaled (quantized) KV caches: what runs where, what it takes, and proof that it works and is given back.",
    pretty_exceptions_enable=False,
    add_completion=False,
)
app.add_typer(cli_config.app, name="config")
app.command()(cli_matrix.matrix)
app.command()(cli_verify.verify)
app.command()(cli_tune.tune)

_Config = Annotated[Path, typer.Option("-c", "--config", metavar="FILE", help="The deployment file.")]
_MaybeConfig = Annotated[Path | None, typer.Option("-c", "--config", metavar="FILE", help="A deployment file.")]
_Sets = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override one value. Repeatable.")]
_Platform = Annotated[str | None, typer.Option("--platform", metavar="NAME", help="Ask about this platform.")]
_Arch = Annotated[str | None, typer.Option("--arch", metavar="ARCH", help="Ask about this arch, such as x86_64.")]
_Mode = Annotated[str | None, typer.Argument(metavar="MODE", help="A mode; all of them if left out.")]
_HeadDims = Annotated[
    list[int] | None, typer.Option("--head-dim", metavar="D", min=1, help="Check this head size. Repeatable.")
]
_BlockSizes = Annotated[
    list[int] | None, typer.Option("--block-size", metavar="N", min=1, help="Check this block size. Repeatable.")
]
_Blocks = Annotated[int | None, typer.Option("--blocks", metavar="N", min=1, help="Plan this many blocks a group.")]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code."""
    args = list(sys.argv[1:] if argv is None else argv)
    session = Session(as_json="--json" in args)
    with _logs_on_stderr():
        try:
            # Without a command typer's versions differ in stream and code.
            code = typer.main.get_command(app).main(
                args or ["--help"], prog_name="kvhal", standalone_mode=False, obj=session
            )
        except KvhalError as exc:
            return _failed(session, exc, exc.exit_code, f"error: {exc}")
        except _UsageError as exc:
            exc.show()
            return _failed(session, exc, USAGE)
        except (_Interrupted, KeyboardInterrupt, typer.Abort) as exc:
            return _failed(session, exc.__cause__ or exc, INTERRUPTED, "interrupted")
        except Exception as exc:  # noqa: BLE001  # what nobody foresaw is reported as a bug, with its traceback
            return _failed(session, exc, BUG, f"{traceback.format_exc()}{_BUG_REPORT}")
        return USAGE if not args else OK if code is None else int(code)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"kvhal {__version__}")
        raise typer.Exit


_Version = Annotated[bool, typer.Option("--version", help="Print the version.", is_eager=True, callback=_print_version)]


@app.callback()
def _root(version: _Version = False) -> None:
    """The options before a command."""


@app.command()
def run(
    ctx: typer.Context,
    config: _Config,
    sets: _Sets = None,
    evidence: EvidenceFolders = None,
    _as_json: AsJson = False,
) -> int:
    """Detect, decide, plan, profile, allocate, use, check and close; print what every step found."""
    from kvhal.detection.host import HostFacts

    deployment = _load(ctx, config, sets)
    # A torch that cannot be imported is a fact about the machine (exit 4), and no bug of ours.
    HostFacts.read()
    with _progress() as say:
        from kvhal.run.flow import run as run_deployment

        report = run_deployment(deployment, progress=say, evidence=evidence or ())
    if ctx.obj.as_json:
        from kvhal.report.document import run_document

        emit_json(run_document(report))
    else:
        from kvhal.report.terminal import run_page

        emit_page(run_page(report))
    return OK if report.is_ok else CHECK_FAILED


@app.command()
def plan(
    ctx: typer.Context,
    config: _Config,
    blocks: _Blocks = None,
    sets: _Sets = None,
    platform: _Platform = None,
    arch: _Arch = None,
    evidence: EvidenceFolders = None,
    _as_json: AsJson = False,
) -> int:
    """Say every byte of a deployment's cache. Needs no device and no torch."""
    from kvhal.answers.outline import outline
    from kvhal.answers.target import target

    deployment = _load(ctx, config, sets)
    found = outline(deployment, target(deployment.platform, platform, arch, evidence=evidence or ()), blocks)
    if ctx.obj.as_json:
        from kvhal.report.document import plan_document

        emit_json(plan_document(found))
    else:
        from kvhal.report.terminal import plan_page

        emit_page(plan_page(found))
    return OK


@app.command()
def explain(
    ctx: typer.Context,
    mode: _Mode = None,
    config: _MaybeConfig = None,
    platform: _Platform = None,
    arch: _Arch = None,
    torch: Annotated[str | None, version_option("torch")] = None,
    triton: Annotated[str | None, version_option("triton")] = None,
    cuda: Annotated[str | None, version_option("cuda")] = None,
    rocm: Annotated[str | None, version_option("rocm")] = None,
    driver: Annotated[str | None, version_option("driver")] = None,
    head_dim: _HeadDims = None,
    block_size: _BlockSizes = None,
    evidence: EvidenceFolders = None,
    sets: _Sets = None,
    _as_json: AsJson = False,
) -> int:
    """Say whether a mode runs on a platform, how, and why. Needs no device and no torch. Exit 3 if it is refused.

    Versions that are not given: those installed here, if the platform is this machine's, else those its table assumes.
    """
    from kvhal.answers.explanation import explain as explained
    from kvhal.answers.explanation import no_row
    from kvhal.answers.target import target
    from kvhal.capability.cells import Shapes
    from kvhal.capability.table import UnknownArch

    if sets and config is None:
        raise ConfigError("--set was given without a deployment file to change; name one with -c")
    given = versions_given({"torch": torch, "triton": triton, "cuda": cuda, "rocm": rocm, "driver": driver})
    deployment = None if config is None else _load(ctx, config, sets)
    asked = None if deployment is None else deployment.platform
    shapes = Shapes(tuple(head_dim or ()), tuple(block_size or ()))
    try:
        found = explained(mode, target(asked, platform, arch, given, evidence or ()), deployment, shapes)
    except UnknownArch as exc:
        return _unknown_arch(ctx, no_row(exc))
    if ctx.obj.as_json:
        from kvhal.report.document import explain_document

        emit_json(explain_document(found))
    else:
        from kvhal.report.explain_page import explain_page

        emit_page(explain_page(found))
    is_list = mode is None and deployment is None
    return OK if found.is_accepted or is_list else REFUSED


def _unknown_arch(ctx: typer.Context, found: NoRow) -> int:
    """Answered like a refusal: on stdout, with exit code 3."""
    if ctx.obj.as_json:
        from kvhal.report.document import no_row_document

        emit_json(no_row_document(found))
    else:
        from kvhal.report.explain_page import no_row_page

        emit_page(no_row_page(found))
    return REFUSED


@app.command()
def probe(ctx: typer.Context, _as_json: AsJson = False) -> int:
    """Say what is here and which platform is chosen: what a bug report needs. Holds no secrets."""
    from kvhal.answers.environment import look_around

    found = look_around()
    if ctx.obj.as_json:
        from kvhal.report.document import probe_document

        emit_json(probe_document(found))
    else:
        from kvhal.report.terminal import probe_page

        emit_page(probe_page(found))
    return OK if found.is_usable else DEVICE


def _load(ctx: typer.Context, config: Path, sets: list[str] | None) -> Deployment:
    from kvhal.config.deployment import load

    deployment = load(config, sets or ())
    if deployment.report.format == "json":
        ctx.obj.as_json = True
    return deployment


def _failed(session: Session, error: BaseException, code: int, message: str = "") -> int:
    """Tell people on stderr and, with --json, programs on stdout."""
    if message:
        typer.echo(message, err=True)
    if session.as_json:
        from kvhal.report.document import error_document

        emit_json(error_document(error, code))
    return code


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[str], None] | None]:
    """One line on stderr that says the current step, if somebody is looking."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console

    with Console(stderr=True).status("starting") as status:
        yield status.update


@contextlib.contextmanager
def _logs_on_stderr() -> Iterator[None]:
    """Warnings of kvhal (a fallback, a leak) as lines on stderr."""
    logger, handler = logging.getLogger("kvhal"), logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


if __name__ == "__main__":
    sys.exit(main())

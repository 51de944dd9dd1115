"""`kvhal config check|resolve|schema`: deployment files without a device. Errors are raised; the main CLI maps them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["app"]

app = typer.Typer(help="Check and explain deployment files. Needs no GPU.", no_args_is_help=True)

_File = Annotated[Path, typer.Argument(metavar="FILE", help="The deployment file.")]
_Sets = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override one value. Repeatable.")]


@app.command()
def check(file: _File, sets: _Sets = None) -> None:
    """Check a file and everything it names; print one line if it is right."""
    from kvhal.config.deployment import load

    deployment = load(file, sets or ())
    spec = deployment.spec()
    stored = ", ".join(dict.fromkeys(spec.modes)) or "opaque stores only"
    typer.echo(f"{file}: ok ({spec.num_layers} layers, {len(spec.groups)} group(s), {stored})")


@app.command()
def resolve(
    file: _File,
    sets: _Sets = None,
    origin: Annotated[bool, typer.Option("--origin", help="Show where each value comes from.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Print every effective value of a deployment."""
    import json

    from kvhal.config.deployment import load

    deployment = load(file, sets or ())
    resolved = deployment.resolved()
    if as_json:
        document = {"schema": "kvhal.deployment/1", "deployment": resolved}
        typer.echo(json.dumps(document | ({"origin": dict(deployment.origin)} if origin else {}), indent=2))
        return
    for key, source in deployment.origin.items():
        value: object = resolved
        for part in key.split("."):
            value = value[part] if isinstance(value, dict) else None
        line = f"{key} = {json.dumps(value)}"
        typer.echo(f"{line:<48} {source}" if origin else line)


@app.command()
def schema() -> None:
    """Print the JSON Schema of deployment files, for editors."""
    import json

    from kvhal.config.schema import json_schema

    typer.echo(json.dumps(json_schema(), indent=2))

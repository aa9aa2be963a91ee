"""The commands ``ctxreuse config show|path|example``."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from ctxreuse.config import Loaded

__all__ = ["app", "loaded"]

_EXAMPLES = """[bold]Examples[/bold]

ctxreuse config show --origin   each value, and where it came from

ctxreuse config example > "$(ctxreuse config path)"   start a config file

[bold]Sources[/bold], each beating the last: default, file, CTXREUSE_SECTION__NAME, flag
"""

app = typer.Typer(help="Settings: what they are and where they come from.", no_args_is_help=True)


def loaded(ctx: typer.Context, **flags: object) -> Loaded:
    """Settings under the global ``--config`` and these flags (``store__path=...`` is ``store.path``)."""
    from ctxreuse.config import load

    return load(ctx.find_root().obj, flags={name.replace("__", "."): value for name, value in flags.items()})


@app.command("show", epilog=_EXAMPLES)
def show(
    ctx: typer.Context,
    origin: Annotated[bool, typer.Option("--origin", help="Say where each value comes from.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
) -> None:
    """Show every setting as it is now; the output is a config file that gives the same settings."""
    import msgspec

    from ctxreuse.config import settings

    found = loaded(ctx)
    values = msgspec.to_builtins(found.settings)
    rows = []
    for setting in settings():
        section, _, name = setting.name.rpartition(".")
        rows.append((section, name, values[section][name], setting))
    if json:
        body = {s.name: {"value": value, "origin": found.origins[s.name]} for _, _, value, s in rows}
        sys.stdout.buffer.write(msgspec.json.format(msgspec.json.encode(body)) + b"\n")
        return
    head = ""
    for section, name, value, setting in rows:
        if section != head:
            typer.echo(f"{chr(10) if head else ''}[{section}]")
            head = section
        line = f"{name} = {setting.show(value)}"
        typer.echo(f"{line:<40} # {found.origins[setting.name]}" if origin else line)


@app.command("path")
def path(ctx: typer.Context) -> None:
    """Print the path of the config file, whether or not it exists."""
    from pathlib import Path

    from ctxreuse.config import config_path

    named = ctx.find_root().obj
    typer.echo(Path(named).expanduser() if named else config_path())


@app.command("example")
def example() -> None:
    """Print a config file that documents every setting, each commented out at its default."""
    from ctxreuse.config import example as text

    typer.echo(text(), nl=False)

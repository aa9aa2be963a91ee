"""The commands ``ctxreuse config show|path|example``."""

from __future__ import annotations

from typing import Annotated

import typer

from ctxreuse.cli.common import Json, print_json
from ctxreuse.errors import ConfigError

__all__ = ["app"]

_EXAMPLES = """[bold]Examples[/bold]

ctxreuse config show --origin   each value, and where it came from

ctxreuse config example > "$(ctxreuse config path)"   start a config file

[bold]Sources[/bold], later ones win: default, file, CTXREUSE_SECTION__NAME, flag
"""

app = typer.Typer(help="Settings and where they come from.", no_args_is_help=True)


@app.command("show", epilog=_EXAMPLES)
def show(
    ctx: typer.Context,
    origin: Annotated[bool, typer.Option("--origin", help="Show where each value comes from.")] = False,
    json: Json = False,
) -> None:
    """Show all settings; the output is a config file that gives the same settings."""
    import msgspec

    from ctxreuse.config import load, settings
    from ctxreuse.store.policy import make_policy

    found = load(ctx.find_root().obj)
    try:  # the one setting whose words the schema does not know
        make_policy(found.settings.store.policy, 1)
    except ConfigError as error:
        what = f"setting store.policy: {error.what}"
        raise ConfigError(what, where=found.origins["store.policy"], fix=error.fix) from None
    values = msgspec.to_builtins(found.settings)
    rows = []
    for setting in settings():
        section, _, name = setting.name.rpartition(".")
        rows.append((section, name, values[section][name], setting))
    if json:
        print_json({s.name: {"value": value, "origin": found.origins[s.name]} for _, _, value, s in rows})
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
    """Print the path of the config file, which need not exist."""
    from pathlib import Path

    from ctxreuse.config import config_path

    named = ctx.find_root().obj
    typer.echo(Path(named).expanduser() if named else config_path())


@app.command("example")
def example() -> None:
    """Print a config file that documents every setting, each commented out at its default."""
    from ctxreuse.config import example as text

    typer.echo(text(), nl=False)

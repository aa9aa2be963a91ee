"""The root of the command line: groups, global flags, and how errors look.

Exit codes: 0 done; 1 a check failed (``doctor``, ``store verify``) or a bench missed its bar; 2 wrong usage or a wrong
setting; 3 any other error that ctxreuse reports; 130 interrupted.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from ctxreuse.cli import bench, config, demo, doctor, keys, store
from ctxreuse.errors import ConfigError, CtxReuseError
from ctxreuse.models.commands import app as models

__all__ = ["EXIT_ERROR", "EXIT_USAGE", "app", "main"]

EXIT_USAGE, EXIT_ERROR, EXIT_INTERRUPTED = 2, 3, 130

_EXAMPLES = """[bold]Examples[/bold]

ctxreuse demo                 a context computed once, reused after a restart

ctxreuse doctor               is everything here, and is it healthy?

ctxreuse model get smollm2    fetch the default model (once, about 100 MB)

ctxreuse store stat           what is kept, and how much of it

ctxreuse bench tree --quick   measure a part against baseline and bound

CTXREUSE_STORE__CAPACITY=20GB ctxreuse config show --origin

[bold]Exit codes[/bold]

0 done · 1 a check failed · 2 wrong usage or setting · 3 other error
"""

app = typer.Typer(
    name="ctxreuse",
    help="Compute a context once; then keep, fork, move and reuse it.",
    epilog=_EXAMPLES,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(config.app, name="config")
app.add_typer(keys.app, name="keys")
app.add_typer(models, name="model")
app.add_typer(store.app, name="store")
app.command("demo")(demo.demo)
app.command("doctor", epilog=doctor.EXAMPLES)(doctor.doctor)
app.command("bench", epilog=bench.EXAMPLES)(bench.bench)


def _version(wanted: bool) -> None:
    if wanted:
        import ctxreuse

        typer.echo(f"ctxreuse {ctxreuse.__version__}")
        raise typer.Exit


@app.callback()
def root(
    ctx: typer.Context,
    config: Annotated[
        str | None, typer.Option("--config", metavar="FILE", help="Read settings from FILE instead of the default one.")
    ] = None,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Compute a context once; then keep, fork, move and reuse it."""
    ctx.obj = config


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line; always ends in SystemExit. With CTXREUSE_DEBUG=1 errors keep their traceback."""
    try:
        app(args, prog_name="ctxreuse")
    except CtxReuseError as error:
        if os.environ.get("CTXREUSE_DEBUG", "0") not in ("", "0"):
            raise
        _show(error)
        sys.exit(EXIT_USAGE if isinstance(error, ConfigError) else EXIT_ERROR)
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)


def _show(error: CtxReuseError) -> None:
    from rich.console import Console
    from rich.panel import Panel
    from rich.text import Text

    lines = [Text(error.what, style="bold")]
    if error.where:
        lines.append(Text(f"where  {error.where}"))
    if error.fix:
        lines.append(Text(f"fix    {error.fix}", style="green"))
    body = Text("\n").join(lines)
    Console(stderr=True).print(Panel(body, title=type(error).__name__, title_align="left", border_style="red"))

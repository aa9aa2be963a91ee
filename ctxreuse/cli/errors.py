"""How a command ends: the exit codes of all commands, and what an error looks like.

0 done; 1 a check failed (``doctor``, ``store verify``) or a bench missed its bar; 2 wrong usage or a wrong setting; 3
any other error that ctxreuse reports; 130 interrupted.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ctxreuse.errors import ConfigError, CtxReuseError

if TYPE_CHECKING:
    import typer

__all__ = ["EXIT_ERROR", "EXIT_INTERRUPTED", "EXIT_USAGE", "run", "show"]

EXIT_USAGE, EXIT_ERROR, EXIT_INTERRUPTED = 2, 3, 130


def run(app: typer.Typer, name: str, args: Sequence[str] | None = None) -> None:
    """Run a command line; always ends in SystemExit. With CTXREUSE_DEBUG=1 errors keep their traceback."""
    try:
        app(args, prog_name=name)
    except CtxReuseError as error:
        if os.environ.get("CTXREUSE_DEBUG", "0") not in ("", "0"):
            raise
        show(error)
        sys.exit(EXIT_USAGE if isinstance(error, ConfigError) else EXIT_ERROR)
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)


def show(error: CtxReuseError) -> None:
    """Print what, where and what to do to standard error."""
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

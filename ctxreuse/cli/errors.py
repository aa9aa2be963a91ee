"""Exit codes of all commands, and how errors are printed.

0 done; 1 a check failed (``doctor``, ``store verify``) or a bench missed its bar; 2 wrong usage or a wrong setting; 3
any other error that ctxreuse reports; 130 interrupted.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ctxreuse.errors import ConfigError, CtxReuseError

if TYPE_CHECKING:
    import typer

__all__ = ["EXIT_ERROR", "EXIT_INTERRUPTED", "EXIT_USAGE", "report_errors", "run", "show"]

EXIT_USAGE, EXIT_ERROR, EXIT_INTERRUPTED = 2, 3, 130


def run(app: typer.Typer, name: str, args: Sequence[str] | None = None) -> None:
    """Run a command line; always ends in SystemExit. With CTXREUSE_DEBUG=1 errors keep their traceback."""
    with report_errors():
        app(args, prog_name=name)


@contextlib.contextmanager
def report_errors() -> Iterator[None]:
    """Turn an error of ctxreuse into a message on standard error and the exit code of its kind."""
    try:
        yield
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

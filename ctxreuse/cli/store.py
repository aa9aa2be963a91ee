"""The commands ``ctxreuse store ls|stat|verify|gc``."""

from __future__ import annotations

import typer

__all__ = ["app"]

app = typer.Typer(help="The store of contexts on this machine.", no_args_is_help=True)

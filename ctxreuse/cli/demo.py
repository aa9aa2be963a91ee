"""The command ``ctxreuse demo``: runs ``examples/demo`` of a checkout."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

__all__ = ["demo"]


def demo(
    keep: Annotated[
        str | None, typer.Option("--keep", metavar="DIR", help="Leave the demo's memory in DIR, to look at afterwards.")
    ] = None,
    short: Annotated[bool, typer.Option("--short", help="Read a third of the handbook, for a slow machine.")] = False,
    engine: Annotated[
        str, typer.Option(help="llama_cpp, or torch: it is calibrated, and shows lossy levels too.")
    ] = "llama_cpp",
) -> None:
    """See a context computed once, reused after a crash and by another device (downloads a small model once).

    Exits with 1 if an answer differed from that of a full recompute, or the other device did not fetch it.
    """
    import ctxreuse
    from ctxreuse.errors import ConfigError

    folder = Path(ctxreuse.__file__).resolve().parents[1] / "examples" / "demo"
    if not folder.is_dir():
        raise ConfigError(
            "the demo is not part of the installed package", fix="Clone the repository and run `make demo`"
        )
    options = [*(["--keep", keep] if keep else []), *(["--short"] if short else []), "--engine", engine]
    raise typer.Exit(subprocess.call([sys.executable, str(folder), *options]))

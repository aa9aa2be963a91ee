"""The command ``ctxreuse demo``: whatever face is installed brings it."""

from __future__ import annotations

from typing import Annotated

import typer

__all__ = ["demo"]


def demo(
    keep: Annotated[
        str | None, typer.Option("--keep", metavar="DIR", help="Leave the demo's memory in DIR, to look at afterwards.")
    ] = None,
) -> None:
    """See a context computed once, reused after a crash and by another device (fetches a small model the first time).

    Exits with 1 if an answer differed from that of a full recompute, or the other device did not fetch it.
    """
    from importlib.metadata import entry_points

    from ctxreuse.errors import ConfigError

    # The core never imports a face, so the demo, which shows one, comes in through the package's metadata.
    found = next(iter(entry_points(group="ctxreuse.commands", name="demo")), None)
    if found is None:
        raise ConfigError("no demo is installed", fix="Install ctxreuse again, with its package ctxreuse_agents")
    if not found.load()(keep):
        raise typer.Exit(1)

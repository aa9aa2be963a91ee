"""The command ``ctxreuse demo``: whatever face is installed brings it."""

from __future__ import annotations

__all__ = ["demo"]


def demo() -> None:
    """See a context computed once, kept over a restart, forked and reused (fetches a small model the first time)."""
    from importlib.metadata import entry_points

    from ctxreuse.errors import ConfigError

    # The core never imports a face, so the demo, which shows one, comes in through the package's metadata.
    found = next(iter(entry_points(group="ctxreuse.commands", name="demo")), None)
    if found is None:
        raise ConfigError("no demo is installed", fix="Install ctxreuse again, with its package ctxreuse_agents")
    found.load()()

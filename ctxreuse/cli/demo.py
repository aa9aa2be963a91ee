"""The command ``ctxreuse demo``."""

from __future__ import annotations

__all__ = ["demo"]


def demo() -> None:
    """See a context computed once, kept over a restart, forked and reused (fetches a small model the first time)."""
    from ctxreuse.demo import run

    run()

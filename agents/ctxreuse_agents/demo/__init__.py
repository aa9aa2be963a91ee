"""The demo: one document, several questions; a killed process, forks, an eviction; then a cloud and three devices."""

from __future__ import annotations

__all__ = ["run"]


def run(keep: str | None = None) -> bool:
    """Play the demo on the terminal; True if every answer had the tokens of a full recompute, and one was fetched.

    ``keep``: a folder for the memory that stays afterwards; without one a temporary folder is used. Fetches the small
    model the first time.
    """
    from ctxreuse_agents.demo.play import play

    return play(keep)

"""Demo: questions on one document, with a killed process, forks and an eviction; then a cloud and three devices."""

from __future__ import annotations

__all__ = ["run"]


def run(keep: str | None = None) -> bool:
    """Run the demo; return True if all answers equal those of a full recompute and one device fetched KV from another.

    ``keep``: folder in which the memory is left; default: a temporary one. Downloads the small model the first time.
    """
    from demo.play import play

    return play(keep)

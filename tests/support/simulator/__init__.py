"""Schedules of faults, each made from its seed alone."""

from __future__ import annotations

__all__ = ["failing"]


def failing(what: str, seed: int) -> str:
    """How to run a schedule again."""
    return f"run it again: PYTHONPATH=tests python -m support.simulator {what} --seed {seed}"

"""Forwards whose tokens stand anywhere in a context: each is written to its own row and sees the rows before it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

__all__ = ["Scatter", "active", "by_position", "scattered"]


class Scatter:
    """Positions of the tokens of one forward: ``rows`` int64 [S], ascending, ``first`` to ``end`` - 1."""

    __slots__ = ("end", "first", "rows")

    def __init__(self, rows: torch.Tensor) -> None:
        self.rows, self.first, self.end = rows, int(rows[0]), int(rows[-1]) + 1

    def write(self, plane: torch.Tensor, states: torch.Tensor) -> None:
        """Put [1, heads, S, dim] into their rows of a plane [1, heads, capacity, dim]."""
        plane.index_copy_(2, self.rows, states)


# A model calls its caches and masks without saying for which forward, on the thread that runs the forward.
_active: ContextVar[Scatter | None] = ContextVar("ctxreuse_scatter", default=None)


def active() -> Scatter | None:
    """The scattered forward that this thread is in, if any."""
    return _active.get()


@contextmanager
def scattered(rows: torch.Tensor) -> Iterator[Scatter]:
    """Forwards of this thread inside have their tokens at ``rows``."""
    scatter = Scatter(rows)
    token = _active.set(scatter)
    try:
        yield scatter
    finally:
        _active.reset(token)


def by_position(scatter: Scatter, allowed: Callable[..., Any]) -> Callable[..., Any]:
    """transformers' mask function, asked for a token's position where it is asked for the token's number."""

    def positioned(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return allowed(batch, head, scatter.rows[query], key)

    return positioned

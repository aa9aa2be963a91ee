"""Forwards whose tokens stand anywhere in a context: each is written to its own row and sees the rows before it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import torch

from ctxreuse.engines.torch_hf.blockwise import Blockwise

if TYPE_CHECKING:
    from ctxreuse.engines.torch_hf.drift import Drift
    from ctxreuse.engines.torch_hf.looking import Looking

__all__ = ["Scatter", "active", "by_position", "scattered"]


class Scatter:
    """Positions of the tokens of one forward: ``rows`` int64 [S], ascending, ``first`` to ``end`` - 1.

    ``looking``: what notes where they look, if anybody asks. ``unseen``: int64, positions that none of them sees.
    ``drift``: what sets other rows right, before a layer writes what is computed. ``blockwise``: how they attend where
    the engine computes that itself.
    """

    __slots__ = ("blockwise", "drift", "end", "first", "looking", "rows", "seen")

    def __init__(
        self, rows: torch.Tensor, looking: Looking | None, unseen: torch.Tensor | None, drift: Drift | None
    ) -> None:
        self.rows, self.first, self.end = rows, int(rows[0]), int(rows[-1]) + 1
        self.seen: torch.Tensor | None = None
        if unseen is not None and len(unseen):
            self.seen = torch.ones(self.end, dtype=torch.bool).index_fill_(0, unseen[unseen < self.end], False)
        self.looking, self.drift, self.blockwise = looking, drift, Blockwise()

    def write(self, plane: torch.Tensor, states: torch.Tensor) -> None:
        """Put [1, heads, S, dim] into their rows of a plane [1, heads, capacity, dim]."""
        plane.index_copy_(2, self.rows, states)


# A model calls its caches and masks without saying for which forward, on the thread that runs the forward.
_active: ContextVar[Scatter | None] = ContextVar("ctxreuse_scatter", default=None)


def active() -> Scatter | None:
    """The scattered forward that this thread is in, if any."""
    return _active.get()


@contextmanager
def scattered(
    rows: torch.Tensor,
    *,
    looking: Looking | None = None,
    unseen: torch.Tensor | None = None,
    drift: Drift | None = None,
) -> Iterator[Scatter]:
    """Forwards of this thread inside have their tokens at ``rows``."""
    scatter = Scatter(rows, looking, unseen, drift)
    if drift is not None:
        drift.begin(rows)
    token = _active.set(scatter)
    try:
        yield scatter
    finally:
        _active.reset(token)


def by_position(scatter: Scatter, allowed: Callable[..., Any]) -> Callable[..., Any]:
    """transformers' mask function, asked for a token's position where it is asked for the token's number."""

    def positioned(batch: Any, head: Any, query: Any, key: Any) -> Any:
        found = allowed(batch, head, scatter.rows[query], key)
        return found if scatter.seen is None else found & scatter.seen[key]

    return positioned

"""Contexts that stay in the engine's memory after their request, so that the next turn needs no load."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import numpy as np

from ctxreuse.engines.provenance import leading
from ctxreuse.keys import Tokens

if TYPE_CHECKING:
    from ctxreuse.engines.base import Engine, Live

__all__ = ["LivePool", "common_prefix"]


def common_prefix(a: Tokens, b: Tokens) -> int:
    """How many leading token ids two arrays share."""
    n = min(len(a), len(b))
    differ = np.flatnonzero(a[:n] != b[:n])
    return int(differ[0]) if len(differ) else n


def _within(held: Tokens, tokens: Tokens) -> bool:
    return 0 < len(held) <= len(tokens) and bool((held == tokens[: len(held)]).all())


class LivePool:
    """Finished contexts, least recently used first, within ``capacity`` bytes. Any thread may call."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._lock = threading.Lock()
        self._held: list[Live] = []

    def __len__(self) -> int:
        return len(self._held)

    @property
    def nbytes(self) -> int:
        """Bytes of KV held."""
        return sum(live.nbytes for live in self._held)

    def put(self, live: Live) -> None:
        """Hold a context; the least recently used ones go while there is too much."""
        with self._lock:
            self._held.append(live)
            while self._held and self.nbytes > self.capacity:
                self._held.pop(0)

    def take(self, engine: Engine, tokens: Tokens, stored: int, lossy: str | None = None) -> tuple[Live, int] | None:
        """Remove and return the context that shares most with ``tokens``, cropped to the shared part, and its length.

        None unless more than ``stored`` tokens (what the store holds) are shared. At least the last of ``tokens`` is
        left to compute. Nothing of it is worse than ``lossy`` allows (None: exact only).
        """
        with self._lock:
            best, length = self._best(engine, tokens, stored, lossy)
            if best is None:
                return None
            self._held.remove(best)
        if best.n > length and not engine.crop(best, length):
            self.put(best)
            return None
        return best, length

    def match(self, engine: Engine, tokens: Tokens, stored: int, lossy: str | None = None) -> int:
        """How many leading tokens `take` would give, at least ``stored``. Pure."""
        with self._lock:
            return self._best(engine, tokens, stored, lossy)[1]

    def _best(self, engine: Engine, tokens: Tokens, stored: int, lossy: str | None) -> tuple[Live | None, int]:
        best, length = None, stored
        for live in self._held:
            shared = min(common_prefix(live.tokens, tokens), len(tokens) - 1, leading(live.levels, lossy))
            if shared < live.n and engine.space.needs_state:
                # Such a context can go back only to where its states were kept.
                shared = max((at for at in live.states if at <= shared), default=0)
            # Cropping destroys the rest of that context, so the rest must be the smaller part of it.
            if shared > length and 2 * shared >= live.n:
                best, length = live, shared
        return best, length

    def drop(self, tokens: Tokens) -> int:
        """Forget all contexts that begin with the same token; returns how many."""
        with self._lock:
            kept = [live for live in self._held if not common_prefix(live.tokens, tokens)]
            gone = len(self._held) - len(kept)
            self._held = kept
        return gone

    def holds(self, tokens: Tokens) -> int:
        """Bytes of the contexts that ``tokens`` go on from or are: what `let_go` would free. Pure."""
        with self._lock:
            return sum(live.nbytes for live in self._held if _within(live.tokens, tokens))

    def let_go(self, tokens: Tokens, *, beyond: int = 0) -> int:
        """Forget the contexts of more than ``beyond`` tokens that ``tokens`` go on from or are; returns their bytes."""
        with self._lock:
            gone = [live for live in self._held if live.n > beyond and _within(live.tokens, tokens)]
            self._held = [live for live in self._held if live not in gone]
        return sum(live.nbytes for live in gone)

    def clear(self) -> None:
        """Forget all contexts."""
        with self._lock:
            self._held.clear()

    def check(self) -> None:
        """Raise AssertionError if a context is held twice or the capacity is exceeded."""
        with self._lock:
            assert len({id(live) for live in self._held}) == len(self._held), "a context is held twice"
            assert self.nbytes <= self.capacity or not self._held, f"{self.nbytes} bytes in a pool of {self.capacity}"

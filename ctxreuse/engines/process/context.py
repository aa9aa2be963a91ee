"""A context in an engine's process, as its owner here sees it."""

from __future__ import annotations

import weakref

import numpy as np

from ctxreuse.engines.process.connection import Connection
from ctxreuse.engines.process.wire import ContextFacts
from ctxreuse.engines.provenance import LevelRun
from ctxreuse.identity.keys import Tokens

__all__ = ["ChildContext"]


class ChildContext:
    """See `ctxreuse.engines.chunks.RelocatedContext`. What it says is from the last call: only its owner changes it."""

    def __init__(self, connection: Connection, number: int, facts: ContextFacts) -> None:
        self.connection, self.number, self.facts = connection, number, facts
        self._ids: Tokens = np.zeros(0, "<i4")
        weakref.finalize(self, connection.release, number).atexit = False

    @property
    def lost(self) -> bool:
        """See `ctxreuse.engines.base.is_lost`."""
        return self.connection.died is not None

    @property
    def tokens(self) -> Tokens:
        """See `Context.tokens`."""
        return self._ids

    @property
    def n(self) -> int:
        """See `Context.n`."""
        return len(self._ids)

    @property
    def nbytes(self) -> int:
        """See `Context.nbytes`."""
        return self.facts.nbytes

    @property
    def states(self) -> tuple[int, ...]:
        """See `Context.states`."""
        return self.facts.states

    @property
    def levels(self) -> tuple[LevelRun, ...]:
        """See `Context.levels`."""
        return self.facts.levels

    @property
    def relocated(self) -> tuple[tuple[int, int], ...]:
        """See `RelocatedContext.relocated`."""
        return self.facts.relocated

    @property
    def gaps(self) -> tuple[tuple[int, int], ...]:
        """See `RelocatedContext.gaps`."""
        return self.facts.gaps

    def update(self, facts: ContextFacts, appended: Tokens | None = None) -> None:
        """Take the facts after a call; ``appended``: ids that were to be appended, of which the first ones were."""
        self.facts, before = facts, len(self._ids)
        if facts.n > before and appended is not None:
            self._ids = np.concatenate([self._ids, appended[: facts.n - before]], dtype="<i4")
        elif facts.n < before:
            self._ids = self._ids[: facts.n].copy()
        self._ids.flags.writeable = False

    def check(self) -> None:
        """Raise AssertionError if ids and facts do not agree."""
        assert self.lost or len(self._ids) == self.facts.n, f"{len(self._ids)} ids for {self.facts.n} tokens"

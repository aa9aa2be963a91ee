"""Lets a request take blocks out of the context of another that computes, or answers, at the same time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, NamedTuple

from ctxreuse.block.format import parse
from ctxreuse.engines.provenance import leading
from ctxreuse.errors import CtxReuseError
from ctxreuse.identity.keys import ROOT
from ctxreuse.runtime.inflight.prompts import Prompt, PromptTable

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from ctxreuse.block.format import BlockView
    from ctxreuse.engines.base import Context, Engine
    from ctxreuse.runtime.steps.order import RequestTurn

__all__ = ["PromptInFlight", "PromptsInFlight", "SharedPrefix"]


class SharedPrefix(NamedTuple):
    """Leading blocks of another request's context, copied, the state at their end where the model has states, and the
    seconds that this took."""

    views: Sequence[BlockView] = ()
    state: BlockView | None = None
    seconds: float = 0.0


class PromptsInFlight:
    """The prompts in flight of one runtime. Any thread may call.

    ``exclusive``: while inside, no pass runs, so that a context can be read that is another thread's.
    """

    def __init__(self, engine: Engine, exclusive: Callable[[], AbstractContextManager[None]]) -> None:
        self.engine, self.exclusive = engine, exclusive
        self.change, self.table = threading.Condition(), PromptTable[PromptInFlight]()
        #: Requests that took another's blocks, and the tokens in these.
        self.followers = self.shared_tokens = 0

    def wake(self) -> None:
        """Let all who wait see what has changed."""
        with self.change:
            self.change.notify_all()

    def check(self) -> None:
        """Raise AssertionError if the table is inconsistent."""
        with self.change:
            self.table.check()


class PromptInFlight(Prompt):
    """One request's prompt. Its thread calls `take`, `publish` and `withdraw`, and `end` in any case."""

    def __init__(
        self, all_of: PromptsInFlight, keys: Sequence[bytes], tokens: int, max_kl: float | None, turn: RequestTurn
    ) -> None:
        """``keys``: of the whole blocks of a prompt of so many ``tokens``; ``max_kl``: see `Request`."""
        size = all_of.engine.space.block_tokens
        super().__init__(keys, (tokens - 1) // size, max_kl)
        self._all, self._turn, self._size = all_of, turn, size
        self._context: Context | None = None
        #: Tokens that it was admitted with, see `MemoryAdmission`; 0: it was not, or has given them back.
        self.room = 0
        #: Copied blocks, as long as others wait for some.
        self._sealed: list[npt.NDArray[np.uint8]] = []
        self._sealing = threading.Lock()
        with all_of.change:
            all_of.table.add(self)

    def take(self, cached: Callable[[], int]) -> SharedPrefix:
        """Copy what another request has of this prompt, or wait until it has computed it: of those that came earlier
        the one that shares most, if that is more than the ``cached()`` blocks.

        Nothing is returned where there is none, or its model state cannot be continued from. Raises
        RequestCancelledError.
        """
        change, table = self._all.change, self._all.table
        while True:
            known = cached()
            with change:
                found = table.follow(self, known)
                if found is None:
                    return SharedPrefix()
                leader, blocks = found
                # Who waits for a request that is in no hurry would be in none either.
                leader._turn.priority = min(leader._turn.priority, self._turn.priority)
                change.notify_all()
            try:
                with change:
                    while not found.settled:
                        self._turn.check()
                        change.wait()
                if found.ready:
                    return self._count(leader._copy(blocks, self.max_kl), known)
            finally:
                with change:
                    leader._left(self)

    def _count(self, shared: SharedPrefix, known: int) -> SharedPrefix:
        if len(shared.views) <= known:
            return SharedPrefix()
        with self._all.change:
            self._all.followers += 1
            self._all.shared_tokens += len(shared.views) * self._size
        return shared

    def _left(self, follower: PromptInFlight) -> None:
        self.wanted.pop(follower.number, None)
        if not self.wanted:
            self._sealed = []
        self._all.change.notify_all()

    def publish(self, context: Context) -> None:
        """All tokens that ``context`` has by now are there for good."""
        with self._all.change:
            self._context = context
            self.done = min(context.n // self._size, len(self.keys))
            self._all.change.notify_all()

    @property
    def promised(self) -> int:
        """Tokens that it was admitted with and has not in memory yet."""
        return max(0, self.room - (self._context.n if self._context is not None else 0))

    def withdraw(self) -> Context | None:
        """Wait for those who copy; nothing is copied any more then. Returns the context that was published."""
        with self._all.change:
            self._all.change.wait_for(lambda: all(blocks > self.done for blocks in self.wanted.values()))
            context, self._context, self.done = self._context, None, 0
            return context

    def cuts(self) -> set[int]:
        """Return the positions that others wait for, which need a state there."""
        with self._all.change:
            return {blocks * self._size for blocks in self.wanted.values()}

    def end(self) -> None:
        """Let those who wait look elsewhere. Idempotent."""
        with self._all.change:
            self._all.table.end(self)
            self.room = 0
            self._all.change.notify_all()

    def _copy(self, blocks: int, max_kl: float | None) -> SharedPrefix:
        """Copy the first ``blocks`` blocks, or as many of them as can be continued from within ``max_kl``."""
        engine, keys = self._all.engine, self.keys
        with self._sealing:
            try:
                with self._all.exclusive():
                    context = self._context
                    if context is None:
                        return SharedPrefix()
                    blocks = min(blocks, leading(context.levels, max_kl) // self._size)
                    state = None
                    if engine.space.needs_state:
                        within = [at for at in context.states if at % self._size == 0 and at <= blocks * self._size]
                        blocks = max(within, default=0) // self._size
                        if blocks:
                            parent = keys[blocks - 2] if blocks > 1 else ROOT
                            state = parse(engine.export_state(context, keys[blocks - 1], parent, blocks * self._size))
                    first = len(self._sealed)
                    if blocks > first:
                        parent = keys[first - 1] if first else ROOT
                        self._sealed += engine.export(context, keys[first:blocks], parent, first)
            except CtxReuseError:
                return SharedPrefix()  # a pass failed for it meanwhile
            return SharedPrefix([parse(one) for one in self._sealed[:blocks]], state)

"""Chooses at which positions states are made, which are stored, and from which one a prompt is continued."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from ctxreuse.store.policy.states import Path, StatePolicy

if TYPE_CHECKING:
    from ctxreuse.cost import CostModel
    from ctxreuse.engines.base import Context
    from ctxreuse.identity.model import ModelSpace
    from ctxreuse.runtime.request import ContextRecord, Request
    from ctxreuse.store.base import Store
    from ctxreuse.tree import Match

__all__ = ["StateCheckpoints"]

#: How many states of a path have a price, the deepest ones: seconds change little from one to the next.
_DEEPEST = 8


class StateCheckpoints:
    """One runtime's states. Any thread may call; for a model without states all of it is empty.

    A state costs next to nothing in the engine's memory and much in the store. So more are made than are stored: also
    at the ends of turns, which the store takes only once a second context has branched there.

    Args:
        space: the engine's.
        policy: at which positions states are stored.
        rewrites_history: the next prompt of a conversation branches at the end of the last turn, as
            `engines.prompt.rewrites_history` says: the store takes the state there without waiting for it.
    """

    def __init__(self, space: ModelSpace, policy: StatePolicy, *, rewrites_history: bool = False) -> None:
        self._space, self._policy, self._rewrites_history = space, policy, rewrites_history
        self._state_nbytes = 0

    def learn(self, nbytes: int) -> None:
        """Note the size of a state that was exported."""
        if nbytes > self._state_nbytes:
            self._state_nbytes = nbytes
            token = self._space.token_nbytes
            self._policy = msgspec.structs.replace(self._policy, worth=nbytes // token if token else 0)

    def nbytes(self, tokens: int) -> int:
        """Return the bytes to load for a context of so many stored tokens: its blocks, and the state at their end."""
        return tokens * self._space.token_nbytes + (self._state_nbytes if tokens else 0)

    def points(self, store: Store | None, keys: Sequence[bytes], request: Request) -> tuple[int, ...]:
        """Return the positions at which the store should keep states of the context of ``keys``, which begins with the
        prompt of ``request``."""
        if store is None or not keys or not self._space.needs_state:
            return ()
        branches = sorted(request.branches)[-1:] if self._rewrites_history else ()
        path = Path(keys, self._space.block_tokens)
        return self._policy.points(path, _Allowed(store, request.max_kl), branches=branches)

    def cuts(self, context: Context, points: Sequence[int], branches: Sequence[int]) -> tuple[int, ...]:
        """Return where the run that continues ``context`` is cut, so that states can be taken there.

        ``branches``: positions at which another context may branch. Of those ahead the first (a shared system prompt)
        and the last two are taken: each cut costs a forward pass, and most would never be used.
        """
        if not self._space.needs_state:
            return ()
        near = sorted(at for at in set(branches) if at > context.n)
        return tuple(sorted({*points, *near[:1], *near[-2:]}))

    def states_to_store(
        self, store: Store, context: Context, keys: Sequence[bytes], record: ContextRecord
    ) -> list[int]:
        """Return the positions of the states of ``context`` to store: those planned before the run, and those that the
        store's tree suggests now, when others may have branched from it; without those that are stored."""
        max_kl, size = record.request.max_kl, self._space.block_tokens
        wanted = {*record.cut_points, *self.points(store, keys, record.request)}
        return [
            at
            for at in context.states
            if at in wanted and at <= len(keys) * size and store.match(keys[: at // size], max_kl).state_tokens < at
        ]

    def resume(
        self, store: Store, keys: Sequence[bytes], total: int, cost: CostModel | None, max_kl: float | None
    ) -> tuple[int, int]:
        """Return from how many leading tokens a prompt of ``total`` tokens is best continued, and how many are stored.

        The deeper the state, the fewer tokens are replayed and the more bytes are loaded; the least predicted seconds
        win.
        """
        stored = store.match(keys, max_kl)
        if not self._space.needs_state:
            most = stored.tokens
            loads = cost is None or not most or cost.loads(most, self.nbytes(most))
            return (most if loads else 0), most
        places = [stored.state_blocks]
        while cost is not None and places[-1] and len(places) < _DEEPEST:
            places.append(store.match(keys[: places[-1] - 1], max_kl).state_blocks)
        places.append(0)
        size = self._space.block_tokens
        best = stored.state_tokens
        if cost is not None:
            priced = [(cost.local(self.nbytes(at * size), total - at * size, at * size), at * size) for at in places]
            known = [(seconds, at) for seconds, at in priced if seconds is not None]
            best = min(known)[1] if len(known) == len(priced) else best
        return best, stored.state_tokens


class _Allowed:
    """A store's tree as one request may use it."""

    def __init__(self, store: Store, max_kl: float | None) -> None:
        self._store, self._max_kl = store, max_kl

    def match(self, keys: Sequence[bytes], /) -> Match:
        return self._store.match(keys, self._max_kl)

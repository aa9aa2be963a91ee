"""Which states a runtime's contexts make, which of them reach the store, and from which one a prompt goes on."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import msgspec

from ctxreuse.store.policy.states import Path, StatePolicy

if TYPE_CHECKING:
    from ctxreuse.cost import CostModel
    from ctxreuse.engines.base import Live
    from ctxreuse.model import ModelSpace
    from ctxreuse.store.base import Store
    from ctxreuse.tree import Match

__all__ = ["Keeping"]

#: How many states of a path have a price, the deepest ones: seconds change little from one to the next.
_DEEPEST = 8


class Keeping:
    """One runtime's states. Any thread may call; of a model without states all of it is empty.

    A state costs next to nothing in the engine's memory and much in the store. So more are made than are stored: also
    at the ends of turns, which the store takes only when a second context has parted there.
    """

    def __init__(self, space: ModelSpace, policy: StatePolicy) -> None:
        self._space, self._policy = space, policy
        self._planned: WeakKeyDictionary[Live, tuple[int, ...]] = WeakKeyDictionary()
        self._lock = threading.Lock()
        self._state_nbytes = 0

    def learn(self, nbytes: int) -> None:
        """A state was sealed, and has so many bytes."""
        if nbytes > self._state_nbytes:
            self._state_nbytes = nbytes
            token = self._space.token_nbytes
            self._policy = msgspec.structs.replace(self._policy, worth=nbytes // token if token else 0)

    def nbytes(self, tokens: int) -> int:
        """Bytes to load for a context of so many held tokens: its blocks, and the state at their end."""
        return tokens * self._space.token_nbytes + (self._state_nbytes if tokens else 0)

    def points(self, store: Store | None, keys: Sequence[bytes], lossy: str | None) -> tuple[int, ...]:
        """Where the context of ``keys`` should keep states in the store."""
        if store is None or not keys or not self._space.needs_state:
            return ()
        return self._policy.points(Path(keys, self._space.block_tokens), _Allowed(store, lossy))

    def stops(self, live: Live, points: Sequence[int], branches: Sequence[int]) -> tuple[int, ...]:
        """Where the run that goes on from ``live`` is cut, so that states can be taken there.

        ``branches``: positions at which another context may part. Of those that are to come the first (a shared system
        prompt) and the last two are taken: each cut costs a forward of its own, and most would never be used.
        """
        if not self._space.needs_state:
            return ()
        with self._lock:
            self._planned[live] = tuple(points)
        near = sorted(at for at in set(branches) if at > live.n)
        return tuple(sorted({*points, *near[:1], *near[-2:]}))

    def admitted(self, store: Store, live: Live, keys: Sequence[bytes], lossy: str | None) -> list[int]:
        """Of the states that ``live`` has, those that the store should keep and lacks: planned before the run, or what
        the tree says now, when others may have parted from this context."""
        with self._lock:
            planned = self._planned.pop(live, ())
        wanted = {*planned, *self.points(store, keys, lossy)}
        size = self._space.block_tokens
        return [
            at
            for at in live.states
            if at in wanted and at <= len(keys) * size and store.match(keys[: at // size], lossy).state_tokens < at
        ]

    def resume(
        self, store: Store, keys: Sequence[bytes], total: int, cost: CostModel | None, lossy: str | None
    ) -> tuple[int, int]:
        """Leading tokens from which a prompt of ``total`` tokens best goes on, and how many the store has: the deeper
        the state, the fewer tokens are replayed, and the more bytes are loaded. The least predicted seconds win."""
        held = store.match(keys, lossy)
        if not self._space.needs_state:
            most = held.tokens
            loads = cost is None or not most or cost.loads(most, self.nbytes(most))
            return (most if loads else 0), most
        places = [held.state_blocks]
        while cost is not None and places[-1] and len(places) < _DEEPEST:
            places.append(store.match(keys[: places[-1] - 1], lossy).state_blocks)
        places.append(0)
        size = self._space.block_tokens
        best = held.state_tokens
        if cost is not None:
            priced = [(cost.local(self.nbytes(at * size), total - at * size, at * size), at * size) for at in places]
            known = [(seconds, at) for seconds, at in priced if seconds is not None]
            best = min(known)[1] if len(known) == len(priced) else best
        return best, held.state_tokens


class _Allowed:
    """A store as the tree of what one request may use."""

    def __init__(self, store: Store, lossy: str | None) -> None:
        self._store, self._lossy = store, lossy

    def match(self, keys: Sequence[bytes], /) -> Match:
        return self._store.match(keys, self._lossy)

"""Contexts between two requests: what each waits for, and what is done with their memory until they return."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ctxreuse.errors import StoreError
from ctxreuse.keys import Tokens
from ctxreuse.pauses import Ahead, Candidate, Estimator, Kind, Sessions, State, load_ahead, make_room
from ctxreuse.pauses.hints import hint_label
from ctxreuse.pauses.kinds import CLOSED, SUPERSEDED

if TYPE_CHECKING:
    from ctxreuse.runtime.pool import LivePool
    from ctxreuse.store.base import WholeStore

__all__ = ["Done", "Waiting"]

#: Contexts that are known at a time, and how many tokens theirs may have in all (64 MiB of ids).
_MOST, _TOKENS = 256, 16 << 20
#: Types of pauses that are learnt from: those of each context, and some hundred tools and tenants.
_TYPES = 1024
#: Shares of a context whose blocks tell that it goes on, though its last ones were written anew.
_ANCHORS = (16, 15, 12)
#: What a byte in memory is worth, in seconds a second: a gigabyte for ten minutes as much as a second of waiting.
_PRICE = 1 / (600 * 1e9)
#: Bytes a second that contexts come from the store with, until the first was measured; weight of a new measurement.
_BANDWIDTH, _NEW = 0.5e9, 0.25
#: Bytes that one round of work may read ahead.
_LINK = 64 << 20
_PAGE = 4096
#: Bytes of a file of what was learnt.
_LARGEST = 1 << 16
#: The share of the engine's memory beyond which contexts are let go of by worth, before they must go by age.
_FULL = 0.75
#: Seconds: what the store has is not computed anew.
_NEVER = 1e9


class Done(NamedTuple):
    """What a round of idle work did: bytes of contexts let go of in memory, bytes read ahead."""

    demoted: int = 0
    prefetched: int = 0


class _Context:
    __slots__ = ("ahead", "keys", "lossy", "nbytes", "tokens")

    def __init__(self) -> None:
        self.tokens: Tokens = np.zeros(0, "<i4")
        self.keys: list[bytes] = []
        self.lossy: str | None = None
        self.nbytes = 0
        self.ahead = False


class Waiting:
    """The contexts of one runtime by what they wait for. Any thread may call; nothing is computed.

    A request that goes on from where one ended, or most of it, is the same session's. The store's policy is told of
    each pause; `work` uses idle time: contexts in the engine's memory whose return is too far off to pay for it are let
    go of, as the store has them, and blocks of those about to return are read from the disk ahead. ``clock``: seconds.
    ``told`` hears of each pause too, its keys and label; it must be quick and never raise.
    """

    def __init__(
        self,
        pool: LivePool,
        store: WholeStore | None,
        keys: Callable[[Tokens], list[bytes]],
        clock: Callable[[], float],
        told: Callable[[Sequence[bytes], int], None] | None = None,
    ) -> None:
        self._pool, self._store, self._keys, self._clock, self._told = pool, store, keys, clock, told
        self._lock = threading.Lock()
        self._sessions: Sessions[int] = Sessions(Estimator(most=_TYPES), most=_MOST)
        self._contexts: dict[int, _Context] = {}
        self._anchors: dict[bytes, int] = {}
        self._next = self._held = 0
        self._bandwidth = _BANDWIDTH
        self.demoted = self.prefetched = self.returned_ahead = 0

    def __len__(self) -> int:
        return len(self._contexts)

    def begun(self, tokens: Tokens, was: Kind | None = None) -> None:
        """A request for this context begins; ``was``: what its session waited for, if the request tells."""
        keys = self._keys(tokens)
        if not keys:
            return
        with self._lock:
            number = self._find(keys)
            if number is None:
                self._next += 1
                number = self._next
                self._contexts[number] = _Context()
            context = self._contexts[number]
            self.returned_ahead += context.ahead
            context.ahead = False
            self._put(number, context, tokens, keys)
            self._sessions.begin(number, self._clock(), was=was)
            self._trim()

    def paused(
        self, tokens: Tokens, kind: Kind, *, nbytes: int = 0, lossy: str | None = None, expect: float | None = None
    ) -> None:
        """The context waits now. ``nbytes``: of its KV in memory; ``expect``: seconds until it returns, if known."""
        keys = self._keys(tokens)
        if not keys:
            return
        with self._lock:
            number = self._find(keys)
            if number is None:
                return
            context = self._contexts[number]
            context.lossy, context.nbytes = lossy, nbytes or context.nbytes
            known = context.tokens
            if len(known) <= len(tokens) or not np.array_equal(known[: len(tokens)], tokens):
                self._put(number, context, tokens, keys)  # else somebody speaks of it who knows its beginning only
            self._sessions.pause(number, kind, self._clock(), expect=expect)
        self._mark(keys, kind.label)
        if self._told is not None:
            self._told(keys, kind.label)

    def hint(self, tokens: Tokens, name: str, *, until: float | None = None) -> bool:
        """Take a hint on the context that ends here or goes on from here, ``until`` seconds from now; False for an
        unknown one. Raises ConfigError."""
        label, keys = hint_label(name), self._keys(tokens)
        with self._lock:
            now, number = self._clock(), self._find(keys)
            known = number is not None and self._sessions.hint(
                number, name, now, until=None if until is None else now + until
            )
        if keys:
            self._mark(keys, label)
        return known

    def state(self, tokens: Tokens) -> State | None:
        """What is known of the context that ends here; None for an unknown one."""
        with self._lock:
            number = self._find(self._keys(tokens))
            return None if number is None else self._sessions.state(number, self._clock())

    def _mark(self, keys: Sequence[bytes], label: int) -> None:
        if self._store is not None:
            self._store.mark(keys, label)

    def _find(self, keys: Sequence[bytes]) -> int | None:
        return next((self._anchors[key] for key in reversed(keys) if key in self._anchors), None)

    def _put(self, number: int, context: _Context, tokens: Tokens, keys: list[bytes]) -> None:
        self._unname(number, context)
        self._held += len(tokens) - len(context.tokens)
        context.tokens, context.keys = tokens, keys
        for key in self._named(keys):
            self._anchors[key] = number

    @staticmethod
    def _named(keys: Sequence[bytes]) -> Iterator[bytes]:
        return (keys[(len(keys) * share - 1) // 16] for share in _ANCHORS)

    def _unname(self, number: int, context: _Context) -> None:
        for key in self._named(context.keys) if context.keys else ():
            if self._anchors.get(key) == number:
                del self._anchors[key]

    def _trim(self) -> None:
        while len(self._contexts) > 1 and (len(self._contexts) > _MOST - 1 or self._held > _TOKENS):
            self._forget(self._sessions.ranked(self._clock())[0])

    def _forget(self, number: int) -> None:
        context = self._contexts.pop(number)
        self._unname(number, context)
        self._held -= len(context.tokens)
        self._sessions.forget(number)

    def work(self, busy: Callable[[], bool] = lambda: False) -> Done:
        """One round of idle work; it ends early once ``busy()``. A store that fails ends it too."""
        demoted = self._demote()
        prefetched = 0
        with suppress(StoreError):
            for number, keys, lossy in self._due():
                if busy():
                    break
                prefetched += self._read_ahead(number, keys, lossy)
        self.demoted += demoted
        self.prefetched += prefetched
        return Done(demoted, prefetched)

    def _demote(self) -> int:
        """Let go of contexts in memory that the store has: such as are over or too long away to pay, and the least
        worth ones of a memory that is nearly full."""
        if self._store is None:
            return 0
        with self._lock:
            now, cheap = self._clock(), 0
            found: list[Candidate[int]] = []
            for number, context in self._contexts.items():
                held = self._pool.holds(context.tokens)
                if not held or self._store.match(context.keys, context.lossy).blocks < len(context.keys):
                    continue
                worth, load = self._sessions.worth(number, now), held / self._bandwidth
                cheap += held if worth * load < _PRICE * held else 0
                found.append(Candidate(number, held, worth, _NEVER, load, copied=True))
            need = max(cheap, self._pool.nbytes - int(_FULL * self._pool.capacity))
            gone = [self._contexts[step.session].tokens for step in make_room(found, need, writes=0)]
        return sum(self._pool.let_go(tokens) for tokens in gone)

    def _due(self) -> list[tuple[int, list[bytes], str | None]]:
        """Contexts that are about to return and that no memory has yet."""
        with self._lock:
            now = self._clock()
            waiting: list[Ahead[int]] = []
            for number, context in self._contexts.items():
                state = self._sessions.state(number, now)
                if state is None or state.pause.stop in _OVER or context.ahead or self._pool.holds(context.tokens):
                    continue
                rates = self._sessions.rates(number, now)
                waiting.append(Ahead(number, context.nbytes, context.nbytes / self._bandwidth, state.age, rates))
            chosen = load_ahead(waiting, room=self._pool.capacity, link=_LINK, price=_PRICE)
            return [(number, self._contexts[number].keys, self._contexts[number].lossy) for number in chosen]

    def _read_ahead(self, number: int, keys: Sequence[bytes], lossy: str | None) -> int:
        """Touch the pages of a context's blocks, a few at a time: `peek` counts as no use."""
        assert self._store is not None
        nbytes, at = 0, self._clock()
        for start in range(0, len(keys), 16):
            with self._store.read(lossy) as reader:
                for key in keys[start : start + 16]:
                    view = reader.peek(key)
                    if view is None:
                        continue
                    raw = np.frombuffer(view.buffer, np.uint8)
                    nbytes += len(raw) if int(raw[::_PAGE].sum()) >= 0 else 0
        took = self._clock() - at
        with self._lock:
            if took > 0 and nbytes > 1 << 20:
                self._bandwidth += _NEW * (nbytes / took - self._bandwidth)
            context = self._contexts.get(number)
            if context is not None:
                context.ahead = True
        return nbytes

    def dump(self) -> bytes:
        """What was learnt of pauses."""
        with self._lock:
            return self._sessions.estimator.dump()

    def load(self, raw: bytes) -> bool:
        """Go on from there; False if it is damaged."""
        with self._lock:
            return self._sessions.estimator.load(raw)

    def save(self, file: Path) -> None:
        """Write what was learnt, atomically. Raises OSError."""
        fresh = file.with_name(file.name + ".new")
        fresh.write_bytes(self.dump())
        fresh.replace(file)

    def recall(self, file: Path) -> bool:
        """Go on from what `save` wrote; False if that is not there or damaged."""
        try:
            with file.open("rb") as stream:
                raw = stream.read(_LARGEST + 1)
        except OSError:
            return False
        return len(raw) <= _LARGEST and self.load(raw)

    def check(self) -> None:
        """Raises AssertionError where contexts, sessions and anchors disagree."""
        with self._lock:
            self._sessions.check()
            assert self._held == sum(len(context.tokens) for context in self._contexts.values()), "tokens miscounted"
            assert set(self._anchors.values()) <= self._contexts.keys(), "an anchor of nothing"
            assert all(number in self._sessions for number in self._contexts), "a context without a session"


_OVER = frozenset(Kind(reason).stop for reason in (CLOSED, SUPERSEDED))

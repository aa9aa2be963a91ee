"""Contexts between two requests: what each waits for, and where its KV stays until it returns."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ctxreuse.errors import StoreError
from ctxreuse.identity.keys import Tokens
from ctxreuse.pauses import Ahead, Estimator, PauseKind, Sessions, State, load_ahead
from ctxreuse.pauses.hints import hint_label
from ctxreuse.pauses.kinds import CLOSED, SUPERSEDED
from ctxreuse.private import write_private

if TYPE_CHECKING:
    from ctxreuse.runtime.context_cache import ContextCache
    from ctxreuse.store.base import Store

__all__ = ["IdleWork", "PausedContext", "PausedContexts"]

#: Contexts known at a time, and the tokens they may have in all (64 MiB of ids).
_MOST, _TOKENS = 256, 16 << 20
#: Types of pauses to learn from: those of each context, and some hundred tools and tenants.
_TYPES = 1024
#: Shares (of 16) of a context whose blocks identify it when its last ones were rewritten.
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
#: The share of the engine's memory beyond which contexts are released by worth, before they must go by age.
_FULL = 0.75


class IdleWork(NamedTuple):
    """What a round of idle work did: bytes of contexts released in memory, bytes read ahead."""

    demoted: int = 0
    prefetched: int = 0


class PausedContext(NamedTuple):
    """A context at one moment: its number, tokens, bytes in memory at its pause, the key of its last whole block, what
    it waits for (a stop reason, and the class of a tool), and since when, by the clock."""

    number: int
    tokens: int
    nbytes: int
    tip: bytes
    stop: str
    tool: str
    since: float


class _Context:
    __slots__ = ("ahead", "keys", "max_kl", "nbytes", "tokens")

    def __init__(self) -> None:
        self.tokens: Tokens = np.zeros(0, "<i4")
        self.keys: Sequence[bytes] = ()
        self.max_kl: float | None = None
        self.nbytes = 0
        self.ahead = False


class PausedContexts:
    """The contexts of one runtime by what they wait for. Any thread may call; nothing is computed.

    A request that continues an earlier one, or most of it, is of its session. Each pause is reported to the store's
    policy and to ``record``, by keys and label. `work` uses idle time: contexts in the engine's memory whose return is
    too far off are released, as the store has them, and blocks of those about to return are read from disk ahead.
    ``clock``: seconds.
    """

    def __init__(
        self,
        cache: ContextCache,
        store: Store | None,
        clock: Callable[[], float],
        record: Callable[[Sequence[bytes], int], None] | None = None,
    ) -> None:
        self._cache, self._store, self._clock, self._record = cache, store, clock, record
        self._lock = threading.Lock()
        self._sessions: Sessions[int] = Sessions(Estimator(most=_TYPES), most=_MOST)
        self._contexts: dict[int, _Context] = {}
        self._anchors: dict[bytes, int] = {}
        self._next = self._tokens = 0
        self._bandwidth = _BANDWIDTH
        self.demoted = self.prefetched = self.returned_ahead = 0

    def __len__(self) -> int:
        return len(self._contexts)

    def on_request(self, tokens: Tokens, keys: Sequence[bytes], was: PauseKind | None = None) -> None:
        """A request for this context begins; ``keys`` of its whole blocks. ``was``: what its session waited for, if the
        request tells."""
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

    def on_pause(
        self,
        tokens: Tokens,
        keys: Sequence[bytes],
        kind: PauseKind,
        *,
        nbytes: int = 0,
        max_kl: float | None = None,
        expect: float | None = None,
    ) -> None:
        """Record that the context pauses. ``nbytes``: of its KV in memory; ``expect``: seconds until it returns."""
        if not keys:
            return
        with self._lock:
            number = self._find(keys)
            if number is None:
                return
            context = self._contexts[number]
            context.max_kl, context.nbytes = max_kl, nbytes or context.nbytes
            known = context.tokens
            if len(known) <= len(tokens) or not np.array_equal(known[: len(tokens)], tokens):
                self._put(number, context, tokens, keys)  # else the caller knows its beginning only
            self._sessions.pause(number, kind, self._clock(), expect=expect)
        self._report(keys, kind.label)
        if self._record is not None:
            self._record(keys, kind.label)

    def hint(self, keys: Sequence[bytes], name: str, *, until: float | None = None) -> bool:
        """Take a hint on the context of ``keys``, or that continues it, ``until`` seconds from now; False for an
        unknown one. Raises ConfigError."""
        label = hint_label(name)
        with self._lock:
            now, number = self._clock(), self._find(keys)
            known = number is not None and self._sessions.hint(
                number, name, now, until=None if until is None else now + until
            )
        if keys:
            self._report(keys, label)
        return known

    def state(self, keys: Sequence[bytes]) -> State | None:
        """Return the pause of the context of ``keys``; None for an unknown one."""
        with self._lock:
            number = self._find(keys)
            return None if number is None else self._sessions.state(number, self._clock())

    def contexts(self) -> list[PausedContext]:
        """Return all contexts that are known, running ones included."""
        with self._lock:
            now, found = self._clock(), list[PausedContext]()
            for number, one in self._contexts.items():
                state = self._sessions.state(number, now)
                if state is not None and one.keys:
                    pause, size = state.pause, len(one.tokens)
                    since = round(now - state.age, 1)
                    found.append(PausedContext(number, size, one.nbytes, one.keys[-1], pause.stop, pause.tool, since))
            return found

    def _report(self, keys: Sequence[bytes], label: int) -> None:
        if self._store is not None:
            self._store.on_pause(keys, label)

    def _find(self, keys: Sequence[bytes]) -> int | None:
        return next((self._anchors[key] for key in reversed(keys) if key in self._anchors), None)

    def _put(self, number: int, context: _Context, tokens: Tokens, keys: Sequence[bytes]) -> None:
        self._unname(number, context)
        self._tokens += len(tokens) - len(context.tokens)
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
        while len(self._contexts) > 1 and (len(self._contexts) > _MOST - 1 or self._tokens > _TOKENS):
            self._forget(self._sessions.ranked(self._clock())[0])

    def _forget(self, number: int) -> None:
        context = self._contexts.pop(number)
        self._unname(number, context)
        self._tokens -= len(context.tokens)
        self._sessions.forget(number)

    def forget(self, keys: Collection[bytes]) -> int:
        """Forget contexts, and hints on them, that have one of these blocks; returns how many."""
        wanted = frozenset(keys)
        with self._lock:
            removed = [number for number, one in self._contexts.items() if not wanted.isdisjoint(one.keys)]
            for number in removed:
                self._forget(number)
        return len(removed)

    def work(self, busy: Callable[[], bool] = lambda: False) -> IdleWork:
        """Do one round of idle work; it ends early once ``busy()``. A store that fails ends it too."""
        demoted = self._demote()
        prefetched = 0
        with suppress(StoreError):
            for number, keys, max_kl in self._due():
                if busy():
                    break
                prefetched += self._read_ahead(number, keys, max_kl)
        self.demoted += demoted
        self.prefetched += prefetched
        return IdleWork(demoted, prefetched)

    def _demote(self) -> int:
        """Release contexts in memory that the store has: those that are over or away too long to pay, and the least
        valuable ones of a memory that is nearly full."""
        if self._store is None:
            return 0
        with self._lock:
            now, cheap = self._clock(), 0
            found: list[tuple[float, int, Tokens]] = []
            for number, context in self._contexts.items():
                nbytes = self._cache.cached_bytes(context.tokens)
                if not nbytes or self._store.match(context.keys, context.max_kl).blocks < len(context.keys):
                    continue
                worth = self._sessions.worth(number, now)
                cheap += nbytes if worth / self._bandwidth < _PRICE else 0
                found.append((worth, nbytes, context.tokens))
            need = max(cheap, self._cache.nbytes - int(_FULL * self._cache.capacity))
            released: list[Tokens] = []
            for _, nbytes, tokens in sorted(found, key=lambda one: one[0]):
                if need > 0:
                    need -= nbytes
                    released.append(tokens)
        return sum(map(self._cache.release, released))

    def _due(self) -> list[tuple[int, Sequence[bytes], float | None]]:
        """Contexts that are about to return and are not in memory yet."""
        with self._lock:
            now = self._clock()
            waiting: list[Ahead[int]] = []
            for number, context in self._contexts.items():
                state = self._sessions.state(number, now)
                if (
                    state is None
                    or state.pause.stop in _OVER
                    or context.ahead
                    or self._cache.cached_bytes(context.tokens)
                ):
                    continue
                rates = self._sessions.rates(number, now)
                waiting.append(Ahead(number, context.nbytes, context.nbytes / self._bandwidth, state.age, rates))
            chosen = load_ahead(waiting, room=self._cache.capacity, link=_LINK, price=_PRICE)
            return [(number, self._contexts[number].keys, self._contexts[number].max_kl) for number in chosen]

    def _read_ahead(self, number: int, keys: Sequence[bytes], max_kl: float | None) -> int:
        """Touch the pages of a context's blocks, a few at a time: `peek` counts as no use."""
        assert self._store is not None
        nbytes, at = 0, self._clock()
        for start in range(0, len(keys), 16):
            with self._store.read(max_kl) as reader:
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
        """Return what was learnt of pauses, for `load`."""
        with self._lock:
            return self._sessions.estimator.dump()

    def load(self, raw: bytes) -> bool:
        """Continue from what `dump` returned; False if it is damaged."""
        with self._lock:
            return self._sessions.estimator.load(raw)

    def save(self, file: Path) -> None:
        """Write what was learnt, atomically. Raises OSError."""
        write_private(file, self.dump())

    def recall(self, file: Path) -> bool:
        """Continue from what `save` wrote; False if that is missing or damaged."""
        try:
            with file.open("rb") as stream:
                raw = stream.read(_LARGEST + 1)
        except OSError:
            return False
        return len(raw) <= _LARGEST and self.load(raw)

    def check(self) -> None:
        """Raise AssertionError where contexts, sessions and anchors disagree."""
        with self._lock:
            self._sessions.check()
            assert self._tokens == sum(len(context.tokens) for context in self._contexts.values()), "tokens miscounted"
            assert set(self._anchors.values()) <= self._contexts.keys(), "an anchor without a context"
            assert all(number in self._sessions for number in self._contexts), "a context without a session"


_OVER = frozenset(PauseKind(reason).stop for reason in (CLOSED, SUPERSEDED))

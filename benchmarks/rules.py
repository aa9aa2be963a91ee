"""Rules for paused sessions: ours, the published ones, and an oracle; what they decide is who leaves a full memory.

InferCept (preserve, discard, swap, elapsed time), Continuum (time to live) and tail-optimised LRU are written from
their papers' formulas, at the level of whole sessions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from benchmarks.pausing import Held, Turn
from ctxreuse.lab.trace import END_OF_TURN
from ctxreuse.pauses import Estimator, PauseKind, Sessions
from ctxreuse.pauses.kinds import CLOSED

__all__ = ["Discard", "Elapsed", "Lru", "Oracle", "Ours", "Preserve", "Swap", "TailLru", "TimeToLive"]


class Lru:
    """The session that was used longest ago goes first."""

    def begin(self, turn: Turn) -> None:
        """Nothing to learn."""

    def pause(self, turn: Turn) -> bool:
        return True

    def victims(self, now: float, held: Mapping[int, Held]) -> Iterable[tuple[int, int]]:
        return [(session, 0) for session in sorted(held, key=lambda one: held[one].used)]


class Discard(Lru):
    """What pauses is dropped."""

    def pause(self, turn: Turn) -> bool:
        return False


class Preserve(Lru):
    """What waits for a tool stays; other pauses end a request, so what they left is a cache and goes by age."""

    def __init__(self) -> None:
        self._tools: set[int] = set()

    def pause(self, turn: Turn) -> bool:
        kept = turn.request.stop != END_OF_TURN
        (self._tools.add if kept else self._tools.discard)(turn.request.session)
        return True

    def victims(self, now: float, held: Mapping[int, Held]) -> Iterable[tuple[int, int]]:
        return [victim for victim in super().victims(now, held) if victim[0] not in self._tools]


class Swap(Lru):
    """The memory is swap space: what pauses goes there as far as there is room and the link moves in that time.

    Who waits in it stays until it returns; the end of a turn is the end of a request and frees it. ``rate``: blocks a
    second that the link moves, in both directions together.
    """

    def __init__(self, rate: float) -> None:
        self._rate, self._credit, self._at = rate, 0.0, 0.0
        self.moved = 0

    def pause(self, turn: Turn) -> bool:
        self._credit = min(self._credit + (turn.answered - self._at) * self._rate, 10 * self._rate)
        self._at = turn.answered
        if turn.request.stop == END_OF_TURN or self._credit < 2 * turn.blocks:
            return False
        self._credit -= 2 * turn.blocks
        self.moved += 2 * turn.blocks
        return True

    def victims(self, now: float, held: Mapping[int, Held]) -> Iterable[tuple[int, int]]:
        return ()


class Elapsed(Lru):
    """InferCept without profiles: a pause lasts as long again, so age times size is wasted; most first."""

    def victims(self, now: float, held: Mapping[int, Held]) -> Iterable[tuple[int, int]]:
        waste = {session: (now - one.used) * one.blocks for session, one in held.items()}
        return [(session, 0) for session in sorted(held, key=lambda one: -waste[one])]


class TimeToLive:
    """Continuum: what pauses is pinned for the time that pays best by the pauses seen so far, then goes by age.

    ``price``: returns that a second of holding costs. Among the pinned, the program that came last goes first.
    """

    def __init__(self, price: float) -> None:
        self._price = price
        self._seen: dict[int, list[float]] = {}
        self._ttl: dict[int, float] = {}
        self._until: dict[int, float] = {}
        self._came: dict[int, float] = {}
        self._ended: dict[int, Turn] = {}

    def begin(self, turn: Turn) -> None:
        session = turn.request.session
        self._came.setdefault(session, turn.request.t)
        self._until[session] = float("inf")
        ended = self._ended.pop(session, None)
        if ended is not None:
            seen = self._seen.setdefault(ended.request.stop, [])
            seen.append(max(0.0, turn.request.t - ended.answered))
            if len(seen) % 16 == 1:
                self._ttl[ended.request.stop] = self._best(np.sort(np.array(seen)))

    def _best(self, seen: np.ndarray[tuple[int], np.dtype[np.float64]]) -> float:
        n = len(seen)
        chance = np.arange(1, n + 1) / n
        held = (np.cumsum(seen) + seen * (n - np.arange(1, n + 1))) / n
        gain = chance - self._price * held
        best = int(np.argmax(gain))
        return float(seen[best]) if gain[best] > 0 else 0.0

    def pause(self, turn: Turn) -> bool:
        self._ended[turn.request.session] = turn
        self._until[turn.request.session] = turn.answered + self._ttl.get(turn.request.stop, 0.0)
        return True

    def victims(self, now: float, held: Mapping[int, Held]) -> Iterable[tuple[int, int]]:
        free = [session for session in held if self._until[session] < now]
        pinned = [session for session in held if self._until[session] >= now]
        free.sort(key=lambda one: held[one].used)
        pinned.sort(key=lambda one: -self._came[one])
        return [(session, 0) for session in (*free, *pinned)]


class TailLru(Lru):
    """Tail-optimised LRU: the last ``spare`` blocks of each, which its next turn has time to recompute, go first."""

    def __init__(self, spare: int) -> None:
        self._spare = spare
        self._whole: dict[int, int] = {}

    def begin(self, turn: Turn) -> None:
        self._whole[turn.request.session] = turn.blocks

    def victims(self, now: float, held: Mapping[int, Held]) -> Iterable[tuple[int, int]]:
        oldest = [session for session, _ in super().victims(now, held)]
        yield from ((session, max(0, self._whole[session] - self._spare)) for session in oldest)
        yield from ((session, 0) for session in oldest)


class Oracle(Lru):
    """Who comes back last goes first."""

    def __init__(self) -> None:
        self._after: dict[int, float] = {}

    def begin(self, turn: Turn) -> None:
        self._after[turn.request.session] = turn.after

    def victims(self, now: float, held: Mapping[int, Held]) -> Iterator[tuple[int, int]]:
        return iter([(session, 0) for session in sorted(held, key=lambda one: -self._after[one])])


class Ours:
    """Least worth holding first, by the estimator that the daemons use. ``hints``: sessions say when they close."""

    def __init__(self, *, hints: bool = False, strength: float = 4.0, personal: bool = True) -> None:
        self._sessions: Sessions[int] = Sessions(Estimator(strength=strength), personal=personal)
        self._hints = hints

    def begin(self, turn: Turn) -> None:
        self._sessions.begin(turn.request.session, turn.request.t)

    def pause(self, turn: Turn) -> bool:
        kind = kind_of(turn)
        if self._hints and turn.last:
            kind = PauseKind(CLOSED)
        self._sessions.pause(turn.request.session, kind, turn.answered)
        return True

    def victims(self, now: float, held: Mapping[int, Held]) -> Iterable[tuple[int, int]]:
        return [(session, 0) for session in self._sessions.ranked(now)]


def kind_of(turn: Turn) -> PauseKind:
    """The kind of the pause after a turn: traces name no tools, but what an answer was made of."""
    shape = turn.request.shape
    return PauseKind(turn.request.stop, bool(shape & 1), bool(shape & 2), bool(shape & 4))

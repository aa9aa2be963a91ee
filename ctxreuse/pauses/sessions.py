"""Which sessions run, pause or are over, and what holding each is worth now: one estimator, many sessions."""

from __future__ import annotations

import heapq
import math
from collections.abc import Hashable
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from ctxreuse.pauses.estimator import Estimator, Pause
from ctxreuse.pauses.hazard import AGES, BUCKETS, Rates, bucket, worth
from ctxreuse.pauses.hints import Hint, weight
from ctxreuse.pauses.kinds import CLOSED, REASONS, RUNNING, SUPERSEDED, Kind

__all__ = ["Sessions", "State"]

S = TypeVar("S", bound=Hashable)

#: A pause still going on is told to the estimator whenever its age has grown by so much, and not sooner than so many
#: seconds: what lasts long is learnt from before it ends.
_GROWTH, _SOON = 1.3, 20.0
#: What a session is worth that was closed: as much as one that returns after a year.
_OVER = 1 / (365 * 86400.0)
#: Who is expected at a time returns around it: between these shares of it most likely, hardly ever before.
_EARLY, _LATE, _BEFORE = 0.75, 1.5, 0.02


class State(NamedTuple):
    """A session at one moment. ``age``: seconds in it; ``worth``: see `Sessions.worth`."""

    pause: Pause
    age: float
    worth: float


class _Session:
    """``began``: its last request; ``since``: its state; ``told``: up to which age the estimator knows of both."""

    __slots__ = (
        "active",
        "began",
        "expect",
        "hints",
        "known",
        "over",
        "pause",
        "running",
        "since",
        "slot",
        "tenant",
        "told",
        "told_run",
    )

    def __init__(self, slot: int, tenant: str) -> None:
        self.slot, self.tenant = slot, tenant
        self.pause = self.running = Pause(REASONS[RUNNING])
        self.began = self.since = 0.0
        self.told = self.told_run = 0.0
        self.expect: float | None = None
        self.active = self.known = self.over = False
        self.hints: dict[str, Hint] = {}

    @property
    def paused(self) -> bool:
        """It waits, and was told why."""
        return not self.active and not self.over and self.pause.stop != REASONS[RUNNING]


class Sessions(Generic[S]):
    """States and worths of at most ``most`` sessions, those of least worth forgotten first. Not thread-safe.

    ``now`` is seconds of the caller's clock; it may stand still, and where it goes back ages are 0. Nothing has to be
    said of a session but that its requests begin: `begin` without a `pause` since the last one is learnt from as well.
    ``personal``: each session's own tempo is learnt too.
    """

    def __init__(self, estimator: Estimator | None = None, *, most: int = 4096, personal: bool = True) -> None:
        self.estimator = estimator if estimator is not None else Estimator()
        self._most, self._personal = max(most, 1), personal
        self._sessions: dict[S, _Session] = {}
        self._free = list(range(self._most - 1, -1, -1))
        self._owner: list[S | None] = [None] * self._most
        size = self._most
        self._since = np.zeros(size)
        self._tables = np.zeros((size, BUCKETS), np.float32)
        self._factor = np.ones(size)
        self._special: set[S] = set()
        self._due: list[tuple[float, int, S]] = []
        self._tick = 0

    def __len__(self) -> int:
        return len(self._sessions)

    def __contains__(self, session: S) -> bool:
        return session in self._sessions

    def begin(self, session: S, now: float, *, tenant: str = "", was: Kind | None = None) -> None:
        """A request of the session begins: it has returned, or is new.

        ``was``: what it waited for, as the request tells afterwards (its last message is a tool's result).
        """
        self._learn(now)
        held = self._sessions.get(session)
        if held is None:
            held = self._open(session, now, tenant)
        else:
            self._came_back(held, now, was)
        name = str(session) if self._personal else ""
        held.running = Pause(REASONS[RUNNING], "", held.tenant, name)
        held.began, held.told_run, held.known = now, 0.0, True
        held.expect, held.active, held.over = None, True, False
        held.hints.pop("demote", None)
        held.hints.pop("prefetch", None)
        self._state(session, held, now)

    def pause(self, session: S, kind: Kind, now: float, *, expect: float | None = None, tenant: str = "") -> None:
        """The session's answer is done, it waits now. ``expect``: seconds until its next request, if that is known.

        CLOSED and SUPERSEDED end it: nobody waits any more.
        """
        self._learn(now)
        held = self._sessions.get(session)
        if held is None:
            held = self._open(session, now, tenant)
        self._tell(held, now)
        held.active = False
        held.over = kind.reason in (CLOSED, SUPERSEDED)
        held.known = held.known and not held.over
        name = str(session) if self._personal else ""
        held.pause = Pause(kind.stop, kind.tool, held.tenant, name)
        held.told = 0.0
        held.expect = expect if expect is not None and math.isfinite(expect) and expect >= 0 else None
        self._state(session, held, now)

    def hint(self, session: S, name: str, now: float, *, until: float | None = None) -> bool:
        """Take a hint, see `ctxreuse.pauses.hints`; False for an unknown session. Raises ConfigError."""
        given, held = Hint.given(name, now, until), self._sessions.get(session)
        if held is None:
            return False
        held.hints[name] = given
        self._special.add(session)
        return True

    def forget(self, session: S) -> None:
        """Drop all that is known of a session but what was learnt from it; unknown ones are ignored."""
        held = self._sessions.pop(session, None)
        if held is not None:
            self._owner[held.slot] = None
            self._free.append(held.slot)
            self._special.discard(session)

    def _open(self, session: S, now: float, tenant: str) -> _Session:
        if not self._free:
            self.forget(self.ranked(now)[0])
        held = self._sessions[session] = _Session(self._free.pop(), tenant)
        self._owner[held.slot] = session
        return held

    def _came_back(self, held: _Session, now: float, was: Kind | None) -> None:
        if held.over:
            return
        if held.paused and was is not None and was.stop != held.pause.stop:
            # What it was told under the wrong name stays there: seconds in which nobody of that kind returned.
            held.pause, held.told = held.pause._replace(stop=was.stop, tool=was.tool), 0.0
        self._tell(held, now)
        if held.paused:
            self.estimator.returned(held.pause, max(now - held.since, 0.0))
        if held.known:
            self.estimator.returned(held.running, max(now - held.began, 0.0))

    def _tell(self, held: _Session, now: float) -> None:
        """The seconds since the last time, in which it did not return."""
        if held.over:
            return
        if held.paused and now - held.since > held.told:
            self.estimator.away(held.pause, held.told, now - held.since)
            held.told = now - held.since
        if held.known and now - held.began > held.told_run:
            self.estimator.away(held.running, held.told_run, now - held.began)
            held.told_run = now - held.began

    def _state(self, session: S, held: _Session, now: float) -> None:
        held.since = now
        self._since[held.slot] = now
        self._tables[held.slot] = self._worth(held)
        if held.over or held.hints:
            self._special.add(session)
        else:
            self._special.discard(session)
        self._tick += 1
        heapq.heappush(self._due, (now + _SOON, self._tick, session))
        if len(self._due) > 64 + 4 * len(self._sessions):
            self._due = [(self._later(one, now), n, s) for n, (s, one) in enumerate(self._sessions.items())]
            self._tick = len(self._due)
            heapq.heapify(self._due)

    @staticmethod
    def _later(held: _Session, now: float) -> float:
        return now + max(_SOON, (now - held.since) * (_GROWTH - 1))

    def _learn(self, now: float) -> None:
        """Tell the estimator of pauses that go on, and take from it what they are worth since."""
        while self._due and self._due[0][0] <= now:
            _, _, session = heapq.heappop(self._due)
            held = self._sessions.get(session)
            if held is None or held.over or now - held.since < _SOON:
                continue
            self._tell(held, now)
            self._tables[held.slot] = self._worth(held)
            self._tick += 1
            heapq.heappush(self._due, (self._later(held, now), self._tick, session))

    def worth(self, session: S, now: float) -> float:
        """Returns per second of holding it, hints included; 0 for an unknown session."""
        held = self._sessions.get(session)
        if held is None:
            return 0.0
        age = max(now - held.since, 0.0)
        value = float(self._tables[held.slot, bucket(age)])
        return self._adjusted(held, value, now) if session in self._special else value

    def rates(self, session: S, now: float) -> Rates:
        """Returns per second by bucket of age of a session's state, with what was expected; zeros for an unknown one.

        Hints that raise its worth raise them as well.
        """
        held = self._sessions.get(session)
        if held is None or held.over:
            return np.zeros(BUCKETS)
        return self._rates(held) * max(weight(held.hints, now), 1.0)

    def _rates(self, held: _Session) -> Rates:
        rates = self.estimator.rates(held.running if held.active else held.pause)
        if held.active or held.expect is None:
            return rates
        early, late = bucket(_EARLY * held.expect), bucket(_LATE * held.expect + 1.0)
        expected = rates.copy()
        expected[:early] *= _BEFORE
        expected[early : late + 1] = np.maximum(rates[early : late + 1], 2.0 / (AGES[late + 1] - AGES[early]))
        return expected

    def _worth(self, held: _Session) -> Rates:
        if held.active or held.expect is None:
            return self.estimator.worth(held.running if held.active else held.pause)
        return worth(self._rates(held))

    def _adjusted(self, held: _Session, value: float, now: float) -> float:
        if held.over:
            value = _OVER
        return value * weight(held.hints, now)

    def ranked(self, now: float) -> list[S]:
        """All sessions, the least worth holding first; among equals the one whose state is oldest. Pure. O(n log n)."""
        sessions = list(self._sessions.values())
        if not sessions:
            return []
        slots = np.fromiter((held.slot for held in sessions), np.int64, len(sessions))
        values = self._values(slots, now)
        order = np.lexsort((self._since[slots], values))
        owners = [self._owner[slot] for slot in slots[order]]
        return [owner for owner in owners if owner is not None]

    def _values(self, slots: npt.NDArray[np.int64], now: float) -> Rates:
        ages = np.maximum(now - self._since[slots], 0.0)
        at = np.minimum(np.searchsorted(AGES, ages, side="right") - 1, BUCKETS - 1)
        values: Rates = self._tables[slots, at].astype(np.float64)
        if self._special:
            place = {slot: i for i, slot in enumerate(slots.tolist())}
            for session in self._special:
                held = self._sessions[session]
                i = place.get(held.slot)
                if i is not None:
                    values[i] = self._adjusted(held, float(values[i]), now)
        return values

    def state(self, session: S, now: float) -> State | None:
        """What is known of a session now."""
        held = self._sessions.get(session)
        if held is None:
            return None
        pause = held.running if held.active else held.pause
        return State(pause, max(now - held.since, 0.0), self.worth(session, now))

    def check(self) -> None:
        """Raises AssertionError where slots and sessions disagree."""
        assert len(self._sessions) + len(self._free) == self._most, "a slot is lost"
        for session, held in self._sessions.items():
            assert self._owner[held.slot] == session, f"the slot of {session!r} is another's"
        assert self._special <= self._sessions.keys(), "a hint without a session"
        self.estimator.check()

"""Which sessions run, pause or have ended, and what keeping each one's context is worth now."""

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
from ctxreuse.pauses.kinds import CLOSED, REASONS, RUNNING, SUPERSEDED, PauseKind

__all__ = ["Sessions", "State"]

S = TypeVar("S", bound=Hashable)

#: A running pause is reported to the estimator whenever its age has grown by this factor, but not before this many
#: seconds, so that long pauses teach before they end.
_GROWTH, _SOON = 1.3, 20.0
#: Worth of a closed session: that of one that returns after a year.
_OVER = 1 / (365 * 86400.0)
#: A return expected after a time comes between these shares of it most likely, and hardly ever earlier.
_EARLY, _LATE, _BEFORE = 0.75, 1.5, 0.02
#: Sessions are ranked again when such a share of them has been forgotten.
_RANKED = 64


class State(NamedTuple):
    """A session at one moment. ``age``: seconds in it; ``worth``: see `Sessions.worth`."""

    pause: Pause
    age: float
    worth: float


class _Session:
    """``began``: its last request; ``since``: its state; ``reported``: up to which age the estimator knows of both;
    ``tick``: of its entry among what is due."""

    __slots__ = (
        "active",
        "began",
        "expect",
        "hints",
        "known",
        "over",
        "pause",
        "reported",
        "reported_run",
        "running",
        "since",
        "slot",
        "tenant",
        "tick",
    )

    def __init__(self, slot: int, tenant: str) -> None:
        self.slot, self.tenant, self.tick = slot, tenant, 0
        self.pause = self.running = Pause(REASONS[RUNNING])
        self.began = self.since = 0.0
        self.reported = self.reported_run = 0.0
        self.expect: float | None = None
        self.active = self.known = self.over = False
        self.hints: dict[str, Hint] = {}

    @property
    def paused(self) -> bool:
        """True if it waits for a known reason."""
        return not self.active and not self.over and self.pause.stop != REASONS[RUNNING]


class Sessions(Generic[S]):
    """States and worths of at most ``most`` sessions, those of least worth forgotten first (a ranking serves for a
    sixty-fourth of them). Not thread-safe.

    ``now`` is seconds of the caller's clock; it may stand still, and where it goes back ages are 0. Nothing has to be
    reported of a session but that its requests begin: `begin` without a `pause` before it teaches as well.
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
        self._special: set[S] = set()
        self._due: list[tuple[float, int, S]] = []
        self._tick = 0
        #: Sessions to be forgotten next, the least last, with their ticks.
        self._least: list[tuple[S, int]] = []

    def __len__(self) -> int:
        return len(self._sessions)

    def __contains__(self, session: S) -> bool:
        return session in self._sessions

    def begin(self, session: S, now: float, *, tenant: str = "", was: PauseKind | None = None) -> None:
        """Begin a request of the session: it has returned, or is new.

        ``was``: what it waited for, as the request itself shows (its last message is a tool's result).
        """
        self._learn(now)
        entry = self._sessions.get(session)
        if entry is None:
            entry = self._open(session, now, tenant)
        else:
            self._came_back(entry, now, was)
        name = str(session) if self._personal else ""
        entry.running = Pause(REASONS[RUNNING], "", entry.tenant, name)
        entry.began, entry.reported_run, entry.known = now, 0.0, True
        entry.expect, entry.active, entry.over = None, True, False
        entry.hints.pop("demote", None)
        entry.hints.pop("prefetch", None)
        self._state(session, entry, now)

    def pause(self, session: S, kind: PauseKind, now: float, *, expect: float | None = None, tenant: str = "") -> None:
        """Pause the session: its answer is done. ``expect``: seconds until its next request, if known.

        CLOSED and SUPERSEDED end the session.
        """
        self._learn(now)
        entry = self._sessions.get(session)
        if entry is None:
            entry = self._open(session, now, tenant)
        self._report_away(entry, now)
        entry.active = False
        entry.over = kind.reason in (CLOSED, SUPERSEDED)
        entry.known = entry.known and not entry.over
        name = str(session) if self._personal else ""
        entry.pause = Pause(kind.stop, kind.tool, entry.tenant, name)
        entry.reported = 0.0
        entry.expect = expect if expect is not None and math.isfinite(expect) and expect >= 0 else None
        self._state(session, entry, now)

    def hint(self, session: S, name: str, now: float, *, until: float | None = None) -> bool:
        """Take a hint, see `ctxreuse.pauses.hints`; False for an unknown session. Raises ConfigError."""
        given, entry = Hint.given(name, now, until), self._sessions.get(session)
        if entry is None:
            return False
        entry.hints[name] = given
        self._special.add(session)
        self._least.clear()
        return True

    def forget(self, session: S) -> None:
        """Drop a session; what the estimator learnt from it stays. Unknown sessions are ignored."""
        entry = self._sessions.pop(session, None)
        if entry is not None:
            self._owner[entry.slot] = None
            self._free.append(entry.slot)
            self._special.discard(session)

    def _open(self, session: S, now: float, tenant: str) -> _Session:
        while not self._free:
            self._forget_least(now)
        entry = self._sessions[session] = _Session(self._free.pop(), tenant)
        self._owner[entry.slot] = session
        return entry

    def _forget_least(self, now: float) -> None:
        """Forget the session that was of least worth when all were last ranked, unless its state has changed since."""
        if not self._least:
            # All in one go: ranking thousands for each new session would cost more than everything else here.
            least = self.ranked(now)[: max(1, self._most // _RANKED)]
            self._least = [(session, self._sessions[session].tick) for session in reversed(least)]
        session, tick = self._least.pop()
        if self._is_due(session, tick):
            self.forget(session)

    def _came_back(self, entry: _Session, now: float, was: PauseKind | None) -> None:
        if entry.over:
            return
        if entry.paused and was is not None and was.stop != entry.pause.stop:
            # What was reported under the wrong name stays there, as seconds without a return.
            entry.pause, entry.reported = entry.pause._replace(stop=was.stop, tool=was.tool), 0.0
        self._report_away(entry, now)
        if entry.paused:
            self.estimator.returned(entry.pause, max(now - entry.since, 0.0))
        if entry.known:
            self.estimator.returned(entry.running, max(now - entry.began, 0.0))

    def _report_away(self, entry: _Session, now: float) -> None:
        """Report the seconds since the last report as seconds without a return."""
        if entry.over:
            return
        if entry.paused and now - entry.since > entry.reported:
            self.estimator.away(entry.pause, entry.reported, now - entry.since)
            entry.reported = now - entry.since
        if entry.known and now - entry.began > entry.reported_run:
            self.estimator.away(entry.running, entry.reported_run, now - entry.began)
            entry.reported_run = now - entry.began

    def _state(self, session: S, entry: _Session, now: float) -> None:
        entry.since = now
        self._since[entry.slot] = now
        self._tables[entry.slot] = self._worth(entry)
        if entry.over or entry.hints:
            self._special.add(session)
        else:
            self._special.discard(session)
        self._report_at(session, entry, now + _SOON)

    def _report_at(self, session: S, entry: _Session, due: float) -> None:
        """Report it next at ``due``, and at no moment that was set before."""
        self._tick += 1
        entry.tick = self._tick
        heapq.heappush(self._due, (due, self._tick, session))
        if len(self._due) > 64 + 4 * len(self._sessions):
            self._due = [one for one in self._due if self._is_due(one[2], one[1])]
            heapq.heapify(self._due)

    def _is_due(self, session: S, tick: int) -> bool:
        """Return True if nothing has been learnt of the session since that tick, and it has the same state."""
        entry = self._sessions.get(session)
        return entry is not None and entry.tick == tick

    def _learn(self, now: float) -> None:
        """Report pauses that go on to the estimator, and refresh their worth."""
        while self._due and self._due[0][0] <= now:
            _, tick, session = heapq.heappop(self._due)
            entry = self._sessions.get(session)
            if entry is None or entry.tick != tick or entry.over or now - entry.since < _SOON:
                continue
            self._report_away(entry, now)
            self._tables[entry.slot] = self._worth(entry)
            self._report_at(session, entry, now + max(_SOON, (now - entry.since) * (_GROWTH - 1)))

    def worth(self, session: S, now: float) -> float:
        """Returns per second of keeping its context, hints included; 0 for an unknown session."""
        entry = self._sessions.get(session)
        if entry is None:
            return 0.0
        age = max(now - entry.since, 0.0)
        value = float(self._tables[entry.slot, bucket(age)])
        return self._adjusted(entry, value, now) if session in self._special else value

    def rates(self, session: S, now: float) -> Rates:
        """Returns per second by bucket of age of a session's state, with what was expected; zeros for an unknown one.

        Hints that raise its worth raise them as well.
        """
        entry = self._sessions.get(session)
        if entry is None or entry.over:
            return np.zeros(BUCKETS)
        return self._rates(entry) * max(weight(entry.hints, now), 1.0)

    def _rates(self, entry: _Session) -> Rates:
        rates = self.estimator.rates(entry.running if entry.active else entry.pause)
        if entry.active or entry.expect is None:
            return rates
        early, late = bucket(_EARLY * entry.expect), bucket(_LATE * entry.expect + 1.0)
        expected = rates.copy()
        expected[:early] *= _BEFORE
        expected[early : late + 1] = np.maximum(rates[early : late + 1], 2.0 / (AGES[late + 1] - AGES[early]))
        return expected

    def _worth(self, entry: _Session) -> Rates:
        if entry.active or entry.expect is None:
            return self.estimator.worth(entry.running if entry.active else entry.pause)
        return worth(self._rates(entry))

    def _adjusted(self, entry: _Session, value: float, now: float) -> float:
        if entry.over:
            value = _OVER
        return value * weight(entry.hints, now)

    def ranked(self, now: float) -> list[S]:
        """Return all sessions, least worth first; ties go to the oldest state. Pure. O(n log n)."""
        sessions = list(self._sessions.values())
        if not sessions:
            return []
        slots = np.fromiter((entry.slot for entry in sessions), np.int64, len(sessions))
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
                entry = self._sessions[session]
                i = place.get(entry.slot)
                if i is not None:
                    values[i] = self._adjusted(entry, float(values[i]), now)
        return values

    def state(self, session: S, now: float) -> State | None:
        """Return the state of a session now."""
        entry = self._sessions.get(session)
        if entry is None:
            return None
        pause = entry.running if entry.active else entry.pause
        return State(pause, max(now - entry.since, 0.0), self.worth(session, now))

    def check(self) -> None:
        """Raise AssertionError where slots and sessions disagree."""
        assert len(self._sessions) + len(self._free) == self._most, "a slot is lost"
        for session, entry in self._sessions.items():
            assert self._owner[entry.slot] == session, f"the slot of {session!r} is another's"
        assert self._special <= self._sessions.keys(), "a hint without a session"
        self.estimator.check()

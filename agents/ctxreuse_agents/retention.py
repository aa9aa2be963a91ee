"""How long sessions are kept: until a time of their own, or by the age and size of what is in a namespace."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta

import msgspec

from ctxreuse.clock import SYSTEM_CLOCK, Clock, SteadyClock
from ctxreuse.errors import ConfigError, SessionError
from ctxreuse.store import Ledger, NewTurn, Turn
from ctxreuse.store import Session as Record
from ctxreuse.store.ledger.records import check_namespace
from ctxreuse.store.recall import Recall

__all__ = ["KeepLimits", "SessionKeeper", "Summarise", "lifetime"]

log = logging.getLogger(__name__)

#: Returns a summary of a session's turns that are about to be deleted; None or "": there is none.
Summarise = Callable[[Sequence[Turn]], str | None]

#: Sessions that expire at a time.
_BATCH = 1000


class KeepLimits(msgspec.Struct, frozen=True):
    """What a namespace and those below it may have; what is too much is deleted, the longest unchanged session first.

    ``age``: seconds since a session's last change. ``turns``, ``characters``: of all sessions together. None: no limit.
    Pinned sessions stay, and do not count.
    """

    age: float | timedelta | None = None
    turns: int | None = None
    characters: int | None = None

    def check(self, namespace: str) -> KeepLimits:
        """Return them with ``age`` as seconds. Raises ConfigError for limits that cannot be."""
        check_namespace(namespace)
        for name, value in (("turns", self.turns), ("characters", self.characters)):
            if value is not None and (not isinstance(value, int) or value < 0):
                where = namespace or "all namespaces"
                raise ConfigError(f"{name} is {value!r}", where=where, fix="Give 0 or more, or None")
        return self if self.age is None else msgspec.structs.replace(self, age=lifetime(self.age, "age"))


def lifetime(value: float | timedelta, name: str = "ttl") -> float:
    """Return seconds. Raises ConfigError for what is no length of time above 0."""
    seconds = value.total_seconds() if isinstance(value, timedelta) else value
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds < 1e11:
        raise ConfigError(f"{name} is {value!r}", fix="Give seconds above 0, or a timedelta")
    return float(seconds)


class SessionKeeper:
    """Deletes what is kept no longer. Any thread may call; one round at a time.

    Where ``summarise`` is given, it is called with the turns of a session that is deleted by age or size, and what it
    returns is kept, pinned, in a session ``summary`` of the namespace. If it fails, the session stays.
    """

    def __init__(
        self,
        ledger: Ledger,
        recall: Recall,
        limits: Mapping[str, KeepLimits],
        delete: Callable[[str], object],
        summarise: Summarise | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._ledger, self._recall, self._delete, self._summarise = ledger, recall, delete, summarise
        self._limits = {namespace: one.check(namespace) for namespace, one in limits.items()}
        self._lock = threading.Lock()
        newest = ledger.sessions(1)
        self.clock = SteadyClock(newest[0].updated if newest else 0.0, clock)

    def expire(self) -> int:
        """Delete the sessions whose time is over; returns how many."""
        done = 0
        with self._lock:
            while batch := self._recall.expired(self.clock.now(), _BATCH):
                before = done
                for id in batch:
                    record = self._record(id)
                    if record is not None and record.expires is not None and not record.pinned:
                        done += self._drop(id)
                if done == before:
                    break
        return done

    def keep_limits(self) -> int:
        """Delete what is more or older than the limits say; returns the number of sessions."""
        done = 0
        for namespace, limits in self._limits.items():
            with self._lock:
                done += self._round(namespace, limits)
        return done

    def _round(self, namespace: str, limits: KeepLimits) -> int:
        rows = self._recall.oldest(namespace)
        turns, size = sum(row[2] for row in rows), sum(row[3] for row in rows)
        now, done = self.clock.now(), 0
        for id, updated, own, characters in rows:
            old = limits.age is not None and updated < now - lifetime(limits.age)
            many = limits.turns is not None and turns > limits.turns
            large = limits.characters is not None and size > limits.characters
            if not (old or many or large):
                break  # those behind it are newer
            record = self._record(id)
            if record is None or record.pinned or record.updated != updated or not self._summed_up(record):
                continue
            done += self._drop(id)
            turns, size = turns - own, size - characters
        return done

    def _summed_up(self, record: Record) -> bool:
        if self._summarise is None:
            return True
        try:
            text = self._summarise(self._ledger.turns(record.head))
            if text:
                self._add_summary(record, text)
        except Exception as error:  # of someone else's code
            log.warning("session %s stays, as its summary failed: %s", record.name, error)
            return False
        return True

    def _add_summary(self, record: Record, text: str) -> None:
        name = f"{record.namespace}/summary" if record.namespace else "summary"
        try:
            self._ledger.create(name, namespace=record.namespace, pinned=True)
        except SessionError:
            self._ledger.session(name)  # it is there
        self._ledger.append(name, [NewTurn("system", text, {"summary_of": record.name})])

    def _record(self, id: str) -> Record | None:
        try:
            return self._ledger.session(id)
        except SessionError:  # deleted since
            return None

    def _drop(self, id: str) -> int:
        try:
            self._delete(id)
        except SessionError:
            return 0
        return 1

"""Retention by age: what was last used longer ago than the settings allow is deleted like by hand."""

from __future__ import annotations

import logging

from ctxreuse.clock import SYSTEM_CLOCK, Clock, SteadyClock
from ctxreuse_edge.forget import Forgetter

__all__ = ["Retention"]

log = logging.getLogger(__name__)

#: Seconds between two looks: what is older goes at most so much later.
_PERIOD = 3600.0


class Retention:
    """Deletes what is older than ``age`` seconds (None: nothing). One thread calls.

    Nothing is deleted by setting the machine's ``clock`` meanwhile.
    """

    def __init__(self, forgetter: Forgetter, age: float | None, clock: Clock = SYSTEM_CLOCK) -> None:
        self._forgetter, self._age, self._clock = forgetter, age, SteadyClock(clock=clock).now
        self._looked: float | None = None

    def round(self) -> int:
        """Look, at most once an hour; returns how many contexts and requests were deleted."""
        now = self._clock()
        if self._age is None or (self._looked is not None and 0 <= now - self._looked < _PERIOD):
            return 0
        self._looked = now
        done = self._forgetter.older_than(now - self._age)
        if done:
            log.info("deleted by age", extra={"count": done})
        return done

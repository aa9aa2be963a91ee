"""Time as an argument: code that needs it takes a Clock, so that tests decide what time it is."""

from __future__ import annotations

import time
from typing import Protocol

__all__ = ["SYSTEM_CLOCK", "Clock", "SteadyClock", "SystemClock"]


class Clock(Protocol):
    """Two readings of time, in seconds. Any thread may call; never blocks."""

    def now(self) -> float:
        """Seconds since the Unix epoch: for what is stored or shown. May jump."""
        ...

    def monotonic(self) -> float:
        """Seconds since some fixed moment: for measuring and deadlines. Never goes back."""
        ...


class SystemClock:
    """The machine's own clocks."""

    __slots__ = ()

    def now(self) -> float:
        """Seconds since the Unix epoch."""
        return time.time()

    def monotonic(self) -> float:
        """Seconds of the monotonic clock."""
        return time.monotonic()


SYSTEM_CLOCK: Clock = SystemClock()


class SteadyClock:
    """Seconds since 1970 that go on evenly from when it was made: where the machine's clock is set meanwhile, right or
    wrong, nothing is deleted by that.

    ``newest``: a time that has been, such as of the last change; a machine's clock that is before it is not believed.
    """

    def __init__(self, newest: float = 0.0, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._start = max(clock.now(), newest) - clock.monotonic()

    def now(self) -> float:
        """Seconds since 1970."""
        return self._start + self._clock.monotonic()

"""A clock that stands still until a test moves it."""

from __future__ import annotations

import threading

__all__ = ["FakeClock"]


class FakeClock:
    """Clock whose time is what the test says. Any thread may call."""

    def __init__(self, now: float = 1_700_000_000.0) -> None:
        self._lock = threading.Lock()
        self._now, self._monotonic = now, 0.0

    def now(self) -> float:
        """Seconds since the Unix epoch, as set."""
        return self._now

    def monotonic(self) -> float:
        """Seconds that ``advance`` has added since the clock was made."""
        return self._monotonic

    def advance(self, seconds: float) -> None:
        """Let time pass on both readings. Raises ValueError for a negative amount."""
        if seconds < 0:
            raise ValueError(f"time cannot pass by {seconds} seconds")
        with self._lock:
            self._now += seconds
            self._monotonic += seconds

    def jump(self, now: float) -> None:
        """Set the wall clock alone, as a time server or a user does; the monotonic reading stays."""
        self._now = now

    __call__ = now

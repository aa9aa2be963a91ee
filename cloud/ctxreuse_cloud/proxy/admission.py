"""Admission: limits the running requests of each tenant."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["Admission"]


class Admission:
    """Counts running requests by tenant; for one event loop. ``limit`` 0: unlimited."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._running: Counter[str] = Counter()

    @contextmanager
    def enter(self, tenant: str) -> Iterator[bool]:
        """Count one more request of ``tenant`` inside the ``with`` block; yields False if that exceeds the limit."""
        if self._limit and self._running[tenant] >= self._limit:
            yield False
            return
        self._running[tenant] += 1
        try:
            yield True
        finally:
            self._running[tenant] -= 1
            if not self._running[tenant]:
                del self._running[tenant]  # else the dict grows with every tenant there ever was

    @property
    def running(self) -> int:
        """Running requests of all tenants."""
        return self._running.total()

    def check(self) -> None:
        """Raise AssertionError if a count is out of range."""
        assert all(n > 0 and (not self._limit or n <= self._limit) for n in self._running.values())

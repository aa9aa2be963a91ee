"""How many requests a tenant may have running at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["Admission"]


class Admission:
    """Counts running requests a tenant. One event loop calls. ``limit`` 0: no limit."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._running: Counter[str] = Counter()

    @contextmanager
    def enter(self, tenant: str) -> Iterator[bool]:
        """Inside the ``with`` block one more request of ``tenant`` runs; yields False if that would be too many."""
        if self._limit and self._running[tenant] >= self._limit:
            yield False
            return
        self._running[tenant] += 1
        try:
            yield True
        finally:
            self._running[tenant] -= 1
            if not self._running[tenant]:
                del self._running[tenant]  # tenants come and go, a counter for each that ever was would grow

    @property
    def running(self) -> int:
        """Requests that run now, of all tenants."""
        return self._running.total()

    def check(self) -> None:
        """Raises AssertionError if a count is not one that requests can have made."""
        assert all(n > 0 and (not self._limit or n <= self._limit) for n in self._running.values())

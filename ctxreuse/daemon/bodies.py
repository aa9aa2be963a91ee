"""Memory for request bodies: one budget for all running requests, and a share of it for each tenant."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["BodyBudget", "NoRoomError"]


class NoRoomError(Exception):
    """A body does not fit; ``mine``: because of the other bodies of its tenant."""

    def __init__(self, message: str, *, mine: bool) -> None:
        super().__init__(message)
        self.mine = mine


class BodyBudget:
    """Counts the bytes of bodies from their first piece until their requests end; for one event loop.

    All together take at most ``total`` bytes, and a tenant at most half of the rest.
    """

    def __init__(self, total: int, seconds: float) -> None:
        """``seconds``: within which a body must have arrived."""
        self._total, self.seconds = total, seconds
        self._reserved: Counter[str] = Counter()

    @property
    def reserved(self) -> int:
        """Bytes of all bodies."""
        return self._reserved.total()

    @contextmanager
    def body(self, tenant: str | None) -> Iterator[Callable[[int], None]]:
        """Yield a function that reserves more bytes, until the ``with`` block ends; it raises NoRoomError.

        ``tenant`` None: all callers are one tenant without a limit of its own.
        """
        name, mine = tenant or "", 0

        def take(nbytes: int) -> None:
            nonlocal mine
            others = self.reserved - self._reserved[name]
            room = self._total - others
            if tenant is not None:
                room //= 2
            if self._reserved[name] + nbytes > room:
                if tenant is not None and self._reserved[name] + nbytes > self._total // 2:
                    raise NoRoomError("your other requests take all the memory of a tenant", mine=True)
                raise NoRoomError("the running requests take all the memory for bodies", mine=False)
            mine += nbytes
            self._reserved[name] += nbytes

        try:
            yield take
        finally:
            self._reserved[name] -= mine
            if not self._reserved[name]:
                del self._reserved[name]

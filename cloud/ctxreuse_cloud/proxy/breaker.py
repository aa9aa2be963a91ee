"""Circuit breaker: a backend that keeps failing gets no requests for a while, then a single trial."""

from __future__ import annotations

import random
from typing import Literal

__all__ = ["Breaker"]


class Breaker:
    """Closed (all pass), open (none), half open (one at a time). ``now``: monotonic seconds.

    ``limit`` failures in a row open it for ``pause`` seconds; each failed trial doubles the pause, up to ``longest``.
    Pauses are drawn from [half, whole], so that many proxies do not try a backend at the same moment.
    """

    def __init__(
        self, limit: int = 5, pause: float = 1.0, longest: float = 30.0, rng: random.Random | None = None
    ) -> None:
        self._limit, self._pause, self._longest = limit, pause, longest
        self._rng = rng or random.Random()
        self._failures = 0
        self._opened = 0
        self._until = 0.0
        self._trial = False

    def state(self, now: float) -> Literal["closed", "open", "half-open"]:
        """Return its state."""
        if not self._opened:
            return "closed"
        return "open" if now < self._until else "half-open"

    def allows(self, now: float) -> bool:
        """Return True if a request may pass now; changes nothing."""
        return not self._opened or (now >= self._until and not self._trial)

    def wait(self, now: float) -> float:
        """Return the seconds until a trial is allowed; 0: now."""
        return max(0.0, self._until - now) if self._opened else 0.0

    def begin(self, now: float) -> None:
        """Note that a request passes; `succeeded`, `failed` or `gave_up` must follow."""
        if self._opened and now >= self._until:
            self._trial = True

    def succeeded(self) -> None:
        """Note that the backend answered."""
        self._failures = self._opened = 0
        self._trial = False

    def failed(self, now: float) -> None:
        """Note that the backend did not answer, or answered with an error."""
        self._failures += 1
        if not self._trial and (self._opened or self._failures < self._limit):
            return  # the request began before the breaker opened
        self._trial = False
        self._opened += 1
        whole = min(self._longest, self._pause * 2.0 ** min(self._opened - 1, 30))
        self._until = now + whole * self._rng.uniform(0.5, 1.0)

    def gave_up(self) -> None:
        """Note that the request ended without a result, as when the caller disconnects."""
        self._trial = False

    def check(self) -> None:
        """Raise AssertionError if the state is inconsistent."""
        assert self._failures >= 0
        assert self._opened >= 0
        assert not (self._trial and not self._opened), "a trial of a closed breaker"

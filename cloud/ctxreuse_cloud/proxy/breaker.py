"""A circuit breaker: a backend that keeps failing is left alone for a while, then tried with one request."""

from __future__ import annotations

import random
from typing import Literal

__all__ = ["Breaker"]


class Breaker:
    """Closed (all pass), open (none), half open (one passes at a time). ``now`` is monotonic seconds.

    ``limit`` failures in a row open it for ``pause`` seconds; each time the trial fails as well the pause doubles, up
    to ``longest``. Pauses are drawn from [half, whole], so that many proxies do not try a backend at the same moment.
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
        """How it stands."""
        if not self._opened:
            return "closed"
        return "open" if now < self._until else "half-open"

    def allows(self, now: float) -> bool:
        """True if a request may go through now. Pure."""
        return not self._opened or (now >= self._until and not self._trial)

    def wait(self, now: float) -> float:
        """Seconds until a trial is allowed; 0 if one is."""
        return max(0.0, self._until - now) if self._opened else 0.0

    def begin(self, now: float) -> None:
        """A request goes through. Must be followed by one of the three below."""
        if self._opened and now >= self._until:
            self._trial = True

    def succeeded(self) -> None:
        """The backend answered."""
        self._failures = self._opened = 0
        self._trial = False

    def failed(self, now: float) -> None:
        """The backend did not answer, or answered that it cannot."""
        self._failures += 1
        if not self._trial and (self._opened or self._failures < self._limit):
            return  # requests that began before it opened prove nothing new
        self._trial = False
        self._opened += 1
        whole = min(self._longest, self._pause * 2.0 ** min(self._opened - 1, 30))
        self._until = now + whole * self._rng.uniform(0.5, 1.0)

    def gave_up(self) -> None:
        """The request ended without saying anything about the backend: the caller went away."""
        self._trial = False

    def check(self) -> None:
        """Raises AssertionError if the parts contradict each other."""
        assert self._failures >= 0
        assert self._opened >= 0
        assert not (self._trial and not self._opened), "a trial of a breaker that is closed"

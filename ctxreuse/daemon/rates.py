"""Requests and tokens a minute of one key, as token buckets, and the headers that clients know them by."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator

from ctxreuse.daemon.openai import ApiError

__all__ = ["Bucket", "KeyRates"]


class Bucket:
    """Fills by ``limit`` a minute up to ``limit``, and may be overdrawn; for one event loop."""

    def __init__(self, limit: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit, self._clock = limit, clock
        self._level, self._at = float(limit), clock()

    @property
    def level(self) -> float:
        """What is left now; negative: overdrawn."""
        now = self._clock()
        self._level = min(float(self.limit), self._level + max(0.0, now - self._at) * self.limit / 60)
        self._at = now
        return self._level

    def take(self, amount: float) -> None:
        """Take an amount, whether there is as much or not."""
        self._level = self.level - amount

    def wait(self, level: float) -> float:
        """Return the seconds until there is ``level``; 0: now."""
        return max(0.0, level - self.level) * 60 / self.limit

    def check(self) -> None:
        """Raise AssertionError if the level is out of range."""
        assert self.level <= self.limit


class KeyRates:
    """What one key may still take; 0: unlimited. For one event loop.

    A request is one of ``requests``. It begins if any of ``tokens`` is left and takes them when it ends, as only then
    they are known: requests at the same time may overdraw, and later ones wait until that is made up for.
    """

    def __init__(self, requests: int, tokens: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.limits = requests, tokens
        #: Requests that began, that were refused, and tokens, since the key was first used.
        self.begun = self.refused = self.spent = 0
        self._buckets = {
            name: Bucket(limit, clock) for name, limit in (("requests", requests), ("tokens", tokens)) if limit
        }

    def begin(self) -> None:
        """Count a request. Raises ApiError (429) if it comes too early."""
        for name, bucket in self._buckets.items():
            wait = bucket.wait(1.0)
            if wait > 0:
                self.refused += 1
                text = f"this key may have {bucket.limit:,} {name} a minute: try again in {_rounded(wait)}"
                after = math.ceil(wait)
                raise ApiError(429, text, type=name, code="rate_limit_exceeded", retry_after=after)
        self.begun += 1
        if "requests" in self._buckets:
            self._buckets["requests"].take(1.0)

    def spend(self, tokens: int) -> None:
        """Count the tokens of a request."""
        self.spent += tokens
        if "tokens" in self._buckets:
            self._buckets["tokens"].take(tokens)

    def headers(self) -> Iterator[tuple[bytes, bytes]]:
        """Return OpenAI's headers: limits, what remains, and the time until all does."""
        for name, bucket in self._buckets.items():
            values = str(bucket.limit), str(max(0, int(bucket.level))), _rounded(bucket.wait(bucket.limit))
            for what, value in zip(("limit", "remaining", "reset"), values):
                yield f"x-ratelimit-{what}-{name}".encode(), value.encode()

    def check(self) -> None:
        """Raise AssertionError if a level is out of range."""
        for bucket in self._buckets.values():
            bucket.check()


def _rounded(seconds: float) -> str:
    """Return a duration as OpenAI writes it, such as ``6m3s``, rounded up."""
    minutes, rest = divmod(math.ceil(seconds), 60)
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"

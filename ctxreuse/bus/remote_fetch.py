"""How fast a cloud computes for this node, learned from what it computed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from ctxreuse.block import BlockView
from ctxreuse.runtime.remote import Fetch

__all__ = ["Pace", "TimedFetch"]

#: What is believed of a cloud that has not computed anything yet: enough to be tried where a device is slow.
_FIRST_GUESS = 2_000.0
_WEIGHT = 0.3


class Pace:
    """Tokens a cloud computes in a second for this node, and seconds until its first block. Any thread may call."""

    def __init__(self) -> None:
        self.tokens_per_second, self.delay = _FIRST_GUESS, 0.0
        self._lock = threading.Lock()
        self._seen = False

    def made(self, tokens: int, first: float, total: float) -> None:
        """``tokens`` came in ``total`` seconds, the first of them after ``first`` seconds."""
        rate = tokens / max(total - first, 1e-3)
        with self._lock:
            if not self._seen:
                self.tokens_per_second, self.delay, self._seen = rate, first, True
            self.tokens_per_second += _WEIGHT * (rate - self.tokens_per_second)
            self.delay += _WEIGHT * (first - self.delay)


class TimedFetch:
    """A `Fetch` of what a cloud computes, that tells a `Pace` how long it took. Any thread may call."""

    def __init__(self, fetch: Fetch, pace: Pace, tokens: int, clock: Callable[[], float]) -> None:
        self._fetch, self._pace, self._tokens, self._clock = fetch, pace, tokens, clock
        self._started = clock()
        self._first: float | None = None
        self._told = False

    @property
    def count(self) -> int:
        """See `Fetch.count`."""
        return self._fetch.count

    def heads(self, timeout: float) -> Sequence[BlockView]:
        """See `Fetch.heads`."""
        found = self._fetch.heads(timeout)
        self._note()
        return found

    def wait_layer(self, layer: int, timeout: float) -> None:
        """See `Fetch.wait_layer`."""
        self._fetch.wait_layer(layer, timeout)
        self._note()

    def tail(self, least: int = 0, timeout: float = 0.0) -> int:
        """See `Fetch.tail`."""
        found = self._fetch.tail(least, timeout)
        self._note()
        return found

    def views(self, last: int) -> Sequence[BlockView]:
        """See `Fetch.views`."""
        return self._fetch.views(last)

    def refinements(self, last: int) -> Sequence[BlockView | None]:
        """See `Fetch.refinements`."""
        return self._fetch.refinements(last)

    def state(self, timeout: float) -> BlockView | None:
        """See `Fetch.state`."""
        return self._fetch.state(timeout)

    @property
    def ended(self) -> str | None:
        """See `Fetch.ended`."""
        return self._fetch.ended

    @property
    def received(self) -> int:
        """See `Fetch.received`."""
        self._note()
        return self._fetch.received

    def stop(self) -> None:
        """See `Fetch.stop`."""
        self._fetch.stop()

    def _note(self) -> None:
        now = self._clock() - self._started
        if self._first is None and self._fetch.received:
            self._first = now
        if self._fetch.ended == "" and self._first is not None and not self._told:
            self._told = True
            # Whoever waits for the heads of all blocks sees the first byte late: a part of the time is all delay then.
            self._pace.made(self._tokens, min(self._first, now / 2), now)

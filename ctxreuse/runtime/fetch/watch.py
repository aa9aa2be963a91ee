"""Watches a fetch: its present speed, the seconds waited for it, and whether waiting is still worthwhile."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from ctxreuse.errors import LinkDownError, LinkError

if TYPE_CHECKING:
    from ctxreuse.bus.remote import Fetch, Offer

__all__ = ["Expected", "Watch"]

T = TypeVar("T")

#: Seconds between two looks at a fetch that is waited for, least and most.
_SLICE = (0.005, 0.05)
#: Seconds over which the rate is taken, least, as a link that stalls for a tenth of a second is not a slow one; and the
#: bytes that must fit, as whole payloads of a MiB arrive at once.
_WINDOW, _PAYLOADS = 0.3, 3 << 20
#: Bytes that may be about to arrive while none do: the most that one payload has.
_PAYLOAD = 1 << 20
#: Seconds beyond two round trips that a peer may take to begin.
_GRACE = 0.05
#: Encoding may take so many times what was expected: the peer serves others too.
_PATIENT = 2.0
#: Past the soft deadline waiting goes on only for the last so much of what recomputing would take.
_NEARLY = 0.1


class Expected(NamedTuple):
    """How a fetch of ``blocks`` blocks and ``nbytes`` bytes from the peer of ``offer`` should come: it encodes for
    ``making`` seconds before more than the first ``heads`` bytes is here."""

    offer: Offer
    blocks: int
    nbytes: int
    making: float = 0.0
    heads: int = 0


class Watch:
    """One fetch that began now. ``deadline``: seconds that doing without it takes (None: unknown);
    ``otherwise(bandwidth)``: seconds that the best other way would take from now on if the link is as fast as that.

    Two threads of one request may wait at a time: the one that computes and the one that copies.
    """

    def __init__(
        self,
        fetch: Fetch,
        expected: Expected,
        deadline: float | None,
        otherwise: Callable[[float], float],
        clock: Callable[[], float],
    ) -> None:
        self.fetch, self.deadline, self._expected = fetch, deadline, expected
        self.offer, self.nbytes = offer, nbytes = expected.offer, expected.nbytes
        self.waited = 0.0
        self._otherwise, self._clock = otherwise, clock
        self._lock = threading.Lock()
        worth = deadline if deadline is not None else 1.0
        self._grace = 2 * offer.rtt + offer.delay + _PATIENT * expected.making + min(_GRACE, worth / 10)
        self._window = max(min(_WINDOW, worth / 4), 4 * offer.rtt)
        if offer.bandwidth > 0:
            self._window = max(self._window, min(_PAYLOADS, nbytes / 8) / offer.bandwidth)
        self._seen: deque[tuple[float, int]] = deque()
        self._began = self._until = self._progressed = clock()

    @property
    def bandwidth(self) -> float:
        """Recent bytes/s: the offer's at first, then this fetch's own."""
        with self._lock:
            self._look(self._clock())
            return self._rate()

    @property
    def lead(self) -> float:
        """Seconds until the first bytes can be here; 0 once they are."""
        begun, offer = self._clock() - self._began, self.offer
        return 0.0 if self.fetch.received else max(0.0, offer.rtt + offer.delay + self._expected.making - begun)

    @property
    def blocks(self) -> float:
        """Complete blocks a second, the last first: each may have its own level."""
        whole = self.fetch.tail()
        each = self.fetch.received / whole if whole > 1 else self.nbytes / self._expected.blocks
        return self.bandwidth / each

    def wait(self, call: Callable[[float], T]) -> T:
        """Repeat ``call(timeout)`` until it returns. Raises its LinkError when the fetch has ended, LinkDownError when
        doing without the fetch has become the better choice."""
        share = (self.deadline or 1.0) / 50
        slice_ = min(max(share, _SLICE[0]), _SLICE[1])
        while True:
            at = self._clock()
            try:
                return call(slice_)
            except LinkError:
                if self.fetch.ended is not None:
                    raise
            finally:
                self.spent(at)
            if self._hopeless():
                raise LinkDownError("fetching has become slower than computing", where=self.offer.peer)

    def spent(self, since: float) -> None:
        """Count the time since ``since`` as waited, each moment once."""
        with self._lock:
            now = self._clock()
            self.waited += max(0.0, now - max(since, self._until))
            self._until = max(self._until, now)
            self._look(now)

    def _look(self, now: float) -> None:
        received = self.fetch.received
        if not self._seen and received <= self._expected.heads and now - self._began <= self._grace:
            return
        if received != (self._seen[-1][1] if self._seen else 0):
            self._progressed = now
        # The wait for the first bytes is the round trip's, not the bandwidth's.
        self._seen.append((now, received))
        while len(self._seen) > 2 and self._seen[1][0] <= now - self._window:
            self._seen.popleft()

    def _rate(self) -> float:
        if len(self._seen) < 2:
            return self.offer.bandwidth
        (first, before), (last, received) = self._seen[0], self._seen[-1]
        # Until the window is half full, the rest of the half is what was promised.
        seen = last - first
        missing = max(0.0, self._window / 2 - seen) if self.offer.bandwidth > 0 else 0.0
        span = seen + missing
        return (received - before + missing * self.offer.bandwidth) / span if span > 0 else self.offer.bandwidth

    def _hopeless(self) -> bool:
        now = self._clock()
        if self.deadline is None or now - self._began <= self._grace:
            return False
        late = now - self._began > self.deadline
        if self.offer.computes:
            return late  # bytes come as they are made: their rate says nothing about when the last one will
        # Nothing for a while: a payload that comes now would have taken that long, and the others would take the same.
        pending = min(_PAYLOAD, self.nbytes / 8)
        bandwidth = self.bandwidth or pending / max(now - self._progressed, self._window)
        left = (self.nbytes - self.fetch.received) / bandwidth
        return left > self._otherwise(bandwidth) or (late and left > _NEARLY * self.deadline)

"""What a link gives at present: bandwidth and round-trip time, from the transfers that go over it."""

from __future__ import annotations

import math
import threading
from collections import deque

__all__ = ["LinkEstimate"]

#: Busy seconds over which older transfers fade.
_MEMORY = 1.0
#: The same once a link gives less than half of what it gave: to believe in a drop too late costs a stalled request.
_DROP_MEMORY = 0.25
#: Seconds a byte of raw planes that a peer is taken to encode in, packed and lossy, before it has said.
_ENCODING = (1e-9, 2e-9)
#: The smallest of the last so many round trips: queues only ever add to it.
_ROUND_TRIPS = 16


class LinkEstimate:
    """Bandwidth in bytes/s while the link is busy, and RTT in seconds. Any thread may call; there is no clock inside.

    ``bandwidth`` and ``rtt`` given at the start (of an earlier process, or a setting) hold until something is seen;
    0 means unknown.
    """

    def __init__(self, bandwidth: float = 0.0, rtt: float = 0.0) -> None:
        self._lock = threading.Lock()
        # Sums that fade, not a mean of rates: many payloads arrive in bursts, and their single rates mean nothing.
        self._seconds = _MEMORY / 4 if bandwidth > 0 else 0.0
        self._nbytes = bandwidth * self._seconds
        self._trips: deque[float] = deque([rtt] if rtt > 0 else [], maxlen=_ROUND_TRIPS)
        self._encoding = _ENCODING

    def bytes_seen(self, nbytes: int, seconds: float) -> None:
        """``nbytes`` arrived in ``seconds`` during which the link was all that they waited for; 0 bytes: it stalled."""
        if not (math.isfinite(seconds) and seconds > 0 <= nbytes):
            return
        with self._lock:
            dropped = 2 * nbytes < self._rate() * seconds
            fade = math.exp(-seconds / (_DROP_MEMORY if dropped else _MEMORY))
            self._nbytes = self._nbytes * fade + nbytes
            self._seconds = self._seconds * fade + seconds

    def rtt_seen(self, seconds: float) -> None:
        """Learn from the round trip of a small message."""
        if math.isfinite(seconds) and seconds > 0:
            with self._lock:
                self._trips.append(seconds)

    def encoding_seen(self, packed: float, lossy: float) -> None:
        """Learn the peer's seconds for encoding a byte of raw planes."""
        if packed >= 0 <= lossy and math.isfinite(packed + lossy):
            with self._lock:
                self._encoding = packed, lossy

    @property
    def encoding(self) -> tuple[float, float]:
        """Seconds the peer takes to encode a byte of raw planes, packed and lossy; a guess before it has said."""
        with self._lock:
            return self._encoding

    def _rate(self) -> float:
        return self._nbytes / self._seconds if self._seconds else 0.0

    @property
    def bandwidth(self) -> float:
        """Bytes per second; 0 while nothing is known, or while nothing comes."""
        with self._lock:
            return self._rate()

    @property
    def rtt(self) -> float:
        """Seconds; 0 while nothing is known."""
        with self._lock:
            return min(self._trips, default=0.0)

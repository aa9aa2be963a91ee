"""The slow part of a link, as numbers: a rate that may follow a trace, and what waits for it."""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Iterator
from typing import Literal, TypeAlias

__all__ = ["MAX_READ", "Bottleneck", "Flow", "Way"]

#: ``up``: from who connects to the target; ``down``: back.
Way: TypeAlias = Literal["up", "down"]

# A pass of the loop moves about this many seconds of the rate; the burst is what an idle link may save up.
_STEP = 0.001
_BURST = 2 * _STEP
_MIN_READ, MAX_READ = 2 << 10, 128 << 10


class Bottleneck:
    """The rate of one direction (bytes/s, None: no limit), as tokens; ``steps`` are what is left of a trace.

    ``moved`` counts bytes handed on; at ``stop_at`` of them the link is to be cut.
    """

    def __init__(self, rate: float | None, now: float) -> None:
        self.rate, self.at, self.tokens, self.moved = rate, now, 0.0, 0
        self.stop_at: int | None = None
        self.steps: Iterator[tuple[float, float | None]] | None = None
        self.until = 0.0

    def advance(self, now: float, busy: bool) -> None:
        """Let time pass. A link that nobody waits for saves up no more than a burst."""
        while self.steps is not None and self.until <= now:
            self._flow(max(self.until, self.at))
            step = next(self.steps, None)
            if step is None:
                self.steps = None
                break
            self.until += step[0]
            self.rate = step[1]
        self._flow(now)
        if not busy and self.rate is not None:
            self.tokens = min(self.tokens, self.rate * _BURST)

    def _flow(self, now: float) -> None:
        if self.rate is not None:
            self.tokens += self.rate * (now - self.at)
        self.at = now

    def passes(self, nbytes: int) -> bool:
        """True if so many bytes may pass now."""
        return self.rate is None or self.tokens >= nbytes

    def wait(self, nbytes: int) -> float:
        """Seconds until ``nbytes`` may pass, or the rate changes."""
        wait = (nbytes - self.tokens) / self.rate if self.rate else 1.0
        return min(wait, max(0.0, self.until - self.at)) if self.steps is not None else wait

    @property
    def read(self) -> int:
        """Bytes to read at once: small enough that a slow link delivers in small steps."""
        return MAX_READ if self.rate is None else int(min(max(self.rate * _STEP, _MIN_READ), MAX_READ))


class Flow:
    """One direction of one connection: read from ``source``, wait for the rate, wait out the delay, write.

    ``waiting`` (``nbytes``) is what has not passed the bottleneck, ``line`` what has, each with when it is due.
    ``ended``: the source sent its last byte; ``shut``: the sink was told; ``blocked``: the sink takes no more now.
    """

    def __init__(self, way: Way, source: socket.socket, sink: socket.socket) -> None:
        self.way, self.source, self.sink = way, source, sink
        self.waiting: deque[bytes] = deque()
        self.line: deque[tuple[float, memoryview]] = deque()
        self.nbytes = 0
        self.ended, self.shut, self.blocked = False, False, False

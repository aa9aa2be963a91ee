"""One link as a state machine, what both sides share: no sockets, no threads, no clock of its own.

The owner of the transport calls `opened` when it is connected, `receive` for each message, `next` while it can take
one more, `tick` when `due` says so (at the latest), `lost` when it is gone. All from one thread.

``now`` is in seconds of a clock. Session time only moves forward, by one heartbeat at most from call to call: a process
that slept, or whose clock jumped, did not receive because it did not listen.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

import msgspec

from ctxreuse.bus.protocol.messages import Message, Terms
from ctxreuse.bus.protocol.wire import Frame, decode, encode
from ctxreuse.errors import CtxReuseError, LinkDownError

__all__ = ["Granting", "Limits", "Request", "Session"]

T = TypeVar("T")


class Granting(Protocol):
    """The receiving side of a transfer, which grants credit."""

    def grant(self) -> Message:
        """Extend the credit; the returned message is about to go."""


class Limits(msgspec.Struct, frozen=True):
    """Bounds of a session.

    Args:
        terms: Sent to the peer.
        queue: Messages without payload that may wait for the transport (beyond it the link is dead), and requests of a
            client.
        announced: Block keys announced at most (8 bytes each here, about 100 at the edge).
        announce_every: Seconds between announcements.
        stall: Seconds after which a transfer that the peer does not move is ended.
        rounds: Connections in a row in which a fetch may get nothing before it is given up.
        backoff: Least and longest wait between attempts to connect, in seconds.
    """

    terms: Terms = Terms()
    queue: int = 1024
    announced: int = 1 << 20
    announce_every: float = 0.25
    stall: float = 60.0
    rounds: int = 100
    backoff: tuple[float, float] = (0.1, 15.0)


class Request(Generic[T]):
    """The future result of a peer. Any thread may wait; the link's thread fills it, and calls ``on_done(request)``."""

    def __init__(self, on_done: Callable[[Request[T]], None] | None = None) -> None:
        self._done = threading.Event()
        self._on_done = on_done
        self.result: T | None = None
        self.error: CtxReuseError | None = None

    @property
    def done(self) -> bool:
        """True with a result or an error."""
        return self._done.is_set()

    def wait(self, timeout: float) -> T:
        """Return the result. Raises the error, or LinkDownError after ``timeout`` seconds (the request goes on)."""
        if not self._done.wait(timeout):
            raise LinkDownError(f"no answer within {timeout:.3g} s")
        if self.error is not None:
            raise self.error
        assert self.result is not None
        return self.result

    def succeed(self, result: T) -> None:
        """Set the result, unless it is done."""
        if not self.done:
            self.result = result
            self._finish()

    def fail(self, error: CtxReuseError) -> None:
        """Set the error, unless it is done."""
        if not self.done:
            self.error = error
            self._finish()

    def _finish(self) -> None:
        self._done.set()
        if self._on_done is not None:
            self._on_done(self)


class Session(ABC):
    """Base of both sides.

    ``dead``: the owner should close this connection, for ``reason``. ``counts``: messages, payloads and bytes in and
    out, and other events by name.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.dead, self.reason = False, ""
        self.counts: Counter[str] = Counter()
        self._control: deque[list[Frame]] = deque()
        #: Transfers that owe credit, by request. Credit is extended when its message goes: one message per transfer at
        #: most, and a peer that sends more than it was granted is detected.
        self._owed: dict[int, Granting] = {}
        self._terms = limits.terms
        self._open = False
        self._time = 0.0
        self._now: float | None = None
        self._heard = 0.0

    # ---- called by the owner of the transport ----

    def opened(self, now: float) -> None:
        """Begin: the transport is connected (again)."""
        self._advance(now)
        self._control.clear()
        self._owed.clear()
        self._terms = self.limits.terms
        self._open, self.dead, self.reason = True, False, ""
        self._heard = self._time
        self.counts["opened"] += 1

    def lost(self, now: float) -> None:
        """Suspend or give up open requests: the transport is gone. Idempotent."""
        self._advance(now)
        self._control.clear()
        self._owed.clear()
        self._open = False

    def receive(self, frames: Sequence[Frame], now: float) -> None:
        """Take one message. Raises ProtocolError if the peer broke the rules; the caller then closes the connection,
        calls `lost`, and (at the edge) connects again."""
        self._advance(now)
        if not self._open:
            self.counts["ignored"] += 1
            return
        self.counts["messages_in"] += 1
        message, payload = decode(frames)
        self._heard = self._time
        if payload is not None:
            self.counts["payloads_in"] += 1
            self.counts["bytes_in"] += len(payload)
        self._take(message, payload)

    def tick(self, now: float) -> None:
        """Do what depends on time alone."""
        self._advance(now)
        if self._open and self._time - self._heard > self._terms.silence_ms / 1000:
            self._die("silent")

    def due(self, now: float) -> float:
        """Return the seconds until `tick` must be called, at most one heartbeat."""
        passed = min(max(0.0, now - self._now), self._heartbeat) if self._now is not None else 0.0
        return max(0.0, self._deadline() - self._time - passed)

    def next(self, now: float) -> list[Frame] | None:
        """Return the frames of the next message, None if there is none. Call only while the transport can take one.
        Payload frames may be kept, and must not be changed."""
        self._advance(now)
        if not self._open:
            return None
        frames = self._urgent() or self._bulk()
        if frames is not None:
            self.counts["messages_out"] += 1
            if len(frames) > 1:
                self.counts["payloads_out"] += 1
                self.counts["bytes_out"] += len(frames[1])
        return frames

    def _urgent(self) -> list[Frame] | None:
        if self._control:
            return self._control.popleft()
        return encode(self._owed.pop(next(iter(self._owed))).grant()) if self._owed else None

    def check(self) -> None:
        """Raise AssertionError if the session's state is inconsistent."""
        assert self._open or not (self._control or self._owed)
        assert len(self._control) <= self.limits.queue

    # ---- for the two sides ----

    @property
    def _heartbeat(self) -> float:
        return self._terms.heartbeat_ms / 1000

    def _advance(self, now: float) -> None:
        before, self._now = self._now, now
        if before is not None and now > before:
            self._time += min(now - before, self._heartbeat)

    def _deadline(self) -> float:
        """Session time of the next tick."""
        return self._time + self._heartbeat

    @abstractmethod
    def _take(self, message: Message, payload: memoryview | None) -> None:
        """Act on one message of the peer. Raises ProtocolError."""

    @abstractmethod
    def _bulk(self) -> list[Frame] | None:
        """Return what goes when no control message waits."""

    def _say(self, message: Message) -> None:
        if not self._open:
            return
        if len(self._control) >= self.limits.queue:
            self._die("does not read")
            return
        self._control.append(encode(message))

    def _die(self, reason: str) -> None:
        self.dead, self.reason = True, reason

    def _who(self) -> str:
        return "peer"

"""One link as a state machine: what both sides share. No sockets, no threads, no clock of its own.

Whoever owns the transport calls: `opened` when it is connected, `receive` for each message, `next` while it can take
one more, `tick` when `due` says so (at the latest), `lost` when it is gone. All from one thread.

``now`` is a monotonic clock's reading in seconds. It need not be one: time of a session only moves forward, and by one
heartbeat at most from call to call, because a process that slept (or whose clock jumped) has not heard its peer for the
reason that it did not listen.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

import msgspec

from ctxreuse.bus.wire import Frame, Message, Terms, decode, encode
from ctxreuse.errors import CtxReuseError, LinkDownError

__all__ = ["Granting", "Limits", "Request", "Session"]

T = TypeVar("T")


class Granting(Protocol):
    """The receiving side of a transfer, which grants credit."""

    def grant(self) -> Message:
        """Extend the credit, now that the message that says so is about to go."""
        ...


class Limits(msgspec.Struct, frozen=True):
    """What a session bounds. ``terms`` are told to the peer (see `ctxreuse.bus.wire.Terms`).

    ``queue``: messages without payload that may wait for the transport (at one more the peer does not read, and the
    link is dead), and requests of a client; ``announced``: block keys that are announced at most (8 bytes each here,
    some 100 at the edge); ``announce_every``: seconds between announcements; ``stall``: seconds after which a transfer
    that the peer does not move is ended; ``rounds``: connections in a row in which a fetch may get nothing before it is
    given up.
    """

    terms: Terms = Terms()
    queue: int = 1024
    announced: int = 1 << 20
    announce_every: float = 0.25
    stall: float = 60.0
    rounds: int = 100


class Request(Generic[T]):
    """The result of something asked of a peer, some time. Any thread may read and wait; the link's thread fills it.

    ``on_done(request)`` is called once, in the thread that fills it (in the caller's, if it is done already).
    """

    def __init__(self, on_done: Callable[[Request[T]], None] | None = None) -> None:
        self._done = threading.Event()
        self._on_done = on_done
        self.result: T | None = None
        self.error: CtxReuseError | None = None

    @property
    def done(self) -> bool:
        """True once there is a result or an error."""
        return self._done.is_set()

    def wait(self, timeout: float) -> T:
        """The result; raises the error, or LinkDownError after ``timeout`` seconds (the request goes on)."""
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
    """Base of both sides. See the module's docstring for who calls what.

    ``dead``: the owner should close this connection; ``reason`` says why. ``counts``: messages, payloads and bytes in
    and out, and what else happened, by name.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.dead, self.reason = False, ""
        self.counts: Counter[str] = Counter()
        self._control: deque[list[Frame]] = deque()
        #: Transfers that want more, by request. Credit is made when it is sent, so that there is one message at most
        #: of each transfer, and a peer that sends more than it was told is found out.
        self._owed: dict[int, Granting] = {}
        self._terms = limits.terms
        self._open = False
        self._time = 0.0
        self._now: float | None = None
        self._heard = 0.0

    # ---- called by the owner of the transport ----

    def opened(self, now: float) -> None:
        """The transport is connected (again)."""
        self._advance(now)
        self._control.clear()
        self._owed.clear()
        self._terms = self.limits.terms
        self._open, self.dead, self.reason = True, False, ""
        self._heard = self._time
        self.counts["opened"] += 1

    def lost(self, now: float) -> None:
        """The transport is gone; what was open waits or is given up. Idempotent."""
        self._advance(now)
        self._control.clear()
        self._owed.clear()
        self._open = False

    def receive(self, frames: Sequence[Frame], now: float) -> None:
        """One message. Raises ProtocolError if the peer broke the rules: the caller closes the connection, calls
        `lost`, and (at the edge) connects again."""
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
        """Whatever depends on time alone."""
        self._advance(now)
        if self._open and self._time - self._heard > self._terms.silence_ms / 1000:
            self._die("silent")

    def due(self, now: float) -> float:
        """Seconds until `tick` must be called, at most one heartbeat."""
        passed = min(max(0.0, now - self._now), self._heartbeat) if self._now is not None else 0.0
        return max(0.0, self._deadline() - self._time - passed)

    def next(self, now: float) -> list[Frame] | None:
        """The frames of the next message to send, None if there is nothing now. Call only while the transport can take
        one. Payload frames must not be changed, and may be kept."""
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
        """Raise AssertionError if the session is in a state that it cannot be in."""
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
        """Act on one message of the peer; raises ProtocolError."""

    @abstractmethod
    def _bulk(self) -> list[Frame] | None:
        """What goes when no control message waits."""

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

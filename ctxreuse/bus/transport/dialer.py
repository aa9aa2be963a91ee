"""The thread that connects an edge to its cloud, runs its session, and reconnects."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import zmq
from zmq import zmq_poll

from ctxreuse.bus.auth.curve import KeyPair
from ctxreuse.bus.protocol.client import ClientSession
from ctxreuse.bus.protocol.messages import Pace
from ctxreuse.bus.protocol.session import Limits
from ctxreuse.bus.protocol.wire import Frame
from ctxreuse.bus.transport.sockets import Monitor, Wakeup, keep_freed, receive, send, tune
from ctxreuse.cost import LinkEstimate
from ctxreuse.errors import LinkError, LinkRefusedError, ProtocolError
from ctxreuse.identity.model import ModelSpace

__all__ = ["ClientOptions", "Dialer", "LinkState", "wait_before"]

LinkState = Literal["down", "up", "refused"]

_log = logging.getLogger(__name__)

#: Seconds that connecting and greeting may take.
_CONNECT = 5.0
#: Milliseconds after which ZeroMQ would connect again by itself: a day, by which the socket is long closed.
_NEVER_MS = 86_400_000
#: Messages sent or received before the other direction has its turn.
_TURN = 32
#: The attempt from which waits do not grow any more, whatever the bounds are.
_REFUSED = 60
# Plain numbers: combining these enums takes as long as a poll.
_IN, _OUT = int(zmq.POLLIN), int(zmq.POLLOUT)
_EVENTS = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CLOSED
)
_FAILED = {
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: ("refused", "the cloud does not know this key, or it was revoked"),
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: ("refused", "the cloud runs without keys, or does not speak ZeroMQ"),
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: ("doubtful", "the handshake was cut off: is the cloud's public key right?"),
    zmq.EVENT_DISCONNECTED: ("failed", "the connection was lost"),
    zmq.EVENT_CLOSED: ("failed", "nothing listens there"),
}


@dataclass(frozen=True, kw_only=True)
class ClientOptions:
    """Options of a `BusClient`.

    Attributes:
        keys: this node's CURVE keys, with ``server_key``; without both only loopback, unless ``insecure``.
        server_key: the cloud's public key, 32 bytes.
        name: the link's name (default: the endpoint).
        spaces: digests of this node's models (default: those of ``models``).
        models: models that are described to the cloud in full, so that it can encode for them.
        node: 16 bytes that name this node (default: random).
        limits: bounds of session and reconnecting; the default ones if None.
        insecure: allow plain TCP beyond loopback.
        on_state: called as ``on_state(state, reason)`` in the link's thread; must return quickly. A ``refused`` link
            (unknown or revoked key, version, …) is tried again too, at the longest wait.
        estimate: updated by transfers.
        context: shared by many links; not closed then.
    """

    keys: KeyPair | None = None
    server_key: bytes | None = None
    name: str = ""
    spaces: Sequence[bytes] = ()
    models: Sequence[ModelSpace] = ()
    node: bytes | None = None
    limits: Limits | None = None
    insecure: bool = False
    on_state: Callable[[LinkState, str], None] | None = None
    estimate: LinkEstimate | None = None
    context: zmq.Context[Any] | None = None


class _Over(Exception):
    """This connection is over: (``refused``, ``failed`` or ``doubtful``, why). Doubtful twice means refused: a server
    cannot report that it was called by a wrong key."""


def wait_before(attempt: int, backoff: tuple[float, float], rng: random.Random) -> float:
    """Return the seconds before an attempt (from 0): doubling between the bounds, times a draw from a half to one."""
    least, most = backoff
    return min(most, least * 2.0 ** min(attempt, _REFUSED)) * rng.uniform(0.5, 1.0)


class Dialer:
    """Keeps one session connected to ``endpoint``, from a thread of its own that starts with `start`.

    ``session`` belongs to that thread: others `post` calls to it. See `BusClient` for the rest. Waits between attempts
    double within ``session.limits.backoff``, each drawn between half and all of it, so that a thousand edges do not
    come back at once.
    """

    def __init__(self, endpoint: str, session: ClientSession, name: str, options: ClientOptions) -> None:
        self.endpoint, self.name = endpoint, name
        self.state: LinkState = "down"
        self.reason = "not connected yet"
        self.ups = 0
        self._session, self._terms, self._options = session, session.limits.terms, options
        self._on_state, self._estimate = options.on_state, options.estimate
        self._backoff, self._rng = session.limits.backoff, random.Random()
        self._wakeup = Wakeup()
        self._calls: deque[tuple[Callable[[], object], Callable[[LinkError], None] | None]] = deque()
        self._lock = threading.Lock()
        self._open = True  # takes calls
        self._leaves: float | None = None  # when to go at the latest
        self._meter_at: float | None = None
        self._metered, self._busy = 0, 0.0
        self._paused = 0.0  # seconds in which the peer had nothing ready, of what arrived last
        self._rtt: float | None = None
        self._context = options.context or zmq.Context()
        self._thread = threading.Thread(target=self._run, name=f"bus {name}", daemon=True)

    # ---- any thread ----

    def start(self) -> None:
        """Connect, and stay connected."""
        self._thread.start()

    def post(self, call: Callable[[], object], fail: Callable[[LinkError], None] | None = None) -> None:
        """Run ``call`` in the session's thread; ``fail`` if it raises, or if the link is closed."""
        with self._lock:
            if self._open:
                self._calls.append((call, fail))
                self._wakeup.set()
                return
        if fail is not None:
            fail(LinkRefusedError("the link is closed", where=self.name))

    def close(self, timeout: float) -> None:
        """Finish what runs for up to ``timeout`` seconds, end the rest. Idempotent."""

        def leave() -> None:
            self._leaves = time.monotonic() + (timeout if self._session.up else 0.0)
            self._session.bye("bye")

        self.post(leave)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    # ---- the link's thread ----

    def _run(self) -> None:
        attempts, kind = 0, ""
        keep_freed()
        try:
            while self._leaves is None:
                before, since, last = self._transferred(), time.monotonic(), kind
                try:
                    self._connection()
                    return
                except _Over as over:
                    kind, reason = over.args
                except (ProtocolError, zmq.ZMQError) as error:
                    kind, reason = "failed", str(error)
                    _log.warning("link %s: %s", self.name, error)
                except Exception as error:
                    # The link must outlive errors in what it calls (a reader of blocks, a listener).
                    kind, reason = "failed", str(error)
                    _log.exception("link %s failed", self.name)
                self._session.lost(time.monotonic())
                refused = kind == "refused" or kind == last == "doubtful"
                self._set("refused" if refused else "down", reason)
                # Coming up alone is no progress: a link that fails at once, every time, must not spin.
                better = self._transferred() > before or time.monotonic() - since > 1.0
                attempts = 0 if better else attempts + 1
                # A refusal will hardly change in a moment.
                self._pause(wait_before(_REFUSED if refused else attempts, self._backoff, self._rng))
        finally:
            self._end()

    def _end(self) -> None:
        with self._lock:
            self._open = False
        self._obey()
        self._session.close("closed")
        self._session.lost(time.monotonic())
        self._set("down", "closed")
        self._wakeup.close()
        if self._options.context is None:
            self._context.term()

    def _obey(self) -> None:
        while self._calls:
            call, fail = self._calls.popleft()
            try:
                call()
            except Exception as error:
                # Of one request (keys of a wrong length, say), so it is that request's.
                _log.exception("link %s: a request failed", self.name)
                if fail is not None:
                    fail(LinkError(str(error), where=self.name))

    def _transferred(self) -> int:
        return self._session.counts["bytes_in"] + self._session.counts["bytes_out"]

    def _set(self, state: LinkState, reason: str) -> None:
        if (state, reason) == (self.state, self.reason):
            return
        changed, self.state, self.reason = state != self.state, state, reason
        if changed or state == "refused":
            calm = state == "up" or self._leaves is not None
            _log.log(logging.INFO if calm else logging.WARNING, "link %s is %s: %s", self.name, state, reason)
        if self._on_state is not None:
            self._on_state(state, reason)

    def came_up(self) -> None:
        """Note that the cloud has accepted (the session's thread)."""
        self.ups += 1
        self._set("up", "")

    def _pause(self, seconds: float) -> None:
        """Wait for the next attempt; calls are run meanwhile."""
        poller = zmq.Poller()
        poller.register(self._wakeup.fileno(), zmq.POLLIN)
        until = time.monotonic() + seconds
        while self._leaves is None and (left := until - time.monotonic()) > 0:
            if poller.poll(int(min(left, 1.0) * 1000) + 1):
                self._wakeup.clear()
            self._obey()
            self._session.tick(time.monotonic())

    def _connection(self) -> None:
        """Run one connection; returns to close the link, raises _Over at the connection's end."""
        socket = self._context.socket(zmq.DEALER)
        monitor = Monitor(socket, _EVENTS)
        try:
            tune(socket, self.endpoint, self._terms)
            # A fresh socket for each connection: ZeroMQ's own reconnecting would deliver what was meant for the last.
            # It is put off: where it is turned off (-1), and where pipes live no longer than a connection
            # (ZMQ_IMMEDIATE), libzmq 4.3 takes the pipe away at a cut though parts of a message are still to be read
            # from it, and aborts the process ("!_more", fq.cpp). Nothing is sent before the handshake, so neither
            # is needed.
            socket.reconnect_ivl = _NEVER_MS
            keys = self._options.keys
            if keys is not None:
                socket.curve_serverkey = self._options.server_key
                socket.curve_publickey, socket.curve_secretkey = keys.public, keys.secret
            socket.connect(self.endpoint)
            self._talk(socket, monitor)
        finally:
            monitor.close()
            socket.close()  # with the linger of `tune`, or of a farewell

    def _talk(self, socket: zmq.Socket[Any], monitor: Monitor) -> None:
        session, connected, pending = self._session, False, None
        wakeup, events = self._wakeup.fileno(), monitor.fileno()
        awaited: dict[bool, list[tuple[Any, int]]] = {
            writes: [(socket, _IN | _OUT if writes else _IN), (events, _IN), (wakeup, _IN)] for writes in (False, True)
        }
        # A descriptor says only what is new after the last look.
        look = True
        give_up = time.monotonic() + _CONNECT
        while True:
            now = time.monotonic()
            wait = give_up - now
            if connected:
                pending, more = self._send(socket, pending, now)
                if session.refused is not None and session.dead:
                    raise _Over("refused", session.refused.what)
                if session.due(now) <= 0:
                    session.tick(now)
                if session.dead:
                    raise _Over("failed", session.reason)
                if session.up:
                    wait = session.due(now)
                    give_up = now + _CONNECT
                wait = 0.0 if more else wait
            if self._leaves is not None and (not connected or session.drained or now >= self._leaves):
                self._farewell(socket, session, now)
                return
            if now >= give_up:
                raise _Over("failed", "no answer to the greeting" if connected else "no connection in time")
            if self._leaves is not None:
                wait = min(wait, self._leaves - now)
            if look:
                wait = 0.0
            found = zmq_poll(awaited[pending is not None], int(wait * 1000) + 1 if wait > 0 else 0)
            ready = [each for each, _ in found]
            if wakeup in ready:
                self._wakeup.clear()
            if self._calls:
                self._obey()
            if look or events in ready:
                look = False
                for event, _ in monitor.drain():
                    if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                        connected = True
                        session.opened(time.monotonic())
                    else:
                        # What came before the end still counts: it need not be sent again.
                        while connected and self._receive(socket):
                            pass
                        raise _Over(*_FAILED[event])
            if socket in ready:
                # The first message may be here before the event that says so was seen.
                look = not connected
                if connected:
                    self._receive(socket, there=True)

    def _send(
        self, socket: zmq.Socket[Any], pending: list[Frame] | None, now: float
    ) -> tuple[list[Frame] | None, bool]:
        """Send while the socket takes it; returns the message that it did not take, and whether there may be more."""
        for _ in range(_TURN):
            frames = pending or self._session.next(now)
            if frames is None:
                return None, False
            try:
                send(socket, frames)
            except zmq.Again:
                return frames, False
            pending = None
        return None, True

    def _receive(self, socket: zmq.Socket[Any], *, there: bool = False) -> bool:
        """Receive some messages, one of which is known to be ``there``; returns False if there were none."""
        session, readable = self._session, [(socket, _IN)]
        for turn in range(_TURN):
            if not (there or zmq_poll(readable, 0)):
                return turn > 0
            there = False
            frames = receive(socket)
            before = session.counts["bytes_in"]
            now = time.monotonic()
            session.receive([frame.buffer for frame in frames], now)
            if self._estimate is not None:
                self._measure(now, session.counts["bytes_in"] - before)
        return True

    def paced(self, pace: Pace) -> None:
        """Note how the payload that arrives was encoded (the link's thread)."""
        if len(pace) == 3 and self._estimate is not None:
            self._paused += pace[0] / 1e6
            self._estimate.encoding_seen(pace[1] / 1e6 / (1 << 20), pace[2] / 1e6 / (1 << 20))

    def _measure(self, now: float, nbytes: int) -> None:
        """Measure the link while it is busy: bytes over the time between payloads of running transfers."""
        assert self._estimate is not None
        session = self._session
        if session.rtt is not None and session.rtt != self._rtt:
            self._rtt = session.rtt
            self._estimate.rtt_seen(session.rtt)
        if not nbytes:
            return
        # A payload that mostly waited for its encoder says nothing of the link.
        if self._meter_at is not None and not 0 < now - self._meter_at < 2 * self._paused:
            self._metered += nbytes
            self._busy += now - self._meter_at
        self._meter_at, self._paused = now, 0.0
        if self._metered >= 256 << 10 and self._busy > 0:
            self._estimate.bytes_seen(self._metered, self._busy)
            self._metered, self._busy = 0, 0.0
        if session.drained:
            self._meter_at, self._metered, self._busy = None, 0, 0.0

    def _farewell(self, socket: zmq.Socket[Any], session: ClientSession, now: float) -> None:
        """End what did not finish; the last messages have a moment to leave."""
        session.close("closed")
        self._send(socket, None, now)
        socket.linger = 200

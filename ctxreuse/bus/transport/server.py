"""The cloud's socket for all its edges."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import msgspec
import zmq
from zmq import zmq_poll

from ctxreuse.bus.auth.curve import ServerAuth, Zap
from ctxreuse.bus.log_limit import LimitedLog
from ctxreuse.bus.protocol.base import Service
from ctxreuse.bus.protocol.server import ServerSession
from ctxreuse.bus.protocol.session import Limits
from ctxreuse.bus.protocol.wire import Frame
from ctxreuse.bus.transfer.send import SendScheduler
from ctxreuse.bus.transport.sockets import (
    Address,
    Monitor,
    Wakeup,
    address_of,
    check_endpoint,
    keep_freed,
    receive,
    send,
    shut_down,
    tune,
)
from ctxreuse.errors import ConfigError, CtxReuseError, ProtocolError

__all__ = ["BusServer", "Peer", "PeerInfo"]

_log = logging.getLogger(__name__)

#: Messages received, or payloads sent, before the other direction has its turn.
_TURN = 32
#: Seconds between looks at all peers (500 of them take about a millisecond), and at the allow-list.
_SWEEP, _FOLLOW = 0.05, 1.0
#: Seconds after which a queue that was full is tried again: a ROUTER does not say when one peer's has room.
_RETRY = 0.002
_MAX_PEERS = 4096
_IN = int(zmq.POLLIN)
#: Connections of one key: enough for processes that share one, and for old ones that are not known to be dead yet.
_MAX_OF_A_KEY = 64
_EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL


class PeerInfo(msgspec.Struct, frozen=True):
    """One connected peer: ``user``, ``tenant`` ("" before hello), address, node id, and its session's counts."""

    user: str
    tenant: str
    address: str
    node: bytes
    counts: Mapping[str, int]


class Peer:
    """One connection. ``key``: public key in hexadecimal, "" without CURVE; ``tenant``: of the key at the handshake;
    ``pending``: frames that the socket has not taken."""

    __slots__ = ("address", "fd", "key", "name", "pending", "session", "tenant", "user")

    def __init__(self, name: bytes, user: str, key: str, fd: int, address: Address, session: ServerSession) -> None:
        self.name, self.user, self.key, self.fd, self.address, self.session = name, user, key, fd, address, session
        self.tenant: str | None = None
        self.pending: list[Frame] | None = None

    def info(self) -> PeerInfo:
        """Return what others may see. Any thread."""
        session = self.session
        grant, hello = session.grant, session.hello  # the server's thread may replace them meanwhile
        return PeerInfo(
            self.user,
            grant.tenant if grant is not None else "",
            f"{self.address[0]}:{self.address[1]}",
            hello.node if hello is not None else b"",
            dict(session.counts),
        )


class BusServer:
    """Serves a `Service` to the peers that may connect. Any thread may call; `start` starts the one that serves.

    A peer that breaks the protocol, is silent, or whose key is revoked (within a second) is cut off and logged; others
    do not notice.

    Args:
        service: The service.
        bind: ``tcp://HOST:PORT``; port 0 is any.
        auth: CURVE and the allow-list; without it only loopback, unless ``insecure``, and every peer is ``local``.
        limits: Bounds of each session.
        node: 16 bytes that name this node (default: random).
        insecure: Allow plain TCP beyond loopback.
    """

    def __init__(
        self,
        service: Service,
        bind: str = "tcp://127.0.0.1:0",
        *,
        auth: ServerAuth | None = None,
        limits: Limits | None = None,
        node: bytes | None = None,
        insecure: bool = False,
    ) -> None:
        """Bind at once, to ``endpoint``. Raises ConfigError if it cannot or may not."""
        check_endpoint(bind, secured=auth is not None, insecure=insecure)
        self._service, self._auth, self._limits = service, auth, limits or Limits()
        self._node, self._epoch = node or os.urandom(16), time.time_ns()
        self._log = LimitedLog(_log)
        self._scheduler = SendScheduler()
        self._peers: dict[bytes, Peer] = {}
        self._owners: dict[ServerSession, Peer] = {}
        self._accepted: dict[int, float] = {}  # connections without a message yet, and since when
        self._talkers: set[ServerSession] = set()
        self._blocked: dict[ServerSession, float] = {}  # their queue is full; when to try again
        self._calls: deque[Callable[[], None]] = deque()
        self._wakeup = Wakeup()
        self._lock = threading.Lock()
        self._open, self._closed = True, False
        self._leaves: float | None = None
        self._sweep_at = 0.0
        self._thread: threading.Thread | None = None
        self._context = zmq.Context()
        self._zap = Zap(self._context, auth)
        self._socket = self._context.socket(zmq.ROUTER)
        self._readable = [(self._socket, _IN)]
        self._monitor = Monitor(self._socket, _EVENTS)
        try:
            tune(self._socket, bind, self._limits.terms)
            # Else messages to a peer that is gone, or whose queue is full, would be dropped in silence.
            self._socket.router_mandatory = True
            self._zap.guard(self._socket)
            self._socket.bind(bind)
        except zmq.ZMQError as error:
            self._monitor.close()
            self._shut()
            raise ConfigError(f"cannot listen: {error.strerror}", where=bind) from None
        self.endpoint = str(self._socket.get_string(zmq.LAST_ENDPOINT))
        self._port = int(self.endpoint.rpartition(":")[2])

    # ---- any thread ----

    def start(self) -> None:
        """Serve in a thread of its own, until `close`."""
        self._thread = threading.Thread(target=self._run, name="bus server", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Make the server's thread look for something to send."""
        with self._lock:
            if self._open:
                self._wakeup.set()

    def peers(self) -> list[PeerInfo]:
        """Return the connected peers."""
        return [peer.info() for peer in list(self._peers.values())]

    def drop(self, user: str, reason: str = "dropped") -> None:
        """Cut off all connections of a user; it may connect again while its key is allowed."""

        def cut() -> None:
            for peer in [peer for peer in self._peers.values() if peer.user == user]:
                self._cut(peer, reason)

        self._post(cut)

    def close(self, timeout: float = 5.0) -> None:
        """Finish what runs for up to ``timeout`` seconds, then end. Idempotent."""

        def leave() -> None:
            self._leaves = time.monotonic() + timeout
            for session in list(self._owners):
                session.drain()
                self._talkers.add(session)

        if self._thread is None:
            if not self._closed:
                self._finish()
            return
        self._post(leave)
        self._thread.join()

    def __enter__(self) -> BusServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _post(self, call: Callable[[], object]) -> None:
        with self._lock:
            if self._open:
                self._calls.append(call)  # type: ignore[arg-type]
                self._wakeup.set()

    def _collect(self, session: ServerSession) -> None:
        """Let a session say what has come for its peer."""

        def collect() -> None:
            if session in self._owners:
                session.collect()
                self._talkers.add(session)

        self._post(collect)

    # ---- the server's thread ----

    def _run(self) -> None:
        wakeup, events = self._wakeup.fileno(), self._monitor.fileno()
        awaited: list[tuple[Any, int]] = [(each, _IN) for each in (self._socket, self._zap.socket, events, wakeup)]
        keep_freed()
        self._follow_connections()  # from now on their descriptor says what is new
        follow_at = 0.0
        busy = False
        try:
            while self._leaves is None or not self._left():
                now = time.monotonic()
                wait = 0.0 if busy else max(0.0, min([self._sweep_at, *self._blocked.values()]) - now)
                ready = [each for each, _ in zmq_poll(awaited, int(wait * 1000) + (wait > 0))]
                if wakeup in ready:
                    self._wakeup.clear()
                while self._calls:
                    self._calls.popleft()()
                if self._zap.socket in ready:
                    self._zap.answer()
                if events in ready:
                    self._follow_connections()
                busy = self._socket in ready and self._receive()
                now = time.monotonic()
                if now >= self._sweep_at:
                    self._sweep_at = now + self._sweep(now)
                if now >= follow_at:
                    follow_at = now + _FOLLOW
                    self._follow_list()
                busy = self._send(now) or busy
        finally:
            self._finish()

    def _left(self) -> bool:
        assert self._leaves is not None
        drained = not self._blocked and all(session.drained for session in self._owners)
        return drained or time.monotonic() >= self._leaves

    def _finish(self) -> None:
        with self._lock:
            self._open = False
        now = time.monotonic()
        for peer in list(self._peers.values()):
            self._forget(peer, now)
        self._monitor.close()
        # Goodbyes that are in the queues get a moment to leave.
        self._socket.linger = 500
        self._shut()

    def _shut(self) -> None:
        self._closed = True
        self._socket.close()
        self._zap.close()
        self._context.term()
        self._wakeup.close()

    def _receive(self) -> bool:
        """Receive some messages, one of which is there; returns True if there may be more."""
        for turn in range(_TURN):
            if turn and not zmq_poll(self._readable, 0):
                return False
            frames = receive(self._socket)
            peer, now = self._sender(frames), time.monotonic()
            if peer is None:
                continue
            # The session copies payloads once, to where they belong; the frames' memory is free afterwards.
            if self._drive(peer, partial(peer.session.receive, [frame.buffer for frame in frames[1:]], now)):
                self._talkers.add(peer.session)
                self._sweep_at = min(self._sweep_at, now + max(_SWEEP, peer.session.due(now)))
        return True

    def _drive(self, peer: Peer, call: Callable[[], object]) -> bool:
        """Call into a peer's session; returns False if that was its end. Errors do not reach other peers."""
        try:
            call()
        except Exception as error:
            self._fail(peer, error)
            return False
        return True

    def _fail(self, peer: Peer, error: Exception) -> None:
        if isinstance(error, ProtocolError):
            self._cut(peer, f"broke the protocol: {error}")
        elif isinstance(error, CtxReuseError):
            self._cut(peer, f"could not be served: {error}")
        else:
            self._log.write(peer.user, logging.ERROR, "serving %s failed", peer.user, exc_info=error)
            self._cut(peer, "could not be served")

    def _sender(self, frames: list[zmq.Frame]) -> Peer | None:
        """Return the connection that sent a message, which may be new."""
        name, last = frames[0].bytes, frames[-1]
        # From the handshake: a routing id can be chosen by the peer, and taken over from one that left.
        user, key = str(last.get("User-Id")), str(last.get("Key"))
        peer = self._peers.get(name)
        if peer is not None and peer.key == key:
            return peer
        now = time.monotonic()
        # The end of an earlier connection with this descriptor comes before this message.
        self._follow_connections()
        if (old := self._peers.get(name)) is not None:
            self._forget(old, now)
        fd = int(last.get(zmq.SRCFD))
        self._accepted.pop(fd, None)
        address = address_of(fd, self._port)
        if address is None:  # the last words of a connection that is gone already
            return None
        same = sum(other.key == key for other in self._peers.values()) if key else 0
        if len(self._peers) >= _MAX_PEERS or same >= _MAX_OF_A_KEY:
            shut_down(fd, self._port, address)
            return None
        session = ServerSession(
            self._service,
            user,
            self._scheduler,
            node=self._node,
            epoch=self._epoch,
            limits=self._limits,
            wake=self.wake,
            ready=self._collect,
        )
        peer = Peer(name, user, key, fd, address, session)
        peer.tenant = self._auth.tenant(user) if self._auth is not None else None
        self._peers[name] = self._owners[session] = peer
        session.opened(now)
        return peer

    def _send(self, now: float) -> bool:
        """Send control messages, then some payloads as scheduled; returns True if there may be more."""
        for session in [session for session, at in self._blocked.items() if at <= now]:
            del self._blocked[session]
            peer = self._owners[session]
            pending, peer.pending = peer.pending, None
            if pending is not None:
                self._hand(peer, pending, now)
            self._talkers.add(session)
        for session in list(self._talkers):
            if session in self._blocked:
                continue
            self._talkers.discard(session)
            while session.talks and session in self._owners and session not in self._blocked:
                self._next(session, now)
        for _ in range(_TURN):
            owner = self._scheduler.turn(self._blocked)
            if not isinstance(owner, ServerSession):
                break
            self._next(owner, now)
        else:
            return True
        # What the last payload left to be said (that it was the last) does not wait for the next event.
        return not self._talkers <= self._blocked.keys()

    def _next(self, session: ServerSession, now: float) -> None:
        peer = self._owners[session]
        frames: list[Frame] | None = None
        try:
            frames = session.next(now)
        except Exception as error:
            self._fail(peer, error)
            return
        if frames is not None:
            self._hand(peer, frames, now)
        if session.talks:
            self._talkers.add(session)
        if session.dead:
            self._cut(peer, session.reason)

    def _hand(self, peer: Peer, frames: list[Frame], now: float) -> None:
        try:
            send(self._socket, [peer.name, *frames])
        except zmq.Again:
            peer.pending = frames
            self._blocked[peer.session] = now + _RETRY
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self._forget(peer, now)

    def _sweep(self, now: float) -> float:
        """Do what depends on time; returns the seconds until it is due again."""
        wait = 1.0
        for session, peer in list(self._owners.items()):
            if session.due(now) <= 0:
                if not self._drive(peer, partial(session.tick, now)):
                    continue
                if session.talks or session.reason:
                    self._talkers.add(session)
            if session.dead:
                self._cut(peer, session.reason)
            else:
                wait = min(wait, session.due(now))
        silence = self._limits.terms.silence_ms / 1000
        for fd in [fd for fd, since in self._accepted.items() if now - since > silence]:
            del self._accepted[fd]
            shut_down(fd, self._port, address_of(fd, self._port))
        return max(_SWEEP, wait)

    def _follow_list(self) -> None:
        """Cut off peers whose key was revoked or has another tenant now."""
        if self._auth is None or not self._auth.allow.refresh():
            return
        for peer in list(self._peers.values()):
            allowed = self._auth.holds(peer.user, bytes.fromhex(peer.key))
            if not allowed or self._auth.tenant(peer.user) != peer.tenant:
                self._cut(peer, "its key has another tenant now" if allowed else "its key was revoked")

    def _follow_connections(self) -> None:
        for event, fd in self._monitor.drain():
            if event == zmq.EVENT_ACCEPTED:
                self._accepted[fd] = time.monotonic()
            elif event == zmq.EVENT_DISCONNECTED:
                self._accepted.pop(fd, None)
                for peer in [peer for peer in self._peers.values() if peer.fd == fd]:
                    self._forget(peer, time.monotonic())

    def _cut(self, peer: Peer, reason: str) -> None:
        """End a connection from this side."""
        if self._peers.get(peer.name) is not peer:
            return
        level = logging.INFO if reason in ("bye", "drain") else logging.WARNING
        self._log.write(peer.user, level, "peer %s at %s was cut off: %s", peer.user, peer.address, reason)
        self._forget(peer, time.monotonic())
        shut_down(peer.fd, self._port, peer.address)

    def _forget(self, peer: Peer, now: float) -> None:
        """Give up the requests of a connection that is gone."""
        if self._peers.get(peer.name) is peer:
            del self._peers[peer.name]
        self._owners.pop(peer.session, None)
        self._talkers.discard(peer.session)
        self._blocked.pop(peer.session, None)
        peer.pending = None
        peer.session.lost(now)

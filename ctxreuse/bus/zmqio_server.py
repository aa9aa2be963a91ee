"""BusServer: a cloud's socket for all its edges."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import zmq
from zmq import zmq_poll

from ctxreuse.bus.auth import ServerAuth, Zap
from ctxreuse.bus.base import Service
from ctxreuse.bus.session import Limits
from ctxreuse.bus.session_server import ServerSession
from ctxreuse.bus.transfer import Outlet
from ctxreuse.bus.wire import Frame
from ctxreuse.bus.zmqio_peer import Peer, PeerInfo
from ctxreuse.bus.zmqio_socket import (
    Bell,
    Monitor,
    address_of,
    check_endpoint,
    keep_freed,
    receive,
    send,
    shut_down,
    tune,
)
from ctxreuse.errors import ConfigError, CtxReuseError, ProtocolError

__all__ = ["BusServer", "PeerInfo"]

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


class BusServer:
    """Serves `Service` to whoever may connect to ``bind``. Any thread may call; `start` starts the one that serves.

    ``auth``: CURVE and the allow-list; without it only loopback (unless ``insecure``), where every peer is the user
    ``local``. A key that is revoked is cut off within about a second. ``node``: 16 bytes that name this node.

    A peer that breaks the protocol is logged and cut off, and so is one that stays silent; others do not notice.
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
        """Binds at once: ``endpoint`` says where. Raises ConfigError if it may or can not."""
        check_endpoint(bind, secured=auth is not None, insecure=insecure)
        self._service, self._auth, self._limits = service, auth, limits or Limits()
        self._node, self._epoch = node or os.urandom(16), time.time_ns()
        self._outlet = Outlet()
        self._peers: dict[bytes, Peer] = {}
        self._owners: dict[ServerSession, Peer] = {}
        self._accepted: dict[int, float] = {}  # connections without a message yet, and since when
        self._talkers: set[ServerSession] = set()
        self._blocked: dict[ServerSession, float] = {}  # their queue is full; when to try again
        self._calls: deque[Callable[[], None]] = deque()
        self._bell = Bell()
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
        """Serve, in a thread of its own, until `close`."""
        self._thread = threading.Thread(target=self._run, name="bus server", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """There may be something to send."""
        with self._lock:
            if self._open:
                self._bell.ring()

    def peers(self) -> list[PeerInfo]:
        """Who is connected."""
        return [peer.info() for peer in list(self._peers.values())]

    def drop(self, user: str, reason: str = "dropped") -> None:
        """Cut off every connection of a user; it may connect again if its key still may."""

        def cut() -> None:
            for peer in [peer for peer in self._peers.values() if peer.user == user]:
                self._cut(peer, reason)

        self._post(cut)

    def close(self, timeout: float = 5.0) -> None:
        """Tell the peers, finish what runs for up to ``timeout`` seconds, then end. Idempotent."""

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
                self._bell.ring()

    # ---- the server's thread ----

    def _run(self) -> None:
        bell, events = self._bell.fileno(), self._monitor.fileno()
        awaited: list[tuple[Any, int]] = [(each, _IN) for each in (self._socket, self._zap.socket, events, bell)]
        keep_freed()
        self._follow_connections()  # from now on their descriptor says what is new
        follow_at = 0.0
        busy = False
        try:
            while self._leaves is None or not self._left():
                now = time.monotonic()
                wait = 0.0 if busy else max(0.0, min([self._sweep_at, *self._blocked.values()]) - now)
                ready = [each for each, _ in zmq_poll(awaited, int(wait * 1000) + (wait > 0))]
                if bell in ready:
                    self._bell.hush()
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
        self._bell.close()

    def _receive(self) -> bool:
        """Take some messages, of which one is there; True if there may be more."""
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
        """Do something with a peer's session; False if that was its end. Nobody else notices what goes wrong."""
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
            _log.error("serving %s failed", peer.user, exc_info=error)
            self._cut(peer, "could not be served")

    def _sender(self, frames: list[zmq.Frame]) -> Peer | None:
        """Who sent a message: a known connection, or a new one."""
        name, last = frames[0].bytes, frames[-1]
        # From the handshake, never from the peer: a routing id can be chosen, and taken over from one who left.
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
            self._service, user, self._outlet, node=self._node, epoch=self._epoch, limits=self._limits, wake=self.wake
        )
        peer = Peer(name, user, key, fd, address, session)
        peer.tenant = self._auth.tenant(user) if self._auth is not None else None
        self._peers[name] = self._owners[session] = peer
        session.opened(now)
        return peer

    def _send(self, now: float) -> bool:
        """Control messages first, then some payloads in the order of the outlet; True if there may be more."""
        for session in [session for session, at in self._blocked.items() if at <= now]:
            del self._blocked[session]
            peer = self._owners[session]
            held, peer.held = peer.held, None
            if held is not None:
                self._hand(peer, held, now)
            self._talkers.add(session)
        for session in list(self._talkers):
            if session in self._blocked:
                continue
            self._talkers.discard(session)
            while session.talks and session in self._owners and session not in self._blocked:
                self._next(session, now)
        for _ in range(_TURN):
            owner = self._outlet.turn(self._blocked)
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
            peer.held = frames
            self._blocked[peer.session] = now + _RETRY
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self._forget(peer, now)

    def _sweep(self, now: float) -> float:
        """Whatever depends on time; returns the seconds until it is to be done again."""
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
        """Cut off whoever is not on the allow-list any more, or there with another tenant."""
        if self._auth is None or not self._auth.allow.refresh():
            return
        for peer in list(self._peers.values()):
            held = self._auth.holds(peer.user, bytes.fromhex(peer.key))
            if not held or self._auth.tenant(peer.user) != peer.tenant:
                self._cut(peer, "its key has another tenant now" if held else "its key was revoked")

    def _follow_connections(self) -> None:
        for event, fd in self._monitor.drain():
            if event == zmq.EVENT_ACCEPTED:
                self._accepted[fd] = time.monotonic()
            elif event == zmq.EVENT_DISCONNECTED:
                self._accepted.pop(fd, None)
                for peer in [peer for peer in self._peers.values() if peer.fd == fd]:
                    self._forget(peer, time.monotonic())

    def _cut(self, peer: Peer, reason: str) -> None:
        """End a connection, from this side."""
        if self._peers.get(peer.name) is not peer:
            return
        level = logging.INFO if reason in ("bye", "drain") else logging.WARNING
        _log.log(level, "peer %s at %s was cut off: %s", peer.user, peer.address, reason)
        self._forget(peer, time.monotonic())
        shut_down(peer.fd, self._port, peer.address)

    def _forget(self, peer: Peer, now: float) -> None:
        """The connection is no more: give up what it asked for."""
        if self._peers.get(peer.name) is peer:
            del self._peers[peer.name]
        self._owners.pop(peer.session, None)
        self._talkers.discard(peer.session)
        self._blocked.pop(peer.session, None)
        peer.held = None
        peer.session.lost(now)

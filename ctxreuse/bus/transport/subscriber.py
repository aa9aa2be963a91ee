"""KvSubscriber: what an engine publishes over ZeroMQ, a thread that receives it and asks for what was missed.

vLLM and SGLang publish [topic, number, batch] and, if a replay endpoint is set, answer [b"", number] with
[b"", …, number, batch] for each batch from there on that they still have, and number -1 at the end.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

import zmq
from zmq import zmq_poll

from ctxreuse.bus.transport.sockets import Monitor, Wakeup
from ctxreuse.errors import ConfigError

__all__ = ["Batches", "KvSubscriber"]

log = logging.getLogger(__name__)

#: Seconds in which a replay must end.
_REPLAY = 10.0
#: Batches that may wait in a socket; vLLM keeps 100,000 itself.
_QUEUE = 10_000
#: Batches received before others have their turn.
_TURN = 64
_END = (-1).to_bytes(8, "big", signed=True)
_IN = int(zmq.POLLIN)
_EVENTS = zmq.EVENT_DISCONNECTED


class Batches(Protocol):
    """Who gets the batches, in the subscriber's thread; see `ctxreuse.routing.EventFeed`."""

    def receive(self, number: int, data: bytes) -> int | None:
        """Take a batch; return the number from which batches should be replayed."""

    def replay(self, number: int, data: bytes) -> None:
        """Take a batch of a replay."""

    def replayed(self) -> None:
        """Note that a replay has ended, or is not to be had."""

    def disconnected(self) -> None:
        """Note that a connection was lost."""


class KvSubscriber:
    """Receives one engine's batches until it is closed. Any thread may close it.

    Args:
        endpoint: ``tcp://HOST:PORT`` of the publisher; with ``@`` before it, the address that this end listens on,
            for publishers that connect themselves.
        replay: ``tcp://HOST:PORT`` where missed batches are asked for; "": nowhere.
        batches: gets them.
        most_bytes: of a batch; larger ones end the connection.
    """

    def __init__(
        self, endpoint: str, replay: str, batches: Batches, most_bytes: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Connect in a thread. Raises ConfigError for an address that cannot be used."""
        self._batches, self._clock, self._most = batches, clock, most_bytes
        self._context = zmq.Context()
        self._ask: zmq.Socket[Any] | None = None
        self._until = 0.0
        self._replay, self._listens = replay, endpoint.startswith("@")
        self._end = False
        self._wakeup = Wakeup()
        try:
            self._connect(endpoint)
            #: Where it listens, or is connected to.
            self.endpoint = str(self._socket.get_string(zmq.LAST_ENDPOINT))
            if replay:
                self._open_replay()
        except zmq.ZMQError as error:
            self._context.destroy(0)
            self._wakeup.close()
            raise ConfigError(
                f"KV events cannot be received: {error}", where=endpoint, fix="Write it as tcp://HOST:PORT"
            ) from None
        self._thread = threading.Thread(target=self._run, name="ctxreuse-kv-events", daemon=True)
        self._thread.start()

    def _open(self, kind: int) -> zmq.Socket[Any]:
        socket = self._context.socket(kind)
        socket.linger, socket.rcvhwm, socket.maxmsgsize, socket.ipv6 = 0, _QUEUE, self._most, True
        socket.heartbeat_ivl, socket.heartbeat_timeout = 2_000, 10_000
        return socket

    def _connect(self, endpoint: str) -> None:
        self._socket = self._open(zmq.SUB)
        self._socket.subscribe(b"")
        self._monitor = Monitor(self._socket, _EVENTS)
        if self._listens:
            self._socket.bind(endpoint.removeprefix("@"))
        else:
            self._socket.connect(endpoint)

    def _open_replay(self) -> None:
        """Make a new socket for each: what an old one still gets belongs to none."""
        if self._ask is not None:
            self._ask.close(0)
        self._ask = self._open(zmq.DEALER)
        self._ask.connect(self._replay)

    def close(self) -> None:
        """End the thread. A second call does nothing."""
        if self._end:
            return
        self._end = True
        self._wakeup.set()
        self._thread.join()
        self._monitor.close()
        self._context.destroy(0)
        self._wakeup.close()

    def _run(self) -> None:
        while not self._end:
            awaited: list[tuple[Any, int]] = [(self._socket, _IN), (self._monitor, _IN), (self._wakeup, _IN)]
            wait = -1
            if self._until and self._ask is not None:
                awaited.append((self._ask, _IN))
                wait = max(0, int(1000 * (self._until - self._clock()))) + 1
            zmq_poll(awaited, wait)
            self._wakeup.clear()
            self._round()

    def _round(self) -> None:
        if list(self._monitor.drain()):
            self._until = 0.0
            self._batches.disconnected()
            if not self._listens:  # ZeroMQ does not connect again after a message that is too large
                self._monitor.close()
                self._socket.close(0)
                self._connect(self.endpoint)
        for _ in range(_TURN):
            frames = self._next(self._socket)
            if frames is None:
                break
            if len(frames) != 3 or len(frames[1]) != 8:
                continue
            missing = self._batches.receive(int.from_bytes(frames[1], "big"), frames[2])
            if missing is not None and not self._until:
                self._begin(missing)
        if self._until:
            self._receive_replay()

    def _begin(self, number: int) -> None:
        if not self._replay:
            self._batches.replayed()
            return
        self._open_replay()
        assert self._ask is not None
        self._ask.send_multipart([b"", number.to_bytes(8, "big")])
        self._until = self._clock() + _REPLAY

    def _receive_replay(self) -> None:
        assert self._ask is not None
        for _ in range(_TURN):
            frames = self._next(self._ask)
            if frames is None:
                break
            if len(frames) < 3 or frames[-2] == _END or len(frames[-2]) != 8:
                self._until = 0.0
                break
            self._batches.replay(int.from_bytes(frames[-2], "big"), frames[-1])
        if self._until and self._clock() > self._until:
            log.warning("an engine does not say which KV events were missed", extra={"replay": self._replay})
            self._until = 0.0
        if not self._until:
            self._batches.replayed()

    @staticmethod
    def _next(socket: zmq.Socket[Any]) -> list[bytes] | None:
        try:
            return socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None

"""ZeroMQ, as both ends of the bus use it: allowed endpoints, socket options, connection events, wakeups."""

from __future__ import annotations

import os
import socket as sockets
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import zmq
from zmq.utils.monitor import recv_monitor_message

from ctxreuse.bus.protocol.messages import Terms
from ctxreuse.bus.protocol.wire import MAX_HEADER, Frame
from ctxreuse.config.hosts import is_loopback
from ctxreuse.errors import ConfigError

__all__ = [
    "COPY_BELOW",
    "Address",
    "Monitor",
    "Wakeup",
    "address_of",
    "check_endpoint",
    "keep_freed",
    "receive",
    "send",
    "shut_down",
    "tune",
]

#: Frames from this size on are sent without copying: below it the bookkeeping costs more than the copy.
COPY_BELOW = 256 << 10
#: Messages that may wait in a socket for one peer, each way. Credit keeps honest peers far below it.
SEND_QUEUE, RECEIVE_QUEUE = 16, 16
_HANDSHAKE_MS = 5_000
# Plain numbers: combining these enums takes as long as sending a small frame.
_LAST, _MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)

_KEPT = 8 << 20

#: One end of a TCP connection: host, port, and what else the system says.
Address: TypeAlias = tuple[Any, ...]


def check_endpoint(endpoint: str, *, secured: bool, insecure: bool) -> None:
    """Raise ConfigError unless ``endpoint`` is ``tcp://HOST:PORT`` and, without keys, on loopback (or ``insecure``)."""
    scheme, _, place = endpoint.partition("://")
    host, _, port = place.rpartition(":")
    if scheme != "tcp" or not host or not (port.isdecimal() and int(port) < 65536):
        raise ConfigError(
            "the address of a bus must be tcp://HOST:PORT", where=endpoint, fix="Write it as tcp://HOST:PORT"
        )
    if secured or insecure or is_loopback(host):
        return
    fix = "Give it keys (`ctxreuse keys add`), or allow it with bus.insecure = true on a network that you trust"
    raise ConfigError("plain TCP beyond this machine would expose contexts", where=endpoint, fix=fix)


def tune(socket: zmq.Socket[Any], endpoint: str, terms: Terms) -> None:
    """Set the options that bound memory and time, before bind or connect."""
    socket.linger = 0
    socket.sndhwm, socket.rcvhwm = SEND_QUEUE, RECEIVE_QUEUE
    # Both ends say at most so much in a frame; a larger one ends the connection before it takes memory.
    socket.maxmsgsize = max(MAX_HEADER, terms.max_payload)
    socket.handshake_ivl = _HANDSHAKE_MS
    socket.heartbeat_ivl, socket.heartbeat_timeout = terms.heartbeat_ms, terms.silence_ms
    # In tenths of a second, as the protocol of ZeroMQ has it, in 16 bits.
    socket.heartbeat_ttl = min(terms.silence_ms, 6_553_500) // 100 * 100
    socket.ipv6 = "[" in endpoint


def keep_freed() -> None:
    """Let the memory of received messages be reused; once per process is enough.

    glibc returns the end of a heap to the system when it exceeds twice the largest block that was ever mapped alone and
    freed. Without one, each message of 1 MiB is faulted in again, which takes half as long as receiving it.
    """
    bytes(_KEPT)


def send(socket: zmq.Socket[Any], frames: Sequence[Frame]) -> None:
    """Send one message without waiting. Raises zmq.Again, and takes nothing, if the queue is full."""
    last = len(frames) - 1
    for i, frame in enumerate(frames):
        socket.send(frame, _MORE if i < last else _LAST, copy=len(frame) < COPY_BELOW)


def receive(socket: zmq.Socket[Any]) -> list[zmq.Frame]:
    """Receive one message without waiting or copying. Raises zmq.Again if there is none; polling before with
    `zmq.zmq_poll` takes a third of the time of the exception."""
    frame = socket.recv(_LAST, copy=False)
    frames = [frame]
    while frame.more:  # `recv_multipart` asks the socket instead, by way of an enum
        frame = socket.recv(_LAST, copy=False)
        frames.append(frame)
    return frames


def address_of(fd: int, port: int) -> Address | None:
    """Return the far end of the connection with this descriptor; None unless it came in at ``port``."""
    try:
        with sockets.socket(fileno=os.dup(fd)) as copy:
            return tuple(copy.getpeername()) if copy.getsockname()[1] == port else None
    except OSError:
        return None


def shut_down(fd: int, port: int, address: Address | None) -> None:
    """Shut down the TCP connection of ``address``, which a ROUTER cannot; ZeroMQ then closes its descriptor.

    Does nothing if the descriptor is another connection's by now.
    """
    try:
        with sockets.socket(fileno=os.dup(fd)) as copy:
            if address is not None and copy.getsockname()[1] == port and tuple(copy.getpeername()) == address:
                copy.shutdown(sockets.SHUT_RDWR)
    except OSError:
        pass  # it was gone before


class Monitor:
    """Connection events of one socket, as (event, value). Owned by the socket's thread.

    A poller may wait for its descriptor if all events were drained before.
    """

    def __init__(self, socket: zmq.Socket[Any], events: int) -> None:
        self._socket = socket
        self._events = socket.get_monitor_socket(events)
        self._fd = self._events.fileno()

    def fileno(self) -> int:
        """Return the descriptor to poll."""
        return self._fd

    def drain(self) -> Iterator[tuple[zmq.Event, int]]:
        """Yield the events until now, in order."""
        while self._events.poll(0):
            found = recv_monitor_message(self._events, zmq.NOBLOCK)
            yield zmq.Event(found["event"]), found["value"]

    def close(self) -> None:
        """Close it, before its socket."""
        self._socket.disable_monitor()
        self._events.close(0)


class Wakeup:
    """Wakes a poller from any thread. Wakeups that it has not seen yet are one."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)
        self._set = False

    def fileno(self) -> int:
        """Return the descriptor to poll."""
        return self._read

    def set(self) -> None:
        """Wake the poller (any thread), after what it should find is in place."""
        if not self._set:
            self._set = True
            os.write(self._write, b"\0")

    def clear(self) -> None:
        """Be ready for the next wakeup; look for work afterwards (the poller's thread)."""
        try:
            os.read(self._read, 64)
        except BlockingIOError:
            pass
        # In this order: what a `set` in between announces is found by the look that follows.
        self._set = False

    def close(self) -> None:
        """Close the pipe, once no thread can call `set`."""
        os.close(self._read)
        os.close(self._write)

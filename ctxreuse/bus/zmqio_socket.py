"""What both ends of the bus need of ZeroMQ: allowed endpoints, socket options, connection events, a doorbell."""

from __future__ import annotations

import ipaddress
import os
import socket as sockets
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import zmq
from zmq.utils.monitor import recv_monitor_message

from ctxreuse.bus.wire import MAX_HEADER, Frame, Terms
from ctxreuse.errors import ConfigError

__all__ = [
    "COPY_BELOW",
    "Address",
    "Bell",
    "Monitor",
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
SEND_QUEUE, RECEIVE_QUEUE = 32, 64
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
        raise ConfigError("this is no address of a bus", where=endpoint, fix="Write it as tcp://HOST:PORT")
    if secured or insecure or _is_loopback(host):
        return
    fix = "Give it keys (`ctxreuse keys new`), or allow it with bus.insecure = true on a network that you trust"
    raise ConfigError("plain TCP beyond this machine would show contexts to everybody", where=endpoint, fix=fix)


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def tune(socket: zmq.Socket[Any], endpoint: str, terms: Terms) -> None:
    """Set every option that bounds memory and time; before bind or connect."""
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
    """Let the memory of received messages be used again; once a process is enough, more do no harm.

    glibc gives the end of a heap back to the system when it is larger than twice the largest block that was ever mapped
    alone and freed. Without one, each message of 1 MiB is faulted in again, which takes half as long as to receive it.
    """
    bytes(_KEPT)


def send(socket: zmq.Socket[Any], frames: Sequence[Frame]) -> None:
    """Send one message without waiting. Raises zmq.Again if the queue is full: then nothing was taken."""
    last = len(frames) - 1
    for i, frame in enumerate(frames):
        socket.send(frame, _MORE if i < last else _LAST, copy=len(frame) < COPY_BELOW)


def receive(socket: zmq.Socket[Any]) -> list[zmq.Frame]:
    """Receive one message without waiting, its frames not copied. Raises zmq.Again if there is none: ask
    `zmq.zmq_poll` before, which takes a third of the time of the exception."""
    frame = socket.recv(_LAST, copy=False)
    frames = [frame]
    while frame.more:  # `recv_multipart` asks the socket instead, by way of an enum
        frame = socket.recv(_LAST, copy=False)
        frames.append(frame)
    return frames


def address_of(fd: int, port: int) -> Address | None:
    """The far end of the connection with this descriptor; None if it is none (any more) that came in at ``port``."""
    try:
        with sockets.socket(fileno=os.dup(fd)) as copy:
            return tuple(copy.getpeername()) if copy.getsockname()[1] == port else None
    except OSError:
        return None


def shut_down(fd: int, port: int, address: Address | None) -> None:
    """Shut down the TCP connection of ``address``, which a ROUTER has no call for; ZeroMQ then closes its descriptor.

    The descriptor may be another's by now, so both ends are compared first. Nothing happens if they differ.
    """
    try:
        with sockets.socket(fileno=os.dup(fd)) as copy:
            if address is not None and copy.getsockname()[1] == port and tuple(copy.getpeername()) == address:
                copy.shutdown(sockets.SHUT_RDWR)
    except OSError:
        pass  # it was gone before


class Monitor:
    """Connection events of one socket, as (event, value). Owned by the socket's thread.

    A poller may wait for its descriptor alone, if all events were drained before, first of all once before any wait.
    """

    def __init__(self, socket: zmq.Socket[Any], events: int) -> None:
        self._socket = socket
        self._events = socket.get_monitor_socket(events)
        self._fd = self._events.fileno()

    def fileno(self) -> int:
        """What a poller waits for."""
        return self._fd

    def drain(self) -> Iterator[tuple[zmq.Event, int]]:
        """The events until now, in order."""
        while self._events.poll(0):
            found = recv_monitor_message(self._events, zmq.NOBLOCK)
            yield zmq.Event(found["event"]), found["value"]

    def close(self) -> None:
        """End it; before its socket is closed."""
        self._socket.disable_monitor()
        self._events.close(0)


class Bell:
    """Wakes a poller from any thread. Rings that nobody has heard yet are one."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)
        self._rung = False

    def fileno(self) -> int:
        """What a poller waits for."""
        return self._read

    def ring(self) -> None:
        """Wake the poller. Any thread; first put in its place what it should find."""
        if not self._rung:
            self._rung = True
            os.write(self._write, b"\0")

    def hush(self) -> None:
        """Be ready for the next ring; look for what there is afterwards. The poller's thread."""
        try:
            os.read(self._read, 64)
        except BlockingIOError:
            pass
        # In this order: a ring in between is silent, and what it announces is found by the look that follows.
        self._rung = False

    def close(self) -> None:
        """Only when nobody can ring any more."""
        os.close(self._read)
        os.close(self._write)

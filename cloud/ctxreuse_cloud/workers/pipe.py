"""Messages between the node and its engine processes, over a socket pair.

::

    offset  size  field (little-endian)
    0       4     header length h, at most 64 KiB
    4       8     payload length p, at most 4 GiB
    12      h     MessagePack map with its kind in ``type``, see the structs
    12+h    p     bytes: token ids, rows, or a sealed block

Nothing is pickled: what a broken process writes can at worst be refused.
"""

from __future__ import annotations

import socket
import struct
import threading
from typing import TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from ctxreuse.block import Kind
from ctxreuse.errors import ProtocolError
from ctxreuse.model import ModelSpace
from ctxreuse.store.base import Buffer

__all__ = [
    "Broken",
    "Cancel",
    "Ended",
    "Found",
    "Job",
    "Made",
    "Message",
    "Open",
    "Payload",
    "Pipe",
    "Ready",
    "Rows",
]

_FRAME = struct.Struct("<IQ")
_MAX_HEADER, _MAX_PAYLOAD = 1 << 16, 1 << 32

Payload: TypeAlias = npt.NDArray[np.uint8]


class Open(msgspec.Struct, frozen=True, tag="open"):
    """Node: open this engine. ``threads`` 0: one a core. ``store``: folder whose blocks need not be computed again."""

    model: str
    dtype: str
    threads: int
    chunk: int
    whole: bool
    store: str
    log_format: str
    log_level: str


class Job(msgspec.Struct, frozen=True, tag="job"):
    """Node: compute the whole blocks of these token ids (payload, int32) and send those from ``first`` on, then the
    state at their end where the model needs one. ``salt`` makes their keys; the first ``held`` may be read from the
    store."""

    job: int
    salt: bytes
    first: int
    held: int


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    """Node: nobody waits for this job any more."""

    job: int


class Rows(msgspec.Struct, frozen=True, tag="rows"):
    """Node: rows of the first layer's K; payload: ``count`` token ids and as many positions, int32."""

    ask: int
    count: int


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """Process: the engine is open and computes in this space."""

    space: ModelSpace


class Broken(msgspec.Struct, frozen=True, tag="broken"):
    """Process: the engine cannot be opened; trying again is of no use before something is changed."""

    what: str


class Made(msgspec.Struct, frozen=True, tag="made"):
    """Process: one item of a job: block ``item`` of the context, or the state at its end; payload: sealed bytes."""

    job: int
    item: int
    kind: Kind


class Ended(msgspec.Struct, frozen=True, tag="ended"):
    """Process: a job is over; ``failed`` is empty, or why. ``tokens`` were computed in ``seconds``."""

    job: int
    failed: str
    tokens: int
    seconds: float


class Found(msgspec.Struct, frozen=True, tag="found"):
    """Process: K of the rows asked for; payload float32 ``shape``. ``layer`` -1: this model has none to compare."""

    ask: int
    layer: int
    shape: tuple[int, ...]


Message: TypeAlias = Open | Job | Cancel | Rows | Ready | Broken | Made | Ended | Found

_decoder = msgspec.msgpack.Decoder(Message)


class Pipe:
    """One end. Any thread may send; one thread receives."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._sending = threading.Lock()

    def send(self, message: Message, payload: Buffer = b"") -> None:
        """Blocks until the other side has taken enough. Raises OSError if it is gone."""
        header = msgspec.msgpack.encode(message)
        body = memoryview(payload.data if isinstance(payload, np.ndarray) else payload)
        body = body.cast("B") if body.nbytes else memoryview(b"")
        with self._sending:
            self._socket.sendall(_FRAME.pack(len(header), body.nbytes) + header)
            if body.nbytes:
                self._socket.sendall(body)

    def receive(self) -> tuple[Message, Payload] | None:
        """The next message, its payload in new memory; None if the other side has closed.

        Raises ProtocolError for what is no message, OSError if the connection broke.
        """
        frame = self._exactly(_FRAME.size)
        if frame is None:
            return None
        header_size, size = _FRAME.unpack(frame.tobytes())
        if header_size > _MAX_HEADER or size > _MAX_PAYLOAD:
            raise ProtocolError(f"a message of {header_size} and {size} bytes between node and engine process")
        header, payload = self._exactly(header_size), self._exactly(size)
        if header is None or payload is None:
            return None
        try:
            return _decoder.decode(header.data), payload
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise ProtocolError(f"not a message between node and engine process: {error}") from None

    def _exactly(self, size: int) -> Payload | None:
        data = np.empty(size, np.uint8)
        view, at = data.data, 0
        while at < size:
            got = self._socket.recv_into(view[at:], min(size - at, 1 << 22))
            if not got:
                return None
            at += got
        return data

    def shut(self) -> None:
        """End both directions; a thread that waits in ``receive`` returns. Any thread, any number of times."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass

    def close(self) -> None:
        """Close the socket, when no thread uses it any more."""
        self._socket.close()

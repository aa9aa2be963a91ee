"""Messages between a process and its child, over a socket pair.

::

    offset  size  field (little-endian)
    0       4     header length h, at most 1 MiB
    4       8     payload length p, at most 4 GiB
    12      h     MessagePack map with its kind in ``type``
    12+h    p     bytes

Nothing is pickled: an invalid message is refused.
"""

from __future__ import annotations

import socket
import struct
import threading
from typing import Generic, TypeAlias, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from ctxreuse.block.format import Buffer
from ctxreuse.errors import ProtocolError

__all__ = ["FRAME", "FramePipe", "Payload"]

M = TypeVar("M")

#: Lengths of header and payload.
FRAME = struct.Struct("<IQ")
_MAX_HEADER, _MAX_PAYLOAD = 1 << 20, 1 << 32

Payload: TypeAlias = npt.NDArray[np.uint8]


class FramePipe(Generic[M]):
    """One end of the socket pair. Any thread may send; one thread receives."""

    def __init__(self, end: socket.socket, decoder: msgspec.msgpack.Decoder[M]) -> None:
        self._socket, self._decoder = end, decoder
        self._sending = threading.Lock()

    def send(self, message: M, payload: Buffer = b"") -> None:
        """Send a message; waits for the other side's buffer. Raises OSError if it is closed."""
        header = msgspec.msgpack.encode(message)
        body = memoryview(payload.data if isinstance(payload, np.ndarray) else payload)
        body = body.cast("B") if body.nbytes else memoryview(b"")
        with self._sending:
            self._socket.sendall(FRAME.pack(len(header), body.nbytes) + header)
            if body.nbytes:
                self._socket.sendall(body)

    def receive(self) -> tuple[M, Payload] | None:
        """Return the next message and its payload in new memory; None if the other side has closed.

        Raises ProtocolError for an invalid message, OSError if the connection broke.
        """
        frame = self._exactly(FRAME.size)
        if frame is None:
            return None
        header_size, size = FRAME.unpack(frame.tobytes())
        if header_size > _MAX_HEADER or size > _MAX_PAYLOAD:
            raise ProtocolError(f"a message of {header_size} and {size} bytes between a process and its child")
        header, payload = self._exactly(header_size), self._exactly(size)
        if header is None or payload is None:
            return None
        try:
            return self._decoder.decode(header.data), payload
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise ProtocolError(f"not a message between a process and its child: {error}") from None

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
        """Shut both directions down, so that ``receive`` returns. Thread-safe, idempotent."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass

    def close(self) -> None:
        """Close the socket, once no thread uses it."""
        self._socket.close()

"""Calibration profiles over the bus: one that arrives, and one that is sent."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from ctxreuse.bus.protocol.base import BlockSource
from ctxreuse.bus.protocol.messages import MAX_PROFILE, Have, Piece
from ctxreuse.bus.transfer.receive import ReceiveBuffer
from ctxreuse.errors import FormatError, LinkDownError, ProtocolError

__all__ = ["ProfileBlockSource", "ProfileBuffer"]

#: Bytes of one part, so that a resumed transfer begins where it was cut.
_PART = 1 << 20


class ProfileBuffer(ReceiveBuffer):
    """The profile ``digest`` (SHA-256) for the model of ``space`` (both 32 bytes) as it arrives from one peer.

    One thread, the link's, writes; any other waits. Memory grows with the bytes received, to ``limit`` at most. Other
    bytes end it with ``foreign``.
    """

    def __init__(self, space: bytes, digest: bytes, *, limit: int = MAX_PROFILE) -> None:
        super().__init__()
        self.space, self.digest = space, digest
        self._limit = limit
        self._data = bytearray()

    @property
    def received(self) -> int:
        """Bytes so far."""
        return len(self._data)

    def write(self, pieces: Sequence[Piece], payload: memoryview) -> int:
        """Write one payload; returns how many bytes were new. Raises ProtocolError for a gap, and beyond the limit."""
        if self._ended is not None:
            return 0
        at = fresh = 0
        for item, start, nbytes in pieces:
            data, at = payload[at : at + nbytes], at + nbytes
            if item or start + nbytes > self._limit:
                self.end("foreign")
                raise ProtocolError(
                    f"item {item} of a profile goes up to byte {start + nbytes}", where=self.digest.hex()[:16]
                )
            if start > len(self._data):
                raise ProtocolError(
                    f"{start - len(self._data)} bytes of a profile are missing", where=self.digest.hex()[:16]
                )
            new = data[len(self._data) - start :]
            self._data += new
            fresh += len(new)
        return fresh

    def have(self) -> tuple[Have, ...]:
        """See `FetchBuffer.have`."""
        return ((0, len(self._data), bytes(self._data[24:32])),) if len(self._data) >= 32 else ()

    def finish(self) -> None:
        """End the transfer: all was sent. Compares the digest."""
        right = hashlib.sha256(self._data).digest() == self.digest
        self.end("" if right else "foreign")

    def data(self, timeout: float) -> bytes:
        """Wait for the bytes. Raises LinkDownError after ``timeout`` seconds or if the link ended it, FormatError if
        the peer sent something else."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended is not None, timeout)
        if self._ended == "foreign":
            raise FormatError("a peer sent another profile than was requested", where=self.digest.hex()[:16])
        if self._ended != "":
            raise LinkDownError("a calibration profile did not arrive", where=self._ended or f"within {timeout:.3g} s")
        return bytes(self._data)


class ProfileBlockSource(BlockSource):
    """The bytes of a profile as the one item."""

    count = 1

    def __init__(self, data: bytes) -> None:
        self._data = memoryview(data)

    def parts(self, item: int) -> tuple[int, ...]:
        """See `BlockSource.parts`."""
        return (*range(0, len(self._data), _PART), len(self._data))

    def read(self, item: int, start: int, stop: int) -> memoryview:
        """See `BlockSource.read`."""
        return self._data[start:stop]

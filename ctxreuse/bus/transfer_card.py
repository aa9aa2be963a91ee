"""Cards over the bus: one as it arrives, and one as it is sent."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Sequence

from ctxreuse.bus.wire import MAX_CARD, Have, Piece
from ctxreuse.errors import FormatError, LinkDownError, ProtocolError

__all__ = ["CardAssembly", "CardSupply"]

#: Bytes that are cut into parts, so that a resumed card begins where it was cut.
_PART = 1 << 20


class CardAssembly:
    """The card ``digest`` (SHA-256) for the model of ``space`` (both 32 bytes) on its way from one peer.

    One thread, the link's, writes; any other waits. Memory grows with what has come and never beyond ``limit`` bytes:
    how long a card is, only its end says. `card` gives the bytes once they are whole and have the digest that was asked
    for; a peer that sends others has ended it with ``foreign``.
    """

    def __init__(self, space: bytes, digest: bytes, *, limit: int = MAX_CARD) -> None:
        self.space, self.digest = space, digest
        self.on_stop: Callable[[], None] | None = None
        self._limit = limit
        self._data = bytearray()
        self._ended: str | None = None
        self._changed = threading.Condition()

    @property
    def received(self) -> int:
        """Bytes so far."""
        return len(self._data)

    @property
    def ended(self) -> str | None:
        """None while more may come; then "" (it is here and right) or why it ended early."""
        return self._ended

    def write(self, pieces: Sequence[Piece], payload: memoryview) -> int:
        """The bytes of one payload; how many were new. ProtocolError for a gap, and for more than a card may have."""
        if self._ended is not None:
            return 0
        at = fresh = 0
        for item, start, nbytes in pieces:
            data, at = payload[at : at + nbytes], at + nbytes
            if item or start + nbytes > self._limit:
                self.end("foreign")
                raise ProtocolError(
                    f"item {item} of a card goes up to byte {start + nbytes}", where=self.digest.hex()[:16]
                )
            if start > len(self._data):
                raise ProtocolError(
                    f"{start - len(self._data)} bytes of a card are missing", where=self.digest.hex()[:16]
                )
            new = data[len(self._data) - start :]
            self._data += new
            fresh += len(new)
        return fresh

    def have(self) -> tuple[Have, ...]:
        """See `Assembly.have`."""
        return ((0, len(self._data), bytes(self._data[24:32])),) if len(self._data) >= 32 else ()

    def finish(self) -> None:
        """All has been sent: compare it with what was asked for."""
        right = hashlib.sha256(self._data).digest() == self.digest
        self.end("" if right else "foreign")

    def end(self, reason: str) -> None:
        """No more will come. The first end counts. Any thread."""
        with self._changed:
            if self._ended is None:
                self._ended = reason
            self._changed.notify_all()

    def card(self, timeout: float) -> bytes:
        """The card's bytes. Raises LinkDownError after ``timeout`` seconds or if the link ended it, FormatError if the
        peer sent something else."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended is not None, timeout)
        if self._ended == "foreign":
            raise FormatError("a peer sent another card than was asked for", where=self.digest.hex()[:16])
        if self._ended != "":
            raise LinkDownError("a card did not come", where=self._ended or f"within {timeout:.3g} s")
        return bytes(self._data)

    def stop(self) -> None:
        """Want no more. Idempotent."""
        if self._ended is None:
            self.end("stopped")
            if self.on_stop is not None:
                self.on_stop()


class CardSupply:
    """See `ctxreuse.bus.base.Supply`: one item, the bytes of a card."""

    count = 1

    def __init__(self, data: bytes) -> None:
        self._data = memoryview(data)

    def parts(self, item: int) -> tuple[int, ...]:
        """See `Supply.parts`."""
        return (*range(0, len(self._data), _PART), len(self._data))

    def read(self, item: int, start: int, stop: int) -> memoryview:
        """See `Supply.read`."""
        return self._data[start:stop]

    def watch(self, wake: Callable[[], None]) -> None:
        """All is here from the start."""

    def close(self) -> None:
        """Nothing to give back."""

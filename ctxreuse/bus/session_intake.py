"""Taking blocks from an edge: the cloud's side of one put, one block in memory at a time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ctxreuse.bus.base import Intake
from ctxreuse.bus.wire import Credit, Piece
from ctxreuse.errors import CtxReuseError, ProtocolError

__all__ = ["Taking"]

#: Payloads of a put that may be on their way.
_WINDOW = 4


class Taking:
    """Wanted blocks arrive one after another, each from first byte to last. Owned by a `ServerSession`."""

    def __init__(self, number: int, turn: int, sizes: Sequence[int], intake: Intake, max_payload: int) -> None:
        self.id, self.round = number, turn
        self.items = tuple(intake.wanted)
        self.got, self.upto = 0, _WINDOW if self.items else 0
        self._sizes, self._intake, self._max_payload = sizes, intake, max_payload
        self._left = list(reversed(self.items))
        self._data: npt.NDArray[np.uint8] | None = None
        self._filled = 0

    @property
    def finished(self) -> bool:
        """True when every wanted block was taken, refused or skipped."""
        return not self._left

    def write(self, pieces: Sequence[Piece], payload: memoryview) -> list[tuple[int, str]]:
        """The bytes of one payload; which blocks became whole and why they were not taken (empty: they were).

        ProtocolError for more payloads than were granted and for bytes out of turn.
        """
        self.got += 1
        if self.got > self.upto or len(payload) > self._max_payload:
            raise ProtocolError(f"payload {self.got} of {len(payload)} bytes with credit for {self.upto}", where="put")
        at, stored = 0, []
        for item, start, nbytes in pieces:
            if not self._left or self._left[-1] != item or start != self._filled:
                raise ProtocolError(f"block {item} comes out of turn at byte {start}", where="put")
            size, stop = self._sizes[item], start + nbytes
            if stop > size:
                raise ProtocolError(f"block {item} of {size} bytes gets some at {stop}", where="put")
            if self._data is None:
                self._data = np.empty(size, np.uint8)
            self._data[start:stop] = payload[at : at + nbytes]
            at, self._filled = at + nbytes, stop
            if stop == size:
                data = self._data.data.toreadonly()
                self._next()
                stored.append((item, self._put(item, data)))
        return stored

    def _put(self, item: int, data: memoryview) -> str:
        try:
            return self._intake.put(item, data)
        except CtxReuseError:
            return "failed"

    def skip(self, item: int) -> None:
        """The peer cannot give this block; ProtocolError if it has begun to."""
        if item not in self._left or (item == self._left[-1] and self._filled):
            raise ProtocolError(f"block {item} cannot be skipped", where="put")
        self._left.remove(item)

    @property
    def owes(self) -> bool:
        """True when half of the credit is used up and there is more to come."""
        return not self.finished and self.upto - self.got <= _WINDOW // 2

    def grant(self) -> Credit:
        """Extend the credit to the full window."""
        self.upto = self.got + _WINDOW
        return Credit(self.id, self.round, self.upto)

    def close(self) -> None:
        """The put is over."""
        self._data = None
        self._intake.close()

    def _next(self) -> None:
        self._left.pop()
        self._data, self._filled = None, 0

    def check(self) -> None:
        """Raise AssertionError if more is held than one block."""
        assert self.got <= self.upto
        assert (self._data is not None) == (self._filled > 0)

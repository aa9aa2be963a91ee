"""Memory for payloads that are gathered from several places, used again once the transport has let go of it."""

from __future__ import annotations

import weakref
from collections import deque

import numpy as np
import numpy.typing as npt

__all__ = ["PayloadMemory"]

_LEAST = 16  # binary logarithm of the smallest size that is made


class PayloadMemory:
    """Gives out memory for payloads; it is given back by itself when nobody refers to it any more.

    One thread takes; any may let go (ZeroMQ does in a thread of its own). At most ``kept`` bytes, once used, wait to be
    used again: fresh memory costs a page fault for every 4 KiB, which takes longer than to fill it.
    """

    def __init__(self, kept: int = 32 << 20) -> None:
        self._most = kept
        self._free: list[deque[npt.NDArray[np.uint8]]] = [deque() for _ in range(64)]  # by logarithm of their size
        self._out: dict[int, tuple[weakref.ref[npt.NDArray[np.uint8]], npt.NDArray[np.uint8]]] = {}

    @property
    def kept(self) -> int:
        """Bytes that wait to be used again."""
        return sum(len(free) << power for power, free in enumerate(self._free) if free)

    @property
    def out(self) -> int:
        """Payloads whose memory somebody still refers to."""
        return len(self._out)

    def take(self, nbytes: int) -> memoryview:
        """``nbytes`` writable bytes of any content. Nobody else has them until the last view of them is gone."""
        power = max(_LEAST, (nbytes - 1).bit_length())
        try:
            room = self._free[power].pop()
        except IndexError:
            room = np.empty(1 << power, np.uint8)
        view = room[:nbytes]
        watch = weakref.ref(view, self._back)
        self._out[id(watch)] = (watch, room)
        return view.data

    def _back(self, watch: weakref.ref[npt.NDArray[np.uint8]]) -> None:
        _, room = self._out.pop(id(watch))
        if self.kept + room.nbytes <= self._most:
            self._free[room.nbytes.bit_length() - 1].append(room)

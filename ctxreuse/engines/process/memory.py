"""Memory that a process shares with its child: large arrays pass through it, not through the pipe."""

from __future__ import annotations

import mmap
import os
import tempfile
import threading
from bisect import insort
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = ["Region", "SharedMemory"]

#: Regions begin at a cache line; the file grows in steps, and keeps so much while nothing is in use.
_LINE, _GROWTH, _KEPT = 64, 1 << 20, 64 << 20


class Region(NamedTuple):
    """Bytes ``at`` to ``at + size`` of the shared memory."""

    at: int
    size: int


class SharedMemory:
    """A file in memory, mapped by both sides. The parent takes and gives back regions; the child only looks at them.

    Thread-safe. It is as large as what was in use at once, and shrinks when nothing is.
    """

    def __init__(self, fd: int | None = None) -> None:
        """Map the file behind ``fd``; None: make a new one."""
        self.fd = _new_file() if fd is None else fd
        self._lock = threading.Lock()
        self._free: list[Region] = []
        self._used = 0
        self._size = 0
        self._map: mmap.mmap | None = None

    def view(self, region: Region) -> npt.NDArray[np.uint8]:
        """The bytes of a region, valid until it is given back."""
        return np.frombuffer(self.map(region.at + region.size), np.uint8, region.size, region.at)

    def map(self, end: int) -> mmap.mmap:
        """The whole file, of at least ``end`` bytes. Earlier maps stay valid as long as something refers to them."""
        with self._lock:
            if self._map is None or len(self._map) < end:
                self._map = mmap.mmap(self.fd, os.fstat(self.fd).st_size)
            return self._map

    def take(self, size: int) -> Region:
        """Reserve a region. Raises OSError if there is no memory."""
        size = -(-max(size, 1) // _LINE) * _LINE
        with self._lock:
            found = next((i for i, one in enumerate(self._free) if one.size >= size), None)
            if found is None:
                tail = self._free.pop() if self._free and sum(self._free[-1]) == self._size else Region(self._size, 0)
                grown = -(-(tail.at + size) // _GROWTH) * _GROWTH
                os.ftruncate(self.fd, grown)
                self._free.append(Region(tail.at, grown - tail.at))
                self._size, found = grown, len(self._free) - 1
            free = self._free.pop(found)
            if free.size > size:
                insort(self._free, Region(free.at + size, free.size - size))
            self._used += 1
            return Region(free.at, size)

    def give_back(self, region: Region) -> None:
        """Free a region that `take` returned; neither side may use it any more."""
        with self._lock:
            insort(self._free, region)
            joined: list[Region] = []
            for one in self._free:
                if joined and sum(joined[-1]) == one.at:
                    joined[-1] = Region(joined[-1].at, joined[-1].size + one.size)
                else:
                    joined.append(one)
            self._free, self._used = joined, self._used - 1
            if not self._used and self._size > _KEPT:
                os.ftruncate(self.fd, _KEPT)
                self._size, self._free = _KEPT, [Region(0, _KEPT)]

    def check(self) -> None:
        """Raise AssertionError if regions overlap or leave the file."""
        with self._lock:
            ends = [0, *(sum(one) for one in self._free)]
            assert all(end <= one.at for end, one in zip(ends, self._free)), "free regions overlap"
            assert ends[-1] <= self._size == os.fstat(self.fd).st_size, "a free region is outside"
            assert self._used or sum(one.size for one in self._free) == self._size, "a region was lost"

    def close(self) -> None:
        """Close the file; maps stay as long as something refers to them."""
        os.close(self.fd)


def _new_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("ctxreuse-engine")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())

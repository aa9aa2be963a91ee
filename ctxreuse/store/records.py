"""The small record that LMDB keeps beside each value, what a value takes on disk, and why bytes are refused."""

from __future__ import annotations

import struct
import sys
from functools import lru_cache
from typing import NamedTuple

from ctxreuse.block import MAGIC, VERSION
from ctxreuse.keys import KEY_BYTES
from ctxreuse.levels import EXACT

__all__ = ["FORMAT", "READABLE", "Record", "diagnose", "footprint"]

#: Version of the tables as a whole, kept in table ``info``, and those that can be read: 1 knew exact blocks only.
FORMAT, READABLE = 2, (1, 2)

_PAGE, _LARGE_HEADER = 4096, 16
_RECORD = struct.Struct(f"<{KEY_BYTES}sIQQQQ")


class Record(NamedTuple):
    """What is known of a key without touching its value: enough to rebuild the context tree and the eviction order.

    ``tokens`` of this block and ``depth`` up to its end; sizes in bytes (0: no such value); ``used`` is the sequence
    number of the last use. ``level`` of the block, ``state_level`` of the state; ``lossy``: the worst level at which
    the owner lets them be kept ("": exact ones only).
    """

    parent: bytes
    tokens: int
    depth: int
    nbytes: int
    state_nbytes: int
    used: int
    level: str = EXACT
    state_level: str = EXACT
    lossy: str = ""

    def pack(self) -> bytes:
        tail = self[6:]
        return _RECORD.pack(*self[:6]) + (b"" if tail == _PLAIN else "\n".join(tail).encode())

    @classmethod
    def unpack(cls, raw: bytes | memoryview) -> Record:
        """Raises ValueError if the bytes are no record."""
        if not _RECORD.size <= len(raw) <= _RECORD.size + _TAIL:
            raise ValueError(f"record of {len(raw)} bytes")
        tail = bytes(raw[_RECORD.size :])
        return cls._make((*_RECORD.unpack_from(raw), *(_levels(tail) if tail else _PLAIN)))


#: What most records need not say.
_PLAIN = (EXACT, EXACT, "")
_TAIL = 200


@lru_cache(maxsize=256)
def _levels(tail: bytes) -> tuple[str, str, str]:
    """The levels at the end of a record; the same texts for equal bytes, as a store holds many of few. ValueError."""
    level, state_level, lossy = (sys.intern(text) for text in tail.decode("ascii").split("\n"))
    return level, state_level, lossy


def footprint(nbytes: int) -> int:
    """Bytes of the whole pages that LMDB gives to a value of this size (0 for none); small ones are counted so too."""
    return -(-(nbytes + _LARGE_HEADER) // _PAGE) * _PAGE if nbytes else 0


def diagnose(head: bytes, nbytes: int) -> str:
    """The reason, as counted in ``StoreStats.misses``, why a value of ``nbytes`` with this head is no block."""
    if len(head) < 32:
        return "truncated"
    if head[:8] != MAGIC:
        return "foreign"
    version = int.from_bytes(head[8:10], "little")
    if version != VERSION:
        return "newer" if version > VERSION else "older"
    if int.from_bytes(head[16:24], "little") > nbytes:
        return "truncated"
    return "corrupt"

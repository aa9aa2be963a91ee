"""The small record that LMDB keeps beside each value, what a value takes on disk, and why bytes are refused."""

from __future__ import annotations

import struct
from typing import NamedTuple

from ctxreuse.block import MAGIC, VERSION
from ctxreuse.keys import KEY_BYTES

__all__ = ["FORMAT", "Record", "diagnose", "footprint"]

#: Version of the tables as a whole, kept in table ``info``.
FORMAT = 1

_PAGE, _LARGE_HEADER = 4096, 16
_RECORD = struct.Struct(f"<{KEY_BYTES}sIQQQQ")


class Record(NamedTuple):
    """What is known of a key without touching its value: enough to rebuild the context tree and the eviction order.

    ``tokens`` of this block and ``depth`` up to its end; sizes in bytes (0: no such value); ``used`` is the sequence
    number of the last use.
    """

    parent: bytes
    tokens: int
    depth: int
    nbytes: int
    state_nbytes: int
    used: int

    def pack(self) -> bytes:
        return _RECORD.pack(*self)

    @classmethod
    def unpack(cls, raw: bytes | memoryview) -> Record:
        """Raises ValueError if the bytes are no record."""
        if len(raw) != _RECORD.size:
            raise ValueError(f"record of {len(raw)} bytes")
        return cls(*_RECORD.unpack(raw))


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

"""The record beside each value in LMDB, the size of a value on disk, and reasons for which bytes are refused."""

from __future__ import annotations

import struct
import sys
from functools import lru_cache
from typing import Final, NamedTuple

import numpy as np

from ctxreuse.block.format import MAGIC, VERSION
from ctxreuse.block.levels import EXACT, limit_name, limit_of
from ctxreuse.identity.keys import KEY_BYTES

__all__ = ["FORMAT", "READABLE", "ROW", "Record", "decode_tail", "diagnose", "footprint"]

#: Version of the tables as a whole, kept in table ``info``, and those that can be read: 1 knew exact blocks only.
FORMAT, READABLE = 2, (1, 2)

_PAGE, _LARGE_HEADER = 4096, 16
_RECORD = struct.Struct(f"<{KEY_BYTES}sIQQQQ")

#: A record and its key as the native scan gives them; it knows `_RECORD` as well.
ROW: Final = np.dtype(
    [("key", f"V{KEY_BYTES}"), ("parent", f"V{KEY_BYTES}")]
    + [(name, "<u8") for name in ("depth", "nbytes", "state_nbytes", "used")]
    + [("tokens", "<u4"), ("kind", "<u4")]
)


class Record(NamedTuple):
    """What is stored of a key beside its value: enough to rebuild the context tree and the eviction order.

    ``tokens`` of this block and ``depth`` up to its end; sizes in bytes (0: no such value); ``used`` is the sequence
    number of the last use. ``level`` of the block, ``state_level`` of the state; ``max_kl``: the limit at
    which the owner lets them be kept, stored as a level's name.
    """

    parent: bytes
    tokens: int
    depth: int
    nbytes: int
    state_nbytes: int
    used: int
    level: str = EXACT
    state_level: str = EXACT
    max_kl: float | None = None

    def pack(self) -> bytes:
        tail = self.level, self.state_level, limit_name(self.max_kl)
        return _RECORD.pack(*self[:6]) + (b"" if tail == _PLAIN else "\n".join(tail).encode())

    @classmethod
    def unpack(cls, raw: bytes | memoryview) -> Record:
        """Decode a record. Raises ValueError."""
        if not _RECORD.size <= len(raw) <= _RECORD.size + _TAIL:
            raise ValueError(f"record of {len(raw)} bytes")
        tail = bytes(raw[_RECORD.size :])
        return cls._make((*_RECORD.unpack_from(raw), *decode_tail(tail)))


#: The levels that are not written, as most records have them.
_PLAIN = (EXACT, EXACT, "")
_TAIL = 200


@lru_cache(maxsize=256)
def decode_tail(tail: bytes) -> tuple[str, str, float | None]:
    """Decode the levels at the end of a record, as shared strings: many records have few. Raises ValueError."""
    if not tail:
        return EXACT, EXACT, None
    if len(tail) > _TAIL:
        raise ValueError(f"record with a tail of {len(tail)} bytes")
    level, state_level, limit = (sys.intern(text) for text in tail.decode("ascii").split("\n"))
    return level, state_level, limit_of(limit)


def footprint(nbytes: int) -> int:
    """Return the bytes of the whole pages that LMDB gives to a value of this size (0 for none)."""
    return -(-(nbytes + _LARGE_HEADER) // _PAGE) * _PAGE if nbytes else 0


def diagnose(head: bytes, nbytes: int) -> str:
    """Return why a value of ``nbytes`` with this head is no block, as counted in ``StoreStats.misses``."""
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

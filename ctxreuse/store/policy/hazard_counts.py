"""The stored form of what the hazard policy learnt: uses and paths seen, by class and age."""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Iterable, Sequence
from typing import TypeAlias

__all__ = ["AGES", "CLASSES", "Counts", "pack_counts", "unpack_counts"]

#: Spans of time since a block's last use, and classes of blocks; see native/policy/hazard.h.
AGES, CLASSES = 56, 4 * 6 * 4 * 32 * 2

#: A class, its paths used by age, and those seen.
Counts: TypeAlias = tuple[int, Sequence[float], Sequence[float]]

_HEAD = struct.Struct("<4sBI")
_ROW = struct.Struct("<HB")
_MAGIC, _VERSION = b"hzrd", 1
_LARGEST = 1 << 16
_LARGEST_COUNT = 1e12


def pack_counts(rows: Iterable[Counts]) -> bytes:
    """Encode the classes that were seen most, as far as 64 KiB hold them."""
    body = b""
    for which, used, seen in sorted(rows, key=lambda row: (-math.fsum(row[2]), row[0])):
        ages = max((age + 1 for age in range(AGES) if seen[age] > 0), default=0)
        one = _ROW.pack(which, ages) + struct.pack(f"<{2 * ages}f", *used[:ages], *seen[:ages])
        if ages and _HEAD.size + len(body) + len(one) <= _LARGEST:
            body += one
    return _HEAD.pack(_MAGIC, _VERSION, zlib.crc32(body)) + body


def unpack_counts(raw: bytes) -> list[Counts] | None:
    """Decode `pack_counts`; None for anything else."""
    if not _HEAD.size <= len(raw) <= _LARGEST:
        return None
    magic, version, crc = _HEAD.unpack_from(raw)
    if (magic, version) != (_MAGIC, _VERSION) or crc != zlib.crc32(raw[_HEAD.size :]):
        return None
    rows: list[Counts] = []
    at = _HEAD.size
    while at < len(raw):
        if at + _ROW.size > len(raw):
            return None
        which, ages = _ROW.unpack_from(raw, at)
        at += _ROW.size
        if which >= CLASSES or ages > AGES or at + 8 * ages > len(raw):
            return None
        counts = struct.unpack_from(f"<{2 * ages}f", raw, at)
        at += 8 * ages
        used, seen = list(counts[:ages]), list(counts[ages:])
        if not all(0 <= uses <= paths * (1 + 1e-6) <= _LARGEST_COUNT for uses, paths in zip(used, seen)):
            return None
        rows.append((which, used, seen))
    return rows

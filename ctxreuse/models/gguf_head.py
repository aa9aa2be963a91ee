"""Checks the head of a GGUF before a reader sees it that believes every count in it.

``gguf.GGUFReader`` makes an object for each element that a count promises, whether the file has it or not: 10 µs and a
kilobyte each, so one changed number could take hours and all memory. Here nothing is made, and the time follows from
the bytes that are there.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path

from ctxreuse.errors import FormatError

__all__ = ["MOST_VALUES", "check_head"]

#: Values in all arrays together: the largest vocabulary known (262,144) takes six for each token.
MOST_VALUES = 1 << 21
_MOST_FIELDS, _MOST_TENSORS, _MOST_AXES, _MOST_NAME = 1 << 16, 1 << 17, 8, 1 << 16
_STRING, _ARRAY = 8, 9
#: Bytes of a number, by its type.
_WIDTHS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}


def check_head(source: Path, *, distinct: str = "") -> None:
    """Raise FormatError for a file whose counts and lengths exceed it, or what any model needs; OSError as `open`.

    ``distinct``: a setting whose strings must differ and hold no NUL, for a reader that ends the process otherwise.
    """
    with open(source, "rb") as file:
        if not file.seek(0, 2):
            raise FormatError("not a readable GGUF: the file is empty", where=str(source))
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            try:
                _Walk(data, distinct.encode()).head()
            except ValueError as error:
                raise FormatError(f"not a readable GGUF: {error}", where=str(source)) from None


class _Walk:
    def __init__(self, data: mmap.mmap, distinct: bytes) -> None:
        self._data, self._end, self._distinct = data, len(data), distinct
        self._at, self._values = 0, 0

    def head(self) -> None:
        magic = self._skip(4)
        if self._data[magic : magic + 4] != b"GGUF":
            raise ValueError("it does not begin as one")
        version = self._number(4)
        if version not in (2, 3):
            raise ValueError(f"version {version} is not known")
        tensors, fields = self._number(8), self._number(8)
        if tensors > _MOST_TENSORS or fields > _MOST_FIELDS:
            raise ValueError(f"{tensors:,} tensors and {fields:,} settings")
        for _ in range(fields):
            name = self._string(_MOST_NAME)
            distinct = self._distinct != b"" and self._data[name : self._at] == self._distinct
            self._value(self._number(4), distinct=distinct)
        for _ in range(tensors):
            self._string(_MOST_NAME)
            axes = self._number(4)
            if axes > _MOST_AXES:
                raise ValueError(f"a tensor of {axes:,} axes")
            self._skip(8 * axes + 12)  # lengths of the axes, type, place

    def _value(self, kind: int, *, distinct: bool) -> None:
        if kind in _WIDTHS:
            self._skip(_WIDTHS[kind])
        elif kind == _STRING:
            self._string()
        elif kind == _ARRAY:
            kind, count = self._number(4), self._number(8)
            self._values += count
            if self._values > MOST_VALUES:
                raise ValueError(f"more than {MOST_VALUES:,} values in its arrays")
            if kind in _WIDTHS:
                self._skip(_WIDTHS[kind] * count)
            elif kind == _STRING:
                seen: set[bytes] = set()
                for i in range(count):
                    at = self._string()
                    if distinct:
                        text = self._data[at : self._at]
                        if b"\0" in text:
                            raise ValueError(f"entry {i:,} of {self._distinct.decode()} holds a NUL")
                        seen.add(text)
                        if len(seen) <= i:
                            raise ValueError(f"entry {i:,} of {self._distinct.decode()} was there before")
            else:
                raise ValueError(f"an array of type {kind}")
        else:
            raise ValueError(f"a setting of type {kind}")

    def _string(self, most: int = 1 << 62) -> int:
        """Pass over a string; returns where it begins."""
        length = self._number(8)
        if length > most:
            raise ValueError(f"a name of {length:,} bytes")
        return self._skip(length)

    def _number(self, width: int) -> int:
        at = self._skip(width)
        return int(struct.unpack_from("<Q" if width == 8 else "<I", self._data, at)[0])

    def _skip(self, count: int) -> int:
        """Pass over bytes that must be there; returns where they begin."""
        at = self._at
        if count > self._end - at:
            raise ValueError(f"it is cut off at byte {at:,}")
        self._at = at + count
        return at

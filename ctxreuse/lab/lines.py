"""Lines of a trace file, packed or not, with bounds on what a hostile file may cost."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, cast

import msgspec

from ctxreuse.errors import ConfigError, FormatError

__all__ = ["MOST_LINE", "UNREADABLE", "first_line", "read_lines"]

#: What decoding a line may raise.
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

#: Bytes of one line: a session of 900,000 tokens over hundreds of turns takes a hundredth of it.
MOST_LINE = 32 << 20

#: Memory that unpacking an .xz may take: the strongest setting of the program needs 65 MiB, a bomb asks for gigabytes.
_MOST_XZ = 256 << 20
_CHUNK = 1 << 16


class _Xz(io.RawIOBase):
    """An .xz file unpacked as it is read. `lzma.open` would give it all the memory that its header asks for."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("rb")
        self._rest = b""
        # None between two streams: several may follow each other, with zeros between them.
        self._stream: lzma.LZMADecompressor | None = None

    def readable(self) -> bool:
        return True

    def readinto(self, room: Any) -> int:
        while True:
            if self._stream is None:
                self._rest = self._rest or self._file.read(_CHUNK)
                if not self._rest:
                    return 0
                self._rest = self._rest.lstrip(b"\0")
                self._stream = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=_MOST_XZ) if self._rest else None
                continue
            packed, self._rest = self._rest, b""
            if not packed and self._stream.needs_input:
                packed = self._file.read(_CHUNK)
                if not packed:
                    raise EOFError("it ends too early")
            data = self._stream.decompress(packed, len(room))
            if self._stream.eof:
                self._rest, self._stream = self._stream.unused_data, None
            if data:
                room[: len(data)] = data
                return len(data)

    def close(self) -> None:
        self._file.close()
        super().close()


_OPENERS: dict[bytes, Callable[[Path], Any]] = {
    b"\xfd7zXZ": lambda path: io.BufferedReader(_Xz(path), _CHUNK),
    b"\x1f\x8b": gzip.GzipFile,
    b"BZh": bz2.BZ2File,
}
_BROKEN = (lzma.LZMAError, gzip.BadGzipFile, zlib.error, EOFError)


def _open(path: Path) -> IO[bytes]:
    try:
        with path.open("rb") as file:
            magic = file.read(6)
        for start, opener in _OPENERS.items():
            if magic.startswith(start):
                return cast(IO[bytes], opener(path))
        return path.open("rb")
    except OSError as error:
        raise ConfigError(
            f"the trace cannot be read: {error.strerror or error}", where=str(path), fix="Name a file that exists"
        ) from error


def read_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """(line number from 1, line) of every line that is not empty, unpacking .xz, .gz and .bz2 as it goes.

    Raises ConfigError if the file cannot be opened, FormatError if it is damaged or a line is longer than MOST_LINE.
    """
    number = 0
    with _open(path) as file:
        while True:
            number += 1
            try:
                line = file.readline(MOST_LINE + 1)
            except (OSError, *_BROKEN) as error:
                raise FormatError(
                    f"the trace is damaged: {error}",
                    where=f"{path.name}, line {number}",
                    fix="Fetch or record it again",
                ) from error
            if not line:
                return
            if len(line) > MOST_LINE:
                raise FormatError(
                    f"a line is longer than {MOST_LINE >> 20} MiB",
                    where=f"{path.name}, line {number}",
                    fix="A trace has one JSON object a line",
                )
            line = line.strip()
            if line:
                yield number, line


def first_line(path: Path) -> bytes:
    """Return the first line that is not empty; raises as `read_lines` does, and FormatError if there is none."""
    for _, line in read_lines(path):
        return line
    raise FormatError("the trace is empty", where=path.name, fix="Record some traffic first, or see --generate")

"""Lines of a trace file, packed or not, with bounds on what a hostile file may cost."""

from __future__ import annotations

import bz2
import gzip
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

_OPENERS: dict[bytes, Callable[[Path], Any]] = {
    b"\xfd7zXZ": lzma.LZMAFile,
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
                    f"the trace is damaged: {error}", where=f"{path.name}, line {number}", fix="Fetch or record it anew"
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
    """The first line that is not empty; raises as `read_lines` does, and FormatError if there is none."""
    for _, line in read_lines(path):
        return line
    raise FormatError("the trace is empty", where=path.name, fix="Record some traffic first, or see --generate")

"""A bounded file of records in the order of writing: two halves; the older is deleted when the newer is full."""

from __future__ import annotations

import contextlib
import logging
import os
import struct
import zlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from ctxreuse.errors import FormatError

__all__ = ["Journal", "read_journal"]

log = logging.getLogger(__name__)

_MAGIC = b"ctxrjnl1"
_FRAME = struct.Struct("<II")
#: Largest record: the ids of the longest prompts there are, twice.
_MOST = 8 << 20
_ADVICE = "Delete the file: nothing but explanations of past misses is lost"


def _older(path: Path) -> Path:
    return path.with_name(path.name + ".old")


def _read(path: Path, limit: int) -> tuple[list[bytes], int]:
    """Return the records of one half and the length up to which it is whole. Raises FormatError."""
    try:
        with open(path, "rb") as file:
            raw = file.read(limit + 1)
    except FileNotFoundError:
        return [], 0
    except OSError as error:
        raise FormatError(f"the journal cannot be read: {error.strerror}", where=str(path), fix=_ADVICE) from None
    if len(raw) > limit:
        raise FormatError(f"the journal has more than {limit:,} bytes", where=str(path), fix=_ADVICE)
    if not raw.startswith(_MAGIC):
        if _MAGIC.startswith(raw):  # the process ended while it began the file
            return [], 0
        raise FormatError("the file is not a journal of this version", where=str(path), fix=_ADVICE)
    found, at = [], len(_MAGIC)
    while at + _FRAME.size <= len(raw):
        size, checksum = _FRAME.unpack_from(raw, at)
        end = at + _FRAME.size + size
        if size > _MOST:
            raise FormatError(f"a record of {size:,} bytes", where=f"{path} at byte {at}", fix=_ADVICE)
        data = raw[at + _FRAME.size : end]
        if end > len(raw) or not (size or any(raw[at:])):
            break  # cut off where the process or the machine ended
        if zlib.crc32(data) != checksum:
            if end == len(raw):
                break
            raise FormatError("a record fails its checksum", where=f"{path} at byte {at}", fix=_ADVICE)
        found.append(data)
        at = end
    return found, at


def read_journal(path: Path, limit: int) -> list[bytes]:
    """Return all records, oldest first, also while another process writes them; none if there is no file.

    ``limit`` as it was written with. A record cut off by a crash is left out. Raises FormatError for a file that is
    damaged elsewhere, too long, or no journal.
    """
    room = limit + _MOST
    return [*_read(_older(path), room)[0], *_read(path, room)[0]]


class Journal:
    """Writes a journal. Not thread-safe. A disk error ends the writing, with a warning.

    ``limit``: bytes of both halves. ``head``: records that each new half begins with. ``lost``: what
    a damaged file means, for the log.
    """

    def __init__(
        self,
        path: Path,
        limit: int,
        head: Callable[[], Sequence[bytes]] = lambda: (),
        *,
        lost: str = "past misses cannot be explained any more",
    ) -> None:
        self.path, self._limit, self._head, self._lost = path, limit, head, lost
        self._fd = -1
        self._size = 0

    def open(self, take: Callable[[bytes], None]) -> None:
        """Call ``take`` with each record, then begin to write.

        A damaged file, or one with a record for which ``take`` raises FormatError, is renamed, with a warning.
        """
        try:
            for data in read_journal(self.path, self._limit):
                take(data)
        except FormatError as error:
            log.warning("%s: %s", self._lost, error)
            for half in (self.path, _older(self.path)):
                with contextlib.suppress(OSError):
                    half.replace(half.with_name(half.name + ".bad"))
        try:
            size = _read(self.path, self._limit + _MOST)[1]
        except FormatError as error:  # it could not be renamed either
            log.warning("requests from now on are not recorded: %s", error)
            return
        self._begin(size)

    def append(self, data: bytes) -> None:
        """Write one record, at most 8 MiB, without syncing it to disk."""
        frame = _FRAME.size + len(data)
        if self._fd < 0 or len(data) > _MOST:
            return
        if self._size + frame > self._limit // 2 and self._size > len(_MAGIC):
            self._turn()
        self._write(_FRAME.pack(len(data), zlib.crc32(data)) + data)

    def rewrite(self, records: Iterable[bytes]) -> None:
        """Replace all records, and delete the files that had the old ones."""
        if self._fd < 0:
            return
        self._end()
        for half in (_older(self.path), self.path):
            with contextlib.suppress(OSError):
                half.unlink(missing_ok=True)
        self._begin(0)
        for data in records:
            self.append(data)

    def close(self) -> None:
        """Stop. A second call does nothing."""
        self._end()

    def _turn(self) -> None:
        self._end()
        try:
            self.path.replace(_older(self.path))
        except OSError as error:
            self._fail(error)
            return
        self._begin(0)

    def _begin(self, size: int) -> None:
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
            self._fd = os.open(self.path, flags, 0o600)
            os.ftruncate(self._fd, size)
        except OSError as error:
            self._fail(error)
            return
        self._size = size
        if not size:
            self._write(_MAGIC)
            for data in self._head():
                self._write(_FRAME.pack(len(data), zlib.crc32(data)) + data)

    def _write(self, data: bytes) -> None:
        if self._fd < 0:
            return
        try:
            if os.write(self._fd, data) != len(data):
                raise OSError(28, "no room")
        except OSError as error:
            self._fail(error)
            return
        self._size += len(data)

    def _fail(self, error: OSError) -> None:
        log.warning("requests from now on are not recorded: %s", error, extra={"file": str(self.path)})
        self._end()

    def _end(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

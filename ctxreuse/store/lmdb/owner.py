"""Ownership: one process at a time may write a store's folder.

The lock is a ``flock`` on the folder itself, which the kernel releases however the process dies; ``owner.json`` beside
the data names the owner and records, for each part of the store, whether it was closed cleanly and in which boot of the
machine.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shlex
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from ctxreuse.errors import StoreError, StoreFullError, StoreOwnedError
from ctxreuse.private import warn_if_shared

__all__ = ["Owner", "Part", "attended", "boot_id", "claim", "folder", "last_use"]

FILE = "owner.json"


class Part(msgspec.Struct, frozen=True):
    """The last use of one part: whether it was closed cleanly, in which boot, and the stamp of its file when it was."""

    clean: bool = True
    boot: str = ""
    stamp: str = ""

    def left_as(self, stamp: str, boot: str) -> bool:
        """Return True if it was closed cleanly in this boot, and its file was not written since."""
        return self.clean and self.boot == boot and bool(stamp) and self.stamp == stamp


class _Record(msgspec.Struct, frozen=True):
    pid: int = 0
    host: str = ""
    command: str = ""
    since: float = 0.0
    boot: str = ""
    parts: dict[str, Part] = {}


def boot_id() -> str:
    """Return the id of the machine's current boot; ``""`` if the kernel has none."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


def folder(path: str | os.PathLike[str], *, readonly: bool) -> Path:
    """Return the store's folder as an absolute path, created unless ``readonly``. Raises StoreError."""
    place = Path(path).expanduser().absolute()
    if place.exists() and not place.is_dir():
        raise StoreError("a store must be a folder, and this is a file", where=str(place), fix="Choose another path")
    if not place.exists():
        if readonly:
            raise StoreError("there is no store here", where=str(place), fix="Open it for writing once to create it")
        try:
            place.mkdir(mode=0o700)
        except FileNotFoundError:
            fix = f"Create {place.parent} first or choose another path"
            raise StoreError("the folder that should hold the store is missing", where=str(place), fix=fix) from None
        except FileExistsError:
            pass
        except OSError as error:
            raise StoreError(f"cannot create the store: {error.strerror}", where=str(place), fix=_WRITABLE) from None
    elif not readonly:
        warn_if_shared(place, "the store")
    return place


_WRITABLE = "Choose a folder that this user may write, or open the store with readonly=True"


class Owner:
    """This process's lock on one folder, shared by the parts (blocks, ledger) that it has open."""

    def __init__(self, place: Path, fd: int, record: _Record, boot: str, clock: Callable[[], float]) -> None:
        self._place, self._fd, self._boot = place, fd, boot
        self._before = record.parts
        self._parts = dict(record.parts)
        self.open: set[str] = set()
        words = " ".join(shlex.quote(word) for word in sys.argv)[:300] or sys.executable
        self._me = _Record(os.getpid(), socket.gethostname(), words, clock(), boot)

    def before(self, part: str) -> Part:
        """Return how its last owner left that part (clean if it never had one)."""
        return self._before.get(part, Part())

    def same_boot(self, part: str) -> bool:
        """Return True if that part was last used in this boot of the machine."""
        return self.before(part).boot == self._boot

    def left_as(self, part: str, stamp: str) -> bool:
        """Return True if that part was closed cleanly in this boot, and its file was not written since."""
        return self.before(part).left_as(stamp, self._boot)

    def begin(self, part: str) -> None:
        """Record that the part is in use. Raises StoreError if that cannot be written."""
        self._parts[part] = Part(clean=False, boot=self._boot, stamp=self.before(part).stamp)
        self._write()
        self.open.add(part)

    def end(self, part: str, *, clean: bool, stamp: str | None = None) -> None:
        """Release one part; the lock goes with the last one. Any thread; a second call does nothing.

        ``stamp``: of its file; default: what it was before.
        """
        if os.getpid() != self._me.pid:
            return
        with _guard:
            if part not in self.open:
                return
            self.open.discard(part)
            stamp = self.before(part).stamp if stamp is None else stamp
            self._parts[part] = Part(clean=clean, boot=self._boot, stamp=stamp)
            # A full disk must not stop the closing: without the record the next owner only verifies once too often.
            with contextlib.suppress(StoreError):
                self._write()
            self._before = dict(self._parts)
            if not self.open:
                _owners.pop(_identity(self._fd), None)
                # Closing alone would leave the lock with a child that was forked a moment ago.
                fcntl.flock(self._fd, fcntl.LOCK_UN)
                os.close(self._fd)

    def _write(self) -> None:
        body = msgspec.json.format(msgspec.json.encode(msgspec.structs.replace(self._me, parts=self._parts)))
        fresh = self._place / (FILE + ".new")
        try:
            fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            try:
                if os.write(fd, body) != len(body):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            finally:
                os.close(fd)
            os.replace(fresh, self._place / FILE)
        except OSError as error:
            with contextlib.suppress(OSError):
                fresh.unlink(missing_ok=True)
            kind = StoreFullError if error.errno in (errno.EFBIG, errno.ENOSPC, errno.EDQUOT) else StoreError
            fix = "Make room on that disk" if kind is StoreFullError else _WRITABLE
            raise kind(f"cannot write the store: {error.strerror}", where=str(self._place), fix=fix) from None

    def forget(self) -> None:
        """In a forked child: close the descriptor, so that the parent's death still frees the lock."""
        with contextlib.suppress(OSError):
            os.close(self._fd)


_owners: dict[tuple[int, int], Owner] = {}
_guard = threading.Lock()


def _after_fork() -> None:
    global _guard
    _guard = threading.Lock()
    for owner in _owners.values():
        owner.forget()
    _owners.clear()


os.register_at_fork(after_in_child=_after_fork)


def _identity(fd: int) -> tuple[int, int]:
    found = os.fstat(fd)
    return found.st_dev, found.st_ino


def _read(place: Path) -> _Record:
    # A torn or foreign file counts as empty: then the parts are verified.
    with contextlib.suppress(OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return msgspec.json.decode((place / FILE).read_bytes(), type=_Record)
    return _Record()


def last_use(place: Path, part: str) -> Part:
    """Return what ``owner.json`` says of a part (clean if it was never used), for readers."""
    return _read(place).parts.get(part, Part())


def _owned(place: Path, record: _Record) -> StoreOwnedError:
    who = f"process {record.pid} on {record.host} ({record.command})" if record.pid else "another process"
    # The file may contain anything: an impossible time must not hide the owner.
    with contextlib.suppress(OverflowError, ValueError, OSError):
        if record.pid:
            who += time.strftime(" since %Y-%m-%d %H:%M:%S", time.localtime(record.since))
    fix = "Close it there, or talk to that process instead; in Python, readonly=True reads beside it"
    return StoreOwnedError(f"the store is in use by {who}", where=str(place), fix=fix)


def attended(place: Path) -> bool:
    """Return True while some process, this one included, owns the store in ``place``."""
    try:
        fd = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(fd)
    return False


def claim(place: Path, part: str, *, boot: str | None = None, clock: Callable[[], float] = time.time) -> Owner:
    """Lock ``part`` of the store in folder ``place`` for writing, until `Owner.end`.

    Raises StoreOwnedError if another process, or this one, has it already; StoreError if the folder cannot be written.
    """
    with _guard:
        try:
            fd = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise StoreError(f"cannot open the store: {error.strerror}", where=str(place), fix=_WRITABLE) from None
        owner = _owners.get(_identity(fd))
        if owner is not None:
            os.close(fd)
            if part in owner.open:
                raise _owned(place, _read(place))
            owner.begin(part)
            return owner
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(fd)
            if isinstance(error, BlockingIOError):
                raise _owned(place, _read(place)) from None
            raise StoreError(f"cannot lock the store: {error.strerror}", where=str(place), fix=_WRITABLE) from None
        owner = Owner(place, fd, _read(place), boot_id() if boot is None else boot, clock)
        try:
            owner.begin(part)
        except BaseException:
            os.close(fd)
            raise
        _owners[_identity(fd)] = owner
        return owner

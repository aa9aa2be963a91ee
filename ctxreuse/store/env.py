"""One LMDB environment: opened safely, grown when full, read in short gated transactions, its errors in our words."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import lmdb

from ctxreuse.errors import StoreClosedError, StoreError, StoreFullError
from ctxreuse.store.gate import Gate

__all__ = ["CACHE_MAP", "DISK_ERRORS", "Env", "broken", "explain", "open_beside", "shortage"]

T = TypeVar("T")

#: Map of the cache of blocks, bytes: address space costs nothing, and a map that never grows never waits for readers.
CACHE_MAP = 1 << 40

#: A commit that ran out of room shows as any of these: LMDB reports a short write as EIO.
DISK_ERRORS = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT, errno.EIO)

_BROKEN = (
    lmdb.CorruptedError,
    lmdb.InvalidError,
    lmdb.PageNotFoundError,
    lmdb.VersionMismatchError,
    lmdb.IncompatibleError,
)
_MIN_MAP = 1 << 20
_GROW_WAIT = 10.0
_READERS = 510

# LMDB 0.9 data format 1: page header (16), magic, version, address, map size, two table records of 48, last page, txn.
_META = struct.Struct("<16xIIQQ48s48sQQ")
_META_MAGIC = 0xBEEFC0DE


def broken(error: BaseException) -> bool:
    """True if the error says that the file's content is damaged, and not that a disk is full or a name is wrong."""
    return isinstance(error, _BROKEN)


def shortage(path: Path) -> int:
    """Bytes by which ``path/data.mdb`` is shorter than its newest meta page says; touching them would be a SIGBUS.

    0 for a whole file, a missing one, or one whose meta pages cannot be read (then LMDB itself refuses it).
    """
    try:
        with open(path / "data.mdb", "rb") as file:
            head = file.read(1 << 17)
            size = file.seek(0, os.SEEK_END)
    except OSError:
        return 0
    newest, need = -1, 0
    psize = 4096
    for page in range(2):
        if len(head) < page * psize + _META.size:
            break
        magic, version, _, _, free, _, last, txn = _META.unpack_from(head, page * psize)
        if magic != _META_MAGIC or version != 1:
            break
        psize = int.from_bytes(free[:4], "little") or psize
        if txn > newest:
            newest, need = txn, (last + 1) * psize
    return max(0, need - size)


def explain(error: BaseException, path: Path) -> StoreError:
    """An LMDB error as ours."""
    code = getattr(error, "code", 0)
    if code in DISK_ERRORS:
        free = "unknown"
        with contextlib.suppress(OSError):
            free = f"{shutil.disk_usage(path).free / 1e6:.1f} MB"
        fix = f"Make room on that disk ({free} free) and repeat; what was acknowledged before is intact"
        return StoreFullError("the disk has no room left or failed to write", where=str(path), fix=fix)
    if code in (errno.EACCES, errno.EROFS, errno.EPERM):
        fix = "Use a folder that this user may write, or open the store with readonly=True"
        return StoreError("the store cannot be written by this user", where=str(path), fix=fix)
    if isinstance(error, lmdb.ReadersFullError):
        return StoreError(f"more than {_READERS} reads at once", where=str(path), fix="Close readers sooner")
    return StoreError(f"LMDB failed: {error}", where=str(path))


class Env:
    """An open environment with its tables. Any thread may read; writes take turns. Not usable in a forked child.

    ``durable``: every commit is on disk when ``write`` returns; else ``sync`` must be called. Growing the map needs a
    moment without readers in this process, which the gate arranges.
    """

    def __init__(
        self, path: Path, tables: Sequence[str], *, map_size: int, readonly: bool, durable: bool, lock: bool = True
    ) -> None:
        self.path, self.readonly = path, readonly
        self.gate = Gate()
        self._tables, self._durable, self._lock = tuple(tables), durable, lock
        self._write_lock = threading.Lock()
        self.pid = os.getpid()
        self._map_size = max(map_size, _MIN_MAP)
        self._env: Any = None
        self.tables: dict[str, Any] = {}
        self.hold: int | None = None
        self._open()

    def _open(self) -> None:
        size = self._map_size
        while True:
            try:
                self._env = lmdb.open(
                    str(self.path),
                    map_size=size,
                    max_dbs=len(self._tables) + 2,
                    max_readers=_READERS,
                    readonly=self.readonly,
                    create=not self.readonly,
                    sync=self._durable,
                    metasync=self._durable,
                    mode=0o600,
                    lock=self._lock,
                )
                break
            except lmdb.Error as error:
                # Some systems have less address space to give than the map asks for.
                if getattr(error, "code", 0) != errno.ENOMEM or size <= _MIN_MAP:
                    raise
                size //= 2
        try:
            self._map_size = size
            self._file = self._on_disk()
            self._env.reader_check()
            self.tables = {name: self._env.open_db(name.encode(), create=not self.readonly) for name in self._tables}
        except BaseException:
            self._env.close()
            raise

    def _on_disk(self) -> tuple[int, int] | None:
        """The file that the path leads to now; None if there is none."""
        try:
            found = os.stat(self.path / "data.mdb")
        except OSError:
            return None
        return found.st_dev, found.st_ino

    def _alive(self) -> Any:
        env = self._env
        if env is None:
            raise StoreClosedError("the store was closed", where=str(self.path))
        if os.getpid() != self.pid:
            fix = "Open the store in the child process itself"
            raise StoreError("the store was opened before a fork", where=str(self.path), fix=fix)
        return env

    @contextlib.contextmanager
    def read(self) -> Iterator[Any]:
        """A read transaction over the newest commit; its buffers die with the block. Raises StoreError."""
        for _ in range(8):
            self._alive()
            self.gate.enter()
            try:
                txn = self._alive().begin(buffers=True)
            except lmdb.MapResizedError:
                self.gate.leave()
                self._resize(0)
                continue
            except lmdb.ReadersFullError as error:
                self.gate.leave()
                # Slots of killed readers are freed only on demand.
                if not self._alive().reader_check():
                    raise explain(error, self.path) from None
                continue
            except BaseException as error:
                self.gate.leave()
                if isinstance(error, lmdb.Error):
                    raise explain(error, self.path) from None
                raise
            try:
                yield txn
            finally:
                txn.abort()
                self.gate.leave()
            return
        raise StoreError("the map keeps changing its size", where=str(self.path))

    def write(self, work: Callable[[Any], T]) -> T:
        """Run ``work(txn)`` in one transaction and commit; nothing of it stays if anything raises.

        ``work`` runs again after the map has grown. Raises lmdb.Error (see ``explain``) or what ``work`` raises;
        StoreError if it should be durable and the file was deleted or replaced: nobody would ever read it.
        """
        self._alive()
        if self._durable and self._on_disk() != self._file:
            fix = "Restore its folder from a backup, then open it again"
            raise StoreError(
                "the store's file was deleted or replaced while it was open", where=str(self.path), fix=fix
            )
        with self._write_lock:
            while True:
                try:
                    with self._alive().begin(write=True) as txn:
                        return work(txn)
                except lmdb.MapFullError:
                    self._resize(self._map_size * 2)
                except lmdb.MapResizedError:
                    self._resize(0)
                except lmdb.PanicError:
                    # A meta page could not be written: LMDB refuses all more until the environment is opened anew.
                    self._reopen()
                    raise

    def _resize(self, size: int) -> None:
        with self.gate.exclusive(_GROW_WAIT) as alone:
            if not alone:
                fix = "Keep reads short"
                raise StoreError("the map cannot grow while readers stay open", where=str(self.path), fix=fix)
            env = self._alive()
            try:
                env.set_mapsize(size)
            except lmdb.Error as error:
                self._swap()
                raise explain(error, self.path) from None
            self._map_size = env.info()["map_size"]

    def _reopen(self) -> None:
        with self.gate.exclusive(_GROW_WAIT) as alone:
            if alone:
                self._swap()

    def _swap(self) -> None:
        self._env.close()
        self._open()

    def sync(self) -> None:
        """Put all commits on disk. Raises lmdb.Error."""
        self._alive().sync(True)

    def free_readers(self) -> int:
        """Free the slots of readers that died; returns how many."""
        return int(self._alive().reader_check())

    def file_bytes(self) -> int:
        """Size of the data file."""
        with contextlib.suppress(OSError):
            return (self.path / "data.mdb").stat().st_size
        return 0

    def close(self, timeout: float = _GROW_WAIT) -> None:
        """Close; waits for reads that are still open. Raises StoreError if they stay. A second call does nothing."""
        if self._env is None:
            return
        if os.getpid() != self.pid:
            self._env = None
            return
        with self._write_lock, self.gate.exclusive(timeout) as alone:
            if not alone:
                fix = "End them before close(): their views would point nowhere"
                raise StoreError("the store has open reads", where=str(self.path), fix=fix)
            if self._env is not None:
                self._env.close()
                self._env = None
                if self.hold is not None:
                    os.close(self.hold)


def open_beside(path: Path, tables: Sequence[str], *, map_size: int) -> Env:
    """Open for reading, also where this user may not write the table of readers. Raises StoreError, lmdb.Error.

    Without a place in that table a writer could overwrite what is being read; so no writer may come as long as such a
    reader is there, and none may be there when it comes.
    """
    try:
        return Env(path, tables, map_size=map_size, readonly=True, durable=False)
    except lmdb.Error as error:
        if getattr(error, "code", 0) != errno.EACCES:
            raise
    hold = None
    try:
        hold = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        fcntl.flock(hold, fcntl.LOCK_SH | fcntl.LOCK_NB)
        env = Env(path, tables, map_size=map_size, readonly=True, durable=False, lock=False)
    except BaseException as error:
        if hold is not None:
            os.close(hold)
        if not isinstance(error, BlockingIOError):
            raise
        fix = "Let this user write lock.mdb, or wait until the owner has closed the store"
        raise StoreError("this user can read the store only while nobody writes it", where=str(path), fix=fix) from None
    env.hold = hold
    return env

"""One LMDB environment: opened safely, grown when full, read in short transactions, with errors that say what to do."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import lmdb

from ctxreuse.errors import StoreClosedError, StoreError, StoreFullError
from ctxreuse.kernels.dispatch import native as _native
from ctxreuse.store.lmdb.rwlock import MapLock

__all__ = ["CACHE_MAP", "DISK_ERRORS", "Env", "broken", "explain", "mapped_lists", "open_beside"]

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
#: An environment that writes has lists of 1 and 2 MiB, of which it needs a few pages; see `mapped_lists`.
_LISTS, _HEAP = 1 << 20, 32 << 20


@contextlib.contextmanager
def mapped_lists() -> Iterator[None]:
    """Open environments within it where others were closed before in this process.

    Their lists are mapped then, as those of the first ones were. From the heap, where the C library takes what is as
    large as anything that was freed before, LMDB's zeros would make 3 MB of memory of each.
    """
    _native.map_from(_LISTS)
    try:
        yield
    finally:
        _native.map_from(_HEAP)


def broken(error: BaseException) -> bool:
    """Return True if the error means that the file's content is damaged, not a full disk or a wrong name."""
    return isinstance(error, _BROKEN)


def explain(error: BaseException, path: Path) -> StoreError:
    """Return an LMDB error as a StoreError."""
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
    """An open environment with its tables. Any thread may read; writes are serialised. Not usable in a forked child.

    ``durable``: every commit is on disk when `write` returns; else call `sync`. Growing the map needs a moment without
    readers in this process, which the lock arranges.
    """

    def __init__(
        self,
        path: Path,
        tables: Sequence[str],
        *,
        map_size: int,
        readonly: bool,
        durable: bool,
        lock: bool = True,
        optional: Sequence[str] = (),
    ) -> None:
        """Open it; ``optional``: tables that a reader may not find, as programs before them wrote the file."""
        self.path, self.readonly = path, readonly
        self.map_lock = MapLock()
        self._tables, self._durable, self._lock = tuple(tables), durable, lock
        self._optional = tuple(optional)
        self._write_lock = threading.Lock()
        self.pid = os.getpid()
        self._map_size = max(map_size, _MIN_MAP)
        self._env: Any = None
        self.tables: dict[str, Any] = {}
        self.lock_fd: int | None = None
        if not readonly:
            shutil.rmtree(self.fresh, ignore_errors=True)  # of a process that ended while it rewrote the file
        self._open()

    @property
    def fresh(self) -> Path:
        """Folder of a new file that is to take the place of this one."""
        return self.path / "fresh"

    @property
    def map_size(self) -> int:
        """Bytes of address space."""
        return self._map_size

    def _open(self) -> None:
        size = self._map_size
        while True:
            try:
                self._env = lmdb.open(
                    str(self.path),
                    map_size=size,
                    max_dbs=len(self._tables) + len(self._optional) + 2,
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
            for name in self._optional:
                with contextlib.suppress(lmdb.NotFoundError):
                    self.tables[name] = self._env.open_db(name.encode(), create=not self.readonly)
        except BaseException:
            self._env.close()
            raise

    def _on_disk(self) -> tuple[int, int] | None:
        """Return the identity of the file at the path now; None if there is none."""
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
        """Open a read transaction over the newest commit; its buffers are valid inside. Raises StoreError."""
        for _ in range(8):
            self._alive()
            if self.readonly and self._on_disk() != self._file:
                self._reopen()  # its owner rewrote the file
            self.map_lock.enter()
            try:
                txn = self._alive().begin(buffers=True)
            except lmdb.MapResizedError:
                self.map_lock.leave()
                self._resize(0)
                continue
            except lmdb.ReadersFullError as error:
                self.map_lock.leave()
                # Slots of killed readers are freed only on demand.
                if not self._alive().reader_check():
                    raise explain(error, self.path) from None
                continue
            except BaseException as error:
                self.map_lock.leave()
                if isinstance(error, lmdb.Error):
                    raise explain(error, self.path) from None
                raise
            try:
                yield txn
            finally:
                txn.abort()
                self.map_lock.leave()
            return
        raise StoreError("the map keeps changing its size", where=str(self.path))

    def write(self, work: Callable[[Any], T]) -> T:
        """Run ``work(txn)`` in one transaction and commit; nothing of it stays if anything raises.

        ``work`` runs again after the map has grown. Raises lmdb.Error (see `explain`) or what ``work`` raises;
        StoreError if commits are durable and the file was deleted or replaced: it would never be read.
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
                    # A meta page could not be written: LMDB refuses everything until the environment is reopened.
                    self._reopen()
                    raise

    def _resize(self, size: int) -> None:
        with self.map_lock.exclusive(_GROW_WAIT) as alone:
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
        with self.map_lock.exclusive(_GROW_WAIT) as alone:
            if alone:
                self._swap()

    def _swap(self) -> None:
        self._env.close()
        self._open()

    def all_tables(self, txn: Any) -> dict[str, Any]:
        """Return all tables of the file by name, those that this program does not know included."""
        names = [bytes(name).decode() for name in txn.cursor().iternext(values=False)]
        return {name: self.tables.get(name) or self._env.open_db(name.encode(), txn, create=False) for name in names}

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Hold back all other writes of this process."""
        self._alive()
        with self._write_lock:
            yield

    def replace(self, file: Path) -> None:
        """Put another data file in the place of this one and go on with it, inside `writing`.

        Raises StoreError if reads stay open, OSError, lmdb.Error.
        """
        fd = os.open(self.path, os.O_RDONLY)
        try:
            with self.map_lock.exclusive(_GROW_WAIT) as alone:
                if not alone:
                    fix = "Keep reads short"
                    raise StoreError("the file cannot be replaced while it is read", where=str(self.path), fix=fix)
                self._alive().close()
                # The table of readers goes first: with its number of the last transaction the new file has no content.
                (self.path / "lock.mdb").unlink(missing_ok=True)
                os.replace(file, self.path / "data.mdb")
                os.fsync(fd)
                with mapped_lists():
                    self._open()
        finally:
            os.close(fd)

    def sync(self) -> None:
        """Sync all commits to disk. Raises lmdb.Error."""
        self._alive().sync(True)

    def free_readers(self) -> int:
        """Free the slots of readers that died. Returns the number."""
        return int(self._alive().reader_check())

    def file_bytes(self) -> int:
        """Return the size of the data file."""
        with contextlib.suppress(OSError):
            return (self.path / "data.mdb").stat().st_size
        return 0

    def close(self, timeout: float = _GROW_WAIT) -> None:
        """Close, after open reads end. Raises StoreError if they stay open. A second call does nothing."""
        if self._env is None:
            return
        if os.getpid() != self.pid:
            self._env = None
            return
        with self._write_lock, self.map_lock.exclusive(timeout) as alone:
            if not alone:
                fix = "End them before close(): their views would point nowhere"
                raise StoreError("the store has open reads", where=str(self.path), fix=fix)
            if self._env is not None:
                self._env.close()
                self._env = None
                if self.lock_fd is not None:
                    os.close(self.lock_fd)


def open_beside(path: Path, tables: Sequence[str], *, map_size: int, optional: Sequence[str] = ()) -> Env:
    """Open for reading, also where this user may not write the table of readers. Raises StoreError, lmdb.Error.

    Without a slot in that table a writer could overwrite pages that are being read; so such a reader locks out writers,
    and cannot open while there is one.
    """
    try:
        return Env(path, tables, map_size=map_size, readonly=True, durable=False, optional=optional)
    except lmdb.Error as error:
        if getattr(error, "code", 0) != errno.EACCES:
            raise
    lock_fd = None
    try:
        lock_fd = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        fcntl.flock(lock_fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        env = Env(path, tables, map_size=map_size, readonly=True, durable=False, lock=False, optional=optional)
    except BaseException as error:
        if lock_fd is not None:
            os.close(lock_fd)
        if not isinstance(error, BlockingIOError):
            raise
        fix = "Let this user write lock.mdb, or wait until the owner has closed the store"
        raise StoreError("this user can read the store only while nobody writes it", where=str(path), fix=fix) from None
    env.lock_fd = lock_fd
    return env

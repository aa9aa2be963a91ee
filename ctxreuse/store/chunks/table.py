"""Tables of the chunk index: a bounded map in order of last use, in memory or in an LMDB environment of its own."""

from __future__ import annotations

import logging
import shutil
import struct
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import lmdb
import xxhash

from ctxreuse.errors import StoreError
from ctxreuse.identity.keys import KEY_BYTES
from ctxreuse.private import write_private
from ctxreuse.store.lmdb.env import Env, broken, open_beside
from ctxreuse.store.lmdb.owner import attended
from ctxreuse.store.lmdb.recovery import shortage, sound

__all__ = ["DiskTable", "MemoryTable", "Table"]

log = logging.getLogger(__name__)

#: ``merged(key, value or None)``: the new value, None for none. It may be called twice for one change.
Merge: TypeAlias = Callable[[bytes, bytes | None], bytes | None]

_TABLES = ("homes", "order", "info")
_FORMAT = b"ctxreuse chunks 1"
_MAP = 1 << 28
#: File beside the data with its checksum, except while it is open for writing.
_SUM = "sum"
_USED = struct.Struct(">Q")
_MOST_USED = 1 << 62


class Table(Protocol):
    """Values by 32-byte key. Not thread-safe: its index serialises the calls. Never raises for a disk error."""

    def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """Return the value of each key; counts as a use."""

    def change(self, keys: Sequence[bytes], merged: Merge) -> bool:
        """Set each key to the value that ``merged`` returns, in one go; False if nothing was changed."""

    def items(self) -> Iterator[tuple[bytes, bytes]]:
        """Iterate over all keys and values."""

    def __len__(self) -> int: ...

    def check(self) -> None:
        """Raise AssertionError where bound or order are wrong."""

    def close(self) -> None:
        """Close the files; the table is empty then."""


class MemoryTable:
    """A `Table` that ends with the process."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._values: OrderedDict[bytes, bytes] = OrderedDict()

    def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        found = [self._values.get(key) for key in keys]
        for key, value in zip(keys, found):
            if value is not None:
                self._values.move_to_end(key)
        return found

    def change(self, keys: Sequence[bytes], merged: Merge) -> bool:
        for key in keys:
            value = merged(key, self._values.pop(key, None))
            if value is not None:
                self._values[key] = value
        while len(self._values) > self._most:
            self._values.popitem(last=False)
        return self._most > 0

    def items(self) -> Iterator[tuple[bytes, bytes]]:
        return iter(self._values.items())

    def __len__(self) -> int:
        return len(self._values)

    def check(self) -> None:
        assert len(self._values) <= self._most, f"{len(self._values)} chunks of at most {self._most}"

    def close(self) -> None:
        self._values.clear()
        self._most = 0


class DiskTable:
    """A `Table` in an environment: ``homes`` has a counter of last use before each value, ``order`` the keys by that.

    A read renews values that are older than most, with the next change: the order need not be exact.
    """

    def __init__(self, env: Env, most: int) -> None:
        self._env: Env | None = env
        self._most = most
        self._aged: dict[bytes, None] = {}
        self._failed = False
        with env.read() as txn, txn.cursor(db=env.tables["order"]) as cursor:
            last = bytes(cursor.key()) if cursor.last() else _USED.pack(0)
        self._sequence = _USED.unpack(last)[0] if len(last) == _USED.size else _MOST_USED + 1
        if self._sequence > _MOST_USED:
            raise StoreError("its order of use makes no sense", where=str(env.path))

    @classmethod
    def open(cls, path: Path, most: int, *, readonly: bool, crashed: bool) -> DiskTable | None:
        """Open the table in folder ``path``; None, with a warning, if that is impossible. See `ChunkIndex.open`."""
        if readonly:
            try:
                if not (path / "data.mdb").exists() or (not attended(path.parent) and _damage(path, crashed=True)):
                    return None
                return cls._ours(open_beside(path, _TABLES, map_size=_MAP), most)
            except (lmdb.Error, StoreError, OSError) as error:
                log.warning("the chunk index at %s cannot be read: %s", path, error)
                return None
        wrong = _damage(path, crashed=crashed)
        for _ in range(2):
            try:
                if wrong:
                    log.warning("the chunk index at %s is damaged and starts empty: %s", path, wrong)
                    shutil.rmtree(path, ignore_errors=True)
                path.mkdir(mode=0o700, exist_ok=True)
                (path / _SUM).unlink(missing_ok=True)
                return cls._ours(Env(path, _TABLES, map_size=_MAP, readonly=False, durable=False), most)
            except (lmdb.Error, StoreError, OSError) as error:
                wrong = str(error)
        log.warning("the chunk index at %s cannot be used and is kept in memory: %s", path, wrong)
        return None

    @classmethod
    def _ours(cls, env: Env, most: int) -> DiskTable:
        try:
            with env.read() as txn:
                found = txn.get(b"format", db=env.tables["info"])
                found = bytes(found) if found is not None else None
                empty = not txn.stat(env.tables["homes"])["entries"]
            if found is None and empty and not env.readonly:
                env.write(lambda txn: txn.put(b"format", _FORMAT, db=env.tables["info"]))
            elif found != _FORMAT:
                raise StoreError("it has another format", where=str(env.path))
            return cls(env, most)
        except BaseException:
            env.close()
            raise

    def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        env = self._env
        if env is None or not keys:
            return [None] * len(keys)
        try:
            with env.read() as txn:
                table = env.tables["homes"]
                raws = [bytes(raw) if (raw := txn.get(key, db=table)) is not None else b"" for key in keys]
        except (lmdb.Error, StoreError) as error:
            self._note_error(error)
            return [None] * len(keys)
        if not env.readonly:
            recent = self._sequence - self._most // 4
            for key, raw in zip(keys, raws):
                if len(raw) > _USED.size and _USED.unpack_from(raw)[0] < recent:
                    self._aged[key] = None
        return [raw[_USED.size :] if len(raw) > _USED.size else None for raw in raws]

    def change(self, keys: Sequence[bytes], merged: Merge) -> bool:
        env = self._env
        if env is None or env.readonly:
            return False
        renewed = [key for key in self._aged if key not in set(keys)]

        def work(txn: Any) -> int:
            sequence = self._sequence
            for i, key in enumerate([*renewed, *keys]):
                raw = txn.pop(key, db=homes)
                if raw is not None and len(raw) >= _USED.size:
                    self._unorder(txn, raw[: _USED.size], key)
                value = raw[_USED.size :] if raw is not None and len(raw) > _USED.size else None
                value = merged(key, value) if i >= len(renewed) else value
                if value is not None:
                    sequence += 1
                    used = _USED.pack(sequence)
                    txn.put(key, used + value, db=homes)
                    txn.put(used, key, db=order)
            self._shrink(txn)
            return sequence

        homes, order = env.tables["homes"], env.tables["order"]
        try:
            self._sequence = env.write(work)
        except (lmdb.Error, StoreError) as error:
            self._note_error(error)
            return False
        self._aged.clear()
        self._failed = False
        return True

    def _unorder(self, txn: Any, used: bytes, key: bytes) -> None:
        assert self._env is not None
        order = self._env.tables["order"]
        if txn.get(used, db=order) == key:
            txn.delete(used, db=order)

    def _shrink(self, txn: Any) -> None:
        """Delete what was used least recently, down to the bound."""
        assert self._env is not None
        homes, order = self._env.tables["homes"], self._env.tables["order"]
        over = txn.stat(homes)["entries"] - self._most
        with txn.cursor(db=order) as cursor:
            while over > 0 and cursor.first():
                key = bytes(cursor.value())
                cursor.delete()
                over -= len(key) == KEY_BYTES and txn.delete(key, db=homes)
        if over > 0:  # entries without an order: there is no telling which to spare
            txn.drop(homes, delete=False)

    def items(self) -> Iterator[tuple[bytes, bytes]]:
        env = self._env
        if env is None:
            return
        with env.read() as txn, txn.cursor(db=env.tables["homes"]) as cursor:
            found = [(bytes(key), bytes(raw)[_USED.size :]) for key, raw in cursor]
        yield from found

    def __len__(self) -> int:
        env = self._env
        if env is None:
            return 0
        try:
            with env.read() as txn:
                return int(txn.stat(env.tables["homes"])["entries"])
        except (lmdb.Error, StoreError) as error:
            self._note_error(error)
            return 0

    def check(self) -> None:
        env = self._env
        if env is None:
            return
        with env.read() as txn:
            ordered = {bytes(used): bytes(key) for used, key in txn.cursor(db=env.tables["order"])}
            values = {bytes(key): bytes(raw) for key, raw in txn.cursor(db=env.tables["homes"])}
        assert env.readonly or len(values) <= self._most, f"{len(values)} chunks of at most {self._most}"
        assert ordered == {raw[: _USED.size]: key for key, raw in values.items()}, "the order of use is wrong"
        assert not ordered or env.readonly or _USED.unpack(max(ordered))[0] <= self._sequence, "numbers come again"

    def _note_error(self, error: lmdb.Error | StoreError) -> None:
        env = self._env
        if not self._failed:  # a full disk fails each write until there is room: one warning is enough
            log.warning("the chunk index failed: %s", error)
        self._failed = True
        if env is not None and not env.readonly and broken(error):
            # It stays damaged; the next to open it finds nothing.
            self.close()
            shutil.rmtree(env.path, ignore_errors=True)

    def close(self) -> None:
        env, self._env = self._env, None
        if env is None:
            return
        try:
            if not env.readonly:
                env.sync()
            env.close()
            if not env.readonly:
                write_private(env.path / _SUM, _sum(env.path))
        except (lmdb.Error, StoreError, OSError) as error:
            log.warning("the chunk index was not closed cleanly: %s", error)


def _damage(path: Path, *, crashed: bool) -> str:
    """Return what is wrong with the files in a folder, "" if nothing.

    LMDB trusts what it reads and may end the process for it. So a closed file is compared with the checksum beside it
    (10 GB/s), and one whose owner died is walked page by page (5 µs a chunk), which finds most damage.
    """
    try:
        if not (path / "data.mdb").exists():
            return ""
        if (path / _SUM).exists():
            return "" if (path / _SUM).read_bytes() == _sum(path) else "its file was changed since it was closed"
        if not crashed:
            return "it was not closed, and the machine went down"
        return "pages are missing at its end" if shortage(path) else sound(path)
    except OSError as error:
        return str(error)


def _sum(path: Path) -> bytes:
    """Return the XXH3-128 of the data file. Raises OSError."""
    digest = xxhash.xxh3_128()
    with open(path / "data.mdb", "rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.digest()

"""The chunk index: by content, where rows of chunks lie in the blocks of a store; a hint that may be lost any time."""

from __future__ import annotations

import os
import struct
import threading
import weakref
from collections.abc import Iterable, Sequence
from pathlib import Path

from ctxreuse.keys import KEY_BYTES
from ctxreuse.reuse.home import Home
from ctxreuse.store.chunks_table import DiskTable, MemoryTable, Table

__all__ = ["FOLDER", "HOMES", "ChunkIndex", "Home"]

#: In the store's folder.
FOLDER = "chunks"
#: Homes that are remembered of one chunk.
HOMES = 4

_HEAD = struct.Struct("<QHHB")
_MOST_KEYS, _MOST_AT = 255, 1 << 40
# Forgotten homes that wait to be written; more are written at once.
_WAITING = 256


class ChunkIndex:
    """Homes by chunk key (`keys.chunk_key`), the least recently used chunks forgotten beyond a bound.

    Use ``open``. Any thread may call. Nothing raises for what the disk does: an index that fails is empty. Whoever
    follows a home compares what lies there; see `reuse.plan`.
    """

    def __init__(self, table: Table) -> None:
        _opened.add(self)
        self._table = table
        self._lock = threading.Lock()
        self._lost: dict[bytes, set[Home]] = {}

    @classmethod
    def open(
        cls,
        path: Path | None = None,
        *,
        most: int = 1 << 16,
        readonly: bool = False,
        crashed: bool = False,
    ) -> ChunkIndex:
        """The index in folder ``path``, created if need be; in memory only where ``path`` is None or cannot be used.

        ``most``: chunks that are kept, 300 to 500 bytes each. ``readonly``: beside the process that writes it; changes
        are then kept in memory or not at all. ``crashed``: whoever wrote it last died without closing it, which LMDB
        survives as long as the machine stays up. What is damaged begins anew.
        """
        if path is None:
            return cls(MemoryTable(most))
        table = DiskTable.open(path, most, readonly=readonly, crashed=crashed)
        return cls(table if table is not None else MemoryTable(most))

    def homes(self, chunk_key: bytes) -> list[Home]:
        """Where rows of this chunk lie, newest first, at most ``HOMES``; [] if that is not known. Counts as a use."""
        return self.homes_many([chunk_key])[0]

    def homes_many(self, chunk_keys: Sequence[bytes]) -> list[list[Home]]:
        """As `homes` for each key, from one moment. About 3 µs each."""
        with self._lock:
            found = [_decode(raw) if raw is not None else [] for raw in self._table.get_many(chunk_keys)]
            if self._lost:
                for i, key in enumerate(chunk_keys):
                    if key in self._lost:
                        found[i] = [home for home in found[i] if home not in self._lost[key]]
        return found

    def add(self, chunk_key: bytes, home: Home) -> int:
        """Note one home; see `add_many`."""
        return self.add_many([(chunk_key, home)])

    def add_many(self, homes: Iterable[tuple[bytes, Home]]) -> int:
        """Note homes in one go, those that are known as the newest again; returns how many could be noted.

        Of more than ``HOMES`` of a chunk the oldest goes, but not the only one that did not stand at position 0.
        """
        fresh: dict[bytes, list[Home]] = {}
        count = 0
        for key, home in homes:
            if len(key) == KEY_BYTES and _sound(home):
                fresh.setdefault(key, []).append(home)
                count += 1
        if not fresh:
            return 0
        with self._lock:
            for key, known in fresh.items():
                if key in self._lost:
                    self._lost[key].difference_update(known)
            written = self._write(fresh)
        return count if written else 0

    def forget(self, chunk_key: bytes, home: Home) -> None:
        """Never give this home again, unless it is added again."""
        self.forget_many([(chunk_key, home)])

    def forget_many(self, homes: Iterable[tuple[bytes, Home]]) -> None:
        """As `forget`; quick: it is written with what is added next."""
        with self._lock:
            for key, home in homes:
                self._lost.setdefault(key, set()).add(home)
            if len(self._lost) > _WAITING:
                self._write({})

    def _write(self, fresh: dict[bytes, list[Home]]) -> bool:
        lost, self._lost = self._lost, {}

        def merged(key: bytes, raw: bytes | None) -> bytes | None:
            known = _decode(raw) if raw is not None else []
            gone = lost.get(key, set())
            kept = _newest(fresh.get(key, ()), [home for home in known if home not in gone])
            return _encode(kept) if kept else None

        return self._table.change([*fresh, *(key for key in lost if key not in fresh)], merged)

    def __len__(self) -> int:
        """Chunks that are known."""
        with self._lock:
            return len(self._table)

    def check(self) -> None:
        """Raises AssertionError where the index breaks its own rules. O(chunks)."""
        with self._lock:
            self._table.check()
            for key, raw in self._table.items():
                homes = _decode(raw)
                assert len(key) == KEY_BYTES, f"a key of {len(key)} bytes"
                assert 0 < len(homes) <= HOMES, f"{key.hex()[:12]} has {len(homes)} homes"
                assert len(set(homes)) == len(homes), f"{key.hex()[:12]} has a home twice"
                assert _encode(homes) == raw, f"{key.hex()[:12]} is not as it was written"

    def close(self) -> None:
        """Write what waits and close; a second call does nothing. Then the index is empty and takes nothing."""
        with self._lock:
            if self._lost:
                self._write({})
            self._table.close()


_opened: weakref.WeakSet[ChunkIndex] = weakref.WeakSet()


def _abandon() -> None:
    # In a forked child the lock may be held by a thread that is not there, and LMDB's files are its parent's.
    for index in _opened:
        index._lock, index._table = threading.Lock(), MemoryTable(0)


os.register_at_fork(after_in_child=_abandon)


def _newest(fresh: Sequence[Home], known: Sequence[Home]) -> list[Home]:
    """The homes to keep, newest first."""
    homes: list[Home] = []
    for home in [*reversed(fresh), *known]:
        # The same place again, of which more or less was stored the other time.
        at = next((i for i, other in enumerate(homes) if other.first == home.first and _same(other, home)), None)
        if at is None:
            homes.append(home)
        elif (home.count, len(home.keys)) > (homes[at].count, len(homes[at].keys)):
            homes[at] = home
    while len(homes) > HOMES:
        behind = [i for i, home in enumerate(homes) if home.first]
        homes.pop(-2 if behind == [len(homes) - 1] else -1)
    return homes


def _same(one: Home, two: Home) -> bool:
    length = min(len(one.keys), len(two.keys))
    return one.at == two.at and one.keys[:length] == two.keys[:length]


def _sound(home: Home) -> bool:
    sizes = 0 <= home.row < 1 << 16 and 0 < home.count < 1 << 16 and 0 <= home.at < _MOST_AT
    return sizes and 0 < len(home.keys) <= _MOST_KEYS and all(len(key) == KEY_BYTES for key in home.keys)


def _encode(homes: Sequence[Home]) -> bytes:
    return b"".join(_HEAD.pack(h.at, h.row, h.count, len(h.keys)) + b"".join(h.keys) for h in homes)


def _decode(raw: bytes) -> list[Home]:
    """The homes of a value; [] for bytes that are none."""
    homes: list[Home] = []
    at, end, head = 0, len(raw), _HEAD.size
    while at < end:
        if end - at < head or len(homes) == HOMES:
            return []
        position, row, count, keys = _HEAD.unpack_from(raw, at)
        at += head
        until = at + keys * KEY_BYTES
        if not count or not 0 < keys <= _MOST_KEYS or until > end or position >= _MOST_AT:
            return []
        homes.append(Home(tuple([raw[i : i + KEY_BYTES] for i in range(at, until, KEY_BYTES)]), row, count, position))
        at = until
    return homes

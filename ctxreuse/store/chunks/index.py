"""The chunk index: places of chunks in the blocks of a store, by content; a hint that may be lost any time."""

from __future__ import annotations

import os
import struct
import threading
import weakref
from collections.abc import Iterable, Sequence
from pathlib import Path

from ctxreuse.identity.keys import KEY_BYTES
from ctxreuse.reuse.chunking import ChunkLocation
from ctxreuse.store.chunks.table import DiskTable, MemoryTable, Table

__all__ = ["FOLDER", "MOST_LOCATIONS", "ChunkIndex", "ChunkLocation", "chunk_limit"]

#: In the store's folder.
FOLDER = "chunks"
#: Locations of one chunk, at most.
MOST_LOCATIONS = 4

_HEAD = struct.Struct("<QHHB")
_MOST_KEYS, _MOST_AT = 255, 1 << 40
#: Forgotten locations that wait to be written with the next change.
_WAITING = 256


def chunk_limit(capacity: int) -> int:
    """Return how many chunks a store of so many bytes knows: all that fit, as long as a token takes 2 KiB."""
    return max(1024, min(1 << 18, capacity >> 17))


class ChunkIndex:
    """Locations by chunk key (`keys.chunk_key`) of a bounded number of chunks, the most recently used.

    Use `open`. Any thread may call. Never raises for a disk error: an index that fails is empty. Compare the token ids
    at a location before use; see `reuse.plan`.
    """

    def __init__(self, table: Table) -> None:
        _opened.add(self)
        self._table = table
        self._lock = threading.Lock()
        self._lost: dict[bytes, set[ChunkLocation]] = {}

    @classmethod
    def open(
        cls,
        path: Path | None = None,
        *,
        most: int = 1 << 16,
        readonly: bool = False,
        crashed: bool = False,
    ) -> ChunkIndex:
        """Open the index in folder ``path``, created if need be; what is damaged is deleted.

        Args:
            path: None: in memory only, as where the path cannot be used.
            most: chunks, 300 to 500 bytes each.
            readonly: beside the process that writes it; changes are kept in memory or lost.
            crashed: its last owner died without closing it, which LMDB survives as long as the machine stays up.
        """
        if path is None:
            return cls(MemoryTable(most))
        table = DiskTable.open(path, most, readonly=readonly, crashed=crashed)
        return cls(table if table is not None else MemoryTable(most))

    def locations(self, chunk_key: bytes) -> list[ChunkLocation]:
        """Return the known locations of a chunk, newest first, at most ``MOST_LOCATIONS``. Counts as a use."""
        return self.locations_many([chunk_key])[0]

    def locations_many(self, chunk_keys: Sequence[bytes]) -> list[list[ChunkLocation]]:
        """Return the locations of each chunk, from one moment. About 3 µs each."""
        with self._lock:
            found = [_decode(raw) if raw is not None else [] for raw in self._table.get_many(chunk_keys)]
            if self._lost:
                for i, key in enumerate(chunk_keys):
                    if key in self._lost:
                        found[i] = [location for location in found[i] if location not in self._lost[key]]
        return found

    def add(self, chunk_key: bytes, location: ChunkLocation) -> int:
        """Add one location; see `add_many`."""
        return self.add_many([(chunk_key, location)])

    def add_many(self, locations: Iterable[tuple[bytes, ChunkLocation]]) -> int:
        """Add locations; known ones become the newest again. Returns the number added.

        Of more than ``MOST_LOCATIONS`` of a chunk the oldest goes, except the only one that is not at position 0.
        """
        fresh: dict[bytes, list[ChunkLocation]] = {}
        count = 0
        for key, location in locations:
            if len(key) == KEY_BYTES and _sound(location):
                fresh.setdefault(key, []).append(location)
                count += 1
        if not fresh:
            return 0
        with self._lock:
            for key, known in fresh.items():
                if key in self._lost:
                    self._lost[key].difference_update(known)
            written = self._write(fresh)
        return count if written else 0

    def forget(self, chunk_key: bytes, location: ChunkLocation) -> None:
        """Remove one location."""
        self.forget_many([(chunk_key, location)])

    def forget_many(self, locations: Iterable[tuple[bytes, ChunkLocation]]) -> None:
        """Remove locations; quick, as they are written with the next addition."""
        with self._lock:
            for key, location in locations:
                self._lost.setdefault(key, set()).add(location)
            if len(self._lost) > _WAITING:
                self._write({})

    def _write(self, fresh: dict[bytes, list[ChunkLocation]]) -> bool:
        lost, self._lost = self._lost, {}

        def merged(key: bytes, raw: bytes | None) -> bytes | None:
            known = _decode(raw) if raw is not None else []
            removed = lost.get(key, set())
            kept = _newest(fresh.get(key, ()), [location for location in known if location not in removed])
            return _encode(kept) if kept else None

        return self._table.change([*fresh, *(key for key in lost if key not in fresh)], merged)

    def __len__(self) -> int:
        """Number of chunks."""
        with self._lock:
            return len(self._table)

    def check(self) -> None:
        """Raise AssertionError where the index is inconsistent. O(chunks)."""
        with self._lock:
            self._table.check()
            for key, raw in self._table.items():
                locations = _decode(raw)
                assert len(key) == KEY_BYTES, f"a key of {len(key)} bytes"
                assert 0 < len(locations) <= MOST_LOCATIONS, f"{key.hex()[:12]} has {len(locations)} locations"
                assert len(set(locations)) == len(locations), f"{key.hex()[:12]} has a location twice"
                assert _encode(locations) == raw, f"{key.hex()[:12]} is not as it was written"

    def close(self) -> None:
        """Write what waits and close; the index is empty then. A second call does nothing."""
        with self._lock:
            if self._lost:
                self._write({})
            self._table.close()


_opened: weakref.WeakSet[ChunkIndex] = weakref.WeakSet()


def _abandon() -> None:
    # In a forked child the lock may be owned by a thread that is not there, and LMDB's files are its parent's.
    for index in _opened:
        index._lock, index._table = threading.Lock(), MemoryTable(0)


os.register_at_fork(after_in_child=_abandon)


def _newest(fresh: Sequence[ChunkLocation], known: Sequence[ChunkLocation]) -> list[ChunkLocation]:
    """Return the locations to keep, newest first."""
    locations: list[ChunkLocation] = []
    for location in [*reversed(fresh), *known]:
        # The same place again, of which more or less was stored before.
        at = next(
            (i for i, other in enumerate(locations) if other.first == location.first and _same(other, location)), None
        )
        if at is None:
            locations.append(location)
        elif (location.count, len(location.keys)) > (locations[at].count, len(locations[at].keys)):
            locations[at] = location
    while len(locations) > MOST_LOCATIONS:
        behind = [i for i, location in enumerate(locations) if location.first]
        locations.pop(-2 if behind == [len(locations) - 1] else -1)
    return locations


def _same(one: ChunkLocation, two: ChunkLocation) -> bool:
    length = min(len(one.keys), len(two.keys))
    return one.at == two.at and one.keys[:length] == two.keys[:length]


def _sound(location: ChunkLocation) -> bool:
    sizes = 0 <= location.row < 1 << 16 and 0 < location.count < 1 << 16 and 0 <= location.at < _MOST_AT
    return sizes and 0 < len(location.keys) <= _MOST_KEYS and all(len(key) == KEY_BYTES for key in location.keys)


def _encode(locations: Sequence[ChunkLocation]) -> bytes:
    return b"".join(_HEAD.pack(h.at, h.row, h.count, len(h.keys)) + b"".join(h.keys) for h in locations)


def _decode(raw: bytes) -> list[ChunkLocation]:
    """Decode locations; [] for malformed bytes."""
    locations: list[ChunkLocation] = []
    at, end, head = 0, len(raw), _HEAD.size
    while at < end:
        if end - at < head or len(locations) == MOST_LOCATIONS:
            return []
        position, row, count, keys = _HEAD.unpack_from(raw, at)
        at += head
        until = at + keys * KEY_BYTES
        if not count or not 0 < keys <= _MOST_KEYS or until > end or position >= _MOST_AT:
            return []
        locations.append(
            ChunkLocation(tuple([raw[i : i + KEY_BYTES] for i in range(at, until, KEY_BYTES)]), row, count, position)
        )
        at = until
    return locations

"""What a store of blocks contains: from memory in the process that writes it, from the newest commit in others."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence

import lmdb

from ctxreuse.errors import StoreError
from ctxreuse.store.blocks.index import Index
from ctxreuse.store.blocks.tables import lookup, match_records, records
from ctxreuse.store.lmdb.env import Env
from ctxreuse.store.lmdb.records import Record
from ctxreuse.store.runs import ContextRuns, tree_runs
from ctxreuse.store.types import Entry, Holding
from ctxreuse.tree import Match, Node

__all__ = ["Contents"]

#: Entries that `Contents.walk` reads at once.
_WALKED = 1024


class Contents:
    """See `Store`, whose methods these are. Thread-safe by ``lock``, the store's; changes nothing.

    With ``readonly`` the index is empty, and the disk answers; ``note_error`` gets what it fails with.
    """

    def __init__(
        self,
        env: Env,
        index: Index,
        lock: threading.RLock,
        note_error: Callable[[BaseException], None],
        *,
        readonly: bool,
    ) -> None:
        self._env, self._index, self.lock = env, index, lock
        self._note_error, self._readonly = note_error, readonly

    def match(self, keys: Sequence[bytes], max_kl: float | None = None) -> Match:
        if self._readonly:
            return match_records(self._lookup(keys), max_kl)
        with self.lock:
            return self._index.tree.match(keys, max_kl)

    def holdings(self, keys: Sequence[bytes]) -> list[Holding | None]:
        """Return what is stored under each key, or None. Pure."""
        if self._readonly:
            return [_holding(record) for record in self._lookup(keys, fill=True)]
        with self.lock:
            return [_holding(self._index.tree.get(key)) for key in keys]

    def walk(self) -> Iterator[Entry]:
        if self._readonly:
            found = sorted(self._records(), key=lambda row: row[1].depth)
            return iter([_entry_of_record(key, record) for key, record in found if record.nbytes])
        return self._walk()

    def _walk(self) -> Iterator[Entry]:
        tree = self._index.tree
        with self.lock:
            places = [node.place for node in sorted(tree, key=lambda node: node.depth)]
        for at in range(0, len(places), _WALKED):
            with self.lock:
                nodes = [tree.at(place) for place in places[at : at + _WALKED] if tree.has(place)]
                entries = [_entry_of_node(node) for node in nodes if node.nbytes]
            yield from entries

    def runs(self, keys: Sequence[bytes] = ()) -> tuple[ContextRuns, list[int]]:
        """See `tree_runs`; of the process that writes only."""
        with self.lock:
            return tree_runs(self._index.tree, keys)

    def recent(self) -> list[bytes]:
        if self._readonly:
            return [key for key, _ in sorted(self._records(), key=lambda row: -row[1].used)]
        with self.lock:
            # What is being evicted has left the tree and not yet the order.
            return [key for key in self._index.policy.order() if key in self._index.tree][::-1]

    def entries(self, keys: Sequence[bytes]) -> list[Entry | None]:
        if self._readonly:
            found = zip(keys, self._lookup(keys, fill=True))
            return [_entry_of_record(key, r) if r is not None and r.nbytes else None for key, r in found]
        with self.lock:
            nodes = [self._index.tree.get(key) for key in keys]
            return [_entry_of_node(node) if node is not None and node.nbytes else None for node in nodes]

    def _lookup(self, keys: Sequence[bytes], fill: bool = False) -> list[Record | None]:
        """The records of ``keys``; none if the disk fails, or with ``fill`` None for each key."""
        try:
            return lookup(self._env, keys)
        except (lmdb.Error, StoreError, ValueError) as error:
            self._note_error(error)
            return [None] * len(keys) if fill else []

    def _records(self) -> list[tuple[bytes, Record]]:
        try:
            return list(records(self._env))
        except (lmdb.Error, StoreError, ValueError) as error:
            self._note_error(error)
            return []


def _holding(found: Node | Record | None) -> Holding | None:
    if found is None:
        return None
    split = isinstance(found, Node) and found.children > 0
    state = found.state_level if found.state_nbytes else ""
    return Holding(found.tokens, found.level if found.nbytes else "", state, split)


def _entry_of_node(node: Node) -> Entry:
    row = node.row
    place = row.key, row.parent, row.tokens, row.depth, row.nbytes
    return Entry(*place, row.state_nbytes > 0, row.kind.level, row.kind.state_level)


def _entry_of_record(key: bytes, record: Record) -> Entry:
    place = key, record.parent, record.tokens, record.depth, record.nbytes
    return Entry(*place, record.state_nbytes > 0, record.level, record.state_level)

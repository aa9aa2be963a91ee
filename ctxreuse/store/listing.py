"""What a block store says about what it holds: from the tree where it writes, from the records beside a writer."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple

import lmdb

from ctxreuse.errors import StoreError
from ctxreuse.keys import ROOT
from ctxreuse.store.base import Entry
from ctxreuse.store.chunks import FOLDER, ChunkIndex
from ctxreuse.store.env import Env
from ctxreuse.store.gone import FILE, Gone, GoneBook
from ctxreuse.store.index import Index
from ctxreuse.store.owner import Owner
from ctxreuse.store.readonly import listed, lookup, match_disk
from ctxreuse.store.records import Record
from ctxreuse.tree import Match, Node

__all__ = ["DiskListing", "Holding", "Listeners", "chunks_for"]


class Holding(NamedTuple):
    """What is held of a key: its tokens, and the levels of its block and its state ("": there is none).

    ``split``: blocks that follow it are held (a reader beside a writer does not know).
    """

    tokens: int
    block: str
    state: str
    split: bool = False


def chunks_for(capacity: int) -> int:
    """How many chunks a store of so many bytes knows: more than can lie in it, as long as a token takes 2 KiB."""
    return max(1024, min(1 << 18, capacity >> 17))


class Listeners:
    """Who wants to know which keys may have come or gone. Any thread may call; see `StoreListing.watch`."""

    def __init__(self) -> None:
        self._watching: tuple[Callable[[Sequence[bytes]], None], ...] = ()
        self._lock = threading.Lock()

    def add(self, listener: Callable[[Sequence[bytes]], None]) -> Callable[[], None]:
        """Tell ``listener`` from now on; the result ends it."""
        with self._lock:
            self._watching = (*self._watching, listener)

        def end() -> None:
            with self._lock:
                self._watching = tuple(other for other in self._watching if other is not listener)

        return end

    def tell(self, keys: Sequence[bytes]) -> None:
        """Name these keys to all."""
        if keys:
            for listener in self._watching:
                listener(keys)


class DiskListing(ABC):
    """The half of a `BlockStore` that answers without reading values. Without an ``owner`` it only reads."""

    def __init__(self, env: Env, index: Index, owner: Owner | None) -> None:
        self._env, self._index, self._owner = env, index, owner
        self._lock = threading.RLock()
        self.gone_book = GoneBook(env.path.parent / FILE if owner is not None else None, clock=index.clock)
        self._listeners_of_keys = Listeners()
        self.chunks = ChunkIndex.open(
            env.path.parent / FOLDER,
            most=chunks_for(index.capacity),
            readonly=owner is None,
            crashed=owner is not None and not owner.before("blocks").clean and owner.same_boot("blocks"),
        )

    def _close_notes(self) -> None:
        self.gone_book.close()
        self.chunks.close()

    @property
    def readonly(self) -> bool:
        """True if this process only reads."""
        return self._owner is None

    def match(self, keys: Sequence[bytes], lossy: str | None = None) -> Match:
        """See ``Store.match``."""
        if self._owner is None:
            return match_disk(self._lookup(keys), lossy)
        with self._lock:
            return self._index.tree.match(keys, lossy)

    def held(self, keys: Sequence[bytes]) -> list[Holding | None]:
        """For each key what is held of it, None if nothing is. Pure."""
        if self._owner is None:
            found = self._lookup(keys)
            return [_holding(record) for record in [*found, *[None] * (len(keys) - len(found))]]
        with self._lock:
            return [_holding(self._index.tree.get(key)) for key in keys]

    def walk(self) -> Iterator[Entry]:
        """See ``StoreListing.walk``."""
        if self._owner is None:
            try:
                found = sorted(listed(self._env), key=lambda row: row[1].depth)
            except (lmdb.Error, StoreError, ValueError) as error:
                self._trouble(error)
                found = []
            return iter([_of_record(key, record) for key, record in found if record.nbytes])
        with self._lock:
            # A child is inserted after its parent and a node never moves, so the tree's own order will do.
            nodes = list(self._index.tree)
        return (_of_node(node) for node in nodes if node.nbytes)

    def recent(self) -> list[bytes]:
        """See ``StoreListing.recent``."""
        if self._owner is None:
            try:
                return [key for key, _ in sorted(listed(self._env), key=lambda row: -row[1].used)]
            except (lmdb.Error, StoreError, ValueError) as error:
                self._trouble(error)
                return []
        with self._lock:
            # What is being evicted has left the tree and not yet the order.
            return [key for key in self._index.policy.order() if key in self._index.tree][::-1]

    def entries(self, keys: Sequence[bytes]) -> list[Entry | None]:
        """See ``StoreListing.entries``."""
        if self._owner is None:
            found = chain(self._lookup(keys), [None] * len(keys))
            return [_of_record(key, r) if r is not None and r.nbytes else None for key, r in zip(keys, found)]
        with self._lock:
            nodes = [self._index.tree.get(key) for key in keys]
            return [_of_node(node) if node is not None and node.nbytes else None for node in nodes]

    def gone(self, key: bytes) -> Gone | None:
        """See ``StoreListing.gone``; without an owner nothing is known."""
        return self.gone_book.gone(key)

    def watch(self, listener: Callable[[Sequence[bytes]], None]) -> Callable[[], None]:
        """See ``StoreListing.watch``; without an owner nothing is ever told."""
        return self._listeners_of_keys.add(listener)

    def _tell(self, keys: Sequence[bytes]) -> None:
        self._listeners_of_keys.tell(keys)

    def _lookup(self, keys: Sequence[bytes]) -> list[Record | None]:
        try:
            return lookup(self._env, keys)
        except (lmdb.Error, StoreError, ValueError) as error:
            self._trouble(error)
            return []

    @abstractmethod
    def _trouble(self, error: BaseException) -> None:
        """Note that the disk failed; nothing is raised."""


def _holding(held: Node | Record | None) -> Holding | None:
    if held is None:
        return None
    split = isinstance(held, Node) and held.children > 0
    return Holding(held.tokens, held.level if held.nbytes else "", held.state_level if held.state_nbytes else "", split)


def _of_node(node: Node) -> Entry:
    parent = node.parent.key if node.parent is not None else ROOT
    place = node.key, parent, node.tokens, node.depth, node.nbytes
    return Entry(*place, node.state_nbytes > 0, node.level, node.state_level)


def _of_record(key: bytes, record: Record) -> Entry:
    place = key, record.parent, record.tokens, record.depth, record.nbytes
    return Entry(*place, record.state_nbytes > 0, record.level, record.state_level)

"""Values and pause labels that wait until their blocks are committed."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from ctxreuse.block.format import BlockView, Buffer, Kind, parse
from ctxreuse.block.levels import expected_kl, quality_key
from ctxreuse.errors import FormatError
from ctxreuse.identity.keys import ROOT
from ctxreuse.store.lmdb.records import footprint
from ctxreuse.tree import ContextTree

__all__ = ["PendingPauseLabels", "PendingPuts", "Put"]

#: Contexts whose last block may be awaited at a time.
_MOST_LABELS = 1024


class Put(NamedTuple):
    """A parsed value to store.

    ``tokens`` of the block, ``end`` the position after its last; ``size``: bytes of whole pages; ``data``: the sealed
    bytes, ``view`` what was parsed of them; ``replace``: overwrite an equal level; ``max_kl``: the limit of its owner;
    ``giver``: see `Store.put`.
    """

    key: bytes
    parent: bytes
    tokens: int
    end: int
    size: int
    data: memoryview
    view: BlockView
    kind: Kind
    replace: bool
    level: str
    max_kl: float | None = None
    giver: bytes = b""

    @classmethod
    def parse(
        cls, key: bytes, data: Buffer, kind: Kind, replace: bool, max_kl: float | None = None, giver: bytes = b""
    ) -> Put | None:
        """Parse the bytes of a value; None if they are no value of this key."""
        try:
            view = parse(data)
        except FormatError:
            return None
        header, size = view.header, footprint(len(view.buffer))
        # A refinement is no block by itself, and who may read an unknown level is unknown.
        if header.key != key or header.kind != kind or expected_kl(header.level) == math.inf:
            return None
        place = key, header.parent, len(header.tokens) // 4, header.end, size
        return cls(*place, view.buffer, view, kind, replace, sys.intern(header.level), max_kl or None, giver)

    @property
    def name(self) -> tuple[Kind, bytes]:
        """Kind and key."""
        return self.kind, self.key

    def beats(self, level: str) -> bool:
        """Return True if it should replace a stored value of this level."""
        mine, theirs = quality_key(self.level), quality_key(level)
        return mine < theirs or (self.replace and mine == theirs)


class PendingPuts:
    """Puts in the writer's queue, by kind and key. Not thread-safe: the store's lock guards it."""

    def __init__(self, tree: ContextTree) -> None:
        self._tree = tree
        self._count: Counter[tuple[Kind, bytes]] = Counter()
        #: The best level queued for each.
        self._levels: dict[tuple[Kind, bytes], str] = {}

    def __contains__(self, name: tuple[Kind, bytes]) -> bool:
        return name in self._count

    def reason_against(self, put: Put) -> str:
        """Return ``duplicate`` or ``orphan`` if a put of the level at which it will be stored is useless, else ""."""
        node = self._tree.get(put.key)
        levels = [self._levels[put.name]] if put.name in self._levels else []
        if node is not None and put.kind == "block" and node.nbytes:
            levels.append(node.level)
        elif node is not None and put.kind == "state" and node.state_nbytes:
            levels.append(node.state_level)
        if any(not put.beats(level) for level in levels):
            return "duplicate"
        if put.kind == "state":
            return "" if node is not None or ("block", put.key) in self else "orphan"
        return "" if put.parent == ROOT or put.parent in self._tree or ("block", put.parent) in self else "orphan"

    def add(self, put: Put) -> None:
        """Count a put that enters the queue."""
        self._count[put.name] += 1
        self._levels[put.name] = min(put.level, self._levels.get(put.name, put.level), key=quality_key)

    def remove(self, put: Put) -> None:
        """Count a put that left the queue, whatever became of it."""
        self._count[put.name] -= 1
        if not self._count[put.name]:
            del self._count[put.name], self._levels[put.name]


class PendingPauseLabels:
    """Labels of pauses whose blocks are not stored yet, by key. Not thread-safe: the index's owner serialises calls."""

    def __init__(self) -> None:
        self._labels: dict[bytes, int] = {}

    def __len__(self) -> int:
        return len(self._labels)

    def add(self, key: bytes, label: int) -> None:
        """Note that the context ending at ``key`` paused."""
        self._labels[key] = label
        if len(self._labels) > _MOST_LABELS:
            del self._labels[next(iter(self._labels))]

    def discard(self, keys: Iterable[bytes]) -> None:
        """Forget the labels of contexts that go on."""
        for key in keys if self._labels else ():
            self._labels.pop(key, None)

    def pop(self, stored: Iterable[bytes]) -> Iterator[tuple[bytes, int]]:
        """Iterate over the labels of keys that are stored now, each once."""
        for key in stored if self._labels else ():
            label = self._labels.pop(key, None)
            if label is not None:
                yield key, label

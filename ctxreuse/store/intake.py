"""Puts on their way to the disk: which are worth taking, and what is known of them until they are committed."""

from __future__ import annotations

from collections import Counter

from ctxreuse.keys import ROOT
from ctxreuse.levels import rank
from ctxreuse.store.base import Kind
from ctxreuse.store.index import Index
from ctxreuse.store.put import Put

__all__ = ["Intake"]


class Intake:
    """What waits in the writer's queue, by kind and key. Not thread-safe: the store's lock guards it."""

    def __init__(self, index: Index) -> None:
        self._index = index
        self._waiting: Counter[tuple[Kind, bytes]] = Counter()
        #: The best of several levels that wait for one key, at which they will rest.
        self._levels: dict[tuple[Kind, bytes], str] = {}

    def __contains__(self, name: tuple[Kind, bytes]) -> bool:
        return name in self._waiting

    def unfit(self, put: Put) -> str:
        """Why the tree and the queue have no use for it: ``duplicate``, ``orphan``, or "" if they have.

        ``put.level`` is that at which it will rest. A duplicate counts as a use of what is held.
        """
        tree, name = self._index.tree, (put.kind, put.key)
        node = tree.get(put.key)
        held = node is not None and bool(node.nbytes if put.kind == "block" else node.state_nbytes)
        levels = [self._levels[name]] if name in self._levels else []
        if node is not None and held:
            levels.append(node.level if put.kind == "block" else node.state_level)
        if any(not put.beats(level) for level in levels):
            self._index.limit([put.key], put.lossy or None)
            self._index.touch([put.key])
            return "duplicate"
        if put.kind == "state":
            return "" if node is not None or ("block", put.key) in self._waiting else "orphan"
        known = put.parent == ROOT or put.parent in tree or ("block", put.parent) in self._waiting
        return "" if known else "orphan"

    def take(self, put: Put) -> None:
        """It goes to the queue."""
        name = put.kind, put.key
        self._waiting[name] += 1
        self._levels[name] = min(put.level, self._levels.get(name, put.level), key=rank)

    def done(self, put: Put) -> None:
        """It has left the queue, whatever came of it."""
        name = put.kind, put.key
        self._waiting[name] -= 1
        if not self._waiting[name]:
            del self._waiting[name], self._levels[name]

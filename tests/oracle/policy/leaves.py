"""Which held blocks are leaves, and which heads of a queue wait until they are."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from typing import Generic

from ctxreuse.store.policy.base import K

__all__ = ["Leaves"]


class Leaves(Generic[K]):
    """The parents of held blocks, and those *parked*: heads of a queue that turned out to be no leaf.

    A parked block comes back to the head of its queue when its last child goes, so each step is O(1) amortised.
    """

    def __init__(self) -> None:
        self._parent: dict[K, K | None] = {}
        self._children: dict[K, int] = {}
        self.parked: set[K] = set()

    def add(self, key: K, parent: K | None) -> None:
        """A block that is not held yet."""
        self._parent[key] = parent
        if parent is not None:
            self._children[parent] = self._children.get(parent, 0) + 1

    def is_leaf(self, key: K) -> bool:
        return key not in self._children

    def remove(self, key: K) -> K | None:
        """It went. Its parent if that was parked, is no more, and belongs at the head of its queue; else None."""
        self.parked.discard(key)
        parent = self._parent.pop(key)
        if parent is None:
            return None
        left = self._children.pop(parent) - 1
        if left:
            self._children[parent] = left
            return None
        if parent not in self.parked:
            return None
        self.parked.remove(parent)
        return parent

    def settle(self, queue: OrderedDict[K, None]) -> bool:
        """Park the head of a queue if it is no leaf; whether it was."""
        key = next(iter(queue))
        if key not in self._children:
            return False
        del queue[key]
        self.parked.add(key)
        return True

    def and_above(self, leaves: Iterable[K]) -> Iterator[K]:
        """All ``leaves``, and behind them what has children, each as soon as the last of these is named."""
        named: deque[K] = deque()
        for key in leaves:
            yield key
            named.append(key)
        lost: dict[K, int] = {}
        while named:
            parent = self._parent[named.popleft()]
            if parent is None:
                continue
            lost[parent] = lost.get(parent, 0) + 1
            if lost[parent] == self._children[parent]:
                yield parent
                named.append(parent)

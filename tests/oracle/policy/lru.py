"""Least recently used, with children always older than their parents."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

from ctxreuse.store.policy.base import Facts, K, Policy

__all__ = ["LRU"]


class LRU(Policy[K]):
    """Evict what was not used for longest.

    A used path is moved to the end leaf first, so that a parent is always newer than its children: the head of the
    order is a leaf, and finding a victim never has to step over inner nodes.
    """

    name = "lru"

    def __init__(self) -> None:
        self._keys: OrderedDict[K, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._keys)

    def insert(self, facts: Facts[K], now: float) -> None:
        self._keys[facts.key] = None

    def access(self, path: Sequence[K], now: float) -> None:
        move = self._keys.move_to_end
        for key in reversed(path):
            move(key)

    def remove(self, key: K, now: float) -> None:
        del self._keys[key]

    def order(self) -> Iterator[K]:
        return iter(self._keys)

"""Least recently used, with children always older than their parents."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

__all__ = ["LRU"]


class LRU:
    """Evict what was not used for longest.

    A used path is moved to the end leaf first, so that a parent is always newer than its children: the head of the
    order is a leaf, and finding a victim never has to step over inner nodes.
    """

    def __init__(self) -> None:
        self._keys: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._keys)

    def insert(self, key: bytes, *, oldest: bool = False) -> None:
        self._keys[key] = None
        self._keys.move_to_end(key, last=not oldest)

    def access(self, path: Sequence[bytes]) -> None:
        move = self._keys.move_to_end
        for key in reversed(path):
            move(key)

    def remove(self, key: bytes) -> None:
        del self._keys[key]

    def order(self) -> Iterator[bytes]:
        return iter(self._keys)

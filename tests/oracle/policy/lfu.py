"""Least frequently used, with a memory of what went; the least recently used first among equals."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

from ctxreuse.store.policy.base import Facts, K, Policy

__all__ = ["LFU"]

#: The most uses that are remembered of an evicted block, and of how many of them at least.
_MOST, _FEWEST = 255, 1 << 16


class LFU(Policy[K]):
    """Evict what was used the fewest times. O(1) a step, plus the number of different counts to order.

    Uses, up to 255, of evicted blocks are remembered, a quarter as many as are held (65,536 at least), so that a block
    that comes back need not begin anew: on a chat service's traffic at small sizes that is the difference between the
    worst of all and the best of the simple policies.

    A parent is used whenever a child is, later within the step, so children go before their parents.
    """

    name = "lfu"

    def __init__(self) -> None:
        self._count: dict[K, int] = {}
        self._by_count: dict[int, OrderedDict[K, None]] = {}
        self._ghosts: OrderedDict[K, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._count)

    def insert(self, facts: Facts[K], now: float) -> None:
        if facts.key not in self._count:
            self._file(facts.key, self._ghosts.pop(facts.key, 0))

    def access(self, path: Sequence[K], now: float) -> None:
        for key in reversed(path):
            self._file(key, self._unfile(key) + 1)

    def remove(self, key: K, now: float) -> None:
        uses = self._unfile(key)
        del self._count[key]
        self._ghosts[key] = min(uses, _MOST)
        while len(self._ghosts) > max(len(self) // 4, _FEWEST):
            self._ghosts.popitem(last=False)

    def _file(self, key: K, count: int) -> None:
        self._count[key] = count
        self._by_count.setdefault(count, OrderedDict())[key] = None

    def _unfile(self, key: K) -> int:
        count = self._count[key]
        keys = self._by_count[count]
        del keys[key]
        if not keys:
            del self._by_count[count]
        return count

    def order(self) -> Iterator[K]:
        for count in sorted(self._by_count):
            yield from self._by_count[count]

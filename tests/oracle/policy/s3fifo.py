"""S3-FIFO (Yang et al., SOSP 2023): a queue on probation, a main one with second chances, a memory of ghosts."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from itertools import chain

from ctxreuse.store.policy.base import K
from oracle.policy.queues import Queues

__all__ = ["S3FIFO"]

_SMALL, _MAIN = 0, 1
#: The small queue's share of the blocks held, and the most uses that are counted.
_SHARE, _MOST = 10, 3


class S3FIFO(Queues[K]):
    """Most blocks that are never used again leave from the small queue (a tenth) before they cost room elsewhere.

    From its head, what was used more than once goes on to the main queue, the rest is evicted and remembered as a
    ghost: if it comes back it enters the main queue. That one gives each use, up to three, another round.
    """

    name = "s3fifo"

    def __init__(self) -> None:
        super().__init__()
        self._uses: dict[K, int] = {}
        self._ghosts: OrderedDict[K, None] = OrderedDict()

    def _first(self, key: K) -> int:
        self._uses[key] = 0
        if key in self._ghosts:
            del self._ghosts[key]
            return _MAIN
        return _SMALL

    def _use(self, key: K) -> None:
        self._uses[key] = min(self._uses[key] + 1, _MOST)

    def _turn(self) -> int:
        small, main = self._queues
        return _SMALL if len(small) * _SHARE >= len(self) or not main else _MAIN

    def _walk(self, first: int) -> Iterator[K]:
        ripe, kept = self._used(_SMALL, 0, 1), self._used(_SMALL, 2, _MOST)
        rounds = [self._used(_MAIN, uses, uses) for uses in range(_MOST + 1)]
        if first == _SMALL:
            return chain(ripe, rounds[0], kept, *rounds[1:])
        return chain(*rounds, ripe, kept)

    def _used(self, which: int, least: int, most: int) -> Iterator[K]:
        return (key for key in self._queues[which] if least <= self._uses[key] <= most)

    def _renew(self, key: K, which: int) -> bool:
        uses = self._uses[key]
        if uses <= (1 if which == _SMALL else 0):
            return False
        self._uses[key] = 0 if which == _SMALL else uses - 1
        self._admit(key, _MAIN)
        return True

    def _gone(self, key: K, which: int | None) -> None:
        self._uses.pop(key, None)
        if which != _SMALL:
            return
        self._ghosts[key] = None
        while len(self._ghosts) > len(self) * (_SHARE - 1) // _SHARE:
            self._ghosts.popitem(last=False)

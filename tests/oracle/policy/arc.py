"""ARC (Megiddo and Modha, FAST 2003): recency and frequency share the room as the ghosts of either ask for it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from ctxreuse.store.policy.base import K
from oracle.policy.queues import Queues

__all__ = ["ARC"]

#: Beyond so many blocks only a quarter as many ghosts as blocks are remembered: each is half a block's metadata.
_FEWEST = 1 << 16


class ARC(Queues[K]):
    """Queue 0 holds blocks used once, queue 1 those used more often, each least recently used first.

    Ghosts of what went from either are remembered, as many as there are blocks; one that comes back shifts the room
    (``_wanted`` blocks for queue 0) towards its queue. The published rule counts pages of a fixed number; here that
    number is how many blocks are held.
    """

    name = "arc"

    def __init__(self) -> None:
        super().__init__()
        self._wanted = 0
        self._ghosts: tuple[OrderedDict[K, None], OrderedDict[K, None]] = OrderedDict(), OrderedDict()

    def _first(self, key: K) -> int:
        once, often = self._ghosts
        if key in once:
            self._wanted = min(len(self), self._wanted + max(1, len(often) // len(once)))
            del once[key]
            return 1
        if key in often:
            self._wanted = max(0, self._wanted - max(1, len(once) // len(often)))
            del often[key]
            return 1
        return 0

    def _use(self, key: K) -> None:
        self._admit(key, 1)

    def _turn(self) -> int:
        once, often = self._queues
        return 0 if once and (len(once) > self._wanted or not often) else 1

    def _walk(self, first: int) -> Iterator[K]:
        yield from self._queues[first]
        yield from self._queues[1 - first]

    def _renew(self, key: K, which: int) -> bool:
        return False

    def _gone(self, key: K, which: int | None) -> None:
        if which is None:
            return
        self._ghosts[which][key] = None
        once, often = self._ghosts
        while len(once) + len(often) > min(len(self), max(len(self) // 4, _FEWEST)):
            (once if once and (len(once) > len(self) - self._wanted or not often) else often).popitem(last=False)

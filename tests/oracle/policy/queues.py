"""Two queues of blocks of which only leaves may go: what S3-FIFO and ARC have in common."""

from __future__ import annotations

from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import chain

from ctxreuse.store.policy.base import Facts, K, Policy
from oracle.policy.leaves import Leaves

__all__ = ["Queues"]


class Queues(Policy[K]):
    """Held blocks in queue 0 or 1, the head first to go; which queue gives the next victim is the subclass's rule.

    A block joins its queue at its first use, the leaf of a path first, so that heads are leaves as a rule; a head that
    is none is parked, see `Leaves`.
    """

    #: What goes next depends on what went before: ask for the order anew after each removal.
    evicts_one_at_a_time = True
    name: str

    def __init__(self) -> None:
        self._queues: tuple[OrderedDict[K, None], OrderedDict[K, None]] = OrderedDict(), OrderedDict()
        #: Queue of each held block, also of a parked one; None before its first use.
        self._home: dict[K, int | None] = {}
        self._leaves: Leaves[K] = Leaves()

    def __len__(self) -> int:
        return len(self._home)

    def insert(self, facts: Facts[K], now: float) -> None:
        if facts.key not in self._home:
            self._home[facts.key] = None
            self._leaves.add(facts.key, facts.parent)

    def access(self, path: Sequence[K], now: float) -> None:
        for key in reversed(path):
            if self._home[key] is None:
                self._admit(key, self._first(key))
            else:
                self._use(key)

    def remove(self, key: K, now: float) -> None:
        if key not in self._home:
            raise KeyError(key)
        first = self._turn()
        self._settle(first)
        if not self._queues[first]:
            self._settle(1 - first)
        home = self._home.pop(key)
        if home is not None:
            self._queues[home].pop(key, None)
        parent = self._leaves.remove(key)
        self._gone(key, home)
        if parent is not None:
            queue = self._queues[self._home[parent] or 0]
            queue[parent] = None
            queue.move_to_end(parent, last=False)

    def order(self) -> Iterator[K]:
        """Exact for its first key; what follows would be next as far as that does not change the order."""
        fresh = (key for key, home in self._home.items() if home is None)
        yield from self._leaves.and_above(filter(self._leaves.is_leaf, chain(self._walk(self._turn()), fresh)))

    def _settle(self, which: int) -> None:
        """Turn the queue until its head may go, or it is empty. Only a removal does it: asking changes nothing."""
        queue = self._queues[which]
        while queue:
            if not self._renew(next(iter(queue)), which) and not self._leaves.settle(queue):
                return

    def _admit(self, key: K, which: int) -> None:
        """To the tail of a queue, from wherever it is."""
        home = self._home[key]
        if home is not None:
            self._queues[home].pop(key, None)
        self._leaves.parked.discard(key)
        self._home[key] = which
        self._queues[which][key] = None

    @abstractmethod
    def _first(self, key: K) -> int:
        """The queue of a block at its first use."""

    @abstractmethod
    def _use(self, key: K) -> None:
        """A further use."""

    @abstractmethod
    def _turn(self) -> int:
        """The queue that gives the next victim."""

    @abstractmethod
    def _walk(self, first: int) -> Iterator[K]:
        """What is in the queues, in the order in which it would go if all were leaves."""

    @abstractmethod
    def _renew(self, key: K, which: int) -> bool:
        """Whether the head of that queue was moved instead of going. Each move is paid for by a use before it."""

    @abstractmethod
    def _gone(self, key: K, which: int | None) -> None:
        """It left the cache from that queue."""

"""Fairness between tenants: whose turn it is, queues served in turn, and shares of a limited amount."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable
from itertools import pairwise
from typing import Generic, NamedTuple, TypeVar

__all__ = ["FairQueue", "Shares", "Turns"]

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")

#: Names that are remembered for their past alone are forgotten beyond so many.
_NAMES = 1024
#: The rank of items that were served already.
_FIRST = -(1 << 31)


class Turns(Generic[K]):
    """Whose turn it is, by what each name was served so far: start-time fair queueing (Goyal, Vin and Cheng, 1996).

    Of names that always have something to do, none is served more than another by more than two of the largest costs
    (and ``burst``). One that comes, or comes back, starts where the others are: idle time earns ``burst`` at most, so
    much is served before those that were never idle. Not thread-safe.
    """

    def __init__(self, burst: float = 0.0) -> None:
        self._burst = burst
        self._ends: dict[K, float] = {}
        self._now = 0.0

    def _start(self, name: K) -> float:
        return max(self._ends.get(name, float("-inf")), self._now - self._burst)

    def order(self, names: Iterable[K]) -> list[K]:
        """Return ``names``, the one whose turn it is first; of equal ones the first."""
        return sorted(names, key=self._start)

    def charge(self, name: K, cost: float) -> None:
        """Note that ``name`` was served."""
        start = self._start(name)
        self._now = max(self._now, start)
        self._ends[name] = start + cost
        if len(self._ends) > _NAMES:  # those that are past are as good as unknown
            self._ends = {one: end for one, end in self._ends.items() if end > self._now - self._burst}


class _Item(NamedTuple, Generic[T]):
    item: T
    cost: float
    rank: int


class FairQueue(Generic[K, T]):
    """Items that wait, each under a name: within a name by rank, first come first served; names in turn by cost.

    At most ``limit`` wait. A name alone may have them all; where others come, it gives up what exceeds its share: one
    with fewer items than ``limit`` divided by the number of names is never refused. Not thread-safe.
    """

    def __init__(self, limit: int, burst: float = 0.0) -> None:
        """``burst``: see `Turns`."""
        #: May change; what waits already stays.
        self.limit, self._turns = limit, Turns[K](burst)
        self._lines: dict[K, deque[_Item[T]]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))

    def waiting(self, name: K) -> int:
        """Return how many items of ``name`` wait."""
        return len(self._lines.get(name, ()))

    def next(self, name: K) -> T:
        """Return the next item of ``name``, which has one."""
        return self._lines[name][0].item

    def push(self, name: K, item: T, cost: float = 1.0, *, rank: int = 0) -> T | None:
        """Add an item; returns the one that there is no room for: the last of the longest line, or ``item`` itself.

        ``rank``: an item goes before those of its name with a greater one.
        """
        out: T | None = None
        if len(self) >= self.limit:
            longest, mine = max(self._lines, key=self.waiting, default=name), self._lines.get(name)
            if self.waiting(longest) <= self.waiting(name) + 1:
                if not mine or mine[-1].rank <= rank:
                    return item
                longest = name
            out = self._lines[longest].pop().item
        line = self._lines.setdefault(name, deque())
        at = next((at for at in range(len(line), 0, -1) if line[at - 1].rank <= rank), 0)
        line.insert(at, _Item(item, cost, rank))
        return out

    def put_back(self, name: K, item: T) -> None:
        """Add an item that was popped and not served, as the first of its name; it was paid for and has room."""
        self._lines.setdefault(name, deque()).appendleft(_Item(item, 0.0, _FIRST))

    def pop(self, may: Callable[[K], bool] = lambda _: True) -> tuple[K, T] | None:
        """Remove and return a name and its next item: the name whose turn it is of those that ``may``; None if none."""
        name = next((name for name in self._turns.order(self._lines) if may(name)), None)
        if name is None:
            return None
        line = self._lines[name]
        item, cost, _ = line.popleft()
        if not line:
            del self._lines[name]
        self._turns.charge(name, cost)
        return name, item

    def remove(self, name: K, item: T) -> bool:
        """Remove an item that waits; returns False if it does not."""
        line = self._lines.get(name, deque())
        at = next((at for at, other in enumerate(line) if other.item is item), None)
        if at is None:
            return False
        del line[at]
        if not line:
            del self._lines[name]
        return True

    def clear(self) -> list[T]:
        """Remove and return all items."""
        lines, self._lines = self._lines, {}
        return [one.item for line in lines.values() for one in line]

    def check(self) -> None:
        """Raise AssertionError if a line is empty or out of order."""
        assert all(self._lines.values())
        assert all(a.rank <= b.rank for line in self._lines.values() for a, b in pairwise(line))


class Shares(Generic[K]):
    """Shares of ``total`` (bytes, slots) that cannot be taken back before its users return it. Not thread-safe.

    A name may have half of what the others leave, so there is always room for one more; ``alone``: all of it.
    """

    def __init__(self, total: int, alone: Callable[[], bool] = lambda: False) -> None:
        self.total, self._alone = total, alone
        self._taken: Counter[K] = Counter()

    @property
    def taken(self) -> int:
        """What all names have."""
        return self._taken.total()

    def of(self, name: K) -> int:
        """Return what ``name`` has."""
        return self._taken[name]

    def fits(self, name: K, amount: int) -> bool:
        """Return True if ``name`` may take ``amount`` more.

        The first that a name takes needs no more than room, and the first of all not even that.
        """
        mine, taken = self._taken[name], self.taken
        left = self.total - taken + mine
        first = amount <= left and not mine
        return not taken or first or mine + amount <= (left if self._alone() else left // 2)

    def take(self, name: K, amount: int) -> None:
        """Count ``amount`` as taken, whether it `fits` or not."""
        self._taken[name] += amount

    def give_back(self, name: K, amount: int) -> None:
        """Count ``amount`` as returned."""
        self._taken[name] -= amount
        if not self._taken[name]:
            del self._taken[name]

    def check(self) -> None:
        """Raise AssertionError if a name has less than nothing."""
        assert all(amount >= 0 for amount in self._taken.values())

"""Which blocks a cache really holds, and which of them are strays: held, but not by the contender that it follows."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Generic, Protocol

from ctxreuse.store.policy.base import Facts, K
from ctxreuse.store.policy.shadow import Served

__all__ = ["Contender", "Roster"]


class Contender(Protocol[K]):
    """One of a duel's contenders: a `Shadow`, or its native twin."""

    @property
    def name(self) -> str:
        """The policy's name."""
        ...

    def __contains__(self, key: K) -> bool: ...

    def request(self, path: Sequence[K], sizes: Sequence[int], tokens: Sequence[int], now: float) -> Served[K]:
        """See `Shadow.request`."""
        ...

    def fill(self, facts: Sequence[Facts[K]], uses: Sequence[Sequence[K]], now: float) -> Sequence[K]:
        """See `Shadow.fill`."""
        ...

    def price(self, per_token: float, per_pair: float) -> None:
        """See `Shadow.price`."""

    def mark(self, tip: K, label: int, now: float) -> None:
        """See `Policy.mark`."""

    def order(self) -> Iterator[K]:
        """What it holds, first to go first."""
        ...

    def beyond(self, other: Any) -> int:
        """Bytes of what it holds and ``other``, a contender of the same kind, does not. O(blocks)."""
        ...

    def dump(self) -> bytes:
        """What its policy learnt, b"" if that learns nothing."""
        ...

    def load(self, raw: bytes) -> bool:
        """See `Learner.load`."""
        ...

    def check(self) -> None:
        """Raises AssertionError where something is wrong inside."""


class Roster(Generic[K]):
    """Strays go first, in the order in which the contender gave them up; before them what it never took in.

    Not thread-safe. O(1) a block.
    """

    def __init__(self) -> None:
        self._held: dict[K, tuple[int, int]] = {}
        self._strays: OrderedDict[K, None] = OrderedDict()
        self.tokens = 0

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, key: K) -> bool:
        return key in self._held

    def hold(self, facts: Facts[K], followed: bool) -> None:
        """One more block; ``followed``: the contender that is followed holds it too."""
        self.tokens += facts.tokens - self._held.get(facts.key, (0, 0))[1]
        self._held[facts.key] = facts.nbytes, facts.tokens
        if not followed and facts.key not in self._strays:
            # Held root first, they have to go leaf first.
            self._strays[facts.key] = None
            self._strays.move_to_end(facts.key, last=False)

    def drop(self, key: K) -> None:
        """A block went. Raises KeyError if it is not held."""
        self.tokens -= self._held.pop(key)[1]
        self._strays.pop(key, None)

    def sizes(self, path: Sequence[K]) -> tuple[list[int], list[int]]:
        """Bytes and tokens of held blocks."""
        pairs = [self._held[key] for key in path]
        return [nbytes for nbytes, _ in pairs], [tokens for _, tokens in pairs]

    def match(self, path: Sequence[K]) -> int:
        """How many leading blocks of ``path`` are held."""
        blocks = 0
        for key in path:
            if key not in self._held:
                break
            blocks += 1
        return blocks

    def came(self, keys: Iterable[K]) -> None:
        """The contender holds these from now on."""
        for key in keys:
            self._strays.pop(key, None)

    def left(self, keys: Iterable[K]) -> None:
        """The contender gave these up."""
        for key in keys:
            if key in self._held:
                self._strays[key] = None

    def follow(self, old: Contender[K], new: Contender[K]) -> None:
        """Follow ``new`` after ``old``: what is held and not by ``new`` is a stray, the first to go under ``old``
        first.

        O(blocks).
        """
        before, self._strays = self._strays, OrderedDict()
        for keys in (before, old.order()):
            for key in keys:
                if key in self._held and key not in new:
                    self._strays[key] = None

    def order(self, followed: Contender[K]) -> Iterator[K]:
        """All held keys: strays, then the rest in the contender's order."""
        yield from self._strays
        for key in followed.order():
            if key in self._held:
                yield key

    def check(self, followed: Contender[K]) -> None:
        """Raises AssertionError where the strays are others than they should be. O(blocks)."""
        assert self._strays.keys() == {key for key in self._held if key not in followed}, "other keys are strays"
        assert self.tokens == sum(tokens for _, tokens in self._held.values()), "tokens are counted wrongly"

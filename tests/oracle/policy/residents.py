"""Which blocks a cache really holds, and which of them are orphans: held, but not by the expert that it follows."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Generic

from ctxreuse.store.policy.base import Facts, K

__all__ = ["ResidentSet"]


class ResidentSet(Generic[K]):
    """Orphans go first, in the order in which the expert gave them up; before them what it never took in.

    Not thread-safe. O(1) a block.
    """

    def __init__(self) -> None:
        self._held: dict[K, tuple[int, int]] = {}
        self._orphans: OrderedDict[K, None] = OrderedDict()
        self.tokens = 0

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, key: K) -> bool:
        return key in self._held

    def insert(self, facts: Facts[K], followed: bool) -> None:
        """One more block; ``followed``: the expert that is followed holds it too."""
        self.tokens += facts.tokens - self._held.get(facts.key, (0, 0))[1]
        self._held[facts.key] = facts.nbytes, facts.tokens
        if not followed and facts.key not in self._orphans:
            # Held root first, they have to go leaf first.
            self._orphans[facts.key] = None
            self._orphans.move_to_end(facts.key, last=False)

    def remove(self, key: K) -> None:
        """A block went. Raises KeyError if it is not held."""
        self.tokens -= self._held.pop(key)[1]
        self._orphans.pop(key, None)

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

    def on_insert(self, keys: Iterable[K]) -> None:
        """The expert holds these from now on."""
        for key in keys:
            self._orphans.pop(key, None)

    def on_evict(self, keys: Iterable[K]) -> None:
        """The expert gave these up."""
        for key in keys:
            if key in self._held:
                self._orphans[key] = None

    def follow(self, old: Any, new: Any) -> None:
        """Follow ``new`` after ``old``: what is held and not by ``new`` is a orphan, the first to go under ``old``
        first.

        O(blocks).
        """
        before, self._orphans = self._orphans, OrderedDict()
        for keys in (before, old.order()):
            for key in keys:
                if key in self._held and key not in new:
                    self._orphans[key] = None

    def order(self, followed: Any) -> Iterator[K]:
        """All held keys: orphans, then the rest in the expert's order."""
        yield from self._orphans
        for key in followed.order():
            if key in self._held:
                yield key

    def check(self, followed: Any) -> None:
        """Raises AssertionError where the orphans are others than they should be. O(blocks)."""
        assert self._orphans.keys() == {key for key in self._held if key not in followed}, "other keys are orphans"
        assert self.tokens == sum(tokens for _, tokens in self._held.values()), "tokens are counted wrongly"

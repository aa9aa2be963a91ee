"""A permutation that cannot lose or repeat anything, with its inverse."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import msgspec

__all__ = ["Permutation"]

_T = TypeVar("_T")


class Permutation(msgspec.Struct, frozen=True):
    """An order of n things: ``order[i]`` is the index, as given, of what now stands at place i.

    Raises ValueError if ``order`` does not name each index from 0 to n - 1 once.
    """

    order: tuple[int, ...]

    def __post_init__(self) -> None:
        if sorted(self.order) != list(range(len(self.order))):
            raise ValueError(f"{self.order} is no permutation of {len(self.order)} things")

    @classmethod
    def identity(cls, n: int) -> Permutation:
        """Return the order in which n things were given."""
        return cls(tuple(range(n)))

    @property
    def inverse(self) -> Permutation:
        """The permutation that restores the given order: ``inverse.order[j]`` is the place of what was given at j."""
        places = [0] * len(self.order)
        for place, index in enumerate(self.order):
            places[index] = place
        return Permutation(tuple(places))

    @property
    def moves(self) -> bool:
        """True if anything stands elsewhere than it was given."""
        return any(place != index for place, index in enumerate(self.order))

    def apply(self, items: Sequence[_T]) -> list[_T]:
        """Return the items in this order. Raises ValueError for another number of them."""
        if len(items) != len(self.order):
            raise ValueError(f"{len(items)} items for a permutation of {len(self.order)}")
        return [items[index] for index in self.order]

"""Which backend answers: where this context was answered before, unless that one has much more to do than others."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, TypeVar

import xxhash

__all__ = ["Place", "choose"]

#: How much more than the mean a backend may have to do before its contexts go elsewhere, and what it may always have:
#: below a few requests a batch costs an engine little, a lost prefix costs seconds.
_EXCESS, _ALWAYS = 1.25, 4


class Place(Protocol):
    """What routing sees of a backend."""

    @property
    def name(self) -> str: ...
    @property
    def outstanding(self) -> int: ...


P = TypeVar("P", bound=Place)


def _score(key: bytes, name: str) -> int:
    return xxhash.xxh3_64_intdigest(name.encode(), xxhash.xxh3_64_intdigest(key))


def choose(places: Sequence[P], key: bytes, room: Callable[[P], bool] = lambda _: True) -> P | None:
    """The place for the context ``key`` (empty: no context, the place with least to do). None if none has ``room``.

    Rendezvous hashing: each key has its own order of all places, so a place that goes takes only its own contexts with
    it, and overflow of one context always goes to the same second place. Bounded load: a place that has more than
    1.25 times the mean (but more than 4) is passed over.
    """
    free = [place for place in places if room(place)]
    if not free:
        return None
    if not key:
        return min(free, key=lambda place: (place.outstanding, place.name))
    bound = max(_ALWAYS, math.ceil(_EXCESS * (_total(places) + 1) / len(places)))
    ranked = sorted(free, key=lambda place: _score(key, place.name), reverse=True)
    return next((place for place in ranked if place.outstanding < bound), None) or min(
        ranked, key=lambda place: place.outstanding
    )


def _total(places: Iterable[Place]) -> int:
    return sum(place.outstanding for place in places)

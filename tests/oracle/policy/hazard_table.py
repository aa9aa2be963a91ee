"""What is learnt about returns: for each class of blocks, the chance of a use by the time since the last one."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ctxreuse.store.policy.hazard_counts import AGES, pack_counts, unpack_counts

__all__ = ["EDGES", "LEVELS", "HazardTable", "best_rates", "level_of"]

#: Ages are cut at 4 s and then 1.2 times later each time, up to 7.5e4 s. Finer cuts gain nothing, 1.5 loses two points
#: of block hits where the cache holds minutes of traffic, and hardly anybody comes back within the first seconds.
_FIRST, _GROWTH = 4.0, 1.2
#: ``EDGES[i]``: seconds at which age ``i`` ends; the last one never does.
EDGES: tuple[float, ...] = tuple(_FIRST * _GROWTH**i for i in range(AGES - 1))
_WIDTHS = tuple(end - start for start, end in zip((0.0, *EDGES), EDGES))

#: Rates are kept as whole numbers: 8 steps to each doubling, from 2^-24 a second on.
LEVELS = 256
_STEPS, _LOWEST = 8, -24

#: Paths that an untried cell is believed to have seen, with the hazards of the class above it; 0.15 to 2 do as well.
_PRIOR = 0.5
#: The same for all classes together.
_LEAST = 0.05
#: Chance of a use per age where nothing was ever seen: the same for each of the ages that grow, so that the rate falls
#: as 1 / age, and the first one, which is longer than the second, in proportion. So all begins as LRU.
_UNSEEN = (0.05 * _WIDTHS[0] / _WIDTHS[1], *[0.05] * (AGES - 1))
#: Uses of the cache after which a row is worked out anew and the past counts for less (half after 4,400).
_EVERY, _DECAY = 64, 0.99
_LARGEST_UNIT = 1e6


def best_rates(hazards: Sequence[float], widths: Sequence[float]) -> list[float]:
    """For each age the best uses per second of holding that can be had from there on, over all times to give up.

    ``hazards[i]`` is the chance of a use within age ``i`` for what has reached it, ``widths[i]`` how many seconds it
    lasts. Holding from age i until the end of age j serves ``P = 1 - prod(1 - h)`` uses and takes ``T`` seconds in
    expectation; the answer is max over j of P / T (the index of Gittins for this problem). Taken from the last age
    back, ages are pooled with what follows as long as that is worth more: O(ages) altogether.
    """
    rates = [0.0] * len(hazards)
    pools: list[tuple[float, float, float]] = []
    for age in range(len(hazards) - 1, -1, -1):
        hazard, width = hazards[age], widths[age]
        use, time, left = hazard, width * (1 - hazard / 2), 1 - hazard
        while pools and pools[-1][0] * time > use * pools[-1][1]:
            more, longer, rest = pools.pop()
            use, time, left = use + left * more, time + left * longer, left * rest
        pools.append((use, time, left))
        rates[age] = use / time
    return rates


def level_of(rate: float) -> int:
    """A positive number as a level, 0 to ``LEVELS - 1``: exact steps, the same on every machine."""
    mantissa, exponent = math.frexp(rate)
    level = (exponent - 1 - _LOWEST) * _STEPS + int((2 * mantissa - 1) * _STEPS)
    return min(max(level, 0), LEVELS - 1)


class _Row:
    """Paths used at each age, those that left it by age or use, and the levels that follow."""

    __slots__ = ("levels", "seen", "used", "when")

    def __init__(self) -> None:
        self.used, self.seen = [0.0] * AGES, [0.0] * AGES
        self.levels: list[int] = []
        self.when = 0


class HazardTable:
    """Counts by class and age, each class leaning on a coarser one and that on all classes together.

        h(class, age) = (used + k h(coarse, age)) / (seen + k),   k = 0.5 paths

    A block counts as its share of the path of its last use: blocks of one path come back together, so a long one says
    no more than a short one (counting blocks costs half a point at small sizes). Blocks that never came back count in
    all ages that they outlived and in none beyond (censored ages). ``coarse[c]``: the number of the coarser class of
    ``c``, for each class.
    """

    def __init__(self, coarse: Sequence[int]) -> None:
        self._coarse = coarse
        self._fine: dict[int, _Row] = {}
        self._middle: dict[int, _Row] = {}
        self._all = _Row()
        self._unit, self._uses = 1.0, 0

    def tick(self) -> None:
        """One more use of the cache."""
        self._uses += 1
        if self._uses % _EVERY:
            return
        self._unit /= _DECAY
        if self._unit > _LARGEST_UNIT:
            for row in (*self._fine.values(), *self._middle.values(), self._all):
                row.used = [count / self._unit for count in row.used]
                row.seen = [count / self._unit for count in row.seen]
            self._unit = 1.0

    def count(self, which: int, age: int, share: float, used: bool) -> None:
        """So much of a path was used at that age, or outlived it, by blocks of a class."""
        weight = share * self._unit
        fine = self._fine.get(which)
        if fine is None:
            fine = self._fine[which] = _Row()
        middle = self._middle.get(self._coarse[which])
        if middle is None:
            middle = self._middle[self._coarse[which]] = _Row()
        for row in (fine, middle, self._all):
            row.seen[age] += weight
            if used:
                row.used[age] += weight

    def level(self, which: int, age: int) -> int:
        """The level of the best rate of use of that class from that age on; at most 64 uses behind what is known."""
        row = self._fine.get(which)
        if row is None:
            row = self._fine[which] = _Row()
        if not row.levels or self._uses - row.when >= _EVERY:
            rates = best_rates(self.hazards(which), (*_WIDTHS, _WIDTHS[-1] * 4))
            row.levels, row.when = [level_of(rate) for rate in rates], self._uses
        return row.levels[age]

    def hazards(self, which: int) -> list[float]:
        """The chance of a use within each age for what has reached it, 0 to 1 (both excluded)."""
        prior, least = _PRIOR * self._unit, _LEAST * self._unit
        middle, fine = self._middle.get(self._coarse[which]), self._fine.get(which)
        chances = [
            (used + least * unseen) / (seen + least)
            for used, seen, unseen in zip(self._all.used, self._all.seen, _UNSEEN)
        ]
        for row in (middle, fine):
            if row is not None:
                chances = [
                    (used + prior * chance) / (seen + prior) for used, seen, chance in zip(row.used, row.seen, chances)
                ]
        return [min(chance, 0.999) for chance in chances]

    def dump(self) -> bytes:
        """See `pack_counts`."""
        return pack_counts(
            (which, [uses / self._unit for uses in row.used], [all_ / self._unit for all_ in row.seen])
            for which, row in self._fine.items()
        )

    def load(self, raw: bytes) -> bool:
        """Take over what `dump` gave; False, and no change, for anything else."""
        rows = unpack_counts(raw)
        if rows is None:
            return False
        self._fine, self._middle, self._all, self._unit = {}, {}, _Row(), 1.0
        for which, used, seen in rows:
            fine = self._fine.setdefault(which, _Row())
            middle = self._middle.setdefault(self._coarse[which], _Row())
            for row in (fine, middle, self._all):
                for age, (uses, all_) in enumerate(zip(used, seen)):
                    row.used[age] += uses
                    row.seen[age] += all_
        return True

    def check(self) -> None:
        """Raises AssertionError if a count is impossible."""
        for row in (*self._fine.values(), *self._middle.values(), self._all):
            for uses, seen in zip(row.used, row.seen):
                assert 0 <= uses <= seen * (1 + 1e-6), f"{uses} of {seen} paths were used"

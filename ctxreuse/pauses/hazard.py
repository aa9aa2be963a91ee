"""How likely a paused context returns by age: counts on a grid, rates from sparse counts, what keeping it is worth.

Ages are seconds since the pause began. A rate is returns per second among those still away; it is constant within a
bucket of the grid, so that everything below is a closed form.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable
from typing import Final, Generic, NamedTuple, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

__all__ = [
    "AGES",
    "BUCKETS",
    "Ahead",
    "Rates",
    "bucket",
    "cumulated",
    "ends_within",
    "exposure",
    "load_ahead",
    "prior",
    "shrink",
    "starts_at",
    "survival",
    "worth",
]

#: One number a bucket: float64 [BUCKETS].
Rates: TypeAlias = npt.NDArray[np.float64]

BUCKETS: Final = 40
#: Where buckets begin and end: 0, then from half a second on by a factor of 1.35, to 12 hours. float64 [BUCKETS + 1].
AGES: Final[npt.NDArray[np.float64]] = np.concatenate([[0.0], 0.5 * 1.35 ** np.arange(BUCKETS)])
_WIDTH: Final = np.diff(AGES)
#: `AGES` for `bisect`: numpy takes ten times as long for one number.
_BEGINS: Final[list[float]] = AGES.tolist()


def bucket(age: float) -> int:
    """Return the bucket of an age; the last one for all that is older than the grid."""
    return min(bisect_right(_BEGINS, max(age, 0.0)) - 1, BUCKETS - 1)


def exposure(since: float, until: float) -> Rates:
    """Return the seconds that a pause spent in each bucket while its age went from ``since`` to ``until``."""
    seconds: Rates = np.zeros(BUCKETS)
    first, last = bucket(since), bucket(until)
    if first == last:
        seconds[first] = until - since
    else:
        seconds[first] = _BEGINS[first + 1] - since
        seconds[first + 1 : last] = _WIDTH[first + 1 : last]
        seconds[last] = until - _BEGINS[last]
    return seconds


def prior() -> Rates:
    """Rates before anything was seen: the longer away, the longer still (rate 1/(10 + 2 age))."""
    rates: Rates = 1.0 / (10.0 + 2.0 * AGES[:-1])
    return rates


def shrink(returns: Rates, seconds: Rates, coarser: Rates, strength: float = 4.0) -> Rates:
    """Rates of a type from its counts and the rates of a coarser type.

    In each bucket the type returns m times as often as the coarser one, and m has a gamma prior of mean 1 that weighs
    as much as ``strength`` expected returns; the posterior mean is ``(returns + strength) / (expected + strength)``.
    Counts of the two neighbouring buckets are taken as well: buckets are finer than what few counts can tell.
    """
    seen, expected = _with_neighbours(returns), _with_neighbours(seconds * coarser)
    rates: Rates = coarser * (seen + strength) / (expected + strength)
    return rates


def _with_neighbours(counts: Rates) -> Rates:
    wide = counts.copy()
    wide[1:] += counts[:-1]
    wide[:-1] += counts[1:]
    return wide


def cumulated(rates: Rates, age: float) -> float:
    """Return the integral of the rate from 0 to ``age``."""
    at = bucket(age)
    return float((rates[:at] * _WIDTH[:at]).sum() + rates[at] * (max(age, 0.0) - AGES[at]))


def survival(rates: Rates, age: float, more: float) -> float:
    """Probability that a context away for ``age`` seconds is still away ``more`` seconds later."""
    return float(np.exp(cumulated(rates, age) - cumulated(rates, age + max(more, 0.0))))


def ends_within(rates: Rates, share: float) -> float:
    """Return the age, in seconds, by which a ``share`` of pauses has ended, rounded up to the grid; its end if none."""
    ended = 1.0 - np.exp(-np.cumsum(rates * _WIDTH))
    return float(AGES[min(int(np.searchsorted(ended, share)) + 1, BUCKETS)])


def worth(rates: Rates) -> Rates:
    """Return what keeping a context is worth by age: the most returns per second kept that any plan to wait achieves.

    For a context of age a it is the maximum over times t of P(return within t) / E[seconds kept until the return or t]:
    Gittins' index. Evicting the lowest is optimal where contexts return independently and each block costs alike.
    """
    # From the last bucket on: a wait goes on as long as what comes is worth more than what it has.
    pools: list[tuple[float, float, float]] = []
    best = np.zeros(BUCKETS)
    for i in range(BUCKETS - 1, -1, -1):
        rate, width = float(rates[i]), float(_WIDTH[i])
        steps = rate * width
        returned, rest = -math.expm1(-steps), math.exp(-steps)
        seconds = returned / rate if steps > 1e-12 else width
        while pools and pools[-1][0] * seconds > returned * pools[-1][1]:
            more, longer, left = pools.pop()
            returned, seconds, rest = returned + rest * more, seconds + rest * longer, rest * left
        pools.append((returned, seconds, rest))
        best[i] = returned / seconds
    return best


S = TypeVar("S")


def starts_at(rates: Rates, age: float, *, saves: float, cost: float) -> float | None:
    """Return the age from which on a context should be back in memory: when ``rate · saves`` exceeds ``cost``.

    ``saves``: seconds that its session does not wait then; ``cost``: what the memory is worth
    otherwise, in seconds per second. The loading itself takes ``saves``, so it begins that much before: the rate then
    counts. None if the chance never pays from ``age`` on.
    """
    first = bucket(age + saves)
    pays = np.flatnonzero(rates[first:] * saves > cost)
    if not len(pays):
        return None
    at = first + int(pays[0])
    return max(age, float(AGES[min(at, BUCKETS)]) - saves)


class Ahead(NamedTuple, Generic[S]):
    """A context that waits below: loading it ahead takes ``load`` seconds and ``nbytes`` of memory and of the link."""

    session: S
    nbytes: int
    load: float
    age: float
    rates: Rates


def load_ahead(waiting: Iterable[Ahead[S]], *, room: int, link: int, price: float) -> list[S]:
    """Return the contexts to load now, most expected gain per byte first, within ``room`` bytes of memory and ``link``
    bytes to move. ``price``: what a byte of memory is worth otherwise, in seconds per second."""
    due: list[tuple[float, int, Ahead[S]]] = []
    for n, one in enumerate(waiting):
        start = starts_at(one.rates, one.age, saves=one.load, cost=price * one.nbytes)
        if start is not None and start <= one.age:
            rate = float(one.rates[bucket(one.age + one.load)])
            due.append((-rate * one.load / max(one.nbytes, 1), n, one))
    chosen: list[S] = []
    for _, _, one in sorted(due, key=lambda entry: entry[:2]):
        if one.nbytes <= min(room, link):
            chosen.append(one.session)
            room -= one.nbytes
            link -= one.nbytes
    return chosen

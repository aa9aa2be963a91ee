"""How likely a paused context returns by age: counts on a grid of ages, rates from thin counts, what holding is worth.

Ages are seconds since the pause began. A rate is returns per second among those still away; it is constant within a
bucket of the grid, so that everything below is a closed form.
"""

from __future__ import annotations

from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = ["AGES", "BUCKETS", "Rates", "bucket", "cumulated", "exposure", "prior", "shrink", "survival", "worth"]

#: One number a bucket: float64 [BUCKETS].
Rates: TypeAlias = npt.NDArray[np.float64]

BUCKETS: Final = 40
#: Where buckets begin and end: 0, then from half a second on by a factor of 1.35, to 12 hours. float64 [BUCKETS + 1].
AGES: Final[npt.NDArray[np.float64]] = np.concatenate([[0.0], 0.5 * 1.35 ** np.arange(BUCKETS)])
_WIDTH: Final = np.diff(AGES)


def bucket(age: float) -> int:
    """The bucket of an age; the last one for all that is older than the grid."""
    return min(int(np.searchsorted(AGES, max(age, 0.0), side="right")) - 1, BUCKETS - 1)


def exposure(since: float, until: float) -> Rates:
    """Seconds that a pause spent in each bucket while its age went from ``since`` to ``until``."""
    low, high = np.clip(AGES[:-1], since, until), np.clip(AGES[1:], since, until)
    seconds: Rates = np.maximum(high - low, 0.0)
    if until > AGES[-1]:
        seconds[-1] += until - max(since, float(AGES[-1]))
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
    """The integral of the rate from 0 to ``age``."""
    at = bucket(age)
    return float((rates[:at] * _WIDTH[:at]).sum() + rates[at] * (max(age, 0.0) - AGES[at]))


def survival(rates: Rates, age: float, more: float) -> float:
    """The chance that who is away for ``age`` seconds is still away ``more`` seconds later."""
    return float(np.exp(cumulated(rates, age) - cumulated(rates, age + max(more, 0.0))))


def worth(rates: Rates) -> Rates:
    """What holding a context is worth by age: the most returns per second held that any plan to wait achieves.

    For a context of age a it is the maximum over times t of P(return within t) / E[seconds held until the return or t]:
    Gittins' index. Evicting the lowest is optimal where contexts return independently and each block costs alike.
    """
    steps = rates * _WIDTH
    chance = -np.expm1(-steps)
    # Expected seconds in a bucket for who is there at its beginning.
    inside = np.where(steps > 1e-12, chance / np.maximum(rates, 1e-300), _WIDTH)
    before = np.concatenate([[0.0], np.cumsum(steps)])[:-1]
    # [from, to]: the chance to reach `to` from `from`; what lies before `from` is left out.
    reach = np.triu(np.exp(-np.maximum(before[None, :] - before[:, None], 0.0)))
    returned, held = np.cumsum(reach * chance, axis=1), np.cumsum(reach * inside, axis=1)
    best: Rates = np.max(np.where(held > 0, returned / np.where(held > 0, held, 1.0), 0.0), axis=1)
    return best

"""How sure a mean over few windows of text is, and what a permission must cover."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

__all__ = ["permission_bound", "upper_bound", "worst_kind"]


def upper_bound(values: Sequence[float], confidence: float = 0.9) -> float:
    """Upper confidence bound of the mean, by Student's t; twice the value where there is one only."""
    mean = statistics.fmean(values)
    n = len(values)
    if n < 2:
        return 2 * mean
    # Student's quantile from the normal one, for n - 1 degrees of freedom (Abramowitz and Stegun, 26.7.5).
    z, free = statistics.NormalDist().inv_cdf(confidence), n - 1
    series = (
        z,
        (z**3 + z) / (4 * free),
        (5 * z**5 + 16 * z**3 + 3 * z) / (96 * free**2),
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * free**3),
    )
    return mean + sum(series) * statistics.stdev(values) / math.sqrt(n)


def worst_kind(kinds: Sequence[str], values: Sequence[float]) -> tuple[str, float]:
    """The kind whose mean is largest, and that mean."""
    grouped: dict[str, list[float]] = {}
    for kind, value in zip(kinds, values, strict=True):
        grouped.setdefault(kind, []).append(value)
    found = {kind: statistics.fmean(own) for kind, own in grouped.items()}
    worst = max(found, key=lambda kind: found[kind])
    return worst, found[worst]


def permission_bound(kinds: Sequence[str], values: Sequence[float]) -> float:
    """The least permission that covers the upper bound of the mean, every kind's mean, and half of each value."""
    return max(upper_bound(values), worst_kind(kinds, values)[1], max(values) / 2)

"""Steps of the levels: by bisection until the divergence measured on validation text is what the level promises."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

__all__ = ["active_components", "find_step"]

#: A component is coded if what it adds is worth this times the going rate of a bit (2 ln 2 / 12 of the squared step).
_WORTH = 1.0
_TOLERANCE = 0.03
_USUAL_SLOPE = 1.7


def active_components(samples: Sequence[npt.NDArray[np.float32]], step: float) -> list[int]:
    """How many components of each group to code at a step; samples: y [rows, C] of each group.

    The last coded one lowers the error by more than its bits are worth elsewhere. At high rate a bit halves an error
    of step^2 / 12 twice over (Gersho & Gray, Vector Quantization, section 5.6).
    """
    price = _WORTH * 2 * np.log(2) * step**2 / 12
    counts = []
    for y in samples:
        q = np.rint(y / np.float32(step))
        gain = (np.square(y) - np.square(y - q * np.float32(step))).mean(0, dtype=np.float64)
        worth = np.flatnonzero(gain > price * _bits(q))
        counts.append(int(worth[-1]) + 1 if len(worth) else 0)
    return counts


def _bits(q: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    """Entropy of each column of whole numbers, in bits."""
    clipped = np.clip(q, -15, 15).astype(np.int64) + 15
    columns = q.shape[1]
    counts = np.bincount((clipped + 31 * np.arange(columns)).reshape(-1), minlength=31 * columns).reshape(columns, 31)
    share = counts / max(len(q), 1)
    return np.asarray(-(share * np.log2(np.where(share > 0, share, 1))).sum(1))


def find_step(measure: Callable[[float], float], target: float, start: float, rounds: int = 10) -> tuple[float, float]:
    """(step, divergence) of the largest step tried whose divergence is within the target, at best 3 % below it.

    The divergence grows about as a power of the step, so the search interpolates logarithms between its bounds, and
    beyond them goes by the last two points.
    """
    aim = target * (1 - _TOLERANCE / 2)
    tried: list[tuple[float, float]] = []
    step = start
    for _ in range(rounds):
        tried.append((step, max(measure(step), 1e-12)))
        below, above = [t for t in tried if t[1] <= target], [t for t in tried if t[1] > target]
        if below and max(below)[1] >= target * (1 - _TOLERANCE):
            break
        nearest = min(tried, key=lambda t: abs(np.log(t[1] / aim)))
        slope = _USUAL_SLOPE
        if below and above:
            low, high = max(below), min(above)
            slope = float(np.log(high[1] / low[1]) / np.log(high[0] / low[0])) if high[0] > low[0] else 0.0
            guess = low[0] * float((aim / low[1]) ** (1 / slope)) if slope > 0 else 0.0
            step = guess if low[0] < guess < high[0] else float(np.sqrt(low[0] * high[0]))
            continue
        if len(tried) > 1 and tried[-1][0] != tried[-2][0]:
            slope = float(np.log(tried[-1][1] / tried[-2][1]) / np.log(tried[-1][0] / tried[-2][0]))
        step = nearest[0] * float(np.clip((aim / nearest[1]) ** (1 / np.clip(slope, 0.7, 2.5)), 0.05, 20))
    within = [t for t in tried if t[1] <= target]
    if within:
        return max(within)
    # Everything that was tried did too much damage: so little cannot.
    step = min(tried)[0] / 4
    return step, measure(step)

"""Steps of the levels: by bisection until the divergence measured on validation text is what the level promises."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

__all__ = ["active_components", "find_step"]

#: A component is coded if what it adds is worth this times the going rate of a bit (2 ln 2 / 12 of the squared step).
_WORTH = 1.0
_TOLERANCE = 0.01


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


def find_step(measure: Callable[[float], float], target: float, start: float, rounds: int = 8) -> tuple[float, float]:
    """(step, divergence): the largest step found with ``measure(step)`` within 1 % below the target, or just below it.

    The divergence grows about as a power of the step, so the search interpolates logarithms between its bounds.
    """
    low: tuple[float, float] | None = None
    high: tuple[float, float] | None = None
    step = start
    for _ in range(rounds):
        kl = max(measure(step), 1e-12)
        if kl <= target:
            low = (step, kl)
        else:
            high = (step, kl)
        if low and target * (1 - _TOLERANCE) <= low[1]:
            break
        aim = target * (1 - _TOLERANCE / 2)
        if low and high:
            slope = np.log(high[1] / low[1]) / np.log(high[0] / low[0])
            guess = low[0] * (aim / low[1]) ** (1 / slope) if slope > 0 else 0.0
            step = guess if low[0] < guess < high[0] else float(np.sqrt(low[0] * high[0]))
        else:
            step *= float(np.clip((aim / kl) ** 0.5, 0.25, 4))
    if low is None:
        step *= 0.5
        return step, measure(step)
    return low

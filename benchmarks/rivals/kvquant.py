"""KVQuant (arXiv 2401.18079): keys by channel, values by token, levels of a k-means, 1 % kept apart."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from benchmarks.rivals.base import Coded, Values, half

__all__ = ["KvQuant", "levels_of"]

_APART = 0.01
_APART_BITS = 16 + 16  # the value and its place
_ROUNDS, _SAMPLE = 300, 20_000


def levels_of(values: npt.NDArray[np.float32], count: int) -> npt.NDArray[np.float32]:
    """One-dimensional k-means of ``values`` [n] from quantiles on: ``count`` levels, ascending."""
    ordered = np.sort(values[:: max(1, len(values) // _SAMPLE)]).astype(np.float64)
    total = np.concatenate([[0.0], np.cumsum(ordered)])
    levels = np.quantile(ordered, (np.arange(count) + 0.5) / count)
    for _ in range(_ROUNDS):
        cut = np.concatenate([[0], np.searchsorted(ordered, (levels[1:] + levels[:-1]) / 2), [len(ordered)]])
        n = np.diff(cut)
        levels = np.where(n > 0, (total[cut[1:]] - total[cut[:-1]]) / np.maximum(n, 1), levels)
    return levels.astype(np.float32)


class KvQuant:
    """``bits`` a value on the plane's own levels (float16), offset and scale (float16) a vector, 1 % apart in float16.

    The published one weighs the k-means by sensitivity and learns levels and key scales beforehand; here they are
    fitted to the very chunk, without weights.
    """

    family = "KVQuant, unweighted"

    def __init__(self, bits: int) -> None:
        self.setting = f"{bits} bit"
        self._bits = bits

    def code(self, values: Values, role: str, layer: int, layers: int) -> Coded:
        """See `Rival.code`."""
        flat = values.reshape(len(values), -1)
        rows = flat.T if role == "k" else flat
        low, high = np.quantile(rows, (_APART / 2, 1 - _APART / 2), axis=1, keepdims=True).astype(np.float32)
        middle, scale = half((high + low) / 2), half((high - low) / 2)
        apart = (rows < low) | (rows > high)
        unit = (rows - middle) / np.where(scale > 0, scale, 1)
        levels = half(levels_of(unit[~apart], 2**self._bits))
        q = np.searchsorted((levels[1:] + levels[:-1]) / 2, unit)
        back = np.where(apart, half(rows), levels[q] * scale + middle)
        back = np.ascontiguousarray(back.T if role == "k" else back, np.float32).reshape(values.shape)
        side = _APART_BITS * int(apart.sum()) + 32 * len(rows) + 16 * len(levels)
        return Coded(back, float(self._bits * values.size + side))

"""A random rotation and Lloyd-Max levels: the first stage of TurboQuant (arXiv 2504.19874)."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from benchmarks.rivals.base import Coded, Values, half

__all__ = ["RotatedLloydMax", "lloyd_max", "rotation"]

_SQRT2, _SQRT2PI = math.sqrt(2), math.sqrt(2 * math.pi)


@lru_cache(maxsize=8)
def lloyd_max(bits: int) -> npt.NDArray[np.float64]:
    """The 2^bits reconstruction levels of least mean squared error for N(0, 1), ascending."""
    levels = np.linspace(-2.0, 2.0, 2**bits)
    for _ in range(2000):
        edges = np.concatenate([[-np.inf], (levels[1:] + levels[:-1]) / 2, [np.inf]])
        density = np.exp(-(edges**2) / 2) / _SQRT2PI
        below = np.array([0.5 * (1 + math.erf(edge / _SQRT2)) for edge in edges])
        moved = (density[:-1] - density[1:]) / (below[1:] - below[:-1])
        done = float(np.abs(moved - levels).max()) < 1e-12
        levels = moved
        if done:
            break
    return levels


@lru_cache(maxsize=8)
def rotation(dim: int, seed: int = 0) -> Values:
    """An orthogonal float32 [dim, dim], uniformly distributed (QR of Gaussians with the signs fixed)."""
    q, r = np.linalg.qr(np.random.default_rng(seed).standard_normal((dim, dim)))
    return (q * np.sign(np.diag(r))).astype(np.float32)


class RotatedLloydMax:
    """Each vector of a token and head: its length in float16, its rotated direction at ``bits`` a coordinate.

    ``centred``: the channel means of the chunk (float16) are taken off first; not published, but it helps.
    """

    def __init__(self, bits: int, *, centred: bool = False) -> None:
        self.family = "rotation + Lloyd-Max" + (", centred" if centred else "")
        self.setting = f"{bits} bit"
        self._bits, self._centred = bits, centred

    def code(self, values: Values, role: str, layer: int, layers: int) -> Coded:
        """See `Rival.code`."""
        tokens, heads, dim = values.shape
        mean = half(values.mean(0)) if self._centred else np.zeros((heads, dim), np.float32)
        rest = values - mean
        length = half(np.linalg.norm(rest, axis=-1, keepdims=True))
        turn = rotation(dim)
        unit = (rest @ turn.T) * (math.sqrt(dim) / np.where(length > 0, length, 1))
        levels = lloyd_max(self._bits)
        q = np.searchsorted((levels[1:] + levels[:-1]) / 2, unit)
        back = (levels[q].astype(np.float32) * (length / math.sqrt(dim))) @ turn + mean
        side = 16 * tokens * heads + (16 * heads * dim if self._centred else 0)
        return Coded(back.astype(np.float32), float(self._bits * values.size + side))

"""Rows that stay as they were moved, set right by what those of their run that are computed anew were off.

Where a run of tokens comes to stand behind other ones, part of what changes in its K and V is the same for all of its
rows: of SmolLM2's, a sixth of the squared distance in V and a third in K before it is turned. That part does not
average out when much is attended to, as the rest does; the rows that a repair computes show it. What is not the same
goes by what is in a row: a regression on 24 of 188 rows leaves .79 of the squared distance in V and .62 in K, where
their mean leaves .87 and .71 (four scenes, layers 8 to 29).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ctxreuse.engines.gauge import Rotary

__all__ = ["Drift"]

#: The first rows of a run tell nothing of the others: they were, or become, what all look at (attention sinks).
_FIRST: Final = 8
#: Rows that are off by more than so many times as much as the usual one (squared) are something else, too.
_USUAL: Final = 4.0
#: Penalty of the regression, in mean squared lengths of its rows.
_RIDGE: Final = 1.0
#: A mean of n rows counts n / (n + 4): few of them say little.
_PRIOR: Final = 4.0

_Span = tuple[int, int]


class _Part(NamedTuple):
    """Rows ``low`` to ``high`` of one run are set right in one forward, in which ``told`` are computed, at ``at``.

    What else of them is computed is written afterwards, so one slice of a plane takes them all.
    """

    told: npt.NDArray[np.int64]
    at: npt.NDArray[np.int64]
    low: int
    high: int


class Drift:
    """Corrections of the runs at ``spans`` in forwards that compute ``rows``, ascending; for one use by one thread.

    Each forward, and `correct` in it for every layer, must come in the order of the rows. ``rotaries``: how each layer
    turns K, by what `correct` calls it. A run whose rows are computed in several forwards is set right piece by piece.
    """

    def __init__(self, spans: Sequence[_Span], rows: npt.NDArray[np.int64], rotaries: Mapping[int, Rotary]) -> None:
        self._spans, self._rows, self._rotaries = spans, rows, rotaries
        self._parts: list[_Part] = []
        self._tables: dict[tuple[Rotary, int], tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]] = {}
        self._ranges: dict[tuple[int, int], npt.NDArray[np.int64]] = {}

    def begin(self, positions: torch.Tensor) -> None:
        """A forward of the tokens at ``positions`` int64 [S]."""
        self._parts = []
        self._tables.clear()
        self._ranges.clear()
        at = positions.numpy()
        for start, end in self._spans:
            told = np.flatnonzero((at >= start + _FIRST) & (at < end))
            if not len(told):
                continue
            before = self._rows[(self._rows < at[0]) & (self._rows >= start)]
            after = self._rows[(self._rows > at[-1]) & (self._rows < end)]
            low = int(before[-1]) + 1 if len(before) else start
            high = int(at[-1]) + 1 if len(after) else end
            self._parts.append(_Part(told, at[told], low, high))

    def correct(self, layer: int, k: torch.Tensor, v: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Before a layer writes ``keys`` and ``values`` [1, heads, S, dim] of the forward into its planes ``k`` and
        ``v`` [1, heads, tokens, dim]: add to the other rows what these tell that they are off."""
        rotary = self._rotaries[layer]
        held_k, held_v, new_k, new_v = (_numbers(states) for states in (k, v, keys, values))
        for part in self._parts:
            stale = held_v[:, part.at]
            off_v = new_v[:, part.told] - stale
            off_k = self._turned(rotary, new_k[:, part.told] - held_k[:, part.at], part.at, back=True)
            usual = _usual(off_v) & _usual(off_k)
            if not usual.any():
                continue
            rows = slice(part.low, part.high)
            weights = _weights(stale[:, usual], held_v[:, rows])
            held_v[:, rows] += weights @ off_v[:, usual]
            held_k[:, rows] += self._turned(rotary, weights @ off_k[:, usual], self._range(part), back=False)
            if k.dtype != torch.float32:
                k[0, :, rows].copy_(torch.from_numpy(held_k[:, rows]))
                v[0, :, rows].copy_(torch.from_numpy(held_v[:, rows]))

    def _range(self, part: _Part) -> npt.NDArray[np.int64]:
        return self._ranges.setdefault((part.low, part.high), np.arange(part.low, part.high))

    def _turned(
        self, rotary: Rotary, x: npt.NDArray[np.float32], positions: npt.NDArray[np.int64], *, back: bool
    ) -> npt.NDArray[np.float32]:
        """[heads, n, dim] turned to positions, or back; a difference of turned K is as long as before."""
        if rotary.style == "none":
            return x
        key = rotary, id(positions)  # kept as long as the table
        if key not in self._tables:
            angle = positions[:, None] * np.asarray(rotary.inv_freq, np.float64)
            self._tables[key] = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
        cos, sin = self._tables[key]
        half = len(rotary.inv_freq)
        first, second = (x[..., :half], x[..., half : 2 * half])
        if rotary.style == "pairs":
            first, second = x[..., 0 : 2 * half : 2], x[..., 1 : 2 * half : 2]
        a, b = (
            (first * cos + second * sin, second * cos - first * sin)
            if back
            else (first * cos - second * sin, second * cos + first * sin)
        )
        first[...], second[...] = a, b  # views of x, which is a result of ours
        return x


def _numbers(states: torch.Tensor) -> npt.NDArray[np.float32]:
    """Float32 [heads, n, dim] of a tensor [1, heads, n, dim]: its own memory if it holds such numbers. Numpy, as these
    are many small steps: torch took three times as long for them."""
    found: npt.NDArray[np.float32] = states[0].float().numpy()
    return found


def _usual(off: npt.NDArray[np.float32]) -> npt.NDArray[np.bool_]:
    """Which rows of [heads, n, dim] are not off by far more than the others."""
    far = np.einsum("hnd,hnd->n", off, off)
    found: npt.NDArray[np.bool_] = far <= _USUAL * np.median(far)
    return found


def _weights(told: npt.NDArray[np.float32], rows: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """How much each row of [heads, n, dim] counts for each of [heads, m, dim], [m, n]: their mean, and by ridge
    regression on what the rows hold what differs from it; for what all rows are off is a matter of what is in them."""
    n, middle = told.shape[1], told.mean(1, keepdims=True)
    x = told - middle
    gram = np.matmul(x, x.swapaxes(1, 2)).sum(0)
    size, mean = float(np.trace(gram)) / n, np.float32(1 / (n + _PRIOR))
    if n < 2 or size <= 0:
        return np.full((rows.shape[1], n), mean)
    y = rows - middle
    # Rows unlike all that were seen are taken for the farthest of those.
    reach = np.sqrt(gram.diagonal().max())
    like = reach / np.sqrt(np.maximum(np.einsum("hmd,hmd->m", y, y), reach * reach))
    shared = np.matmul(x, y.swapaxes(1, 2)).sum(0) * like
    gram[np.diag_indices(n)] += np.float32(_RIDGE * size)
    found: npt.NDArray[np.float32] = np.linalg.solve(gram, shared).T + mean
    return found

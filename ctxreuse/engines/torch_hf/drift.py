"""Rows that stay as they were moved, set right by what those of their run that are computed anew were off.

Where a run of tokens comes to stand behind other ones, part of what changes in its K and V is the same for all of its
rows: of SmolLM2's, a sixth of the squared distance in V and a third in K before it is turned. That part does not
average out when much is attended to, as the rest does; the rows that a repair computes show it. What is not the same
goes by what is in a row: the regression on 24 of 192 rows leaves .79 of the squared distance in V and .64 in K, where
their mean leaves .86 and .70 (four scenes of 4 x 192 tokens from behind another head, layers 8, 15, 22 and 29).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ctxreuse.engines.gauge import Rotary, Tables

if TYPE_CHECKING:
    from ctxreuse.engines.torch_hf.layers import ArenaLayer

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

    Each forward, and `correct` in it for every layer, must come in the order of the rows. ``rotaries``: how the layers
    turn K. A run whose rows are computed in several forwards is set right piece by piece.
    """

    def __init__(
        self, spans: Sequence[_Span], rows: npt.NDArray[np.int64], rotaries: Mapping[ArenaLayer, Rotary]
    ) -> None:
        self._spans, self._rows, self._rotaries = spans, rows, rotaries
        self._parts: list[_Part] = []
        self._tables: dict[Rotary, list[tuple[Tables, Tables]]] = {}

    def begin(self, positions: torch.Tensor) -> None:
        """A forward of the tokens at ``positions`` int64 [S]."""
        self._parts, self._tables = [], {}
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

    def correct(self, layer: ArenaLayer, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Before a layer writes ``keys`` and ``values`` [1, heads, S, dim] of the forward: add to the other rows of its
        planes what these tell that they are off."""
        rotary = self._rotaries[layer]
        new_k, new_v = _numbers(keys), _numbers(values)
        for part, (back, there) in zip(self._parts, self._turning(rotary)):
            planes = [plane[:, :, part.low : part.high] for plane in (layer.keys, layer.values)]
            held_k, held_v = map(_numbers, planes)
            at = part.at - part.low
            stale = held_v[:, at]
            off_v = new_v[:, part.told] - stale
            off_k = rotary.turn_by(new_k[:, part.told] - held_k[:, at], back)
            usual = _usual(off_v) & _usual(off_k)
            if not usual.any():
                continue
            weights = _weights(stale[:, usual], held_v)
            held_v += weights @ off_v[:, usual]
            held_k += rotary.turn_by(weights @ off_k[:, usual], there)
            for plane, held in zip(planes, (held_k, held_v)):
                if plane.dtype != torch.float32:  # then what was changed is a copy
                    plane.copy_(torch.from_numpy(held))

    def _turning(self, rotary: Rotary) -> list[tuple[Tables, Tables]]:
        """For each part how what is computed is turned back, and all of its rows to their places."""
        if rotary not in self._tables:
            self._tables[rotary] = [
                (rotary.tables(part.at, back=True), rotary.tables(np.arange(part.low, part.high), back=False))
                for part in self._parts
            ]
        return self._tables[rotary]


def _numbers(states: torch.Tensor) -> npt.NDArray[np.float32]:
    """Float32 [heads, n, dim] of a tensor [1, heads, n, dim]: its own memory if it holds such numbers. Numpy, as these
    are many small steps, each of which costs more in torch."""
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

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
    """Rows of one run in one forward: ``told`` are computed in it and stand at ``at``, ``rest`` are set right."""

    told: torch.Tensor
    at: torch.Tensor
    rest: torch.Tensor


class Drift:
    """Corrections of the runs at ``spans`` in forwards that compute ``rows``, ascending; for one use by one thread.

    Each forward, and `correct` in it for every layer, must come in the order of the rows. ``rotaries``: how each layer
    turns K, by what `correct` calls it. A run whose rows are computed in several forwards is set right piece by piece.
    """

    def __init__(self, spans: Sequence[_Span], rows: npt.NDArray[np.int64], rotaries: Mapping[int, Rotary]) -> None:
        self._spans, self._rows, self._rotaries = spans, rows, rotaries
        self._parts: list[_Part] = []
        self._tables: dict[tuple[Rotary, int], tuple[torch.Tensor, torch.Tensor]] = {}

    def begin(self, positions: torch.Tensor) -> None:
        """A forward of the tokens at ``positions`` int64 [S]."""
        self._parts = []
        self._tables.clear()
        at = positions.numpy()
        for start, end in self._spans:
            told = np.flatnonzero((at >= start + _FIRST) & (at < end))
            if not len(told):
                continue
            before = self._rows[(self._rows < at[0]) & (self._rows >= start)]
            after = self._rows[(self._rows > at[-1]) & (self._rows < end)]
            low = int(before[-1]) + 1 if len(before) else start
            rest = np.setdiff1d(np.arange(low, int(at[-1]) + 1 if len(after) else end), self._rows)
            if len(rest):
                self._parts.append(_Part(torch.from_numpy(told), positions[told], torch.from_numpy(rest)))

    def correct(self, layer: int, k: torch.Tensor, v: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Before a layer writes ``keys`` and ``values`` [1, heads, S, dim] of the forward into its planes ``k`` and
        ``v`` [1, heads, tokens, dim]: add to the other rows what these tell that they are off."""
        rotary = self._rotaries[layer]
        for part in self._parts:
            stale = v[0].index_select(1, part.at).float()
            off_v = values[0][:, part.told].float() - stale
            off_k = keys[0][:, part.told].float() - k[0].index_select(1, part.at).float()
            off_k = self._turned(rotary, off_k, part.at, back=True)
            usual = _usual(off_v) & _usual(off_k)
            told, off_v, off_k = stale[:, usual], off_v[:, usual], off_k[:, usual]
            if not told.shape[1]:
                continue
            weights = _weights(told, v[0].index_select(1, part.rest).float())
            v[0].index_add_(1, part.rest, (weights @ off_v).to(v.dtype))
            k[0].index_add_(1, part.rest, self._turned(rotary, weights @ off_k, part.rest, back=False).to(k.dtype))

    def _turned(self, rotary: Rotary, x: torch.Tensor, positions: torch.Tensor, *, back: bool) -> torch.Tensor:
        """Float32 [heads, n, dim] turned to positions, or back; a difference of turned K is as long as before."""
        if rotary.style == "none":
            return x
        key = rotary, id(positions)  # which the part keeps
        if key not in self._tables:
            angle = positions.double()[:, None] * torch.tensor(rotary.inv_freq, dtype=torch.float64)
            self._tables[key] = angle.cos().float(), angle.sin().float()
        cos, sin = self._tables[key]
        sin = -sin if back else sin
        half = len(rotary.inv_freq)
        first, second = slice(0, half), slice(half, 2 * half)
        if rotary.style == "pairs":
            first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
        out = x.clone()
        out[..., first] = x[..., first] * cos - x[..., second] * sin
        out[..., second] = x[..., second] * cos + x[..., first] * sin
        return out


def _usual(off: torch.Tensor) -> torch.Tensor:
    """Which rows of [heads, n, dim] are not off by far more than the others."""
    far = (off**2).sum((0, 2))
    return far <= _USUAL * far.median()


def _weights(told: torch.Tensor, rest: torch.Tensor) -> torch.Tensor:
    """How much each row of [heads, n, dim] counts for each of [heads, m, dim], [m, n]: their mean, and by ridge
    regression on what the rows hold what differs from it; for what all rows are off is a matter of what is in them."""
    x, y = (rows.transpose(0, 1).flatten(1) for rows in (told, rest))
    n, middle = len(x), x.mean(0)
    x, y = x - middle, y - middle
    mean = torch.full((1, n), 1 / (n + _PRIOR))
    gram = x @ x.T
    size = float(gram.diagonal().mean())
    if n < 2 or size <= 0:
        return mean.expand(len(y), n)
    # Rows unlike all that were seen are taken for the farthest of those.
    reach = float(gram.diagonal().max().sqrt())
    y = y * (reach / y.norm(dim=1, keepdim=True).clamp(min=reach))
    ridge = torch.linalg.solve(gram + _RIDGE * size * torch.eye(n), x @ y.T).T
    return mean + ridge

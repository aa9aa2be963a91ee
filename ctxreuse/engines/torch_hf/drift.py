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

from ctxreuse.engines.gauge import Rotary
from ctxreuse.engines.torch_hf.rotary import add_turned, tables

if TYPE_CHECKING:
    from ctxreuse.engines.torch_hf.layers import ArenaLayer

__all__ = ["Drift"]

#: The first rows of a run tell nothing of the others: they were, or become, what all look at (attention sinks).
_FIRST: Final = 8
#: Rows that are off by more than so many times as much as the usual one (squared) are something else, too.
_USUAL: Final = 4.0
#: Penalty of the regression, in mean squared lengths of its rows.
_RIDGE: Final = 1.0
#: So many rows of a run are asked at most, spread evenly over those that are computed. By all of them the KL of three
#: scenes of 8 x 256 tokens of SmolLM2 was .0186 in place of .0188 (10 % asked for), .0212 in place of .0230 (5 %), and
#: the whole repair took 2.2 s in place of 1.6.
_ASKED: Final = 32
#: A mean of n rows counts n / (n + 4): few of them say little.
_PRIOR: Final = 4.0

_Span = tuple[int, int]
_Tables = tuple[torch.Tensor, torch.Tensor]


class _Parts(NamedTuple):
    """Of each of R runs what is set right in one forward.

    ``told`` int64 [R, n]: which of the forward's tokens tell, ``at`` [R, n]: their positions, ``counts`` [R, n]: those
    that do count, as runs with fewer are filled up. ``rows``: the positions to be set right, a slice a run. What else
    of them is computed is written afterwards.
    """

    told: torch.Tensor
    at: torch.Tensor
    counts: torch.Tensor
    rows: list[slice]


class _Fit(NamedTuple):
    """A regression for each of R runs. ``x`` [R, n, numbers]: what the rows that tell hold, less the run's ``middle``
    [R, numbers], zero where one does not count. ``inverse`` [R, n, n], ``reach`` [R]: the largest squared length of x.
    ``mean`` [R, n]: how much each counts for all rows."""

    x: torch.Tensor
    middle: torch.Tensor
    inverse: torch.Tensor
    reach: torch.Tensor
    mean: torch.Tensor


class Drift:
    """Corrections of the runs at ``spans`` in forwards that compute ``rows``, ascending; for one use by one thread.

    Each forward, and `correct` in it for every layer, must come in the order of the rows. ``rotaries``: how the layers
    turn K. A run whose rows are computed in several forwards is set right piece by piece.
    """

    # In torch, as numpy's matrix products have threads of their own, which keep the processors from the model's: a
    # repair of 345 rows of SmolLM2 took 4.0 s with them and takes 1.9 s.

    def __init__(
        self, spans: Sequence[_Span], rows: npt.NDArray[np.int64], rotaries: Mapping[ArenaLayer, Rotary]
    ) -> None:
        self._spans, self._rows, self._rotaries = spans, rows, rotaries
        self._parts: _Parts | None = None
        self._tables: dict[Rotary, tuple[_Tables, list[_Tables]]] = {}

    def begin(self, positions: torch.Tensor) -> None:
        """A forward of the tokens at ``positions`` int64 [S]."""
        told, rows, at = [], [], positions.numpy()
        for start, end in self._spans:
            here = np.flatnonzero((at >= start + _FIRST) & (at < end))
            if not len(here):
                continue
            before = self._rows[(self._rows < at[0]) & (self._rows >= start)]
            after = self._rows[(self._rows > at[-1]) & (self._rows < end)]
            low = int(before[-1]) + 1 if len(before) else start
            told.append(here[np.arange(min(len(here), _ASKED)) * len(here) // min(len(here), _ASKED)])
            rows.append(slice(low, int(at[-1]) + 1 if len(after) else end))
        self._parts, self._tables = _parts(told, rows, at) if told else None, {}

    def correct(self, layer: ArenaLayer, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Before a layer writes ``keys`` and ``values`` [1, heads, S, dim] of the forward: add to the other rows of its
        planes what these tell that they are off."""
        parts = self._parts
        if parts is None:
            return
        rotary = self._rotaries[layer]
        back, there = self._turning(rotary, parts)
        stale = _rows(layer.values, parts.at)
        off_v = _rows(values, parts.told) - stale
        moved = _rows(keys, parts.told) - _rows(layer.keys, parts.at)
        off_k = torch.zeros_like(moved)
        add_turned(off_k.flatten(1, 2), moved.flatten(1, 2), rotary, back)
        usual = _usual(off_v, parts.counts) & _usual(off_k, parts.counts)
        # Not by factors of zero, as those that are left out may be no numbers.
        stale, off_v, off_k = (states.where(usual[..., None], 0.0) for states in (stale, off_v, off_k))
        fit = _fit(_by_run(stale), usual)
        for run, (rows, to) in enumerate(zip(parts.rows, there)):
            held_k, held_v = layer.keys[0, :, rows], layer.values[0, :, rows]
            weights = _weights(fit, run, held_v.float()).expand(len(held_v), -1, -1)
            held_v += torch.bmm(weights, off_v[:, run])
            right = held_k.float()  # itself, if it holds such numbers
            add_turned(right, torch.bmm(weights, off_k[:, run]), rotary, to)
            if right is not held_k:
                held_k.copy_(right)

    def _turning(self, rotary: Rotary, parts: _Parts) -> tuple[_Tables, list[_Tables]]:
        """How the R * n rows that tell are turned back, and those of each run to their places."""
        if rotary not in self._tables:
            there = [tables(rotary, np.arange(rows.start, rows.stop), back=False) for rows in parts.rows]
            self._tables[rotary] = tables(rotary, parts.at.flatten().numpy(), back=True), there
        return self._tables[rotary]


def _parts(told: list[npt.NDArray[np.int64]], rows: list[slice], at: npt.NDArray[np.int64]) -> _Parts:
    """Runs side by side."""
    n = max(map(len, told))
    which = np.stack([np.resize(some, n) for some in told])
    counts = np.stack([np.arange(n) < len(some) for some in told])
    return _Parts(torch.from_numpy(which), torch.from_numpy(at[which]), torch.from_numpy(counts), rows)


def _rows(states: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Float32 [heads, R, n, dim] of a tensor [1, heads, N, dim]; a copy."""
    return states[0].index_select(1, rows.flatten()).float().unflatten(1, rows.shape)


def _by_run(states: torch.Tensor) -> torch.Tensor:
    """[heads, R, n, dim] as [R, n, heads * dim]."""
    return states.permute(1, 2, 0, 3).flatten(2)


def _usual(off: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Which rows of [heads, R, n, dim] count and are not off by far more than the others of their run: [R, n]."""
    far = off.square().sum((0, 3)).masked_fill(~counts, torch.nan)
    return far <= _USUAL * far.nanmedian(1, keepdim=True).values


def _fit(told: torch.Tensor, usual: torch.Tensor) -> _Fit:
    """A ridge regression of what differs from the mean on what the rows hold, [R, n, numbers]: what all rows are off is
    a matter of what is in them. Only ``usual`` ones, [R, n], count; the others are zero."""
    seen = usual.float()[..., None]
    n = seen.sum(1, keepdim=True)
    middle = told.sum(1, keepdim=True) / n.clamp(min=1)
    x = (told - middle) * seen
    gram = torch.bmm(x, x.transpose(1, 2))
    lengths = gram.diagonal(dim1=1, dim2=2)
    size = lengths.sum(1)[:, None, None] / n.clamp(min=1)
    # Where all that tell are alike, or only one does, there is nothing to regress on, and any number will do.
    ridge = torch.where(size > 0, _RIDGE * size, 1.0)
    # Not by inv() or solve(): of many matrices they start MKL's threads inside of torch's, which wait for each other.
    roots, _ = torch.linalg.cholesky_ex(gram + ridge * torch.eye(gram.shape[1]))
    return _Fit(x, middle[:, 0], torch.cholesky_inverse(roots), lengths.amax(1), (seen / (n + _PRIOR))[..., 0])


def _weights(fit: _Fit, run: int, rows: torch.Tensor) -> torch.Tensor:
    """How much each row that tells counts for each of the ``rows`` [heads, m, dim] of its run: [m, n]."""
    heads, _, dim = rows.shape
    x = fit.inverse[run] @ fit.x[run]
    y = rows - fit.middle[run].view(heads, 1, dim)
    # Rows unlike all that were seen are taken for the farthest of those.
    like = (fit.reach[run] / y.square().sum((0, 2)).clamp(min=1e-30)).clamp(max=1).sqrt()
    shared = torch.bmm(y, x.unflatten(1, (heads, dim)).permute(1, 2, 0)).sum(0)
    return shared.mul_(like[:, None]).add_(fit.mean[run])

"""Corrects relocated rows by the drift of those rows of their run that are recomputed.

Where a run comes to stand behind other tokens, part of the change in its K and V is the same for all of its rows: in
SmolLM2 a sixth of the squared distance in V, and a third in K before rotation. That part does not average out when many
rows are attended to, as the rest does; the recomputed rows show it. What is not shared depends on the content of a row:
the regression on 24 of 192 rows leaves .79 of the squared distance in V and .64 in K, where their mean leaves .86 and
.70 (four cases of 4 x 192 tokens from behind another head, layers 8, 15, 22 and 29).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from ctxreuse.engines.torch_hf.bits import numbers
from ctxreuse.kernels.drift import DriftFit, correct_drift
from ctxreuse.rope import Rotary

__all__ = ["DriftCorrection"]

#: The first rows of a run are no sample of the others: they were, or become, attention sinks.
_FIRST: Final = 8
#: Rows whose squared drift is more than so many times the median are left out.
_OUTLIER: Final = 4.0
#: Penalty of the regression, in mean squared lengths of its rows.
_RIDGE: Final = 1.0
#: Sampled rows of a run at most, spread evenly over the recomputed ones. With all of them the KL of three cases of
#: 8 x 256 tokens of SmolLM2 was .0186 in place of .0188 (10 % by attention), .0212 in place of .0230 (5 %), and the
#: whole recompute took 2.2 s in place of 1.6.
_SAMPLES: Final = 32
#: A mean of n rows counts n / (n + 4): few of them say little.
_PRIOR: Final = 4.0

_Span = tuple[int, int]
_Tables = tuple[torch.Tensor, torch.Tensor]


class _Layer(Protocol):
    """A layer's K and V in the context, [1, heads, N, dim]."""

    keys: torch.Tensor
    values: torch.Tensor


class _Samples(NamedTuple):
    """What one forward says about each of R runs.

    ``tokens`` int64 [R, n]: which of the forward's tokens are sampled, ``at`` [R, n]: their positions, ``valid``
    [R, n]: False where padded. ``rows``: the positions to be corrected, a slice a run; those that are recomputed are
    overwritten afterwards.
    """

    tokens: torch.Tensor
    at: torch.Tensor
    valid: torch.Tensor
    rows: list[slice]

    def on(self, device: torch.device) -> _Samples:
        """The same in the memory of a device."""
        return _Samples(self.tokens.to(device), self.at.to(device), self.valid.to(device), self.rows)


class _Fit(NamedTuple):
    """A regression for each of R runs: what `ctxreuse.kernels.drift.DriftFit` says of its first four numbers."""

    x: torch.Tensor
    mean: torch.Tensor
    reach: torch.Tensor
    prior: torch.Tensor


class DriftCorrection:
    """Corrections of the runs at ``spans`` in forwards that recompute ``rows``, ascending; for one use by one thread.

    Forwards, and `correct` in them for every layer, come in the order of the rows. ``rotaries``: how each layer rotates
    K. A run whose rows are recomputed in several forwards is corrected part by part.
    """

    # The fit is torch's, as numpy's matrix products have threads of their own, which keep the processors from the
    # model's: recomputing 345 rows of SmolLM2 took 4.0 s with them and takes 1.9 s.

    def __init__(self, spans: Sequence[_Span], rows: npt.NDArray[np.int64], rotaries: Mapping[Any, Rotary]) -> None:
        self._spans, self._rows, self._rotaries = spans, rows, rotaries
        self._samples: _Samples | None = None
        self._there = torch.device("cpu")
        self._tables: dict[Rotary, tuple[_Tables, _Tables]] = {}

    def begin(self, positions: torch.Tensor) -> None:
        """Begin a forward of the tokens at ``positions`` int64 [S]."""
        tokens, rows, at = [], [], positions.numpy()
        for start, end in self._spans:
            here = np.flatnonzero((at >= start + _FIRST) & (at < end))
            if not len(here):
                continue
            before = self._rows[(self._rows < at[0]) & (self._rows >= start)]
            after = self._rows[(self._rows > at[-1]) & (self._rows < end)]
            low = int(before[-1]) + 1 if len(before) else start
            tokens.append(here[np.arange(min(len(here), _SAMPLES)) * len(here) // min(len(here), _SAMPLES)])
            rows.append(slice(low, int(at[-1]) + 1 if len(after) else end))
        self._samples, self._tables = _padded(tokens, rows, at) if tokens else None, {}
        self._there = torch.device("cpu")

    def correct(self, layer: _Layer, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Correct a layer's other rows before it writes ``keys`` and ``values`` [1, heads, S, dim] of the forward."""
        samples = self._samples
        if samples is None:
            return
        if self._there != keys.device:
            self._there = keys.device
            samples = self._samples = samples.on(keys.device)
        rotary = self._rotaries[layer]
        back, there = self._rotation(rotary, samples)
        old_v = _rows(layer.values, samples.at)
        drift_v = _rows(values, samples.tokens) - old_v
        rotated = _rows(keys, samples.tokens) - _rows(layer.keys, samples.at)
        drift_k = torch.zeros_like(rotated)
        _add_rotated(drift_k.flatten(1, 2), rotated.flatten(1, 2), rotary, back)
        usual = _usual(drift_v, samples.valid) & _usual(drift_k, samples.valid)
        # Not by factors of zero, as those that are left out may be no numbers.
        old_v, drift_v, drift_k = (_by_run(x.where(usual[..., None], 0.0)) for x in (old_v, drift_v, drift_k))
        fit = _fit(old_v, usual)
        (_by_kernel if keys.device.type == "cpu" else _by_torch)(
            layer, samples.rows, fit, drift_k, drift_v, rotary, there
        )

    def _rotation(self, rotary: Rotary, samples: _Samples) -> tuple[_Tables, _Tables]:
        """Tables that rotate the R * n sampled rows back, and those that rotate all rows to their positions."""
        if rotary not in self._tables:
            device = samples.at.device
            rows = np.concatenate([np.arange(one.start, one.stop) for one in samples.rows])
            back = _tables(rotary, samples.at.flatten().cpu().numpy(), device, undo=True)
            self._tables[rotary] = back, _tables(rotary, rows, device)
        return self._tables[rotary]


def _by_kernel(
    layer: _Layer, rows: list[slice], fit: _Fit, dk: torch.Tensor, dv: torch.Tensor, rotary: Rotary, there: _Tables
) -> None:
    """Correct the rows of all runs in one call; drifts are [R, n, heads * dim]."""
    correct_drift(
        numbers(layer.keys[0]),
        numbers(layer.values[0]),
        str(layer.keys.dtype).removeprefix("torch."),
        np.array([(one.start, one.stop) for one in rows], np.int64),
        DriftFit(*(x.numpy() for x in (*fit, dk, dv))),
        *(table.numpy() for table in there),
        interleaved=rotary.style == "pairs",
        threads=torch.get_num_threads(),
    )


def _by_torch(
    layer: _Layer, rows: list[slice], fit: _Fit, dk: torch.Tensor, dv: torch.Tensor, rotary: Rotary, there: _Tables
) -> None:
    """The same where a device has them."""
    parts = zip(*(table.split([one.stop - one.start for one in rows]) for table in there))
    for run, (of, tables) in enumerate(zip(rows, parts)):
        k, v = layer.keys[0, :, of], layer.values[0, :, of]
        heads, dim = k.shape[0], k.shape[2]
        weights = _weights(fit, run, v.float()).expand(heads, -1, -1)
        by_heads = (x[run].unflatten(1, (heads, dim)).transpose(0, 1) for x in (dk, dv))
        step_k, step_v = (torch.bmm(weights, x) for x in by_heads)
        v += step_v
        corrected = k.float()  # itself, if it is float32
        _add_rotated(corrected, step_k, rotary, tables)
        if corrected is not k:
            k.copy_(corrected)


def _padded(tokens: list[npt.NDArray[np.int64]], rows: list[slice], at: npt.NDArray[np.int64]) -> _Samples:
    """Samples of runs side by side."""
    n = max(map(len, tokens))
    which = np.stack([np.resize(some, n) for some in tokens])
    valid = np.stack([np.arange(n) < len(some) for some in tokens])
    return _Samples(torch.from_numpy(which), torch.from_numpy(at[which]), torch.from_numpy(valid), rows)


def _rows(plane: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Float32 [heads, R, n, dim] of a plane [1, heads, N, dim]; a copy."""
    return plane[0].index_select(1, rows.flatten()).float().unflatten(1, rows.shape)


def _tables(rotary: Rotary, positions: npt.NDArray[np.int64], device: torch.device, *, undo: bool = False) -> _Tables:
    cos, sin = rotary.tables(positions, undo=undo)
    return torch.from_numpy(cos).to(device), torch.from_numpy(sin).to(device)


def _add_rotated(to: torch.Tensor, k: torch.Tensor, rotary: Rotary, by: _Tables) -> None:
    """Add K [..., rows, dim], rotated by these tables [rows, pairs], to a tensor like it; both float32."""
    (cos, sin), (first, second) = by, rotary.pairs
    to[..., first].addcmul_(k[..., first], cos).addcmul_(k[..., second], sin, value=-1)
    to[..., second].addcmul_(k[..., second], cos).addcmul_(k[..., first], sin)
    rest = 2 * len(rotary.inv_freq)
    if rest < k.shape[-1]:
        to[..., rest:] += k[..., rest:]


def _by_run(plane: torch.Tensor) -> torch.Tensor:
    """[heads, R, n, dim] as [R, n, heads * dim]."""
    return plane.permute(1, 2, 0, 3).flatten(2)


def _usual(drift: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """Which rows of [heads, R, n, dim] are valid and no outliers of their run: [R, n]."""
    far = drift.square().sum((0, 3)).masked_fill(~valid, torch.nan)
    return far <= _OUTLIER * far.nanmedian(1, keepdim=True).values


def _fit(rows: torch.Tensor, usual: torch.Tensor) -> _Fit:
    """Ridge regression on what sampled rows [R, n, numbers] hold; only ``usual`` ones [R, n] count, others are zero."""
    seen = usual.float()[..., None]
    n = seen.sum(1, keepdim=True)
    mean = rows.sum(1, keepdim=True) / n.clamp(min=1)
    x = (rows - mean) * seen
    gram = torch.bmm(x, x.transpose(1, 2))
    lengths = gram.diagonal(dim1=1, dim2=2)
    size = lengths.sum(1)[:, None, None] / n.clamp(min=1)
    # Where all samples are alike, or there is one only, there is nothing to regress on, and any number will do.
    ridge = torch.where(size > 0, _RIDGE * size, 1.0)
    # Not by inv() or solve(): of many matrices they start MKL's threads inside of torch's, which wait for each other.
    roots, _ = torch.linalg.cholesky_ex(gram + ridge * torch.eye(gram.shape[1], device=gram.device))
    inverse = torch.cholesky_inverse(roots)
    return _Fit(torch.bmm(inverse, x), mean[:, 0], lengths.amax(1), (seen / (n + _PRIOR))[..., 0])


def _weights(fit: _Fit, run: int, rows: torch.Tensor) -> torch.Tensor:
    """The weight of each sample for each of the ``rows`` [heads, m, dim] of its run: [m, n]."""
    y = rows.transpose(0, 1).flatten(1) - fit.mean[run]
    # Rows unlike all samples are taken for the farthest of those.
    like = (fit.reach[run] / y.square().sum(1).clamp(min=1e-30)).clamp(max=1).sqrt()
    return (y @ fit.x[run].T).mul_(like[:, None]).add_(fit.prior[run])

"""Rows of K and V that came to stand elsewhere, corrected by what is known of the change of some of them.

Threads. Any thread may call; the interpreter lock is released meanwhile. Other tables round in other ways.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ctxreuse.kernels.base import dtype_code
from ctxreuse.kernels.dispatch import native

__all__ = ["DriftFit", "correct_drift"]

_Floats = NDArray[np.float32]


class DriftFit(NamedTuple):
    """What n samples of each of R runs tell; float32 and contiguous, W = heads * dim.

    A row v of V [W] of the run has weights w = min(1, reach / |v - mean|^2)^(1/2) * (v - mean) x^T + prior [n].

    Args:
        x: [R, n, W].
        mean: [R, W].
        reach: [R]; the square of how far from the mean a row may be before it is drawn nearer.
        prior: [R, n].
        keys: [R, n, W], changes of the samples' K before rotation.
        values: [R, n, W], changes of their V.
    """

    x: _Floats
    mean: _Floats
    reach: _Floats
    prior: _Floats
    keys: _Floats
    values: _Floats


def correct_drift(
    keys: NDArray[Any],
    values: NDArray[Any],
    dtype: str,
    spans: NDArray[np.int64],
    fit: DriftFit,
    cos: _Floats,
    sin: _Floats,
    *,
    interleaved: bool = False,
    threads: int = 1,
) -> None:
    """Add w ``fit.values`` to rows of V in place, and w ``fit.keys``, rotated to the row's position, to those of K.

    Args:
        keys: K of a layer [heads, tokens, dim], dim contiguous; numbers, or the bits of those of two bytes.
        values: V, like it.
        dtype: their type by name.
        spans: [R, 2], the first row of each run and the one behind its last, ascending.
        fit: of these runs.
        cos: [rows of all runs, pairs], of the rows' positions.
        sin: like it.
        interleaved: pairs are (2i, 2i + 1), else (i, i + pairs).
        threads: at most.

    Raises:
        ValueError: shapes, types or spans do not fit.
        MemoryError: some rows may have been corrected.
    """
    boxes = [(x, dtype_code(dtype, x), 0, tuple(step // x.itemsize for step in x.strides)) for x in (keys, values)]
    x, mean, reach, prior, dk, dv = fit
    native.drift_correct(
        *boxes[0], *boxes[1], keys.shape, spans, cos, sin, interleaved, x, mean, reach, prior, dk, dv, threads
    )

"""Linear layers: y = x w^T * scales + bias, the weights read once, where they lie, by several threads.

What the tokens of a decode step need: a library's matrix product packs the weights first, which reads them twice. Of
many rows, some at a time share what was decoded of the weights.
Weights are float32, bfloat16 as 16-bit integers, or int8 codes with a scale an output (`quantise_weights`). Sums are
float32, and run in the same order however many rows there are: a row has the same bits alone and among others. Tables
do not give the same bits.

Any thread may call anything; the interpreter lock is released. One call at a time has the helping threads, others that
run beside it have only their own.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ctxreuse.kernels.dispatch import native

__all__ = ["ACTIVATIONS", "FORMATS", "TOP", "Weights", "linear", "linear_top", "quantise_weights"]

#: What `linear_top` gives of a row: the largest output, the next one, the log-sum-exp of all, its number.
TOP: Final = np.dtype([("best", "<f4"), ("second", "<f4"), ("total", "<f4"), ("index", "<u4")])

#: How the kernels number the types of weights: fp32, bf16, int8.
FORMATS: Final = {np.dtype(np.float32): 0, np.dtype(np.int16): 1, np.dtype(np.uint16): 1, np.dtype(np.int8): 2}
#: fp32 and bf16, as the kernels number them.
ACTIVATIONS: Final = {np.dtype(np.float32): 0, np.dtype(np.int16): 2, np.dtype(np.uint16): 2}


class Weights(NamedTuple):
    """``data`` [outputs, inputs] float32, (u)int16 (bits of bfloat16) or int8.

    ``scales`` (int8 needs them) and ``bias`` are float32 [outputs].
    """

    data: NDArray[Any]
    scales: NDArray[np.float32] | None = None
    bias: NDArray[np.float32] | None = None


def linear(x: NDArray[Any], weights: Weights, y: NDArray[Any], threads: int = 1) -> None:
    """Write x [rows, inputs] times the weights to y [rows, outputs], both float32 or both bits of bfloat16.

    ``threads``: at most. ValueError for types and shapes that do not fit, or memory that is not contiguous.
    """
    data = weights.data
    kind, format = ACTIVATIONS.get(x.dtype), FORMATS.get(data.dtype)
    if kind is None or format is None or y.dtype != x.dtype:
        raise ValueError(f"linear: cannot multiply {x.dtype} with weights of {data.dtype} to {y.dtype}")
    outputs, inputs = data.shape
    native.linear(
        x, kind, data, format, weights.scales, weights.bias, y, x.size // max(inputs, 1), outputs, inputs, threads
    )  # fmt: skip


def linear_top(x: NDArray[Any], weights: Weights, threads: int = 1) -> NDArray[Any]:
    """Return of each row of x [rows, inputs] times the weights, of one output at least, the largest: `TOP` [rows].

    The outputs are compared in the cache, where they were computed. -inf is the second of one; a row that is not finite
    has a ``total`` that is none. ValueError as `linear`.
    """
    data = weights.data
    kind, format = ACTIVATIONS.get(x.dtype), FORMATS.get(data.dtype)
    if kind is None or format is None:
        raise ValueError(f"linear_top: cannot multiply {x.dtype} with weights of {data.dtype}")
    outputs, inputs = data.shape
    tops = np.empty(x.size // max(inputs, 1), TOP)
    native.linear_top(
        x, kind, data, format, weights.scales, weights.bias, tops.view(np.float32), len(tops), outputs, inputs, threads
    )  # fmt: skip
    return tops


def quantise_weights(data: NDArray[np.float32], bias: NDArray[np.float32] | None = None) -> Weights:
    """int8 codes and a scale for each row of ``data`` float32 [outputs, inputs]; ValueError if they are not finite."""
    peak = np.abs(data).max(axis=1, initial=0.0)
    if not np.isfinite(peak).all():
        raise ValueError("weights: not finite")
    scales = np.where(peak > 0, peak / 127, 1).astype(np.float32)
    return Weights(np.rint(data / scales[:, None]).astype(np.int8), scales, bias)

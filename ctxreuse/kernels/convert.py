"""Arrays between float32 and the bits of a stored type, natively: round to nearest even, NaN and infinities kept."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ctxreuse.dtypes import BITS, FLOATS
from ctxreuse.kernels.base import dtype_code
from ctxreuse.kernels.rope import rope_shift

__all__ = ["from_float32", "to_float32"]

_BITS: Final = tuple(BITS[name] for name in FLOATS)


def to_float32(values: NDArray[Any], dtype: str) -> NDArray[np.float32]:
    """Return values of ``dtype`` (given as such, or as their bits) as float32, exactly; the same shape."""
    bits = np.ascontiguousarray(values).view(_BITS[dtype_code(dtype)])
    out = np.empty(bits.shape, np.float32)
    _convert(out, "fp32", bits, dtype)
    return out


def from_float32(values: NDArray[np.float32], dtype: str) -> NDArray[Any]:
    """Return float32 as the bits of ``dtype`` (uint32 or uint16), rounded to nearest even; the same shape."""
    out = np.empty(values.shape, _BITS[dtype_code(dtype)])
    _convert(out, dtype, np.ascontiguousarray(values), "fp32")
    return out


def _convert(out: NDArray[Any], dtype: str, values: NDArray[Any], src_dtype: str) -> None:
    # A rotation by no angles copies and converts.
    rope_shift(out, values, (1, 1, values.size), (), (), dst_dtype=dtype, src_dtype=src_dtype)

"""Element types and checksums as the native kernels take them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import xxhash

from ctxreuse.dtypes import CODES, FLOATS, ITEM_BYTES

if TYPE_CHECKING:
    from ctxreuse._native import Memory

__all__ = ["LONG_HASH", "dense", "dtype_code", "hash_matches", "item_bytes"]

LONG_HASH: Final = 241
"""Bytes from which the native kernels compute XXH3-64: they have the form for long inputs only."""

_SIZES: Final = tuple(ITEM_BYTES[name] for name in FLOATS)
_NUMPY: Final = (np.dtype(np.float32), np.dtype(np.float16), None)


def dtype_code(dtype: str, buffer: Any = None) -> int:
    """Return the native code of an element type; a floating array given as ``buffer`` must be of that type.

    Raises ValueError for an unknown name, TypeError for an array of another floating type.
    """
    code = CODES.get(dtype)
    if code is None:
        raise ValueError(f"element type {dtype!r} is unknown; use one of {', '.join(CODES)}")
    if isinstance(buffer, np.ndarray) and buffer.dtype.kind == "f" and buffer.dtype != _NUMPY[code]:
        raise TypeError(f"array of {buffer.dtype} given as {dtype}; view it as unsigned integers to pass raw bits")
    return code


def item_bytes(code: int) -> int:
    """Return the bytes of an element by its native code."""
    return _SIZES[code]


def dense(shape: Sequence[int]) -> tuple[int, int, int]:
    """Return C-order strides, in elements, of a (heads, tokens, dim) box. ValueError for another number of axes."""
    if len(shape) != 3:
        raise ValueError(f"shape needs (heads, tokens, dim), got {len(shape)} sizes")
    return max(shape[1] * shape[2], 0), max(shape[2], 0), 1


def hash_matches(buffer: Memory, offset: int, size: int, checksum: int) -> bool:
    """Compare the XXH3-64 of ``size`` bytes at ``offset``; False also where the buffer is shorter."""
    data = memoryview(buffer)  # type: ignore[arg-type]
    part = data.cast("B")[offset : offset + size] if data.nbytes else data
    return offset >= 0 and part.nbytes == size and xxhash.xxh3_64_intdigest(part) == checksum

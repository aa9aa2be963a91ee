"""Lossless streams of one plane (scheme 2): self-describing, no card needed."""

from __future__ import annotations

import struct
from math import prod

import numpy as np
import numpy.typing as npt

from ctxreuse.errors import FormatError
from ctxreuse.model import DTYPE_BYTES

__all__ = ["pack_plane", "unpack_plane"]

_NAMES = tuple(DTYPE_BYTES)
_BITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def pack_plane(data: memoryview, dtype: str, shape: tuple[int, ...]) -> bytes:
    """The stream of a plane's bytes."""
    return struct.pack(f"<BBBB{len(shape)}I", 2, 0, _NAMES.index(dtype), len(shape), *shape) + bytes(data)


def unpack_plane(data: memoryview) -> tuple[npt.NDArray[np.generic], str]:
    """The plane's bits in its shape, and its type; FormatError for bytes that are no such stream."""
    if (
        len(data) < 4
        or data[0] != 2
        or data[1] != 0
        or data[2] >= len(_NAMES)
        or data[3] > 8
        or len(data) < 4 + 4 * data[3]
    ):
        raise FormatError("packed plane has no head")
    dtype = _NAMES[data[2]]
    shape = struct.unpack_from(f"<{data[3]}I", data, 4)
    at = 4 + 4 * data[3]
    if len(data) - at != prod(shape) * DTYPE_BYTES[dtype]:
        raise FormatError(f"packed plane of shape {shape} has {len(data) - at} bytes")
    return np.frombuffer(data, _BITS[DTYPE_BYTES[dtype]], offset=at).reshape(shape), dtype

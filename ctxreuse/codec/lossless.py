"""Lossless streams of planes (scheme 2), the level "exact+rans": self-describing, any type and shape, no profile.

Floating-point planes are coded by `ctxreuse.kernels.lossless`; other types are kept as they are behind the same head,
and so is what does not become shorter. A head has type and shape, so that a plane can be read from its bytes alone.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from math import prod
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ctxreuse import kernels
from ctxreuse.dtypes import ITEM_BYTES, UNSIGNED
from ctxreuse.errors import FormatError

__all__ = ["decode_plane", "encode_plane", "plane_of", "unpack_plane", "unpack_run"]

Bytes = npt.NDArray[np.uint8]

_SCHEME: Final = 2
_MAX_AXES: Final = 8
_MAX_LENGTH: Final = 1 << 32
#: Types by their number in a stream; the first three are those that are coded.
_TYPES: Final = ("float32", "float16", "bfloat16", "int32", "int64", "uint8", "int8")
_CODED: Final = 3
_HEAD: Final = 16  # of three axes, as the kernel writes it


def encode_plane(data: Any, dtype: str, shape: tuple[int, ...]) -> Bytes:
    """Return the stream uint8 [n] of a plane, given as its bytes or as an array of them (C order)."""
    flat = np.ascontiguousarray(data).reshape(-1).view(np.uint8) if isinstance(data, np.ndarray) else _flat(data)
    if dtype not in _TYPES or len(shape) > _MAX_AXES or not all(0 <= n < _MAX_LENGTH for n in shape):
        raise ValueError(f"plane of type {dtype!r} and shape {shape} cannot be packed")
    if flat.size != prod(shape) * ITEM_BYTES[dtype]:
        raise ValueError(f"plane of shape {shape} and type {dtype} has {flat.size} bytes")
    if len(shape) == 3 and _TYPES.index(dtype) < _CODED:
        return kernels.lossless_encode(flat, dtype, shape)
    head = np.frombuffer(
        struct.pack(f"<BBBB{len(shape)}I", _SCHEME, _TYPES.index(dtype), len(shape), 0, *shape), np.uint8
    )
    body = flat if _TYPES.index(dtype) >= _CODED else kernels.lossless_encode(flat, dtype, _box(shape))[_HEAD:]
    return np.concatenate([head, body])


def plane_of(data: Any) -> tuple[str, tuple[int, ...]]:
    """Return type and shape from a stream's head; FormatError for a malformed head. The rest is not checked."""
    view = memoryview(data)
    if len(view) < 4 or view[0] != _SCHEME or view[1] >= len(_TYPES) or view[2] > _MAX_AXES or view[3]:
        raise FormatError("packed plane has no head")
    if len(view) < 4 + 4 * view[2]:
        raise FormatError(f"packed plane of {view[2]} axes has {len(view)} bytes")
    dtype, shape = _TYPES[view[1]], struct.unpack_from(f"<{view[2]}I", view, 4)
    # An axis of 0 makes the others no smaller for who counts in 32 bits.
    if (view[1] < _CODED or 0 in shape) and prod(max(n, 1) for n in shape) >= 1 << 31:
        raise FormatError(f"packed plane of shape {shape} in {len(view)} bytes")
    return dtype, shape


def decode_plane(data: Any, out: npt.NDArray[Any]) -> None:
    """Decode a stream into ``out``, a contiguous array of its element size and shape, else FormatError."""
    dtype, shape = plane_of(data)
    if out.itemsize != ITEM_BYTES[dtype] or out.shape != shape or not out.flags.c_contiguous:
        raise FormatError(f"packed plane of type {dtype} and shape {shape} is wanted as {out.dtype} {out.shape}")
    view, at = memoryview(data), 4 + 4 * len(shape)
    if _TYPES.index(dtype) >= _CODED:
        if len(view) - at != out.nbytes:
            raise FormatError(f"packed plane of shape {shape} has {len(view) - at} bytes")
        out.reshape(-1).view(np.uint8)[:] = _flat(view)[at:]
        return
    heads, tokens, dim = _box(shape)
    target = out.reshape(-1).view(np.uint8)
    bad = kernels.lossless_decode(
        target, dtype, 0, (tokens * dim, dim), heads, dim, [_flat(view)], [0], [len(view)], [tokens]
    )
    if bad >= 0:
        raise FormatError(f"packed plane of shape {shape} is corrupt")


def unpack_plane(data: memoryview, *, limit: int = 1 << 34) -> tuple[npt.NDArray[Any], str]:
    """Return the plane's bits (unsigned integers of its element size) in its shape, and its type.

    FormatError for a malformed stream, or one whose head claims more than ``limit`` bytes.
    """
    dtype, shape = plane_of(data)
    # A coded element takes six bits or more of its stream: no memory for a shape that the bytes cannot fill.
    if prod(shape) * ITEM_BYTES[dtype] > min(limit, 8 * memoryview(data).nbytes):
        raise FormatError(f"packed plane of shape {shape} in {memoryview(data).nbytes} bytes")
    out = np.empty(shape, UNSIGNED[ITEM_BYTES[dtype]])
    decode_plane(data, out)
    return out, dtype


def unpack_run(
    streams: Sequence[Any],
    offsets: Sequence[int],
    sizes: Sequence[int],
    token_counts: Sequence[int],
    dtype: str,
    target: npt.NDArray[Any],
    start: int,
    checksums: Sequence[int] | None = None,
) -> None:
    """Decode one plane of consecutive blocks into rows from ``start`` of ``target`` [heads, capacity, dim] in one call.

    Stream i is ``sizes[i]`` bytes at byte ``offsets[i]`` of ``streams[i]`` and must hold [heads, token_counts[i], dim].
    ``target``: bits of the type, any strides. With ``checksums``, XXH3-64 values are compared first. FormatError at the
    first corrupt stream: rows have been written then. The interpreter lock is released.
    """
    heads, capacity, dim = target.shape
    if start < 0 or start + sum(token_counts) > capacity or any(step % target.itemsize for step in target.strides):
        raise ValueError(f"rows {start} to {start + sum(token_counts)} of {capacity}")
    strides = [step // target.itemsize for step in target.strides]
    rows = target[:, start:]
    if not sum(token_counts):
        rows = target
    bits = rows if rows.dtype.kind == "u" else rows.view(UNSIGNED[target.itemsize])
    bad = kernels.lossless_decode(bits, dtype, 0, strides, heads, dim, streams, offsets, sizes, token_counts, checksums)
    if bad >= 0:
        raise FormatError("packed plane is corrupt", where=f"block {bad} of {len(streams)}", fix="It is recomputed")


def _box(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """A shape of any number of axes as [heads, tokens, dim]."""
    tokens, dim = (1, 1, *shape)[-2:]
    return prod(shape[:-2]), tokens, dim


def _flat(data: Any) -> Bytes:
    return np.frombuffer(data, np.uint8) if memoryview(data).nbytes else np.zeros(0, np.uint8)

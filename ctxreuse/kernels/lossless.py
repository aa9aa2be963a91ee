"""Lossless packing of planes [heads, tokens, dim] of float32, float16 and bfloat16: any bits come back as they were.

Exponents and signs are entropy-coded by channel, since a channel of a cache has one scale; what is left of the
mantissas is noise and stays as it is. `native/lossless/lossless.h` defines the streams. They are never longer than the
elements and `lossless_bound(0)` bytes. All instruction sets give the same bytes.

The decoder takes any bytes: a malformed stream is reported, and nothing outside of the box is
written; but changed bytes may decode to other numbers, so compare checksums.

Threads. Any thread may call anything, without the interpreter lock. Decoding more than `PARALLEL_BYTES` uses one
thread a core.

Errors. ValueError: sizes, strides, types; MemoryError. Bytes that are not right are a value (an index), not an error.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from ctxreuse.kernels.base import LONG_HASH, dense, dtype_code, hash_matches, item_bytes
from ctxreuse.kernels.dispatch import native
from ctxreuse.kernels.threads import cores, spread

if TYPE_CHECKING:
    from ctxreuse._native import Memory

__all__ = ["PARALLEL_BYTES", "lossless_bound", "lossless_decode", "lossless_encode"]

Bytes = NDArray[np.uint8]

PARALLEL_BYTES: Final = 4 << 20
"""Bytes of elements from which one call uses several threads: a millisecond of work for two."""
#: Bytes that each thread keeps to encode into: a plane of 64 tokens of the largest models.
_KEPT: Final = 1 << 20
_thread = threading.local()


def lossless_bound(nbytes: int) -> int:
    """Bytes that suffice for the stream of a plane of so many bytes."""
    return nbytes + 40


def lossless_encode(
    src: Memory,
    dtype: str,
    shape: Sequence[int],
    *,
    strides: Sequence[int] | None = None,
    offset: int = 0,
    out: Bytes | None = None,
) -> Bytes:
    """Pack a box (heads, tokens, dim); `strides` in elements, C order if None, `offset` in bytes.

    Returns the stream as a view of `out`, uint8 of at least `lossless_bound`, or in memory of its own size.
    """
    code = dtype_code(dtype)
    if strides is None:
        strides = dense(shape)
    if out is not None:
        return out[: native.lossless_encode(src, code, offset, strides, shape, out)]
    room = _room(lossless_bound(max(0, shape[0] * shape[1] * shape[2] * item_bytes(code))))
    return room[: native.lossless_encode(src, code, offset, strides, shape, room)].copy()


def lossless_decode(
    dst: Memory,
    dtype: str,
    offset: int,
    strides: Sequence[int],
    heads: int,
    dim: int,
    srcs: Sequence[Memory],
    src_offsets: Sequence[int],
    src_sizes: Sequence[int],
    token_counts: Sequence[int],
    checksums: Sequence[int] | None = None,
) -> int:
    """Unpack the planes of consecutive blocks into an engine's tensor [heads, tokens, dim], in one call.

    Stream i, `src_sizes[i]` bytes at byte `src_offsets[i]` of `srcs[i]`, must be a plane [heads, token_counts[i], dim]
    of this type; its tokens follow those of plane i-1, the first at `offset`. With `checksums`, its XXH3-64 is compared
    before it is decoded. Returns the index of the first stream that is not right, or -1; the destination is not to be
    used then, for some of it has been written.
    """
    code, count = dtype_code(dtype), len(srcs)
    if checksums is not None and min(src_sizes, default=0) < LONG_HASH:
        for i, (src, at, size, wanted) in enumerate(zip(srcs, src_offsets, src_sizes, checksums, strict=True)):
            if not hash_matches(src, at, size, wanted):
                return i
        checksums = None
    total = sum(token_counts)
    threads = min(cores(), count) if heads * total * dim * item_bytes(code) > PARALLEL_BYTES else 1
    edges = [count * i // threads for i in range(threads + 1)]

    def decode(i: int) -> int:
        part = slice(edges[i], edges[i + 1])
        first = sum(token_counts[: edges[i]])
        at = offset + first * strides[1] * item_bytes(code)
        sums = None if checksums is None else checksums[part]
        run = (srcs[part], src_offsets[part], src_sizes[part], token_counts[part], sums)
        bad = native.lossless_decode(dst, code, at, strides, heads, dim, *run)
        return bad if bad < 0 else bad + edges[i]

    bad = [stream for stream in spread(decode, threads) if stream >= 0]
    return min(bad, default=-1)


def _room(size: int) -> Bytes:
    """Memory of this thread to encode into: fresh pages would cost a tenth of the time. Large planes get their own."""
    if size > _KEPT:
        return np.empty(size, np.uint8)
    room: Bytes | None = getattr(_thread, "room", None)
    if room is None:
        room = _thread.room = np.empty(_KEPT, np.uint8)
    return room

"""Blocks into an engine's memory and out of it, and that memory's pages; see `ctxreuse.kernels` for the boxes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from ctxreuse.kernels.base import LONG_HASH, dense, dtype_code, hash_matches, item_bytes
from ctxreuse.kernels.dispatch import native

if TYPE_CHECKING:
    from ctxreuse._native import Memory

__all__ = ["advise_hugepages", "copy_box", "gather_checked", "scatter_checked"]

_NO_ANGLES: Final = np.zeros(0, np.float32)


def scatter_checked(
    dst: Memory,
    dst_dtype: str,
    dst_offset: int,
    dst_strides: Sequence[int],
    srcs: Sequence[Memory],
    src_offsets: Sequence[int],
    src_dtype: str,
    heads: int,
    dim: int,
    token_counts: Sequence[int],
    checksums: Sequence[int],
) -> int:
    """Write the planes of consecutive blocks into an engine's tensor [heads, tokens, dim], comparing their XXH3-64.

    Plane i is contiguous [heads, token_counts[i], dim] at byte `src_offsets[i]` of `srcs[i]` and has the checksum
    `checksums[i]`; its tokens follow those of plane i-1, the first at `dst_offset`. Nothing is written if any argument
    is refused.

    Returns the index of the first plane that differs, or -1. What was written of that plane and of those before it
    stays written: the destination is not to be used then. Memory is read once and, where the tensor is aligned to 64
    bytes, written past the caches (94 MB of 48 KiB planes on one core: 12.2 GB/s with AVX-512, 10.4 with AVX2; memcpy
    14.9; see ``ctxreuse bench kernels``. Checking first and copying then: 5.8).
    """
    to, of = dtype_code(dst_dtype, dst), dtype_code(src_dtype)
    sizes = [heads * count * dim * item_bytes(of) for count in token_counts]
    if not any(0 < size < LONG_HASH for size in sizes):
        run = srcs, src_offsets, of, heads, dim, token_counts
        return native.scatter_checked(dst, to, dst_offset, dst_strides, *run, checksums)
    row = dst_offset
    for i, (src, at, count, checksum) in enumerate(zip(srcs, src_offsets, token_counts, checksums, strict=True)):
        if not sizes[i]:
            continue
        if not hash_matches(src, at, sizes[i], checksum):
            return i
        # A rotation by no angles copies and converts.
        box = src, of, at, (count * dim, dim, 1), (heads, count, dim)
        native.rope_shift(dst, to, row, dst_strides, *box, _NO_ANGLES, _NO_ANGLES, False)
        row += count * dst_strides[1] * item_bytes(to)
    return -1


def gather_checked(
    to: Memory, buffers: Sequence[Memory], spans: npt.NDArray[np.int64], checksums: npt.NDArray[np.uint64]
) -> int:
    """Copy spans of buffers one behind another to another one, comparing their XXH3-64.

    Args:
        to: bytes, writable, at least as many as the spans have.
        buffers: the bytes that they are spans of; each has as many.
        spans: byte offset and size of each, int64 [buffers, n, 2].
        checksums: uint64 [buffers, n].

    Returns the index of the first that differs, or -1; what was written before it stays. Memory is read once.
    """
    spans, checksums = np.ascontiguousarray(spans, np.int64), np.ascontiguousarray(checksums, np.uint64)
    sizes = spans[..., 1]
    if not (sizes < LONG_HASH).any():
        return native.gather_checked(to, buffers, spans, checksums)
    out, at = memoryview(to).cast("B"), 0  # type: ignore[arg-type]
    views = [memoryview(buffer).cast("B") for buffer in buffers]  # type: ignore[arg-type]
    ends = (spans[..., 0] + sizes).max(1)
    fits = (
        spans.shape[:2] == checksums.shape
        and len(spans) == len(views)
        and all(map(int.__le__, ends.tolist(), map(len, views)))
    )
    if spans.min() < 0 or sizes.sum() > len(out) or not fits:
        raise ValueError(
            f"spans: do not fit {len(views)} buffers, {len(out)} bytes there and {checksums.size} checksums"
        )
    places = spans.reshape(-1, 2).tolist()
    for i, ((first, size), checksum) in enumerate(zip(places, checksums.ravel().tolist(), strict=True)):
        view = views[i // spans.shape[1]]
        if not hash_matches(view, first, size, checksum):
            return i
        out[at : at + size] = view[first : first + size]
        at += size
    return -1


def copy_box(
    dst: Memory,
    src: Memory,
    dtype: str,
    shape: Sequence[int],
    *,
    dst_offset: int = 0,
    dst_strides: Sequence[int] | None = None,
    src_offset: int = 0,
    src_strides: Sequence[int] | None = None,
) -> None:
    """Copy a box of elements of one type between two layouts, transposing in tiles where their inner axes differ."""
    code = dtype_code(dtype)
    dst_strides = dense(shape) if dst_strides is None else dst_strides
    src_strides = dense(shape) if src_strides is None else src_strides
    # A rotation by no angles copies.
    box = src, code, src_offset, src_strides, shape
    native.rope_shift(dst, code, dst_offset, dst_strides, *box, _NO_ANGLES, _NO_ANGLES, False)


def advise_hugepages(buffer: Memory, *, populate: bool = False) -> int:
    """Ask for huge pages on the whole 2 MiB pages inside a buffer; with `populate`, fault them in writable.

    Returns the bytes advised: 0 where the buffer holds no whole page or the kernel has no transparent huge pages.
    """
    return native.advise_hugepages(buffer, populate)

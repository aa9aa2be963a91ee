"""Rows of an engine's memory, [heads, capacity, dim] as bits: filled from planes of blocks, and copied into them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt

from ctxreuse import kernels
from ctxreuse.block.format import BlockView
from ctxreuse.block.levels import is_raw
from ctxreuse.codec import Codec

__all__ = ["Bits", "fill_rows", "fill_rows_of", "gather", "scatter"]

# Equal types are copied as bytes, so float16 may stand for bfloat16 too.
_NAMES = {2: "float16", 4: "float32"}

#: Numbers as whole numbers over the same memory.
Bits = npt.NDArray[Any]


def scatter(target: Bits, start: int, views: Sequence[BlockView], layer: int, role: str) -> None:
    """Check plane ``layer, role`` of consecutive blocks and copy it to rows from ``start`` of [heads, capacity, dim].

    Raises FormatError at the first plane whose checksum differs; rows have been written then, the context is spoiled.
    """
    heads, capacity, dim = target.shape
    # One native call checks and copies all planes of the layer without the interpreter lock, reading memory once.
    kind = _NAMES[target.dtype.itemsize]
    buffers = [view.buffer for view in views]
    offsets = [view.offset(layer, role) for view in views]
    counts = [len(view.header.tokens) // 4 for view in views]
    sums = [view.checksum(layer, role) for view in views]
    strides = (capacity * dim, dim)
    at = start * dim * target.dtype.itemsize
    bad = kernels.scatter_checked(target, kind, at, strides, buffers, offsets, kind, heads, dim, counts, sums)
    if bad >= 0:
        views[bad].plane(layer, role)  # raises, naming the plane


def fill_rows_of(
    target: Bits, row: int, views: Sequence[BlockView], layer: int, role: str, codec: Codec | None
) -> None:
    """Copy or decode a plane of consecutive blocks, all raw or all coded, to rows from ``row`` on; see `scatter`."""
    if codec is None or is_raw(views[0].header.level):
        scatter(target, row, views, layer, role)
    else:
        codec.fill(views, layer, role, target, row)


def fill_rows(target: Bits, row: int, views: Sequence[BlockView], layer: int, role: str, codec: Codec | None) -> None:
    """As `fill_rows_of`, of blocks of any levels that ``codec`` knows."""
    for _, run in groupby(views, key=lambda view: is_raw(view.header.level)):
        alike = list(run)
        fill_rows_of(target, row, alike, layer, role, codec)
        row += sum(len(view.header.tokens) // 4 for view in alike)


def gather(source: Bits, start: int, target: npt.NDArray[np.uint8]) -> None:
    """Copy rows of ``source`` [heads, capacity, dim] from ``start`` into the bytes of a plane [heads, count, dim]."""
    heads, _, dim = source.shape
    plane = target.view(source.dtype).reshape(heads, -1, dim)
    plane[:] = source[:, start : start + plane.shape[1]]

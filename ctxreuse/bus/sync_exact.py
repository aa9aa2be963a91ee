"""Blocks that a store keeps packed, as they were before: what a cloud takes."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ctxreuse.block import BlockView, Layout, Plane, reseal, rewriter
from ctxreuse.codec.lossless import plane_of, unpack_plane
from ctxreuse.levels import EXACT, PACKED

__all__ = ["exact_bytes", "exact_nbytes"]


def exact_nbytes(view: BlockView) -> int:
    """Bytes of the block or state when it is not packed. Raises FormatError for streams that say nothing of it."""
    return (
        len(view.buffer)
        if view.header.level != PACKED
        else rewriter(view, layout=_layout(view), level=EXACT).buffer.nbytes
    )


def exact_bytes(view: BlockView) -> npt.NDArray[np.uint8]:
    """The sealed bytes of an exact block or state with raw planes: its own memory where it is not packed. Raises
    FormatError for damaged bytes."""
    if view.header.level != PACKED:
        return np.frombuffer(view.buffer, np.uint8)
    made = {}
    for plane in view.layout.planes:
        array, _ = unpack_plane(view.plane(plane.layer, plane.role))
        made[plane.layer, plane.role] = np.ascontiguousarray(array).view(np.uint8).reshape(-1)
    return reseal(view, made, layout=_layout(view), level=EXACT)


def _layout(view: BlockView) -> Layout:
    planes = []
    for plane in view.layout.planes:
        dtype, shape = plane_of(view.plane(plane.layer, plane.role, verify=False))
        planes.append(Plane(plane.layer, plane.role, dtype, tuple(shape)))
    return Layout(tuple(planes))

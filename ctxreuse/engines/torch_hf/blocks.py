"""Planes between blocks and an arena: the one place that moves K and V bytes in either direction."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ctxreuse.block import BlockView, Layout, Plane, layout_of
from ctxreuse.model import ModelSpace

__all__ = ["bits", "block_layout", "gather", "scatter"]

_BITS: dict[int, Any] = {2: np.uint16, 4: np.uint32}
_INTEGERS = {2: torch.int16, 4: torch.int32}
#: A model whose layers all keep states only has no K/V to put in a block; the format wants one plane.
_EMPTY = Plane(0, "empty", "uint8", (0,))

Bits = npt.NDArray[Any]


def block_layout(space: ModelSpace) -> Layout:
    """The planes of a block of this space: k and v [heads, block_tokens, dim] of every layer that keeps all tokens."""
    planes = [
        Plane(layer, role, space.dtype, (spec.kv_heads, space.block_tokens, dim))
        for layer, spec in enumerate(space.layers)
        if spec.blocked
        for role, dim in (("k", spec.k_dim), ("v", spec.v_dim))
    ]
    return layout_of(tuple(planes) or (_EMPTY,))


def bits(plane: torch.Tensor) -> Bits:
    """An arena plane [1, heads, capacity, dim] as whole numbers [heads, capacity, dim] over the same memory.

    Numbers are moved as bits: a copy through float types could quieten a NaN, and numpy has no bfloat16.
    """
    size = plane.dtype.itemsize
    array: Bits = plane[0].view(_INTEGERS[size]).numpy()
    return array.view(_BITS[size])


def scatter(target: Bits, views: Sequence[BlockView], layer: int, role: str) -> None:
    """Check plane ``layer, role`` of consecutive blocks and copy it into ``target`` [heads, capacity, dim] from row 0.

    Raises FormatError at the first plane whose checksum differs; rows up to it have been written then.
    """
    heads, _, dim = target.shape
    at = 0
    for view in views:
        count = len(view.header.tokens) // 4
        source = np.frombuffer(view.plane(layer, role), target.dtype)
        target[:, at : at + count] = source.reshape(heads, count, dim)
        at += count


def gather(source: Bits, start: int, target: npt.NDArray[np.uint8]) -> None:
    """Copy rows of ``source`` [heads, capacity, dim] from ``start`` into the bytes of a plane [heads, count, dim]."""
    heads, _, dim = source.shape
    plane = target.view(source.dtype).reshape(heads, -1, dim)
    plane[:] = source[:, start : start + plane.shape[1]]

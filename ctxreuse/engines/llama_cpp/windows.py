"""Sliding windows as sealed states: K and V of the last positions that a token still sees, layer by layer."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ctxreuse.block.format import BlockView, BlockWriter, Layout, Plane, layout_of
from ctxreuse.block.levels import EXACT, approx
from ctxreuse.engines.llama_cpp.state import LlamaState, StateLayout
from ctxreuse.identity.keys import Tokens
from ctxreuse.identity.model import ModelSpace

__all__ = ["fits", "read_windows", "seal_windows"]


def _layout(space: ModelSpace, position: int) -> Layout:
    return layout_of(
        tuple(
            Plane(layer, role, space.dtype, (spec.kv_heads, min(position, spec.window - 1), dim))
            for layer, spec in enumerate(space.layers)
            if spec.window
            for role, dim in (("k", spec.k_dim), ("v", spec.v_dim))
        )
    )


def fits(view: BlockView, space: ModelSpace) -> bool:
    """True if the planes of a sealed state are those of this space at the view's position."""
    return view.layout.planes == _layout(space, view.header.end).planes


def seal_windows(
    space: ModelSpace, windows: LlamaState, level: str, tokens: Tokens, key: bytes, parent: bytes
) -> npt.NDArray[np.uint8]:
    """The bytes of the windows at a position; the header names the ids of the block that ends there."""
    end = windows.cells
    writer = BlockWriter(
        _layout(space, end),
        kind="state",
        space=space.digest,
        key=key,
        parent=parent,
        end=end,
        tokens=tokens[end - space.block_tokens : end],
        level=level if level == EXACT else approx(level),
    )
    for plane in writer.layout.planes:
        heads, count, dim = plane.shape
        rows = windows.rows(plane.layer, plane.role)
        target = writer.plane(plane.layer, plane.role).view(rows.dtype).reshape(plane.shape)
        target[:] = rows[len(rows) - count :].reshape(count, heads, dim).transpose(1, 0, 2)
    return writer.seal()


def read_windows(view: BlockView, layout: StateLayout) -> LlamaState:
    """A sealed state as windows of ``layout``; raises FormatError if a plane is corrupt."""
    made = LlamaState(layout, view.header.end)
    for plane in view.layout.planes:
        heads, count, dim = plane.shape
        rows = made.rows(plane.layer, plane.role)
        bits = np.frombuffer(view.plane(plane.layer, plane.role), rows.dtype).reshape(plane.shape)
        rows[: len(rows) - count] = 0  # nothing sees it any more
        rows[len(rows) - count :].reshape(count, heads, dim)[:] = bits.transpose(1, 0, 2)
    return made

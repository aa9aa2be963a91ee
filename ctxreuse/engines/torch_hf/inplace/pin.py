"""Pins rows of blocks as a run that contexts attend to in place: quantised, or as the blocks store them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ctxreuse.block.format import BlockView, Layout
from ctxreuse.block.levels import is_joint, is_raw
from ctxreuse.codec import Codec
from ctxreuse.dtypes import BITS, KERNEL_NAMES, VALUES
from ctxreuse.engines.checks import check_rows
from ctxreuse.engines.chunks import BlockRows, RelocationError, RunFormat
from ctxreuse.errors import EngineError, FormatError
from ctxreuse.identity.model import ModelSpace
from ctxreuse.kernels.attention import GROUP, Plane, quantise
from ctxreuse.reuse.inplace import CodedSlab, PinnedRun, Slab

__all__ = ["pin_rows"]


def pin_rows(
    rows: Sequence[BlockRows], format: RunFormat, space: ModelSpace, layout: Layout, codec: Codec | None
) -> PinnedRun:
    """See `InPlaceOps.pin_run`; ``codec`` is needed if a view is coded."""
    widths = {width for spec in space.layers for width in (spec.k_dim, spec.v_dim) if spec.blocked}
    if any((spec.k_dim != spec.v_dim) for spec in space.layers if spec.blocked):
        raise EngineError("K and V of different widths cannot be attended to in place", where=space.architecture)
    if format == "int4" and any(width % GROUP for width in widths):
        raise EngineError(f"int4 needs heads of a multiple of {GROUP} values", fix="Pin them as int8")
    if not rows:
        raise EngineError("no rows to pin")
    check_rows(rows, space, layout, codec)
    first = rows[0].view.header.rope_at + rows[0].row
    tokens = np.concatenate([one.view.tokens[one.row : one.row + one.count] for one in rows])
    layers: dict[int, tuple[Slab | CodedSlab, ...]] = {}
    for layer, spec in enumerate(space.layers):
        if not spec.blocked:
            continue
        if format == "stored":
            layers[layer] = _as_stored(rows, layer, space, codec)
        else:
            k, v = (_together(rows, layer, role, space, codec) for role in ("k", "v"))
            layers[layer] = (Slab(quantise(k, format), quantise(v, format), 0, len(tokens)),)
    return PinnedRun(tokens, first, layers, format)


def _as_stored(
    rows: Sequence[BlockRows], layer: int, space: ModelSpace, codec: Codec | None
) -> tuple[Slab | CodedSlab, ...]:
    """Views of raw planes; coded blocks that lie one behind another as one slab, so that one call decodes them.

    Of joint levels all layers would be decoded for each: those are decoded once, to raw planes.
    """
    name, slabs, at = KERNEL_NAMES[space.dtype], list[Slab | CodedSlab](), 0
    levels = [one.view.header.level for one in rows]
    coded = [codec is not None and not is_raw(level) and not is_joint(level) for level in levels]
    for index, one in enumerate(rows):
        # For coded ones this is the check: damage must be found here.
        k, v = (Plane(name, _plane(rows, index, layer, role, space, codec)) for role in ("k", "v"))
        if not coded[index]:
            slabs.append(Slab(k, v, one.row, one.count))
            at = index + 1
        elif one.row + one.count < space.block_tokens or not any(coded[index + 1 : index + 2]):
            assert codec is not None
            slabs.append(_coded(rows[at : index + 1], layer, space, codec))
            at = index + 1
    return tuple(slabs)


def _coded(rows: Sequence[BlockRows], layer: int, space: ModelSpace, codec: Codec) -> CodedSlab:
    """The rows of coded blocks that lie one behind another (see `check_rows`), none but the last ending within."""
    size, views = space.block_tokens, [one.view for one in rows]
    count = sum(one.count for one in rows)
    nbytes = sum(view.layout.planes[view.layout.index[layer, role]].nbytes for view in views for role in ("k", "v"))

    def plane(role: str) -> Plane:
        return Plane(KERNEL_NAMES[space.dtype], _decoded(views, layer, role, space, codec))

    return CodedSlab(plane, nbytes * count // (len(views) * size), rows[0].row, count)


def _decoded(views: Sequence[BlockView], layer: int, role: str, space: ModelSpace, codec: Codec) -> npt.NDArray[Any]:
    """Planes of coded blocks one behind another, [heads, tokens, dim]."""
    spec = space.layers[layer]
    whole = np.empty((spec.kv_heads, len(views) * space.block_tokens, spec.k_dim), BITS[space.dtype])
    codec.fill(views, layer, role, whole, 0)
    return whole.view(VALUES[space.dtype])


def _plane(
    rows: Sequence[BlockRows], index: int, layer: int, role: str, space: ModelSpace, codec: Codec | None
) -> npt.NDArray[Any]:
    """A whole plane [heads, tokens, dim]: a view of the block if it is raw, decoded if not."""
    view = rows[index].view
    try:
        if codec is None or is_raw(view.header.level):
            return np.asarray(view.array(layer, role)).view(VALUES[space.dtype])
        return _decoded([view], layer, role, space, codec)
    except FormatError as error:
        raise RelocationError(error.what, where=error.where, fix=error.fix, index=index, key=view.header.key) from error


def _together(
    rows: Sequence[BlockRows], layer: int, role: str, space: ModelSpace, codec: Codec | None
) -> npt.NDArray[Any]:
    """The rows [heads, n, dim] in new memory."""
    spec, at = space.layers[layer], 0
    out = np.empty((spec.kv_heads, sum(one.count for one in rows), spec.k_dim), VALUES[space.dtype])
    for index, one in enumerate(rows):
        whole = _plane(rows, index, layer, role, space, codec)
        out[:, at : at + one.count] = whole[:, one.row : one.row + one.count]
        at += one.count
    return out

"""Rows of blocks as runs that are attended to in place: quantised, or as the blocks hold them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ctxreuse.block import BlockView, Layout
from ctxreuse.codec import Codec
from ctxreuse.engines.moving import HeldFormat, MoveError, Rows
from ctxreuse.engines.torch_hf.checks import check_rows
from ctxreuse.engines.torch_hf.inplace import FORMATS
from ctxreuse.errors import EngineError, FormatError
from ctxreuse.kernels.attend import GROUP, Plane, quantise
from ctxreuse.levels import is_raw
from ctxreuse.model import ModelSpace
from ctxreuse.reuse.attend import Coded, Held, Slab

__all__ = ["hold"]


def hold(
    pieces: Sequence[Rows], format: HeldFormat, space: ModelSpace, layout: Layout, codec: Callable[[], Codec]
) -> Held:
    """See `Holder.hold`; ``codec`` is asked for if a view is coded."""
    widths = {width for spec in space.layers for width in (spec.k_dim, spec.v_dim) if spec.blocked}
    if any((spec.k_dim != spec.v_dim) for spec in space.layers if spec.blocked):
        raise EngineError("K and V of different widths cannot be attended to in place", where=space.architecture)
    if format == "int4" and any(width % GROUP for width in widths):
        raise EngineError(f"int4 needs heads of a multiple of {GROUP} values", fix="Hold them as int8")
    if not pieces:
        raise EngineError("no rows to hold")
    decoder = None if all(is_raw(piece.view.header.level) for piece in pieces) else codec()
    check_rows(pieces, space, layout, decoder)
    first = pieces[0].view.header.rope_at + pieces[0].row
    tokens = np.concatenate([piece.view.tokens[piece.row : piece.row + piece.count] for piece in pieces])
    layers: dict[int, tuple[Slab | Coded, ...]] = {}
    for layer, spec in enumerate(space.layers):
        if not spec.blocked:
            continue
        if format == "stored":
            layers[layer] = _as_stored(pieces, layer, space, decoder)
        else:
            k, v = (_together(pieces, layer, role, space, decoder) for role in ("k", "v"))
            layers[layer] = (Slab(quantise(k, format), quantise(v, format), 0, len(tokens)),)
    return Held(tokens, first, layers, format)


def _as_stored(pieces: Sequence[Rows], layer: int, space: ModelSpace, codec: Codec | None) -> tuple[Slab | Coded, ...]:
    """Views of raw planes; coded blocks that lie one behind another as one slab, so that one call decodes them."""
    name, slabs, at = FORMATS[space.dtype][0], list[Slab | Coded](), 0
    coded = [codec is not None and not is_raw(piece.view.header.level) for piece in pieces]
    for index, piece in enumerate(pieces):
        # Of coded ones this is the check: what is damaged must be found here.
        k, v = (Plane(name, _plane(pieces, index, layer, role, space, codec)) for role in ("k", "v"))
        if not coded[index]:
            slabs.append(Slab(k, v, piece.row, piece.count))
            at = index + 1
        elif piece.row + piece.count < space.block_tokens or not any(coded[index + 1 : index + 2]):
            assert codec is not None
            slabs.append(_coded(pieces[at : index + 1], layer, space, codec))
            at = index + 1
    return tuple(slabs)


def _coded(pieces: Sequence[Rows], layer: int, space: ModelSpace, codec: Codec) -> Coded:
    """The rows of coded blocks that lie one behind another (see `check_rows`), none but the last ending within."""
    spec, size, views = space.layers[layer], space.block_tokens, [piece.view for piece in pieces]
    name, kind = FORMATS[space.dtype]
    rows = sum(piece.count for piece in pieces)

    def plane(role: str) -> Plane:
        whole = np.empty((spec.kv_heads, len(views) * size, spec.k_dim), np.uint32 if name == "fp32" else np.uint16)
        codec.fill(views, layer, role, whole, 0)
        return Plane(name, whole.view(kind))

    nbytes = sum(view.layout.planes[view.layout.index[layer, role]].nbytes for view in views for role in ("k", "v"))
    return Coded(plane, nbytes * rows // (len(views) * size), pieces[0].row, rows)


def _values(view: BlockView, layer: int, role: str, space: ModelSpace, codec: Codec | None) -> npt.NDArray[Any]:
    """A whole plane [heads, tokens, dim]: a view of the block if it is raw, decoded if not."""
    name, kind = FORMATS[space.dtype]
    if codec is None or is_raw(view.header.level):
        return np.asarray(view.array(layer, role)).view(kind)
    spec = space.layers[layer]
    whole = np.empty((spec.kv_heads, space.block_tokens, spec.k_dim), np.uint32 if name == "fp32" else np.uint16)
    codec.fill([view], layer, role, whole, 0)
    return whole.view(kind)


def _plane(
    pieces: Sequence[Rows], index: int, layer: int, role: str, space: ModelSpace, codec: Codec | None
) -> npt.NDArray[Any]:
    view = pieces[index].view
    try:
        return _values(view, layer, role, space, codec)
    except FormatError as error:
        raise MoveError(error.what, where=error.where, fix=error.fix, index=index, key=view.header.key) from error


def _together(
    pieces: Sequence[Rows], layer: int, role: str, space: ModelSpace, codec: Codec | None
) -> npt.NDArray[Any]:
    """The pieces' rows [heads, n, dim] in new memory."""
    spec, at = space.layers[layer], 0
    rows = np.empty((spec.kv_heads, sum(piece.count for piece in pieces), spec.k_dim), FORMATS[space.dtype][1])
    for index, piece in enumerate(pieces):
        whole = _plane(pieces, index, layer, role, space, codec)
        rows[:, at : at + piece.count] = whole[:, piece.row : piece.row + piece.count]
        at += piece.count
    return rows

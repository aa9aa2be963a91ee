"""Rows of blocks copied to other positions of a context's memory, and their K rotated there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from ctxreuse import kernels
from ctxreuse.block.format import BlockView
from ctxreuse.block.levels import is_joint, is_raw
from ctxreuse.codec import Codec
from ctxreuse.engines.chunks import Relocation, RelocationError
from ctxreuse.engines.rows import Bits, fill_rows_of
from ctxreuse.engines.torch_hf.cache.arena import Lease
from ctxreuse.engines.torch_hf.cache.blocks import bits
from ctxreuse.errors import FormatError
from ctxreuse.rope import Rotary

__all__ = ["fill_plane", "fill_rows"]


def fill_rows(
    lease: Lease, rows: Sequence[Relocation], rotaries: Mapping[int, Rotary], codec: Codec | None, dtype: str
) -> None:
    """Check and copy or decode K and V of all layers to their rows; rotate K of the layers in ``rotaries``.

    ``dtype``: the space's type. Raises RelocationError after rows beyond the context's end may have been written.
    """
    for layer in lease.arena.k:
        for role, plane in (("k", lease.arena.k[layer]), ("v", lease.arena.v[layer])):
            fill_plane(bits(plane), rows, layer, role, rotaries, codec, dtype)


def fill_plane(
    target: Bits,
    rows: Sequence[Relocation],
    layer: int,
    role: str,
    rotaries: Mapping[int, Rotary],
    codec: Codec | None,
    dtype: str,
    origin: int = 0,
) -> None:
    """As `fill_rows`, for one plane [heads, capacity, dim], whose row 0 has the position ``origin``."""
    _fill(target, rows, layer, role, codec, origin)
    if role == "k" and layer in rotaries:
        _rotate(target, rows, rotaries[layer], dtype, origin)


def _whole(one: Relocation) -> bool:
    return one.row == 0 and one.count == len(one.view.header.tokens) // 4


def _raw(one: Relocation) -> bool:
    return is_raw(one.view.header.level)


def _batches(rows: Sequence[Relocation]) -> Iterator[tuple[int, list[Relocation]]]:
    """The relocations in order as (number of the first, those that one call can copy): whole blocks in a row."""
    at = 0
    while at < len(rows):
        batch = [rows[at]]
        for one in rows[at + 1 :]:
            last = batch[-1]
            follows = last.start + last.count == one.start and last.view.header.end + one.count == one.view.header.end
            if not (follows and _whole(last) and _whole(one) and _raw(last) == _raw(one)):
                break
            batch.append(one)
        yield at, batch
        at += len(batch)


def _fill(target: Bits, rows: Sequence[Relocation], layer: int, role: str, codec: Codec | None, origin: int) -> None:
    for first, batch in _batches(rows):
        views = [one.view for one in batch]
        try:
            if _whole(batch[0]):
                fill_rows_of(target, batch[0].start - origin, views, layer, role, codec)
            else:
                _copy_part(target, batch[0], layer, role, codec, origin)
        except FormatError as error:
            at = next((i for i, view in enumerate(views) if _corrupt(view, layer, role)), 0)
            key = views[at].header.key
            raise RelocationError(error.what, where=error.where, fix=error.fix, index=first + at, key=key) from error


def _copy_part(target: Bits, one: Relocation, layer: int, role: str, codec: Codec | None, origin: int) -> None:
    heads, _, dim = target.shape
    size = len(one.view.header.tokens) // 4
    if _raw(one):
        whole = np.frombuffer(one.view.plane(layer, role), target.dtype).reshape(heads, size, dim)
    else:
        assert codec is not None
        whole = np.empty((heads, size, dim), target.dtype)
        codec.fill([one.view], layer, role, whole, 0)
    at = one.start - origin
    target[:, at : at + one.count] = whole[:, one.row : one.row + one.count]


def _corrupt(view: BlockView, layer: int, role: str) -> bool:
    # Of joint levels the stream may stand in another layer's place.
    joint = is_joint(view.header.level)
    places = [(plane.layer, plane.role) for plane in view.layout.planes] if joint else [(layer, role)]
    try:
        for place in places:
            view.plane(*place)
    except FormatError:
        return True
    return False


def _rotate(target: Bits, rows: Sequence[Relocation], rotary: Rotary, dtype: str, origin: int) -> None:
    """Rotate K in place, once for each run of neighbours that move equally far."""
    if rotary.style == "none":
        return
    heads, capacity, dim = target.shape
    strides = (capacity * dim, dim)
    for start, end, delta in _runs(rows):
        if delta == 0:
            continue  # the very bits
        cos, sin, interleaved = rotary.shift(delta)
        at = (start - origin) * dim * target.dtype.itemsize
        kernels.rope_shift(
            target,
            target,
            (heads, end - start, dim),
            cos,
            sin,
            dst_dtype=dtype,
            dst_strides=strides,
            src_strides=strides,
            dst_offset=at,
            src_offset=at,
            interleaved=interleaved,
        )


def _runs(rows: Sequence[Relocation]) -> list[tuple[int, int, int]]:
    """(start, end, delta) of neighbouring relocations that go equally far."""
    runs: list[tuple[int, int, int]] = []
    for one in rows:
        delta, end = one.start - (one.view.header.rope_at + one.row), one.start + one.count
        if runs and runs[-1][1:] == (one.start, delta):
            runs[-1] = (runs[-1][0], end, delta)
        else:
            runs.append((one.start, end, delta))
    return runs

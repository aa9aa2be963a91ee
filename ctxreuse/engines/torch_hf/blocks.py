"""Between blocks and a context's memory: the one place that moves K, V and state bytes in either direction."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ctxreuse import kernels
from ctxreuse.block import BlockView, BlockWriter, Layout
from ctxreuse.codec import Codec
from ctxreuse.engines.torch_hf.arena import Lease
from ctxreuse.engines.torch_hf.live import TorchLive
from ctxreuse.engines.torch_hf.states import Snapshot
from ctxreuse.keys import Tokens
from ctxreuse.levels import EXACT, approx, is_raw
from ctxreuse.model import ModelSpace

__all__ = ["fill_layer", "seal_block", "seal_state"]

_BITS: dict[int, Any] = {2: np.uint16, 4: np.uint32}
# Equal types are copied as bytes, so float16 may stand for bfloat16 too.
_NAMES = {2: "float16", 4: "float32"}
_INTEGERS = {2: torch.int16, 4: torch.int32}

Bits = npt.NDArray[Any]


def bits(plane: torch.Tensor) -> Bits:
    """An arena plane [1, heads, capacity, dim] as whole numbers [heads, capacity, dim] over the same memory.

    Numbers are moved as bits: a copy through float types could quieten a NaN, and numpy has no bfloat16.
    """
    size = plane.dtype.itemsize
    array: Bits = plane[0].view(_INTEGERS[size]).numpy()
    return array.view(_BITS[size])


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


def gather(source: Bits, start: int, target: npt.NDArray[np.uint8]) -> None:
    """Copy rows of ``source`` [heads, capacity, dim] from ``start`` into the bytes of a plane [heads, count, dim]."""
    heads, _, dim = source.shape
    plane = target.view(source.dtype).reshape(heads, -1, dim)
    plane[:] = source[:, start : start + plane.shape[1]]


def fill_layer(
    lease: Lease,
    start: int,
    views: Sequence[BlockView],
    layer: int,
    ready: Callable[[int], None] | None,
    codec: Codec | None,
) -> None:
    """Check and copy or decode K and V of one layer to the rows from ``start``, once ``ready`` says that they are in.

    ``codec`` knows the levels of all views. Holding the lease keeps the memory from another context meanwhile.
    """
    if ready is not None:
        ready(layer)
    for role, plane in (("k", lease.arena.k[layer]), ("v", lease.arena.v[layer])):
        target, row = bits(plane), start
        for raw, run in groupby(views, key=lambda view: is_raw(view.header.level)):
            alike = list(run)
            if raw or codec is None:
                scatter(target, row, alike, layer, role)
            else:
                codec.fill(alike, layer, role, target, row)
            row += sum(len(view.header.tokens) // 4 for view in alike)


def seal_block(
    space: ModelSpace, layout: Layout, live: TorchLive, number: int, key: bytes, parent: bytes
) -> npt.NDArray[np.uint8]:
    """The bytes of block ``number`` of a context; K stands there as rotated at its own position."""
    size = space.block_tokens
    at = number * size
    row = live.row(at, at + size)
    writer = BlockWriter(
        layout,
        kind="block",
        space=space.digest,
        key=key,
        parent=parent,
        end=at + size,
        tokens=live.tokens[at : at + size],
        level=live.provenance.worst(at, at + size),
        rope_at=at,
    )
    for index, _ in live.arena_layers:
        assert live.lease is not None
        gather(bits(live.lease.arena.k[index]), row, writer.plane(index, "k"))
        gather(bits(live.lease.arena.v[index]), row, writer.plane(index, "v"))
    return writer.seal()


def seal_state(
    space: ModelSpace, snapshot: Snapshot, tokens: Tokens, key: bytes, parent: bytes
) -> npt.NDArray[np.uint8]:
    """The bytes of the states at a position; the header names the ids of the block that ends there."""
    end = snapshot.position
    writer = BlockWriter(
        snapshot.layout,
        kind="state",
        space=space.digest,
        key=key,
        parent=parent,
        end=end,
        tokens=tokens[end - space.block_tokens : end],
        level=snapshot.level if snapshot.level == EXACT else approx(snapshot.level),
        extra=snapshot.flags,
    )
    for (layer, role), tensor in snapshot.planes.items():
        writer.plane(layer, role)[:] = tensor.contiguous().view(-1).view(torch.uint8).numpy()
    return writer.seal()

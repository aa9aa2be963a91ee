"""Between blocks and a context's memory: the one place that moves K, V and state bytes in either direction."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from ctxreuse.block.format import BlockView, BlockWriter
from ctxreuse.block.levels import EXACT, approx
from ctxreuse.codec import Codec
from ctxreuse.dtypes import UNSIGNED
from ctxreuse.engines.rows import Bits, fill_rows, gather
from ctxreuse.engines.torch_hf.cache.arena import Lease
from ctxreuse.engines.torch_hf.cache.states import Snapshot
from ctxreuse.engines.torch_hf.context import TorchContext
from ctxreuse.identity.keys import Tokens
from ctxreuse.identity.model import ModelSpace

__all__ = ["as_integers", "bits", "bits_of", "fill_block", "fill_layer", "seal_state"]

_INTEGERS = {2: torch.int16, 4: torch.int32}


def as_integers(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor as whole numbers over the same memory: what other libraries know of all types."""
    return tensor.view(_INTEGERS[tensor.dtype.itemsize])


def bits_of(tensor: torch.Tensor) -> Bits:
    """A tensor in the host's memory as unsigned numbers over the same memory.

    Numbers are copied as bits: a copy through float types could quieten a NaN, and numpy has no bfloat16.
    """
    array: Bits = as_integers(tensor).numpy()
    return array.view(UNSIGNED[array.itemsize])


def bits(plane: torch.Tensor) -> Bits:
    """An arena plane [1, heads, capacity, dim] as whole numbers [heads, capacity, dim] over the same memory."""
    return bits_of(plane[0])


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
        fill_rows(bits(plane), start, views, layer, role, codec)


def fill_block(context: TorchContext, writer: BlockWriter, start: int, end: int) -> None:
    """Write the planes of the tokens between two positions; raises what `TorchContext.row_of` raises."""
    row = context.row_of(start, end)
    for index, _ in context.arena_layers:
        assert context.lease is not None
        gather(bits(context.lease.arena.k[index]), row, writer.plane(index, "k"))
        gather(bits(context.lease.arena.v[index]), row, writer.plane(index, "v"))


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
        writer.plane(layer, role)[:] = tensor.contiguous().view(-1).view(torch.uint8).cpu().numpy()
    return writer.seal()

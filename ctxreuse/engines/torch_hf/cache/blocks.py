"""Between blocks and a context's memory: the one place that moves K, V and state bytes in either direction."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from ctxreuse.block.format import BlockView, BlockWriter
from ctxreuse.block.levels import EXACT, approx
from ctxreuse.codec import Codec
from ctxreuse.engines.rows import Bits, fill_rows, gather
from ctxreuse.engines.torch_hf.bits import bits_of
from ctxreuse.engines.torch_hf.cache.arena import Lease
from ctxreuse.engines.torch_hf.cache.states import Snapshot
from ctxreuse.engines.torch_hf.context import TorchContext
from ctxreuse.identity.keys import Tokens
from ctxreuse.identity.model import ModelSpace

__all__ = ["bits", "fill_block", "fill_layer", "seal_state"]


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

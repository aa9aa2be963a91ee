"""K and V of a context on a device on their way into blocks: all layers of some blocks in one copy."""

from __future__ import annotations

from typing import Final

import torch

from ctxreuse.block.format import BlockWriter
from ctxreuse.engines.rows import Bits
from ctxreuse.engines.torch_hf.bits import bits_of
from ctxreuse.engines.torch_hf.context import TorchContext
from ctxreuse.engines.torch_hf.devices import TorchDevice, device_errors

__all__ = ["StagedRows"]

#: Bytes of rows that one copy to the host brings; that much pinned memory is taken.
_WINDOW: Final = 64 << 20


class StagedRows:
    """Rows of a context on their way to the host, from position ``start`` on, in windows of some blocks."""

    def __init__(self, context: TorchContext, place: TorchDevice, start: int) -> None:
        self._context, self._place = context, place
        self._from = self._to = start
        self._rows: dict[tuple[int, str], Bits] = {}

    def fill(self, writer: BlockWriter, start: int, end: int) -> None:
        """See `ctxreuse.engines.torch_hf.cache.blocks.fill_block`; called for blocks one after another."""
        if start < self._from or end > self._to:
            self._take(start, end)
        at = slice(start - self._from, end - self._from)
        for (layer, role), rows in self._rows.items():
            wanted = rows[:, at]
            writer.plane(layer, role).view(rows.dtype).reshape(wanted.shape)[:] = wanted

    def _take(self, start: int, end: int) -> None:
        """Copy the rows from ``start`` on, at least to ``end``: as many blocks as fit into a window."""
        context = self._context
        if context.lease is None:  # windows only
            self._from, self._to = start, end
            return
        arena = context.lease.arena
        names = [(layer, role) for layer in arena.k for role in ("k", "v")]
        planes = [(arena.k if role == "k" else arena.v)[layer][0] for layer, role in names]
        each = (end - start) * sum(plane.shape[0] * plane.shape[2] * plane.itemsize for plane in planes)
        blocks = max(1, min(_WINDOW // max(each, 1), (context.n - start) // max(end - start, 1)))
        self._to = start + blocks * (end - start)
        row = context.row_of(start, self._to) if blocks > 1 and not context.lies_in_runs(start, self._to) else -1
        if row < 0:
            self._to = end
            row = context.row_of(start, end)
        count = self._to - start
        with device_errors(self._place), self._place.copying():
            parts = [plane[:, row : row + count].reshape(-1) for plane in planes]
            staged = self._place.staging(sum(part.numel() for part in parts), planes[0].dtype)
            staged.copy_(torch.cat(parts), non_blocking=True)
        whole, at = staged.split([part.numel() for part in parts]), zip(names, planes)
        self._rows = {name: bits_of(part.view(len(plane), count, -1)) for (name, plane), part in zip(at, whole)}
        self._from = start

"""K and V between blocks on the host and a context's memory on a device, through pinned memory of bounded size.

Raw planes are checked while they are copied to pinned memory, and go on from there. Planes of a lossy level go coded:
a CUDA kernel decodes them into the context's rows. Rows that are exported come in windows of some blocks, all layers in
one copy. All of it runs on a stream of the calling thread's own, beside the model's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Final

import numpy as np
import torch

from ctxreuse.block.format import BlockView, BlockWriter
from ctxreuse.block.levels import is_raw, parse_level
from ctxreuse.codec import Codec
from ctxreuse.cuda.runs import BlockRun, RunDecoder
from ctxreuse.dtypes import UNSIGNED
from ctxreuse.engines.chunks import Relocation
from ctxreuse.engines.rows import Bits, fill_rows
from ctxreuse.engines.torch_hf.cache.arena import Lease
from ctxreuse.engines.torch_hf.chunks.insert import fill_plane
from ctxreuse.engines.torch_hf.context import TorchContext
from ctxreuse.engines.torch_hf.place import Place, device_errors
from ctxreuse.rope import Rotary

__all__ = ["LayerLoad", "StagedRows", "relocate_rows"]

#: Bytes of rows that one copy to the host brings; that much pinned memory is taken.
_WINDOW: Final = 64 << 20
#: Bytes of a plane that one copy to the device takes: large enough for its speed, and the host fills the next meanwhile.
_PIECE: Final = 8 << 20
_INTEGERS: Final = {2: torch.int16, 4: torch.int32}


class LayerLoad:
    """A load of blocks into a context on a device; `fill` may be called for different layers by different threads."""

    def __init__(self, place: Place, dtype: str) -> None:
        self._place, self._dtype = place, dtype
        self._decoders: dict[str, RunDecoder | None] = {}

    def fill(
        self,
        lease: Lease,
        start: int,
        views: Sequence[BlockView],
        layer: int,
        ready: Callable[[int], None] | None,
        codec: Codec | None,
    ) -> None:
        """See `ctxreuse.engines.torch_hf.cache.blocks.fill_layer`. Returns when the rows are there."""
        if ready is not None:
            ready(layer)
        planes = {"k": lease.arena.k[layer], "v": lease.arena.v[layer]}
        with device_errors(self._place), self._place.copying():
            row = start
            for level, run in groupby(views, key=lambda view: view.header.level):
                alike = list(run)
                decoder = None if is_raw(level) else self._decoder(level, codec)
                if decoder is None:
                    for role, plane in planes.items():
                        self._copy(plane, row, alike, layer, role, codec)
                else:
                    self._decode(decoder, planes, row, alike, layer)
                row += sum(len(view.tokens) for view in alike)

    def _copy(
        self, plane: torch.Tensor, row: int, views: list[BlockView], layer: int, role: str, codec: Codec | None
    ) -> None:
        each = max(1, _PIECE // (plane.shape[1] * plane.shape[3] * plane.itemsize * len(views[0].tokens)))
        for some in (views[at : at + each] for at in range(0, len(views), each)):
            tokens = sum(len(view.tokens) for view in some)
            there = plane[0, :, row : row + tokens]
            staged = self._place.staging(there.numel(), plane.dtype).view(there.shape)
            fill_rows(_bits(staged), 0, some, layer, role, codec)
            there.copy_(staged, non_blocking=True)
            row += tokens

    def _decoder(self, level: str, codec: Codec | None) -> RunDecoder | None:
        if level not in self._decoders:
            name, found = parse_level(level), None
            if codec is not None and name.profile and not name.base:
                profile = self._place.profile(codec.profile_of(level), name.name, self._dtype)
                found = None if profile is None else RunDecoder(profile)
            self._decoders[level] = found
        return self._decoders[level]

    def _decode(
        self, decoder: RunDecoder, planes: Mapping[str, torch.Tensor], row: int, views: list[BlockView], layer: int
    ) -> None:
        start = views[0].header.end - len(views[0].tokens)
        runs = [
            BlockRun(layer, role, [view.plane(layer, role) for view in views], [len(view.tokens) for view in views],
                     _bits(plane) if plane.is_cpu else plane.view(_INTEGERS[plane.itemsize]), row, start)
            for role, plane in planes.items()
        ]  # fmt: skip
        decoder.decode(runs, self._dtype)


class StagedRows:
    """Rows of a context on their way to the host, from position ``start`` on, in windows of some blocks."""

    def __init__(self, context: TorchContext, place: Place, start: int) -> None:
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
        self._rows = {name: _bits(part.view(len(plane), count, -1)) for (name, plane), part in zip(at, whole)}
        self._from = start


def relocate_rows(
    place: Place,
    lease: Lease,
    rows: Sequence[Relocation],
    rotaries: Mapping[int, Rotary],
    codec: Codec | None,
    dtype: str,
) -> None:
    """See `ctxreuse.engines.torch_hf.chunks.insert.fill_rows`, for a context on a device."""
    if not rows:
        return
    low, high = rows[0].start, rows[-1].start + rows[-1].count
    for layer in lease.arena.k:
        for role, planes in (("k", lease.arena.k), ("v", lease.arena.v)):
            there = planes[layer][0, :, low:high]
            with device_errors(place), place.copying():
                staged = place.staging(there.numel(), there.dtype).view(there.shape)
                staged.copy_(there)  # where no row goes it stays
                fill_plane(_bits(staged), rows, layer, role, rotaries, codec, dtype, low)
                there.copy_(staged, non_blocking=True)


def _bits(tensor: torch.Tensor) -> Bits:
    """A tensor in the host's memory as whole numbers over the same memory."""
    size = tensor.dtype.itemsize
    array: Bits = tensor.view(_INTEGERS[size]).numpy()
    return array.view(UNSIGNED[size])

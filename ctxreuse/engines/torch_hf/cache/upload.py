"""Blocks on their way into a context on a device, through pinned memory of bounded size, beside the model's stream.

Raw planes are checked while they are copied to pinned memory, and go on from there. Planes of a lossy level go coded,
several layers together, and a CUDA kernel decodes them into the context's rows.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Final

import numpy as np
import torch

from ctxreuse import kernels
from ctxreuse.block.format import BlockView
from ctxreuse.block.levels import is_raw, parse_level
from ctxreuse.codec import Codec
from ctxreuse.cuda.runs import BlockRun, RunDecoder
from ctxreuse.engines.chunks import Relocation
from ctxreuse.engines.rows import fill_rows
from ctxreuse.engines.torch_hf.cache.arena import Lease
from ctxreuse.engines.torch_hf.cache.blocks import as_integers, bits_of
from ctxreuse.engines.torch_hf.chunks.insert import fill_plane
from ctxreuse.engines.torch_hf.devices import TorchDevice, device_errors
from ctxreuse.kernels.threads import cores, spread
from ctxreuse.rope import Rotary

__all__ = ["Upload", "relocate_rows"]

#: Bytes of a raw plane that one copy takes: large enough for its speed, and the next is filled meanwhile.
_PIECE: Final = 8 << 20
#: Coded bytes that go together, about: a launch for fewer would cost more than its work.
_CODED: Final = 16 << 20
#: Threads that copy to pinned memory at most: so many are as fast as the bus.
_THREADS: Final = 4


class _Layers:
    """Layers that are loaded together, by the thread that needs one of them first."""

    def __init__(self, layers: Sequence[int]) -> None:
        self.layers, self.lock, self.done = layers, threading.Lock(), False


class Upload:
    """A load of blocks into a context on a device; `fill` may be called for different layers by different threads.

    Args:
        place: the device.
        dtype: the type of the model space.
        lease: keeps the memory that is written to from another context meanwhile.
        start: the first row, and the position of its token.
        views: the blocks, which follow each other.
        ready: returns when a layer of all of them is there; None: they are.
        codec: knows the levels of all views; None: they are raw.
    """

    def __init__(
        self,
        place: TorchDevice,
        dtype: str,
        lease: Lease,
        start: int,
        views: Sequence[BlockView],
        ready: Callable[[int], None] | None,
        codec: Codec | None,
    ) -> None:
        self._place, self._dtype, self._lease, self._start = place, dtype, lease, start
        self._views, self._ready, self._codec = views, ready, codec
        self._decoders = {level: self._decoder(level) for level in {view.header.level for view in views}}
        layers = list(lease.arena.k)
        coded = sum(view.layout.nbytes for view in views if self._decoders[view.header.level] is not None)
        together = 1 if ready is not None or not coded else max(1, _CODED * len(layers) // coded)
        self._groups: dict[int, _Layers] = {}
        for at in range(0, len(layers), together):
            group = _Layers(layers[at : at + together])
            self._groups |= dict.fromkeys(group.layers, group)

    def fill(self, layer: int) -> None:
        """See `ctxreuse.engines.torch_hf.cache.blocks.fill_layer`. Returns when the rows are there."""
        if self._ready is not None:
            self._ready(layer)
        group = self._groups[layer]
        with group.lock:
            if not group.done:
                with device_errors(self._place), self._place.copying():
                    self._load(group.layers)
                group.done = True

    def _load(self, layers: Sequence[int]) -> None:
        row = self._start
        for level, run in groupby(self._views, key=lambda view: view.header.level):
            views, decoder = list(run), self._decoders[level]
            if decoder is None:
                for layer in layers:
                    self._copy(self._lease.arena.k[layer], row, views, layer, "k")
                    self._copy(self._lease.arena.v[layer], row, views, layer, "v")
            else:
                self._decode(decoder, row, views, layers)
            row += sum(len(view.tokens) for view in views)

    def _copy(self, plane: torch.Tensor, row: int, views: list[BlockView], layer: int, role: str) -> None:
        each = max(1, _PIECE // (plane.shape[1] * plane.shape[3] * plane.itemsize * len(views[0].tokens)))
        pieces = [views[at : at + each] for at in range(0, len(views), each)]
        threads = min(_THREADS, cores())
        for some in (pieces[at : at + threads] for at in range(0, len(pieces), threads)):
            targets, staged = [], []
            for piece in some:
                tokens = sum(len(view.tokens) for view in piece)
                targets.append(plane[0, :, row : row + tokens])
                staged.append(self._place.staging(targets[-1].numel(), plane.dtype).view(targets[-1].shape))
                row += tokens
            filled = [bits_of(one) for one in staged]

            def fill(i: int, some=some, filled=filled) -> None:  # type: ignore[no-untyped-def]
                fill_rows(filled[i], 0, some[i], layer, role, self._codec)

            spread(fill, len(some))
            for target, one in zip(targets, staged):
                target.copy_(one, non_blocking=True)

    def _decoder(self, level: str) -> RunDecoder | None:
        name = parse_level(level)
        if is_raw(level) or self._codec is None or not name.profile or name.base:
            return None
        profile = self._place.profile(self._codec.profile_of(level), name.name, self._dtype)
        return None if profile is None else RunDecoder(profile)

    def _decode(self, decoder: RunDecoder, row: int, views: list[BlockView], layers: Sequence[int]) -> None:
        names = [(layer, role) for layer in layers for role in ("k", "v")]
        numbers = [[view.layout.index[name] for name in names] for view in views]
        spans = [view.spans[own] for view, own in zip(views, numbers)]
        sizes = np.stack([span[:, 1] for span in spans])
        ends = np.cumsum(sizes).reshape(sizes.shape)
        staged = self._place.staging(int(ends[-1, -1]), torch.uint8)
        data, cuts = staged.numpy(), [0, *ends[:, -1].tolist()]
        parts = min(_THREADS, cores(), len(views))

        def gather(part: int) -> None:
            for i in range(part, len(views), parts):
                sums = views[i].checksums[numbers[i]]
                bad = kernels.gather_checked(data[cuts[i] : cuts[i + 1]], views[i].buffer, spans[i], sums)
                if bad >= 0:
                    views[i].plane(*names[bad])  # raises, naming the plane

        spread(gather, parts)
        there = staged.to(self._place.device, non_blocking=True)
        tokens, start = [len(view.tokens) for view in views], views[0].header.end - len(views[0].tokens)
        runs = []
        for at, (layer, role) in enumerate(names):
            plane = (self._lease.arena.k if role == "k" else self._lease.arena.v)[layer]
            memory = self._place.array(as_integers(plane))
            runs.append(BlockRun(layer, role, ends[:, at] - sizes[:, at], sizes[:, at], tokens, memory, row, start))
        decoder.decode(runs, data, self._place.array(there), self._dtype)


def relocate_rows(
    place: TorchDevice,
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
                fill_plane(bits_of(staged), rows, layer, role, rotaries, codec, dtype, low)
                there.copy_(staged, non_blocking=True)

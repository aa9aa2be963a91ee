"""Blocks on their way into a context on a device, through pinned memory of bounded size, beside the model's stream.

Raw planes are checked while they are copied to pinned memory, and go on from there. Planes of a lossy level go coded,
several layers together, and a CUDA kernel decodes them into the context's rows.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ctxreuse import kernels
from ctxreuse.block.format import BlockView
from ctxreuse.block.levels import is_raw, parse_level
from ctxreuse.codec import Codec
from ctxreuse.cuda import DeviceProfile
from ctxreuse.cuda.runs import BlockRun, decode_runs
from ctxreuse.engines.chunks import Relocation
from ctxreuse.engines.rows import Bits, fill_rows
from ctxreuse.engines.torch_hf.bits import as_integers, bits_of
from ctxreuse.engines.torch_hf.cache.arena import Lease
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


class _Run(NamedTuple):
    """Consecutive blocks of one level.

    Attributes:
        views: the blocks.
        tokens: of each, int64 [blocks].
        row: the row of the first token.
        profile: what the device decodes them by; None: they are raw, or decoded on the host.
        order: the number of each plane, by layer and role, in what follows.
        spans, sums: of whole blocks, [blocks, planes, 2] and [blocks, planes]; of coded ones only.
    """

    views: list[BlockView]
    tokens: npt.NDArray[np.int64]
    row: int
    profile: DeviceProfile | None
    order: dict[tuple[int, str], int]
    spans: npt.NDArray[np.int64]
    sums: npt.NDArray[np.uint64]

    @classmethod
    def of(cls, views: list[BlockView], row: int, profile: DeviceProfile | None) -> _Run:
        tokens = np.array([len(view.header.tokens) // 4 for view in views], np.int64)
        order, some = views[0].layout.index, views if profile is not None else []
        # All blocks of a space have their planes in one order: `check_blocks` has compared them.
        spans = np.stack([view.spans for view in some]) if some else np.zeros((0, 0, 2), np.int64)
        sums = np.stack([view.checksums for view in some]) if some else np.zeros((0, 0), np.uint64)
        return cls(views, tokens, row, profile, order, spans, sums)

    def planes(
        self, names: Sequence[tuple[int, str]], *, arriving: bool
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint64]]:
        """Spans [blocks, names, 2] and checksums of some planes; ``arriving``: each lies where it came to."""
        numbers = [self.order[name] for name in names]
        spans = self.spans[:, numbers]
        if arriving:
            spans[..., 0] = [[view.offset(*name) for name in names] for view in self.views]
        return spans, self.sums[:, numbers]


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
        self._place, self._dtype, self._lease = place, dtype, lease
        self._ready, self._codec = ready, codec
        self._runs: list[_Run] = []
        coded, row = 0, start
        for level, run in groupby(views, key=lambda view: view.header.level):
            made = _Run.of(list(run), row, self._profile(level))
            self._runs.append(made)
            row += int(made.tokens.sum())
            coded += int(made.spans[..., 1].sum())
        layers = list(lease.arena.k)
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
                    for run in self._runs:
                        self._load(run, group.layers)
                group.done = True

    def _load(self, run: _Run, layers: Sequence[int]) -> None:
        if run.profile is not None:
            self._decode(run, run.profile, layers)
            return
        for layer in layers:
            self._copy(self._lease.arena.k[layer], run, layer, "k")
            self._copy(self._lease.arena.v[layer], run, layer, "v")

    def _copy(self, plane: torch.Tensor, run: _Run, layer: int, role: str) -> None:
        each = max(1, int(_PIECE // (plane.shape[1] * plane.shape[3] * plane.itemsize * run.tokens[0])))
        pieces = [slice(at, at + each) for at in range(0, len(run.views), each)]
        threads, row = min(_THREADS, cores()), run.row
        for some in (pieces[at : at + threads] for at in range(0, len(pieces), threads)):
            targets = []
            for piece in some:
                end = row + int(run.tokens[piece].sum())
                targets.append(plane[0, :, row:end])
                row = end
            staged = [self._place.staging(target.numel(), plane.dtype).view(target.shape) for target in targets]
            jobs = [(bits_of(to), run.views[piece]) for to, piece in zip(staged, some)]

            def fill(i: int, jobs: list[tuple[Bits, list[BlockView]]] = jobs) -> None:
                fill_rows(jobs[i][0], 0, jobs[i][1], layer, role, self._codec)

            spread(fill, len(some))
            for target, one in zip(targets, staged):
                target.copy_(one, non_blocking=True)

    def _profile(self, level: str) -> DeviceProfile | None:
        name, profiles = parse_level(level), self._place.profiles
        if is_raw(level) or self._codec is None or profiles is None or not name.profile or name.base:
            return None
        return profiles.get(self._codec.profile_of(level), name.name, self._dtype)

    def _decode(self, run: _Run, profile: DeviceProfile, layers: Sequence[int]) -> None:
        names = [(layer, role) for layer in layers for role in ("k", "v")]
        spans, sums = run.planes(names, arriving=self._ready is not None)
        sizes = spans[..., 1]
        ends = np.cumsum(sizes).reshape(sizes.shape)
        staged = self._place.staging(int(ends[-1, -1]), torch.uint8)
        data, cuts = staged.numpy(), [0, *ends[:, -1].tolist()]
        parts = min(_THREADS, cores(), len(run.views))
        blocks = [len(run.views) * part // parts for part in range(parts + 1)]

        def gather(part: int) -> None:
            own, to = slice(*blocks[part : part + 2]), slice(cuts[blocks[part]], cuts[blocks[part + 1]])
            bad = kernels.gather_checked(data[to], [view.buffer for view in run.views[own]], spans[own], sums[own])
            if bad >= 0:
                run.views[blocks[part] + bad // len(names)].plane(*names[bad % len(names)])  # raises, naming the plane

        spread(gather, parts)
        there = staged.to(self._place.device, non_blocking=True)
        start, arena, runs = run.views[0].header.end - int(run.tokens[0]), self._lease.arena, []
        for at, (layer, role) in enumerate(names):
            memory = self._place.array(as_integers((arena.k if role == "k" else arena.v)[layer]))
            begin = ends[:, at] - sizes[:, at]
            runs.append(BlockRun(layer, role, begin, sizes[:, at], run.tokens, memory, run.row, start))
        decode_runs(profile, runs, data, self._place.array(there), self._dtype)


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

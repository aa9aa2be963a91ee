"""A context's own rows quantised where they lie, and back: what waits takes a fraction of its memory."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch

from ctxreuse.cuda.quantised import expand_plane, quantise_plane
from ctxreuse.engines.chunks import CompressedFormat, Role
from ctxreuse.engines.torch_hf.cache.arena import Lease
from ctxreuse.engines.torch_hf.context import TorchContext
from ctxreuse.engines.torch_hf.devices import device_errors, kernel_stream
from ctxreuse.engines.torch_hf.inplace.device import DIMS
from ctxreuse.errors import EngineError
from ctxreuse.kernels.attention import GROUP, Plane, quantise
from ctxreuse.reuse.inplace import AttachedRun, PinnedRun, Slab
from ctxreuse.rope import Rotary

__all__ = ["compress", "expand"]


def compress(context: TorchContext, format: CompressedFormat, rotaries: Mapping[int, Rotary], level: str) -> None:
    """See `CompressingOps.compress`. Rows that are quantised already stay as they are."""
    if format not in ("int8", "int4"):
        raise EngineError(f"contexts are not kept as {format!r}", fix="Use int8 or int4")
    if not context.n:
        return
    layers = dict(context.arena_layers)
    if context.in_place is not None and not context.compressed:
        raise EngineError("the context has attached runs, which others may share")
    if any(layer.keys.shape[3] != layer.values.shape[3] for layer in layers.values() if layer.length):
        raise EngineError("K and V of different widths cannot be attended to in place")
    if format == "int4" and any(layer.keys.shape[3] % GROUP for layer in layers.values() if layer.length):
        raise EngineError(f"int4 needs heads of a multiple of {GROUP} values", fix="Compress as int8")
    if context.place.apart and any(layer.keys.shape[3] not in DIMS for layer in layers.values() if layer.length):
        raise EngineError(f"on a device, rows are attended to in place in heads of {', '.join(map(str, DIMS))} values")
    if context.place.apart and context.place.launcher is None:
        raise EngineError("on a device, quantised rows are read by CUDA kernels, which need CuPy")
    runs = list(context.in_place.runs) if context.in_place is not None else []
    start = runs[-1].start + runs[-1].count if runs else 0
    if start < context.n:
        positions = np.arange(start, context.n)
        slabs = {}
        for index in layers:
            k, v = (_quantised(context, index, role, positions, format) for role in ("k", "v"))
            slabs[index] = (Slab(k, v, 0, len(positions)),)
        run = PinnedRun(context.tokens[start:].copy(), start, slabs, format)
        runs.append(AttachedRun(start, run, 0, len(positions)))
    context.replace_rows(rotaries, runs)
    context.provenance.recode(context.n, level)


def _quantised(
    context: TorchContext, layer: int, role: Role, positions: npt.NDArray[np.int64], format: CompressedFormat
) -> Plane:
    """Rows of a layer's own memory, quantised where they lie."""
    place, launcher = context.place, context.place.launcher
    if launcher is None:
        return quantise(context.read(layer, role, positions), format)
    own = dict(context.arena_layers)[layer]
    rows = positions if context.in_place is None else context.in_place.own(positions)
    plane = own.keys if role == "k" else own.values
    some = plane[0].index_select(1, torch.from_numpy(rows).to(plane.device)).float()
    with kernel_stream(place.device, launcher):
        return quantise_plane(launcher, some.numpy() if some.is_cpu else launcher.xp.from_dlpack(some), format)


def _expanded(context: TorchContext, layer: int, role: Role, positions: npt.NDArray[np.int64]) -> torch.Tensor:
    """Rows [heads, n, dim] of a layer as attention takes them for all positions."""
    launcher, runs = context.place.launcher, context.in_place
    if launcher is None or runs is None:
        return torch.from_numpy(context.read(layer, role, positions))
    own = dict(context.arena_layers)[layer]
    plane = own.keys if role == "k" else own.values
    found = plane.new_empty((plane.shape[1], len(positions), plane.shape[3]), dtype=torch.float32)
    known = runs.rows_at(positions)
    computed = np.flatnonzero(known >= 0)
    with kernel_stream(context.place.device, launcher):
        for one in runs.runs:
            for slab in one.run.layers[layer]:
                rows = expand_plane(launcher, slab.k if role == "k" else slab.v)
                found[:, one.start : one.start + one.count] = torch.from_dlpack(rows)[:, : one.count]
    if len(computed):
        to, rows = (torch.from_numpy(part).to(plane.device) for part in (computed, known[computed]))
        found[:, to] = plane[0].index_select(1, rows).float()
    return found


def expand(context: TorchContext) -> None:
    """Give a compressed context rows of its own again, as they were read; it can be loaded into and forked then."""
    n = context.n
    lease = context.lease_rows()
    positions = np.arange(n)
    with device_errors(context.place):
        _fill(context, lease, positions)
    context.become_plain(lease)


def _fill(context: TorchContext, lease: Lease, positions: npt.NDArray[np.int64]) -> None:
    n = len(positions)
    for index, _ in context.arena_layers:
        for role, planes in (("k", lease.arena.k), ("v", lease.arena.v)):
            rows = _expanded(context, index, "k" if role == "k" else "v", positions)
            planes[index][0, :, :n] = rows.to(planes[index].dtype)

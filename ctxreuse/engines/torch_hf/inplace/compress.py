"""A context's own rows quantised where they lie, and back: what waits takes a fraction of its memory."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from ctxreuse.engines.chunks import CompressedFormat
from ctxreuse.engines.torch_hf.context import TorchContext
from ctxreuse.errors import EngineError
from ctxreuse.kernels.attention import GROUP, quantise
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
    runs = list(context.in_place.runs) if context.in_place is not None else []
    start = runs[-1].start + runs[-1].count if runs else 0
    if start < context.n:
        positions = np.arange(start, context.n)
        slabs = {}
        for index in layers:
            k, v = (quantise(context.read(index, role, positions), format) for role in ("k", "v"))
            slabs[index] = (Slab(k, v, 0, len(positions)),)
        run = PinnedRun(context.tokens[start:].copy(), start, slabs, format)
        runs.append(AttachedRun(start, run, 0, len(positions)))
    context.replace_rows(rotaries, runs)
    context.provenance.recode(context.n, level)


def expand(context: TorchContext) -> None:
    """Give a compressed context rows of its own again, as they were read; it can be loaded into and forked then."""
    n = context.n
    lease = context.lease_rows()
    positions = np.arange(n)
    for index, _ in context.arena_layers:
        for role, planes in (("k", lease.arena.k), ("v", lease.arena.v)):
            rows = torch.from_numpy(context.read(index, "k" if role == "k" else "v", positions))
            planes[index][0, :, :n] = rows.to(planes[index].dtype)
    context.become_plain(lease)

"""Attention on a device over a context whose first rows are quantised there, and whose later ones are its own.

The quantised rows are read by the CUDA kernel (`ctxreuse.cuda.attention`), the own ones by torch in float32; the two
are merged by their log-sum-exp.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ctxreuse.cuda import ChunkAttention, DevicePart, Launcher
from ctxreuse.engines.torch_hf.devices import kernel_stream
from ctxreuse.reuse.inplace import CodedSlab, InPlaceRuns, ScoreOptions
from ctxreuse.reuse.inplace.runs import SeenRows
from ctxreuse.rope import Rotary

__all__ = ["DIMS", "DeviceAttention", "lies_on_device"]

#: Widths of heads that the kernel has.
DIMS: Final = (64, 128, 256)


class _Layout(NamedTuple):
    """A launch that serves as long as its ``rows`` are seen by all queries."""

    rows: list[SeenRows]
    attention: ChunkAttention


class DeviceAttention:
    """One layer's attention over attached runs on a device. Not thread-safe: the context's owner calls."""

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        self._kept: dict[tuple[object, ...], _Layout] = {}

    def attend(
        self,
        runs: InPlaceRuns,
        layer: int,
        query: torch.Tensor,
        positions: npt.NDArray[np.int64],
        own: tuple[torch.Tensor, torch.Tensor],
        rotary: Rotary,
        scores: ScoreOptions,
    ) -> torch.Tensor:
        """See `InPlaceRuns.attend`: float32 [H, S, D] for q [H, S, D]; ``own``: K and V [heads, capacity, dim]."""
        q = query.float().contiguous()
        rows = runs.seen_rows(layer, positions, scores.window)
        o, lse = _own(runs, q, positions, own, scores)
        if not rows:
            return o
        with kernel_stream(q.device, self._launcher):
            given = q.numpy() if q.is_cpu else self._launcher.xp.from_dlpack(q)
            found = self._layout(rows, tuple(q.shape), positions, rotary, scores)(given)
            other, ends = torch.from_dlpack(found.o), torch.from_dlpack(found.lse)
        top = torch.maximum(lse, ends)
        mine, theirs = (lse - top).exp(), (ends - top).exp()
        return (o * mine[..., None] + other * theirs[..., None]) / (mine + theirs)[..., None]

    def _layout(
        self,
        rows: list[SeenRows],
        shape: tuple[int, ...],
        positions: npt.NDArray[np.int64],
        rotary: Rotary,
        scores: ScoreOptions,
    ) -> ChunkAttention:
        same = all(one.at is None and one.hidden is None for one in rows)
        key = (shape, scores, *((id(one.slab.k.data), one.first, one.last, one.shift) for one in rows))
        if same and key in self._kept:
            return self._kept[key].attention
        parts = [
            DevicePart(
                one.slab.k, one.slab.v, one.first, one.last, one.at,
                None if rotary.style == "none" or not one.shift else rotary.shift(-one.shift), one.hidden,
            )
            for one in rows
        ]  # fmt: skip
        made = ChunkAttention(self._launcher, parts, shape, positions=positions, **scores._asdict())  # type: ignore[arg-type]
        if same:
            if len(self._kept) >= 4:
                self._kept.clear()
            self._kept[key] = _Layout(rows, made)  # which keeps the ids
        return made


def lies_on_device(launcher: Launcher | None, rows: list[SeenRows]) -> bool:
    """True if the kernel can read all of them."""
    if launcher is None:
        return False
    slabs = [one.slab for one in rows]
    return not any(isinstance(slab, CodedSlab) for slab in slabs) and all(
        isinstance(plane.data, launcher.xp.ndarray) and plane.format in ("int8", "int4") and plane.dim in DIMS
        for slab in slabs
        for plane in (slab.k, slab.v)
    )


def _own(
    runs: InPlaceRuns,
    q: torch.Tensor,
    positions: npt.NDArray[np.int64],
    own: tuple[torch.Tensor, torch.Tensor],
    scores: ScoreOptions,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of q float32 [H, S, D] over the rows of own memory, and its log-sum-exp [H, S]."""
    k, v = (plane[:, : runs.rows].float() for plane in own)
    heads, (total, queries, dim) = k.shape[0], q.shape
    grouped = q.view(heads, total // heads * queries, dim)
    scale = dim**-0.5 if scores.scale is None else scores.scale
    found = torch.bmm(grouped, k.transpose(1, 2)) * scale
    if scores.softcap is not None:
        found = scores.softcap * torch.tanh(found / scores.softcap)
    seen: Any = runs.own_seen(positions, scores.window)
    if seen is not None:
        unseen = ~torch.from_numpy(seen).to(q.device)
        found.view(heads, -1, queries, k.shape[1]).masked_fill_(unseen, float("-inf"))
    lse = torch.logsumexp(found, 2)
    o = torch.bmm((found - lse.clamp(min=torch.finfo(torch.float32).min)[..., None]).exp(), v)
    return o.view(total, queries, -1), lse.view(total, queries)

"""Attention on a device over a context whose first rows are quantised there, and whose later ones are its own.

The quantised rows are read by the CUDA kernel (`ctxreuse.cuda.attention`), the own ones by torch in float32; the two
are merged by their log-sum-exp.
"""

from __future__ import annotations

from typing import Final, NamedTuple

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
        rows: list[SeenRows],
        runs: InPlaceRuns,
        query: torch.Tensor,
        positions: npt.NDArray[np.int64],
        own: tuple[torch.Tensor, torch.Tensor],
        rotary: Rotary,
        scores: ScoreOptions,
    ) -> torch.Tensor:
        """See `InPlaceRuns.attend`: float32 [H, S, D] for q [H, S, D].

        Args:
            rows: of the runs, those that the queries see; all `lies_on_device`.
            runs: where each position lies.
            query: the queries.
            positions: theirs, ascending.
            own: K and V [heads, capacity, dim] of the context's own memory.
            rotary: how the layer rotates K.
            scores: how scores are formed.
        """
        q = query.float().contiguous()
        k, v = (plane[:, : runs.rows].float() for plane in own)
        heads, (total, queries, dim) = k.shape[0], q.shape
        shape = heads, total // heads * queries
        scale = dim**-0.5 if scores.scale is None else scores.scale
        found = torch.bmm((q * scale).view(*shape, dim), k.transpose(1, 2))
        if scores.softcap is not None:
            found = scores.softcap * torch.tanh(found / scores.softcap)
        seen = runs.own_seen(positions, scores.window)
        if seen is not None:
            unseen = ~torch.from_numpy(seen).to(q.device)
            found.view(heads, -1, queries, k.shape[1]).masked_fill_(unseen, float("-inf"))
        if not rows:
            return torch.bmm(found.softmax(2), v).view(total, queries, -1)
        with kernel_stream(q.device, self._launcher):
            given = q.numpy() if q.is_cpu else self._launcher.xp.from_dlpack(q)
            there = self._layout(rows, (total, queries, dim), positions, rotary, scores)(given)
            o, lse = torch.from_dlpack(there.o), torch.from_dlpack(there.lse)
        # All rows of the runs together weigh as one row whose score is their log-sum-exp.
        weights = torch.cat([found, lse.view(*shape, 1)], 2).softmax(2)
        whole = torch.baddbmm(o.view(*shape, -1) * weights[:, :, -1:], weights[:, :, :-1], v)
        return whole.view(total, queries, -1)

    def _layout(
        self,
        rows: list[SeenRows],
        shape: tuple[int, int, int],
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
        made = ChunkAttention(self._launcher, parts, shape, positions=positions, **scores._asdict())
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

"""Layers of a context with attached runs: new rows go to its own memory, attention reads both where they are."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from ctxreuse.cuda import Launcher
from ctxreuse.dtypes import KERNEL_NAMES, VALUES
from ctxreuse.engines.torch_hf.chunks.scatter import active
from ctxreuse.engines.torch_hf.inplace.device import DeviceAttention, lies_on_device
from ctxreuse.errors import EngineError
from ctxreuse.kernels.attention import Plane
from ctxreuse.reuse.inplace import InPlaceRuns, ScoreOptions
from ctxreuse.rope import Rotary

__all__ = ["InPlaceCall", "InPlaceLayer", "call_of"]

# transformers hands a model's attention the very tensor that the cache returned; nothing else tells one call's context.
_MARK = "_ctxreuse_call"


class _Own(Protocol):
    """A layer's own memory: the first rows of its planes."""

    keys: torch.Tensor
    values: torch.Tensor

    def resize(self, n: int) -> None: ...


def plane_of(tensor: torch.Tensor) -> Plane:
    """K or V [1, heads, tokens, dim] as the kernels read it, over the same memory."""
    name = str(tensor.dtype).removeprefix("torch.")
    kind = VALUES[name]
    tensor = tensor.cpu()
    bits = tensor[0] if kind is not np.uint16 else tensor[0].view(torch.int16)
    return Plane(KERNEL_NAMES[name], bits.numpy().view(kind))


class InPlaceCall:
    """One layer's attention in one forward: the tokens' positions and the layer's own memory, filled."""

    def __init__(self, layer: InPlaceLayer, positions: npt.NDArray[np.int64], k: torch.Tensor, v: torch.Tensor) -> None:
        self._layer, self._positions, self._k, self._v = layer, positions, k, v

    def keys(self) -> torch.Tensor:
        """K of all positions up to the last of this call, as attention takes it: float32 [1, heads, n, dim]."""
        end = int(self._positions[-1]) + 1
        return torch.from_numpy(self._layer.read("k", np.arange(end), self._k))[None]

    def attend(
        self, query: torch.Tensor, mask: torch.Tensor | None, scale: float | None, special: Mapping[str, Any]
    ) -> torch.Tensor:
        """Attention of q [1, H, S, D] over the whole context -> [1, S, H, D].

        ``special``: what else the model's attention takes. Raises EngineError if the runs cannot be read that way.
        """
        layer, window, softcap = self._layer, special.get("sliding_window"), special.get("softcap")
        layer.pending = False
        if any(value is not None for name, value in special.items() if name not in ("sliding_window", "softcap")):
            raise EngineError("the model's attention has terms that attached runs cannot be read with")
        if mask is not None:
            last = int(self._positions[-1]) + 1
            if int((mask[0, 0, -1] == 0).sum()) != min(last, window or last):
                raise EngineError("the model masks tokens in a way that attached runs cannot be read with")
        scores = ScoreOptions(scale, window, softcap)
        rows = [] if layer.launcher is None else layer.runs.seen_rows(layer.index, self._positions, window)
        if lies_on_device(layer.launcher, rows):
            there = self._k[0], self._v[0]
            o = layer.on_device.attend(rows, layer.runs, query[0], self._positions, there, layer.rotary, scores)
        else:
            q = np.ascontiguousarray(query[0].float().cpu().numpy())
            own = plane_of(self._k), plane_of(self._v)
            found = layer.runs.attend(layer.index, q, self._positions, *own, layer.rotary, scores)
            o = torch.from_numpy(found.o)
        return o.transpose(0, 1)[None].to(query.device, query.dtype).contiguous()


def call_of(key: torch.Tensor) -> InPlaceCall | None:
    """The call that a cache's K belongs to, if its context has attached runs."""
    found: InPlaceCall | None = getattr(key, _MARK, None)
    return found


class InPlaceLayer:
    """A layer's attached runs beside its own memory. ``n``: positions that it has."""

    def __init__(self, runs: InPlaceRuns, index: int, rotary: Rotary, n: int, launcher: Launcher | None = None) -> None:
        """``launcher``: of the device that the layer's own memory is on."""
        self.runs, self.index, self.rotary, self.n, self.launcher = runs, index, rotary, n, launcher
        self.pending = False

    @cached_property
    def on_device(self) -> DeviceAttention:
        """Attention where the rows lie."""
        assert self.launcher is not None
        return DeviceAttention(self.launcher)

    def restart(self, n: int) -> None:
        """The context has ``n`` positions now, and no forward is in flight."""
        self.n, self.pending = n, False

    def check_attended(self) -> None:
        """Raise EngineError if the model attended to something else than what the last call returned."""
        if self.pending:
            raise EngineError("the model changes what its cache gives it, so it cannot attend to attached runs")

    def read(self, role: str, positions: npt.NDArray[np.int64], own: torch.Tensor) -> npt.NDArray[np.float32]:
        """K or V [heads, n, dim] at ``positions``; ``own`` is the layer's own memory of it."""
        return self.runs.read(self.index, role, positions, plane_of(own), self.rotary)

    def update(
        self, own: _Own, keys: torch.Tensor, values: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write K and V [1, heads, S, dim] to rows of the layer's own planes ``k`` and ``v``.

        Returns views of these rows, the first of them marked for `call_of`. Raises EngineError without capacity.
        """
        self.check_attended()
        scatter, count = active(), keys.shape[-2]
        positions = np.arange(self.n, self.n + count) if scatter is None else scatter.rows.numpy()
        rows = self.runs.allocate(positions)
        if self.runs.rows > k.shape[2]:
            raise EngineError(f"no room for {count} more tokens", fix="Give new_context() a reserve for all of them")
        first, last = int(rows[0]), int(rows[-1]) + 1
        if last - first == count and (np.diff(rows) == 1).all():
            k[:, :, first:last], v[:, :, first:last] = keys, values
        else:
            there = torch.from_numpy(rows).to(k.device)
            k.index_copy_(2, there, keys)
            v.index_copy_(2, there, values)
        own.resize(self.runs.rows)
        self.n = max(self.n, int(positions[-1]) + 1)
        seen = own.keys[:]
        setattr(seen, _MARK, InPlaceCall(self, positions, k, v))
        self.pending = True
        return seen, own.values

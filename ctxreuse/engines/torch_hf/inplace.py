"""Layers of a context that holds runs in place: new rows go to its own memory, attention reads both where they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from ctxreuse.engines.torch_hf.scatter import active
from ctxreuse.errors import EngineError
from ctxreuse.kernels.attend import Plane
from ctxreuse.reuse.attend import Residents, Turn

if TYPE_CHECKING:
    from ctxreuse.engines.torch_hf.layers import ArenaLayer

__all__ = ["FORMATS", "Beside", "Call", "call_of"]

#: By item size of K and V: what the kernels call the numbers, and numpy's type for them (it has no bfloat16).
FORMATS: dict[str, tuple[str, Any]] = {
    "float32": ("fp32", np.float32),
    "float16": ("fp16", np.float16),
    "bfloat16": ("bf16", np.uint16),
}
# transformers hands a model's attention the very tensor that the cache returned; nothing else tells one call's context.
_MARK = "_ctxreuse_call"


def plane_of(tensor: torch.Tensor) -> Plane:
    """K or V [1, heads, tokens, dim] as the kernels read it, over the same memory."""
    name, kind = FORMATS[str(tensor.dtype).removeprefix("torch.")]
    bits = tensor[0] if kind is not np.uint16 else tensor[0].view(torch.int16)
    return Plane(name, bits.numpy().view(kind))


class Call:
    """One layer's attention in one forward: the tokens' positions and the layer's own memory, filled."""

    def __init__(self, beside: Beside, positions: npt.NDArray[np.int64], k: torch.Tensor, v: torch.Tensor) -> None:
        self._beside, self._positions, self._k, self._v = beside, positions, k, v

    def keys(self) -> torch.Tensor:
        """K of all positions up to the last of this call, as attention takes it: float32 [1, heads, n, dim]."""
        end = int(self._positions[-1]) + 1
        return torch.from_numpy(self._beside.read("k", np.arange(end), self._k))[None]

    def attend(
        self, query: torch.Tensor, mask: torch.Tensor | None, scale: float | None, special: Mapping[str, Any]
    ) -> torch.Tensor:
        """Attention of q [1, H, S, D] over all that the context holds -> [1, S, H, D]."""
        beside, window, softcap = self._beside, special.get("sliding_window"), special.get("softcap")
        beside.pending = False
        if any(value is not None for name, value in special.items() if name not in ("sliding_window", "softcap")):
            raise EngineError("the model's attention has more to it than held runs can be read with")
        if mask is not None:
            last = int(self._positions[-1]) + 1
            seen = min(last, window or last)
            if int((mask[0, 0, -1] == 0).sum()) != seen:
                raise EngineError("the model hides tokens in a way that held runs cannot be read with")
        q = np.ascontiguousarray(query[0].float().numpy())
        found = beside.residents.attend(
            beside.layer,
            q,
            self._positions,
            plane_of(self._k),
            plane_of(self._v),
            beside.turn,
            scale=scale,
            window=window,
            softcap=softcap,
        )
        return torch.from_numpy(found.o).transpose(0, 1)[None].to(query.dtype).contiguous()


def call_of(key: torch.Tensor) -> Call | None:
    """The call that a cache's K belongs to, if its context holds runs in place."""
    found: Call | None = getattr(key, _MARK, None)
    return found


class Beside:
    """What a layer has beside its own memory. ``n``: positions that it has seen."""

    def __init__(self, residents: Residents, layer: int, turn: Turn, n: int) -> None:
        self.residents, self.layer, self.turn, self.n = residents, layer, turn, n
        self.pending = False

    def restart(self, n: int) -> None:
        """The context has ``n`` positions now, and no forward is in flight."""
        self.n, self.pending = n, False

    def settle(self) -> None:
        """Raises EngineError if the model attended to something else than what the last call returned."""
        if self.pending:
            raise EngineError("the model changes what its cache gives it, so it cannot attend to held runs")

    def read(self, role: str, positions: npt.NDArray[np.int64], own: torch.Tensor) -> npt.NDArray[np.float32]:
        """K or V [heads, n, dim] for ``positions``; ``own`` is the layer's own memory of it."""
        return self.residents.read(self.layer, role, positions, plane_of(own), self.turn)

    def update(
        self, own: ArenaLayer, keys: torch.Tensor, values: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write K and V [1, heads, S, dim] to rows of the layer's own planes ``k`` and ``v``.

        Returns views of these rows, the first of them marked for `call_of`. Raises EngineError if there is no room.
        """
        self.settle()
        scatter, count = active(), keys.shape[-2]
        positions = np.arange(self.n, self.n + count) if scatter is None else scatter.rows.numpy()
        rows = torch.from_numpy(self.residents.place(positions))
        if self.residents.rows > k.shape[2]:
            raise EngineError(f"no room for {count} more tokens", fix="Give start() a reserve for all of them")
        k.index_copy_(2, rows, keys)
        v.index_copy_(2, rows, values)
        own.resize(self.residents.rows)
        self.n = max(self.n, int(positions[-1]) + 1)
        seen = own.keys[:]
        setattr(seen, _MARK, Call(self, positions, k, v))
        self.pending = True
        return seen, own.values

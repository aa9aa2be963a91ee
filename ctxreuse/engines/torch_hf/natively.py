"""Attention of tokens that stand far apart by the native kernels, which read for each no more keys than it sees."""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ctxreuse.kernels.attend import Part, Plane, attend, attend_name, attend_ready

__all__ = ["Natively"]

#: Kernels that are quicker than torch's own.
_QUICK: Final = ("avx2", "avx512", "neon")
_MOST_DIM: Final = 512


class _Sight(NamedTuple):
    """What one mask lets tokens see: the last ``window`` keys (None: all) up to their own, but the ``hidden`` ones."""

    window: int | None
    hidden: npt.NDArray[np.int64] | None


class Natively:
    """Attention of one forward whose tokens are at ``rows`` int64 [S], ascending; one thread.

    torch's own kernel computes all scores and takes the masked ones away: of tokens that are spread over a context that
    is half of them.
    """

    def __init__(self, rows: torch.Tensor) -> None:
        self._rows: npt.NDArray[np.int64] = rows.numpy()
        self._known: list[tuple[torch.Tensor, _Sight | None]] = []

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor,
        scale: float | None,
        window: int | None,
    ) -> torch.Tensor | None:
        """Attention [1, S, H, D] of q [1, H, S, D] on k, v [1, Hkv, N, D], the rows up to the last token's; all
        float32. None where the kernels cannot: the mask [1, 1, S, N] says something else than rows and ``window`` do,
        or this machine has no quick ones."""
        dim = query.shape[3]
        if (
            not attend_ready()
            or {query.dtype, key.dtype, value.dtype, mask.dtype} != {torch.float32}
            or value.shape[3] != dim
            or dim > _MOST_DIM
            or attend_name(dim) not in _QUICK
        ):
            return None
        low = int(self._rows[-1]) + 1 - key.shape[2]
        sight = self._sight(mask, low, window)
        if sight is None:
            return None
        k, v = (Plane("fp32", states[0].numpy()) for states in (key, value))
        part = Part(k, v, at=low, hidden=sight.hidden)
        found = attend(query[0].numpy(), [part], positions=self._rows, scale=scale, window=sight.window)
        return torch.from_numpy(found.o).transpose(0, 1)[None].contiguous()

    def _sight(self, mask: torch.Tensor, low: int, window: int | None) -> _Sight | None:
        """What the mask of a layer lets tokens see; layers that share one give the same tensor, and it is read once."""
        for known, sight in self._known:
            if known is mask:
                return sight
        sight = _read(mask[0, 0], torch.from_numpy(self._rows) - low, window)
        self._known.append((mask, sight))
        return sight


def _read(mask: torch.Tensor, rows: torch.Tensor, window: int | None) -> _Sight | None:
    """None for a mask [S, N] that is not of this kind; ``rows`` are those of N at which the tokens stand."""
    columns = torch.arange(mask.shape[1])
    near = columns <= rows[:, None]
    if window is not None:
        near &= columns > rows[:, None] - window
    seen = mask == 0
    somebody, reached = seen.any(0), near.any(0)
    if not torch.equal(seen, near & somebody) or not bool((seen | (mask == -torch.inf)).all()):
        return None
    hidden = (reached & ~somebody).nonzero()[:, 0]
    return _Sight(window, hidden.numpy() if len(hidden) else None)

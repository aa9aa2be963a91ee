"""Where the tokens of a forward look: softmax weights on each position, added up over layers, heads and tokens."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

__all__ = ["Looking"]


class Looking:
    """Sums over the forwards of one look: queries at positions ``first`` to ``end`` - 1 count."""

    def __init__(self, first: int, end: int) -> None:
        self._first, self._sum = first, torch.zeros(end)

    def note(
        self,
        positions: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        mask: torch.Tensor | None,
        scale: float | None,
        softcap: float | None,
    ) -> None:
        """Count one layer: q [1, H, S, D] at ``positions`` int64 [S] on k [1, Hkv, N, D], the keys of the N positions
        up to the last of these; ``mask``: additive, [1, 1, S, N]."""
        asked = positions >= self._first
        if not bool(asked.any()):
            return
        group, heads = query.shape[1] // key.shape[1], key.shape[1]
        q = query[0, :, asked].float().reshape(heads, -1, query.shape[3])
        scores = (q @ key[0].float().transpose(1, 2)) * (query.shape[3] ** -0.5 if scale is None else scale)
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores.view(heads, group, -1, key.shape[2])
        if mask is not None:
            scores = scores + mask[0, 0, asked].float()
        end = int(positions[-1]) + 1
        self._sum[end - key.shape[2] : end] += scores.softmax(-1).sum((0, 1, 2))

    def of(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        """What the rows got, float32 [n]."""
        found: npt.NDArray[np.float32] = self._sum[torch.from_numpy(rows)].numpy()
        return found

"""Forwards whose tokens stand anywhere in a context: each is written to its own row and sees the rows before it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ctxreuse.engines.torch_hf.chunks.blockwise import Blockwise
from ctxreuse.engines.torch_hf.chunks.drift import DriftCorrection
from ctxreuse.engines.torch_hf.modes import by_kernels, setting

__all__ = ["AttentionScores", "ComparedError", "RowComparison", "Scatter", "active", "by_position", "scattered"]


class AttentionScores:
    """Softmax weights on each position, summed over layers, heads and queries at ``first`` to ``end`` - 1."""

    def __init__(self, first: int, end: int) -> None:
        self._first, self._sum = first, torch.zeros(end)

    def add(
        self,
        positions: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        mask: torch.Tensor | None,
        scale: float | None,
        softcap: float | None,
    ) -> None:
        """Add one layer: q [1, H, S, D] at ``positions`` int64 [S] on k [1, Hkv, N, D], the keys of the N positions up
        to the last of these; ``mask``: additive, [1, 1, S, N]."""
        counted = positions >= self._first
        if not bool(counted.any()):
            return
        group, heads = query.shape[1] // key.shape[1], key.shape[1]
        q = query[0, :, counted].float().reshape(heads, -1, query.shape[3])
        scores = (q @ key[0].float().transpose(1, 2)) * (query.shape[3] ** -0.5 if scale is None else scale)
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores.view(heads, group, -1, key.shape[2])
        if mask is not None:
            scores = scores + mask[0, 0, counted].float()
        end = int(positions[-1]) + 1
        self._sum[end - key.shape[2] : end] += scores.softmax(-1).sum((0, 1, 2)).cpu()

    def of(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        """The sums on these rows, float32 [n]."""
        found: npt.NDArray[np.float32] = self._sum[torch.from_numpy(rows)].numpy()
        return found


class ComparedError(Exception):
    """Ends a forward of which only the comparison is wanted."""


class RowComparison:
    """Squared distances between rows as they are held and as they are computed, and squared lengths of the latter.

    Each is float32 [S] by layer in the order of the forward, K and V one behind the other. The forward ends with
    ComparedError in the ``layers``-th layer.
    """

    def __init__(self, layers: int) -> None:
        self._layers = layers
        self.distances: list[torch.Tensor] = []
        self.lengths: list[torch.Tensor] = []

    def add(self, stored: torch.Tensor, fresh: torch.Tensor) -> None:
        """Compare [1, heads, S, dim] of one plane."""
        rows = fresh.float()
        self.distances.append(((stored.float() - rows) ** 2).sum((0, 1, 3)))
        self.lengths.append((rows**2).sum((0, 1, 3)))
        if len(self.distances) == 2 * self._layers:
            raise ComparedError


class Scatter:
    """Positions of the tokens of one forward: ``rows`` int64 [S], ascending, ``first`` to ``end`` - 1.

    ``scores`` collects attention. ``unseen``: int64, positions that none of the tokens sees. ``drift`` corrects other
    rows before a layer writes what is computed. With ``compared`` nothing is written: tokens see what is held of
    themselves too. ``blockwise`` attends where the engine computes attention itself.
    """

    __slots__ = ("_there", "blockwise", "compared", "drift", "end", "first", "rows", "scores", "seen")

    def __init__(
        self,
        rows: torch.Tensor,
        scores: AttentionScores | None,
        unseen: torch.Tensor | None,
        drift: DriftCorrection | None,
        compared: RowComparison | None,
    ) -> None:
        self.rows, self.first, self.end = rows, int(rows[0]), int(rows[-1]) + 1
        self._there = rows
        self.seen: torch.Tensor | None = None
        if unseen is not None and len(unseen):
            self.seen = torch.ones(self.end, dtype=torch.bool).index_fill_(0, unseen[unseen < self.end], False)
        self.scores, self.drift, self.compared, self.blockwise = scores, drift, compared, Blockwise()

    def rows_on(self, device: torch.device) -> torch.Tensor:
        """The rows in the memory of a device; a copy stays for the other layers."""
        if self._there.device != device:
            self._there = self.rows.to(device)
        return self._there

    def write(self, plane: torch.Tensor, states: torch.Tensor) -> None:
        """Put [1, heads, S, dim] into their rows of a plane [1, heads, capacity, dim], or compare them."""
        rows = self.rows_on(plane.device)
        if self.compared is not None:
            self.compared.add(plane.index_select(2, rows), states)
        else:
            plane.index_copy_(2, rows, states)


# A model calls its caches and masks without saying for which forward, on the thread that runs the forward.
_active: ContextVar[Scatter | None] = ContextVar("ctxreuse_scatter", default=None)


def active() -> Scatter | None:
    """The scattered forward that this thread is in, if any."""
    return _active.get()


@contextmanager
def scattered(
    rows: torch.Tensor,
    *,
    scores: AttentionScores | None = None,
    unseen: torch.Tensor | None = None,
    drift: DriftCorrection | None = None,
    compared: RowComparison | None = None,
) -> Iterator[Scatter]:
    """Forwards of this thread inside have their tokens at ``rows``.

    Kernels may compute them in float32 too: what is scattered is approximate anyway.
    """
    scatter = Scatter(rows, scores, unseen, drift, compared)
    if drift is not None:
        drift.begin(rows)
    with setting(_active, scatter), by_kernels(True):
        yield scatter


def by_position(scatter: Scatter, allowed: Callable[..., Any]) -> Callable[..., Any]:
    """transformers' mask function, called with a token's position in place of the token's number."""

    def positioned(batch: Any, head: Any, query: Any, key: Any) -> Any:
        found = allowed(batch, head, scatter.rows_on(query.device)[query], key)
        return found if scatter.seen is None else found & scatter.seen.to(key.device)[key]

    return positioned

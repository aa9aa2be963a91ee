"""A token that left the model early: what its later layers still have to compute."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ctxreuse.exits import ExitRow

__all__ = ["PendingRow"]


class PendingRow:
    """One token of a context.

    Attributes:
        depth: layers that it ran through; later ones have no K and V of it.
        hidden: its hidden state there, [width].
        left: the ramp at which it left; -1: it did not.
        ramps: those that are to be computed for it, by number, also after it left.
        scores, tokens: of those that were.
    """

    __slots__ = ("depth", "hidden", "left", "ramps", "scores", "tokens")

    def __init__(self, ramps: Sequence[int]) -> None:
        self.depth, self.left, self.ramps = 0, -1, ramps
        self.hidden: torch.Tensor | None = None
        self.scores, self.tokens = dict[int, float](), dict[int, int]()

    def completed(self, token: int) -> ExitRow:
        """Return what became of it: the model says that ``token`` follows."""
        return ExitRow(self.scores, {ramp: said == token for ramp, said in self.tokens.items()}, self.left)

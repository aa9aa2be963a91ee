"""What a repair is: it chooses which rows of moved runs are computed anew."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Final, Literal, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from ctxreuse.keys import Tokens
from ctxreuse.model import ModelSpace

__all__ = ["DEPTH", "LOOKING", "Attention", "Deviations", "Repair", "Role", "Span", "look_layers"]

Role: TypeAlias = Literal["k", "v"]

#: ``deviations(positions int32 [n], layer, role)``: float32 [n], how far K or V that were computed afresh up to
#: ``layer`` lie from those that are held: squared distance, summed over heads and dims.
Deviations: TypeAlias = Callable[[Tokens, int, Role], npt.NDArray[np.float32]]

#: ``attention(positions int32 [n])``: float32 [n], the attention that these held rows get from the `LOOKING` tokens
#: that the prompt ends with, in the model's first layers (`look_layers`): softmax weights, summed over these, heads and
#: tokens.
Attention: TypeAlias = Callable[[Tokens], npt.NDArray[np.float32]]

#: So many tokens of a prompt's end look.
LOOKING: Final = 32
#: They look in this share of the layers, from the first on. What is asked of a document they find in the middle ones:
#: over 27 questions on short chats (SmolLM2, first-4+last-16+every-20+ask-5%+drift) the answer's KL is .0584 with 5 of
#: its 30 layers and .0541 with 20. To text that goes on it matters less: over 8 x 256 moved tokens, with 5 % asked for,
#: .0174 with 10, .0180 with 20, .0157 with all.
DEPTH: Final = 2 / 3


class Span(Protocol):
    """A moved run, such as `Run`: positions ``start`` to ``end`` of the prompt."""

    @property
    def start(self) -> int: ...
    @property
    def end(self) -> int: ...


class Repair(ABC):
    """Chooses rows. Immutable; any thread may call, and equal arguments give equal rows."""

    @property
    @abstractmethod
    def name(self) -> str:
        """As users write it; `parse` gives an equal repair for it."""

    @property
    def turned(self) -> bool:
        """False only for ``none``: not even the keys are turned to their new positions."""
        return True

    @property
    def drifts(self) -> bool:
        """True if rows that are not computed are set right by what the computed ones were off (`Mover.mend`)."""
        return False

    @abstractmethod
    def rows(self, runs: Sequence[Span], budget: int, deviations: Deviations, attention: Attention) -> Tokens:
        """Positions in ``runs`` to compute anew, ascending, int32, at most ``budget`` of them."""

    def beyond(
        self, chosen: Tokens, runs: Sequence[Span], budget: int, deviations: Deviations, attention: Attention
    ) -> Tokens:
        """As `rows`, but none of ``chosen``, which others have chosen before."""
        found = self.rows(runs, budget + len(chosen), deviations, attention)
        return np.setdiff1d(found, chosen)[: max(budget, 0)]

    @abstractmethod
    def work(self, tokens: int, runs: int, layers: int) -> float:
        """Layer-tokens that it computes over ``runs`` runs of ``tokens`` tokens together in a model of ``layers``
        layers, as a share of computing them all; its looking for rows is part of it."""


def look_layers(space: ModelSpace) -> int:
    """In how many of a model's layers the prompt's end looks: so many that one of them sees all tokens, if any does."""
    least = math.ceil(len(space.layers) * DEPTH)
    whole = next((i + 1 for i, layer in enumerate(space.layers) if layer.blocked and not layer.window), 0)
    return max(least, whole)

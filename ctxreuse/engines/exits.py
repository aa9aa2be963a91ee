"""What engines offer that let tokens leave before their last layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from ctxreuse.engines.base import Context, Logits
from ctxreuse.engines.text import TextModel
from ctxreuse.errors import CtxReuseError
from ctxreuse.exits import ExitPlan, ExitRow, RampCost
from ctxreuse.identity.keys import Tokens
from ctxreuse.identity.model import ModelSpace

__all__ = ["ExitCalibration", "ExitEngine", "ExitStates", "ExitStep", "HiddenStates"]


class ExitStep(NamedTuple):
    """What a step with exits found.

    Attributes:
        logits: those after its token; None if that left.
        token: what follows it, if it left: the ramp's most likely token.
        left: the ramp at which it left; -1: at none.
        rows: tokens that ran through the whole model, in their order: those that had left before, then its own.
        spent: seconds of its pass that a pass without exits does not have: ramps, and what running in parts adds.
    """

    logits: Logits | None
    token: int
    left: int
    rows: tuple[ExitRow, ...]
    spent: float = 0.0


@runtime_checkable
class ExitEngine(Protocol):
    """An engine some of whose tokens may leave early. K and V that such a token misses in later layers are computed
    together with those of later tokens of its context: before anything else is done with that."""

    @property
    def ramps(self) -> Sequence[RampCost] | str:
        """What the ramps of the model's exit profile cost, or why no token can leave."""
        ...

    def exit_step(self, batch: Sequence[tuple[Context, Tokens, ExitPlan]]) -> list[ExitStep | CtxReuseError]:
        """Append one token each to different contexts in one pass, which ends at the first ramp where all of them may
        leave as planned: one that goes on reads the weights in any case. Returns what became of each, or the error
        that `Engine.prefill` would raise, which does not harm the others. Raises EngineError without ramps."""
        ...

    def complete_rows(self, context: Context) -> tuple[ExitRow, ...]:
        """Compute what the last tokens miss; returns those that were completed since the last step."""
        ...


class HiddenStates(NamedTuple):
    """Of each token of a text: ``hidden``, by depth, as a ramp's head takes it, float32 [n, width]; ``last``: behind
    all layers, as the model's own head takes it; ``said``: what the model says next, int64 [n]."""

    hidden: list[npt.NDArray[np.float32]]
    last: npt.NDArray[np.float32]
    said: npt.NDArray[np.int64]


class ExitStates(Protocol):
    """Reads hidden states of a model, to make ramps from."""

    #: Of hidden states.
    width: int

    def read(self, ids: Tokens, depths: Sequence[int]) -> HiddenStates:
        """Run a text from position 0 on; depths, layers before ramps, ascend."""
        ...

    def head_rows(self, tokens: Tokens) -> npt.NDArray[np.float32]:
        """Return the rows of the model's own head, float32 [n, width], of some tokens."""
        ...


@runtime_checkable
class ExitCalibration(Protocol):
    """An engine that ramps can be made for."""

    @property
    def space(self) -> ModelSpace:
        """See `Engine.space`."""
        ...

    @property
    def text(self) -> TextModel | None:
        """See `Engine.text`."""
        ...

    def exit_states(self) -> ExitStates:
        """What reads its hidden states. Raises EngineError, with the reason, for a model that tokens cannot leave."""
        ...

"""What engines offer that let tokens leave before their last layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from ctxreuse.engines.base import Context, Logits
from ctxreuse.errors import CtxReuseError
from ctxreuse.exits import ExitPlan, ExitRow, RampCost
from ctxreuse.identity.keys import Tokens

__all__ = ["ExitEngine", "ExitStep"]


class ExitStep(NamedTuple):
    """What a step with exits found.

    Attributes:
        logits: those after its token; None if that left.
        token: what follows it, if it left: the ramp's most likely token.
        left: the ramp at which it left; -1: at none.
        rows: tokens that ran through the whole model, in their order: those that had left before, then its own.
    """

    logits: Logits | None
    token: int
    left: int
    rows: tuple[ExitRow, ...]


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

"""What an engine is to do with one token that may leave early, and what it found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

__all__ = ["ExitPlan", "ExitRow", "RampCost"]


class ExitPlan(msgspec.Struct, frozen=True, array_like=True):
    """``ramps``: numbers, ascending, of those to compute; ``least``: the score with which the token leaves at some."""

    ramps: Sequence[int] = ()
    least: Mapping[int, float] = {}


class ExitRow(msgspec.Struct, frozen=True, array_like=True):
    """A token that ran through the whole model.

    Attributes:
        scores: of the ramps that were computed for it, by number.
        right: whether they said what the model says.
        left: the ramp at which it had left; -1: it had not.
    """

    scores: Mapping[int, float] = {}
    right: Mapping[int, bool] = {}
    left: int = -1


class RampCost(msgspec.Struct, frozen=True, array_like=True):
    """Of one ramp, as shares of a full step: what a token saves that leaves there, and what computing the ramp adds."""

    saved: float
    cost: float

"""How answers are written in steps, and who judges them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ctxreuse.errors import ConfigError
from ctxreuse.judge.own import OwnJudge
from ctxreuse.judge.profile import MAX_STEP

__all__ = ["StepRule"]


@dataclass(frozen=True, kw_only=True)
class StepRule:
    """How answers are written in steps.

    Attributes:
        judge: the cloud's model by ``likelihood`` or ``digit``, or a function of this node's.
        threshold: the score from which on a step is accepted (None: that of the judge's calibration).
        tokens: of a step at most. Raises ConfigError for more than 128, or none.
    """

    judge: Literal["likelihood", "digit"] | OwnJudge = "likelihood"
    threshold: float | None = None
    tokens: int = 64

    def __post_init__(self) -> None:
        if not 1 <= self.tokens <= MAX_STEP:
            raise ConfigError(f"steps of {self.tokens} tokens", fix=f"Let them have 1 to {MAX_STEP}")

"""The digit that a model gives a step of an answer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ctxreuse.engines.text import Message

if TYPE_CHECKING:
    from ctxreuse.engines.base import Logits
    from ctxreuse.engines.text import TextModel

__all__ = ["DigitQuestion"]

#: Stands in a chat template where a step does.
_MARK = "steptobejudged"
_ASK = (
    "Is the last step of the answer above correct and logically valid? Judge only that. "
    "Give a single digit from 0 (wrong) to 9 (right)."
)
_OPENING = "The digit is "


class DigitQuestion:
    """How a model is asked for a digit after a step (SpecReason, Pan et al. 2025: it says one token).

    Attributes:
        ids: the question's tokens, which follow those of the step, int32 [n]: what ends the answer in the model's chat
            template, the question, and the beginning of what it answers.
    """

    def __init__(self, text: TextModel) -> None:
        chat = [Message("user", "?"), Message("assistant", _MARK), Message("user", _ASK)]
        rendered = text.render(chat, generate=True)
        _, found, after = rendered.rpartition(_MARK)
        # A template that drops what was said before: the question then follows as plain text.
        self.ids = text.encode((after if found else f"\n\n{_ASK}\n\n") + _OPENING)
        self._digits = np.array([int(text.encode(str(digit), markers=False)[-1]) for digit in range(10)])

    def score(self, logits: Logits) -> float:
        """Return the expected digit, 0 to 9; ``logits``: float32 [vocab] after `ids`."""
        rows = logits[self._digits].astype(np.float64)
        weights = np.exp(rows - rows.max())
        return float((weights * np.arange(10)).sum() / weights.sum())

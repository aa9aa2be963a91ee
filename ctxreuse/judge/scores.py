"""How likely a model finds a step, and how well scores tell right steps from wrong ones."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ctxreuse.identity.keys import Tokens

if TYPE_CHECKING:
    from ctxreuse.engines.base import Logits

__all__ = ["area_under_curve", "best_threshold", "likelihood"]


#: The score of a step that a model cannot say, as no message carries a number that is not finite.
_NEVER = -1e9


def likelihood(logits: Logits, step: Tokens) -> float:
    """Return the mean log-probability of a step's tokens, in nats; ``logits``: float32 [n, vocab], of each token what
    the model thinks before it."""
    rows = np.atleast_2d(logits)[: len(step)].astype(np.float64)
    most = rows.max(axis=1)
    sums = most + np.log(np.exp(rows - most[:, None]).sum(axis=1))
    found = float((rows[np.arange(len(step)), step] - sums).mean())
    return found if isfinite(found) else _NEVER


def area_under_curve(scores: Sequence[float], right: Sequence[bool]) -> float:
    """Return how probably a right step scores above a wrong one (the area under the ROC curve); equal scores count
    half. Both kinds must be there."""
    wrong, good = _split(scores, right)
    above = np.searchsorted(wrong, good, "left").sum() + np.searchsorted(wrong, good, "right").sum()
    return float(above / (2 * len(wrong) * len(good)))


def best_threshold(scores: Sequence[float], right: Sequence[bool]) -> float:
    """Return the score from which on steps are accepted so that right and wrong ones differ most: the share of
    right ones accepted less that of wrong ones is greatest (Youden 1950)."""
    wrong, good = _split(scores, right)
    tried = np.unique(good)
    gain = (len(good) - np.searchsorted(good, tried, "left")) / len(good)
    gain = gain - (len(wrong) - np.searchsorted(wrong, tried, "left")) / len(wrong)
    return float(tried[int(gain.argmax())])


def _split(scores: Sequence[float], right: Sequence[bool]) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Scores of wrong and of right steps, ascending."""
    all_scores, labels = np.asarray(scores, np.float64), np.asarray(right, bool)
    return np.sort(all_scores[~labels]), np.sort(all_scores[labels])

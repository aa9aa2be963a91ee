"""What ramps said of tokens and whether it was right, and the thresholds that would have saved most of them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ctxreuse.exits.plan import RampCost

__all__ = ["Records", "Thresholds"]

Floats = npt.NDArray[np.float64]

#: Tokens that are remembered, and after how many more each counts half.
_ROWS, _HALF = 2048, 1024
#: Thresholds of the first of two ramps that are tried.
_TRIED = 12
#: Ramps that are computed for a token at most, beside probes.
_MOST = 2


class Thresholds(NamedTuple):
    """The least score with which a token leaves at each ramp (by number), and what that is expected to save, as a share
    of a full step a token. No ramp: nothing is worth it."""

    least: dict[int, float]
    saved: float = 0.0


class Records:
    """The newest tokens: of each ramp the score (NaN: it was not computed) and whether it was right."""

    def __init__(self, ramps: int, rows: int = _ROWS, half: float = _HALF) -> None:
        """``rows`` are remembered; one counts half after ``half`` more."""
        self.scores = np.full((rows, ramps), np.nan)
        self.right = np.zeros((rows, ramps), bool)
        self._half = half
        #: Tokens so far.
        self.count = 0

    def add(self, scores: Sequence[float], right: Sequence[bool]) -> None:
        """Remember a token."""
        at = self.count % len(self.scores)
        self.scores[at], self.right[at] = scores, right
        self.count += 1

    def _weights(self) -> Floats:
        rows = len(self.scores)
        kept = min(self.count, rows)
        weights: Floats = 0.5 ** ((self.count - 1 - np.arange(kept)) % rows / self._half)
        return weights

    def best(self, costs: Sequence[RampCost], rate: float, keep: Sequence[int] = ()) -> Thresholds:
        """Return the ramps, two at most, and thresholds that save most if wrong tokens may be a share ``rate``.

        ``keep``: ramps in use, which others replace only if they save a tenth more. One more token than were wrong
        counts as wrong, so that few records allow nothing.
        """
        found, bar = Thresholds({}), 0.0
        weights = self._weights()
        sets = [one for size in range(1, _MOST + 1) for one in combinations(range(len(costs)), size)]
        kept = tuple(sorted(keep))
        for ramps in sorted(sets, key=lambda one: one != kept):
            chosen = self._set(ramps, costs, rate, weights)
            if chosen is not None and chosen.saved > bar:
                found, bar = chosen, chosen.saved * (1.1 if ramps == kept else 1.0)
        return found

    def _set(
        self, ramps: tuple[int, ...], costs: Sequence[RampCost], rate: float, weights: Floats
    ) -> Thresholds | None:
        rows = np.flatnonzero(~np.isnan(self.scores[: len(weights)][:, list(ramps)]).any(1))
        total = float(weights[rows].sum())
        allowed = rate * total - 1.0
        if allowed < 0:
            return None
        first, *others = ramps
        score, wrong, weight = self.scores[rows, first], ~self.right[rows, first] * weights[rows], weights[rows]
        order = np.argsort(-score)
        spent = np.cumsum(wrong[order])
        end = _whole(score[order], int(np.searchsorted(spent, allowed, side="right")))
        if not others:
            if not end:
                return None
            gained = float(weight[order[:end]].sum()) * costs[first].saved / total - costs[first].cost
            return Thresholds({first: float(score[order[end - 1]])}, gained)
        second = others[0]
        best: Thresholds | None = None
        for stop in sorted({round(end * part / _TRIED) for part in range(1, _TRIED)} - {0}):
            stop = _whole(score[order], stop)
            if not stop:
                continue
            here, rest = order[:stop], order[stop:]
            gained = float(weight[here].sum()) * costs[first].saved
            late = self.scores[rows[rest], second]
            after = rest[np.argsort(-late)]
            more = np.cumsum(~self.right[rows[after], second] * weight[after])
            far = _whole(
                self.scores[rows[after], second], int(np.searchsorted(more, allowed - spent[stop - 1], "right"))
            )
            if not far:
                continue
            gained += float(weight[after[:far]].sum()) * costs[second].saved
            gained -= float(weight[rest].sum()) * costs[second].cost
            saved = gained / total - costs[first].cost
            if best is None or saved > best.saved:
                least = {first: float(score[order[stop - 1]]), second: float(self.scores[rows[after[far - 1]], second])}
                best = Thresholds(least, saved)
        return best

    def dump(self) -> tuple[bytes, bytes, int]:
        """Return what `restore` takes."""
        return self.scores.astype("<f4").tobytes(), np.packbits(self.right).tobytes(), self.count

    def restore(self, scores: bytes, right: bytes, count: int) -> None:
        """Take what `dump` gave. Raises ValueError for what it cannot have given."""
        shape = self.scores.shape
        values = np.frombuffer(scores, "<f4").astype(np.float64)
        bits = np.unpackbits(np.frombuffer(right, np.uint8))
        if values.size != self.scores.size or bits.size < self.right.size or count < 0 or np.isinf(values).any():
            raise ValueError("no records of these ramps")
        self.scores, self.right = values.reshape(shape), bits[: self.right.size].reshape(shape).astype(bool)
        self.count = count


def _whole(scores: Floats, end: int) -> int:
    """The most of the first ``end`` scores, descending, that a threshold can tell from those behind them."""
    if not 0 < end < len(scores):
        return end
    return end if scores[end] < scores[end - 1] else int(np.searchsorted(-scores, -scores[end]))

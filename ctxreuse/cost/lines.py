"""Lines fitted online: seconds as a sum of features with coefficients that cannot be negative."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = ["DecodeLine", "DiskLine", "PrefillLine"]

Numbers: TypeAlias = npt.NDArray[np.floating]

#: Observations kept. A machine's speed changes with what else runs on it, so old ones must go.
_WINDOW = 96
#: Weight of an observation against the next one.
_FORGET = 0.96
#: How far from the others (in times of their typical distance) an observation still counts in full (Huber, 1964).
_HUBER = 1.5
_PASSES = 8
#: Seconds. Shorter times are mostly the clock's and the scheduler's.
_SHORTEST = 1e-4


class _Line:
    """Fits ``seconds = Σ coefficient · feature`` over the last observations. Any thread may call.

    Weighted least squares of the *relative* error, as a short prefill must be predicted as well as a long one; an
    observation that lies far off (the machine was busy) loses weight; newer ones count more. ``penalty``, one a
    feature, is a slight pull to zero that decides where the observations cannot (all of one length): there the feature
    with the least penalty explains everything.
    """

    penalty: tuple[float, ...]

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rows: deque[tuple[float, ...]] = deque(maxlen=_WINDOW)  # features, then seconds
        self._found: Numbers | None = None

    def __len__(self) -> int:
        """Number of observations kept."""
        return len(self._rows)

    def _observe(self, features: tuple[float, ...], seconds: float) -> None:
        if math.isfinite(seconds) and seconds > 0:
            with self._lock:
                self._rows.append((*features, max(seconds, _SHORTEST)))
                self._found = None

    @property
    def coefficients(self) -> tuple[float, ...] | None:
        """One a feature, each at least 0; None before the first observation."""
        with self._lock:
            if not self._rows:
                return None
            if self._found is None:
                self._found = _fit(np.array(self._rows), np.array(self.penalty))
            return tuple(self._found.tolist())

    def _seconds(self, features: tuple[float, ...]) -> float | None:
        found = self.coefficients
        return None if found is None else sum(map(float.__mul__, found, features))

    def dump(self) -> list[tuple[float, ...]]:
        """Return the observations, oldest first, for `restore` in a later process."""
        with self._lock:
            return list(self._rows)

    def restore(self, rows: Iterable[Sequence[float]]) -> None:
        """Take observations of an earlier process in front of those of this one; what makes no sense is left out."""
        width = len(self.penalty) + 1
        good = [tuple(map(float, row)) for row in rows if len(row) == width]
        good = [row for row in good if all(0 <= x < 1e15 for x in row) and row[-1] >= _SHORTEST]
        with self._lock:
            cached = list(self._rows)
            self._rows.clear()
            self._rows.extend([*good, *cached])
            self._found = None

    def check(self) -> None:
        """Raise AssertionError if a prediction could be negative or not finite."""
        found = self.coefficients
        assert found is None or all(math.isfinite(x) and x >= 0 for x in found), f"coefficients {found}"
        assert len(self._rows) <= _WINDOW


def _fit(rows: Numbers, penalty: Numbers) -> Numbers:
    seconds = rows[:, -1]
    relative = rows[:, :-1] / seconds[:, None]
    age = np.arange(len(rows))[::-1]
    trust = _FORGET**age
    weight = trust
    found: Numbers = np.zeros(relative.shape[1])
    for _ in range(_PASSES):
        found = _least(relative, weight, penalty)
        off = np.abs(relative @ found - 1)
        typical = max(_median(off, trust), 0.01)
        weight = trust * np.minimum(1, _HUBER * typical / np.maximum(off, 1e-12)) ** 2
    return found


def _median(values: Numbers, weight: Numbers) -> float:
    """The value that half of the weight lies below."""
    order = values.argsort()
    reached = weight[order].cumsum()
    return float(values[order[int(np.searchsorted(reached, reached[-1] / 2))]])


def _least(relative: Numbers, weight: Numbers, penalty: Numbers) -> Numbers:
    """Coefficients ≥ 0 with the least weighted squared distance of ``relative @ x`` from 1."""
    scale = np.sqrt((weight[:, None] * relative**2).sum(0) / weight.sum())
    usable = scale > 0
    found: Numbers = np.zeros(relative.shape[1])
    while usable.any():
        scaled = relative[:, usable] / scale[usable]
        left = (weight[:, None] * scaled).T @ scaled + np.diag(penalty[usable] * weight.sum())
        solved = np.linalg.solve(left, (weight[:, None] * scaled).sum(0))
        if solved.min() >= 0:
            found[usable] = solved / scale[usable]
            return found
        # Dropping the worst and solving again: exact enough for two or three features.
        usable[np.flatnonzero(usable)[solved.argmin()]] = False
    return found


class PrefillLine(_Line):
    """Seconds to compute n tokens behind p cached ones: ``a + b·n + c·n·(p + n/2)``.

    a: what any forward costs; b: the layers' matrices; c: attention over the whole context (n·p + n²/2 pairs).
    """

    penalty = (1e-4, 1e-7, 1e-4)

    def observe(self, n: int, p: int, seconds: float) -> None:
        """Add an observation: ``n`` tokens behind ``p`` cached ones took ``seconds``."""
        if n > 0 <= p:
            self._observe(self._features(n, p), seconds)

    def seconds(self, n: int, p: int = 0) -> float | None:
        """Predicted seconds; 0 for no tokens, None before the first observation."""
        return 0.0 if n <= 0 else self._seconds(self._features(n, p))

    @staticmethod
    def _features(n: int, p: int) -> tuple[float, ...]:
        return (1.0, float(n), n * (p + n / 2))


class DecodeLine(_Line):
    """Seconds of one generated token behind p cached ones: ``a + b·p``."""

    penalty = (1e-7, 1e-4)

    def observe(self, p: int, seconds: float) -> None:
        """Add an observation: one token behind ``p`` cached ones took ``seconds``."""
        self._observe((1.0, float(p)), seconds)

    def seconds(self, p: int) -> float | None:
        """Predicted seconds of one token; None before the first observation."""
        return self._seconds((1.0, float(p)))


class DiskLine(_Line):
    """Seconds to bring stored bytes into the engine's memory: ``a + b·nbytes``."""

    penalty = (1e-4, 1e-7)

    def observe(self, nbytes: int, seconds: float) -> None:
        """Loading ``nbytes`` took so long."""
        if nbytes > 0:
            self._observe((1.0, float(nbytes)), seconds)

    def seconds(self, nbytes: int) -> float | None:
        """Predicted seconds; 0 for no bytes, None before the first observation."""
        return 0.0 if nbytes <= 0 else self._seconds((1.0, float(nbytes)))

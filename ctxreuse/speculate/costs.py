"""What a pass of an engine costs by its rows, as measured."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping, Sequence
from math import isfinite
from statistics import median

__all__ = ["PassCosts"]

#: Passes of one kind whose median counts, and how many are needed to know what one costs.
_PASSES, _KNOWN = 7, 3
#: What a further row costs, as a share of a pass of one, while nothing was measured.
_PRIOR = 0.12
#: How much more than those before them rows beyond the largest pass are taken to cost.
_STEEPER = 1.25
#: Each number of rows up to here is a class of its own; then eight are one.
_FINE = 8


class PassCosts:
    """Seconds of passes that only decode, by rows (a token of an answer or of its draft). Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seconds: dict[int, deque[float]] = {}
        #: Their medians; none where they are to be found anew.
        self._table: dict[int, float] = {}
        #: Passes since one of only single tokens.
        self.since_plain = 0

    def observe(self, rows: int, contexts: int, seconds: float) -> None:
        """Learn from a pass of ``rows`` tokens of ``contexts`` contexts."""
        with self._lock:
            self._seconds.setdefault(_kind(rows), deque(maxlen=_PASSES)).append(seconds)
            self._table = {}
            self.since_plain = 0 if rows == contexts else self.since_plain + 1

    def dump(self) -> dict[int, list[float]]:
        """Return the newest observations, for `restore` after a restart: as many as are needed to know, so that those
        of another day are soon outnumbered."""
        with self._lock:
            return {kind: list(times)[-_KNOWN:] for kind, times in self._seconds.items()}

    def restore(self, seconds: Mapping[int, Sequence[float]]) -> None:
        """Take what `dump` gave; what cannot be seconds of a pass is left out."""
        with self._lock:
            for kind, times in seconds.items():
                good = [one for one in times if isfinite(one) and one > 0]
                if kind == _kind(max(kind, 1)) and good:
                    self._seconds[kind] = deque(good, maxlen=_PASSES)
            self._table = {}

    def known(self, rows: int) -> bool:
        """True if passes of so many rows were measured."""
        return len(self._seconds.get(_kind(rows), ())) >= _KNOWN

    def seconds(self, rows: int) -> float | None:
        """Return what a pass of so many rows takes, by the classes around it; None: unknown.

        Between the middles of classes it rises evenly: with steps none of many answers would draft the first token.
        """
        with self._lock:
            table = self._table = self._table or {kind: median(times) for kind, times in self._seconds.items()}
        if not table:
            return None
        below = max((one for one in table if one <= rows), default=None)
        above = min((one for one in table if one >= rows), default=None)
        if below is None:
            assert above is not None
            return table[above] / (1 + _PRIOR * (above - rows))
        if above is None:
            return table[below] + (rows - below) * _slope(table, below)
        if above == below:
            return table[below]
        least, most = table[below], max(table[above], table[below])
        return least + (most - least) * (rows - below) / (above - below)


def _slope(table: Mapping[int, float], most: int) -> float:
    """What a row beyond all that were measured, the class ``most`` the largest, is taken to cost.

    At most as much as one before that: where rows cost little, a fixed share would never let a pass be tried that shows
    it; where they cost much, further ones often cost less.
    """
    least, share = min(table), _PRIOR * table[most]
    if least == most:
        return share
    return min(max(_STEEPER * (table[most] - table[least]) / (most - least), 0.0), share)


def _kind(rows: int) -> int:
    """The class of a number of rows, named by one in its middle."""
    return rows if rows <= _FINE else (rows - 1) // 8 * 8 + 4

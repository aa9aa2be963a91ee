"""Probes: the few rows of a moved run that are compared with freshly computed ones, and what is made of them.

Calibration measures by the same two functions as a request does, so that a card's limits mean what they say.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from ctxreuse.keys import Tokens
from ctxreuse.reuse.repair import Span

__all__ = ["PROBES", "deviation", "probe_rows"]

#: Rows of one run that are compared.
PROBES = 16


def probe_rows(run: Span) -> Tokens:
    """Up to `PROBES` positions of a run, int32 ascending, evenly spread; all of them in a short one."""
    count = min(PROBES, run.end - run.start)
    found: Tokens = (run.start + (np.arange(count) * 2 + 1) * (run.end - run.start) // (2 * count)).astype("<i4")
    return found


def deviation(distance: npt.NDArray[np.float32], length: npt.NDArray[np.float32]) -> float:
    """Of the probes of one run: squared distances over squared lengths (see `Mover.deviations`), infinite if that is
    no number, as for rows that are damaged."""
    total = float(length.sum(dtype=np.float64))
    found = float(distance.sum(dtype=np.float64)) / total if total > 0 else math.inf
    return found if math.isfinite(found) else math.inf

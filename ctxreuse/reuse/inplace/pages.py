"""Which pages of attached runs a query reads: those whose keys could score highest, by bounds kept for each page.

A page is some neighbouring rows of a K plane. With the least and the greatest value of each channel over its rows, no
key in it can score more than ``sum over channels of max(q * least, q * greatest)`` (Tang et al., Quest, arXiv
2406.10774). Bounds are float32: those of pages of 16 rows are an eighth of the keys' bytes as floats, half of int8's.

What that costs is measured for each model by the calibration of chunks; `QualityGate.in_place` says what a model may
leave out. SmolLM2 after 960 tokens, 896 of them pinned in int8, 6 texts of 48 tokens one by one, KL against exact
attention: 0.0001 with all pages, 0.013 with half of them, 0.040 with a quarter. Small models attend everywhere, so the
default is to read all pages.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ctxreuse.kernels.attention import Plane, dequantise

__all__ = ["Bounds", "Selection", "bounds_of", "ceilings", "chosen"]

Floats = NDArray[np.float32]


class Selection(NamedTuple):
    """Read ``share`` of the pages of ``page`` rows, but ``least`` pages; each KV head has its own.

    The first ``dense`` layers read all: attention there is spread evenly. So do forwards of more than ``queries``
    tokens, as their queries together want most pages, and reading is a small part of what they cost.
    """

    share: float = 0.25
    page: int = 16
    least: int = 16
    dense: int = 2
    queries: int = 4

    def applies(self, layer: int, queries: int) -> bool:
        """True if a forward of so many tokens selects pages in that layer."""
        return layer >= self.dense and queries <= self.queries


class Bounds(NamedTuple):
    """Least and greatest value of each channel, float32 [heads, pages, dim]."""

    low: Floats
    high: Floats


def bounds_of(k: Plane, page: int) -> Bounds:
    """The bounds of a K plane's pages; the last may have fewer rows."""
    rows = dequantise(k)
    starts = np.arange(0, rows.shape[1], page)
    low, high = np.minimum.reduceat(rows, starts, axis=1), np.maximum.reduceat(rows, starts, axis=1)
    return Bounds(np.ascontiguousarray(low), np.ascontiguousarray(high))


def ceilings(q: Floats, bounds: Bounds) -> Floats:
    """float32 [KV heads, pages]: no query of the head's group, ``q`` [Hq, S, D], scores more on any key of the page."""
    heads, _, dim = bounds.low.shape
    grouped = q.reshape(heads, -1, dim)
    # max(q * low, q * high) is q * high where q > 0, and q * low elsewhere.
    tops = np.maximum(grouped, 0) @ bounds.high.transpose(0, 2, 1)
    tops += np.minimum(grouped, 0) @ bounds.low.transpose(0, 2, 1)
    found: Floats = tops.max(1)
    return found


def chosen(tops: Floats, selection: Selection) -> NDArray[np.bool_]:
    """Which pages each head reads, bool [heads, pages]."""
    count = max(round(selection.share * tops.shape[1]), min(selection.least, tops.shape[1]))
    picked = np.zeros(tops.shape, np.bool_)
    if count >= tops.shape[1]:
        picked[:] = True
    else:
        np.put_along_axis(picked, np.argpartition(-tops, count - 1, axis=1)[:, :count], True, axis=1)
    return picked

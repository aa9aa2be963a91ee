"""Sets of positions as spans: ascending (start, end), ends left out, none empty and no two that touch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

import numpy as np

from ctxreuse.identity.keys import Tokens

__all__ = ["Spans", "difference", "intersection", "positions", "union"]

Spans: TypeAlias = tuple[tuple[int, int], ...]


def union(spans: Iterable[tuple[int, int]]) -> Spans:
    """Return all positions of the spans, which may come in any order, overlap and be empty."""
    found: list[tuple[int, int]] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        elif end > start:
            found.append((start, end))
    return tuple(found)


def difference(spans: Iterable[tuple[int, int]], others: Iterable[tuple[int, int]]) -> Spans:
    """Return the positions of ``spans`` that are not in ``others``."""
    found: list[tuple[int, int]] = []
    cut, i = union(others), 0
    for start, end in union(spans):
        at = start
        while i < len(cut) and cut[i][1] <= at:
            i += 1
        n = i
        while n < len(cut) and cut[n][0] < end:
            if cut[n][0] > at:
                found.append((at, cut[n][0]))
            at = cut[n][1]
            n += 1
        i = max(i, n - 1)
        if at < end:
            found.append((at, end))
    return tuple(found)


def intersection(spans: Iterable[tuple[int, int]], others: Iterable[tuple[int, int]]) -> Spans:
    """Return the positions in both."""
    mine = union(spans)
    return difference(mine, difference(mine, others))


def positions(spans: Iterable[tuple[int, int]]) -> Tokens:
    """Return the positions one by one, int32."""
    runs = [np.arange(start, end, dtype="<i4") for start, end in union(spans)]
    return np.concatenate(runs) if runs else np.zeros(0, "<i4")

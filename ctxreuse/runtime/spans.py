"""Sets of positions as spans: ascending (start, end), ends left out, none empty and no two that touch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

import numpy as np

from ctxreuse.keys import Tokens

__all__ = ["Spans", "rows_of", "together", "within", "without"]

Spans: TypeAlias = tuple[tuple[int, int], ...]


def together(spans: Iterable[tuple[int, int]]) -> Spans:
    """All positions that any span has; they may come in any order, overlap and be empty."""
    found: list[tuple[int, int]] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        elif end > start:
            found.append((start, end))
    return tuple(found)


def without(spans: Iterable[tuple[int, int]], others: Iterable[tuple[int, int]]) -> Spans:
    """The positions of ``spans`` that ``others`` have not."""
    found: list[tuple[int, int]] = []
    gone, i = together(others), 0
    for start, end in together(spans):
        at = start
        while i < len(gone) and gone[i][1] <= at:
            i += 1
        n = i
        while n < len(gone) and gone[n][0] < end:
            if gone[n][0] > at:
                found.append((at, gone[n][0]))
            at = gone[n][1]
            n += 1
        i = max(i, n - 1)
        if at < end:
            found.append((at, end))
    return tuple(found)


def within(spans: Iterable[tuple[int, int]], others: Iterable[tuple[int, int]]) -> Spans:
    """The positions that both have."""
    mine = together(spans)
    return without(mine, without(mine, others))


def rows_of(spans: Iterable[tuple[int, int]]) -> Tokens:
    """The positions one by one, int32."""
    runs = [np.arange(start, end, dtype="<i4") for start, end in together(spans)]
    return np.concatenate(runs) if runs else np.zeros(0, "<i4")

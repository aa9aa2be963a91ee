"""Runs made longer, token by token: what stood beside a chunk in its source and stands beside it here is moved too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ctxreuse.keys import ROOT, Tokens
from ctxreuse.levels import is_approx, rank
from ctxreuse.reuse.search import Run

if TYPE_CHECKING:
    from ctxreuse.block import BlockView
    from ctxreuse.model import ModelSpace
    from ctxreuse.store.base import Reader

__all__ = ["BEHIND", "SINK", "extended"]

#: So many tokens at the head of a prompt are always computed: all later ones attend to them, and rows that were
#: computed behind others cannot stand in for them.
SINK = 4
#: Tokens behind a chunk whose blocks are noted with it: about as many as the next chunk has.
BEHIND = 64


def extended(
    reader: Reader, runs: Sequence[Run], tokens: Tokens, space: ModelSpace, first: int, limit: int
) -> list[Run]:
    """These runs, in order and apart, each with what it can have of the tokens on either side, between positions
    ``first`` and ``limit``.

    Chunks find a run; where it ends is not for them to say: of a document that nobody marked the first and the last
    chunk hold tokens of its neighbours, and an edit changes a chunk of 65 tokens. Only headers of blocks at the ends of
    runs are read, some 15 µs each. Rows beside a chunk may have been moved there themselves unless their block is
    exact, or coded from an exact one: no others are taken.
    """
    found: list[Run] = []
    for i, run in enumerate(runs):
        high = runs[i + 1].start if i + 1 < len(runs) else limit
        low = found[-1].end if found else first
        found.append(_leftwards(reader, _rightwards(reader, run, tokens, space, high), tokens, space, low))
    return found


def _rightwards(reader: Reader, run: Run, tokens: Tokens, space: ModelSpace, high: int) -> Run:
    """Within the block in which the run ends, and in those behind it."""
    size, source = space.block_tokens, run.sources[-1]
    row, last = source.row + source.count - (len(source.keys) - 1) * size, len(source.keys) - 1
    for block, key in enumerate((*source.keys[last:], *run.ahead), start=last):
        if row == size:
            row = 0
            continue
        view = _exact(reader, key, space, source.at + (block + 1) * size) if run.end < high else None
        if view is None:
            break
        there, here = view.tokens[row:], tokens[run.end : min(run.end + size - row, high)]
        count = _equal(there[: len(here)], here)
        if count:
            source = source._replace(keys=(*source.keys[:block], key), count=source.count + count)
            level = max(run.level, view.header.level, key=rank)
            run = run._replace(end=run.end + count, sources=(*run.sources[:-1], source), level=level)
        row += count
        if row < size:
            break
        row = 0
    return run


def _leftwards(reader: Reader, run: Run, tokens: Tokens, space: ModelSpace, low: int) -> Run:
    """Back through the blocks before, but not to where the head of the source's prompt was."""
    size = space.block_tokens
    source = run.sources[0]
    view = _exact(reader, source.keys[0], space, source.at + size) if run.start > low else None
    while view is not None and run.start > low and source.at + source.row > SINK:
        if not source.row:
            key = view.header.parent
            view = _exact(reader, key, space, source.at) if key != ROOT else None
            if view is None:
                break
            source = source._replace(keys=(key, *source.keys), row=size, at=source.at - size)
        most = min(source.row, run.start - low, source.at + source.row - SINK)
        there, here = view.tokens[source.row - most : source.row], tokens[run.start - most : run.start]
        count = _equal(there[::-1], here[::-1])
        if count:
            source = source._replace(row=source.row - count, count=source.count + count)
            level = max(run.level, view.header.level, key=rank)
            run = run._replace(start=run.start - count, sources=(source, *run.sources[1:]), level=level)
        if source.row:
            break
    return run


def _exact(reader: Reader, key: bytes, space: ModelSpace, end: int) -> BlockView | None:
    """The block of ``key`` if it ends at this position of its prompt and all of its rows were computed there."""
    view = reader.peek(key)
    if view is None or view.header.space != space.digest or is_approx(view.header.level):
        return None
    return view if view.header.end == end and len(view.tokens) == space.block_tokens else None


def _equal(one: Tokens, two: Tokens) -> int:
    """How many leading ids are the same in both, which are equally long."""
    same = one == two
    return len(same) if same.all() else int(np.argmin(same))

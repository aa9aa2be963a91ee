"""Which runs of a prompt a store holds somewhere, read and proven; and noting where a prompt's chunks came to lie."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ctxreuse.keys import Tokens, chunk_keys
from ctxreuse.reuse.chunking import REACH, chunks
from ctxreuse.reuse.extend import BEHIND, SINK, extended
from ctxreuse.reuse.home import Home
from ctxreuse.reuse.search import Run, Search, Source

if TYPE_CHECKING:
    from ctxreuse.block import BlockView
    from ctxreuse.model import ModelSpace
    from ctxreuse.store.base import Reader, WholeStore
    from ctxreuse.store.chunks import ChunkIndex

__all__ = ["SINK", "TAIL", "WORTH", "Piece", "Run", "Source", "forget", "plan", "read", "record", "used"]

#: Fewer tokens are not worth a run: placing one costs as much as computing a few rows.
WORTH = 16
#: Of what a prompt ends with so many tokens are never moved: that is mostly a question, and rows of the same question
#: that were computed behind other documents know the answer of those.
TAIL = 64
_WORDS = 8


class Piece(NamedTuple):
    """Rows ``row`` to ``row + count`` of a block; the view is valid as long as the reader is."""

    view: BlockView
    row: int
    count: int  # type: ignore[assignment]  # no tuple is searched here


def plan(
    store: WholeStore,
    salt: bytes,
    space: ModelSpace,
    tokens: Tokens,
    start: int,
    parts: Sequence[int] = (),
    lossy: str | None = None,
) -> list[Run]:
    """Runs of ``tokens[start:]`` that the store holds somewhere at levels that ``lossy`` allows, in order, apart.

    ``start``: tokens that are there already (an exact prefix). ``parts``: see `chunks`; they should be those that were
    given when the chunks were recorded. What a prompt ends with is left out: its last part, at most `TAIL` tokens.
    Reads no plane; homes that are known to be gone are forgotten. A plan is a hint: blocks may go before they are read.
    Raises StoreError.
    """
    first, limit = max(start, SINK), _tail(len(tokens), parts)
    wanted = [chunk for chunk in chunks(tokens, parts) if chunk.end > first and chunk.start < limit]
    keys = chunk_keys(space.digest, salt, tokens, wanted)
    homes = store.chunks.homes_many(keys)
    search = Search(store, space.block_tokens, lossy, wanted, keys, homes, first, limit)
    runs = search.runs()
    if search.stale:
        store.chunks.forget_many(search.stale)
    if runs:
        with store.read(lossy) as reader:
            runs = extended(reader, runs, tokens, space, first, limit)
    return [run for run in runs if run.end - run.start >= WORTH]


def _tail(n: int, parts: Sequence[int]) -> int:
    """Where the end begins that is always computed. Parts of a few tokens, such as the words that open an answer, are
    not taken for the last."""
    ends = [at for at in parts if at <= n - _WORDS]
    return max(n - TAIL, max(ends, default=0), 0)


def read(reader: Reader, run: Run, tokens: Tokens, space: ModelSpace) -> list[Piece] | None:
    """The blocks that hold a run's rows, in order, each proven to be of this space and to hold these token ids.

    None if one of them is not (any more) what the run says: `forget` it then, and compute its tokens. ``tokens`` are
    the whole prompt's.
    """
    pieces: list[Piece] = []
    at, size = run.start, space.block_tokens
    for source in run.sources:
        row, left = source.row, source.count
        for i, key in enumerate(source.keys):
            view = reader.peek(key)
            count = min(size - row, left)
            if view is None or view.header.space != space.digest or view.header.end != source.at + (i + 1) * size:
                return None
            ids = view.tokens
            if len(ids) != size or not np.array_equal(ids[row : row + count], tokens[at : at + count]):
                return None
            pieces.append(Piece(view, row, count))
            at, left, row = at + count, left - count, 0
        if left:
            return None
    return pieces if at == run.end else None


def used(store: WholeStore, runs: Sequence[Run]) -> None:
    """Count the blocks of runs, and all before them in their prompts, as used now: the policy keeps what is moved."""
    store.touch([source.keys[-1] for run in runs for source in run.sources], needed=True)


def forget(index: ChunkIndex, run: Run) -> None:
    """Forget the homes that led to a run which could not be read."""
    gone = {key for source in run.sources for key in source.keys}
    homes = index.homes_many(run.chunks)
    index.forget_many(
        [(key, home) for key, found in zip(run.chunks, homes) for home in found if not gone.isdisjoint(home.keys)]
    )


def record(
    index: ChunkIndex,
    salt: bytes,
    space: ModelSpace,
    tokens: Tokens,
    keys: Sequence[bytes],
    computed: Sequence[tuple[int, int]],
    parts: Sequence[int] = (),
    since: int = 0,
) -> int:
    """Note where the chunks of a prompt lie, after its blocks ``keys`` were put; returns how many were noted.

    ``computed``: spans (start, end) whose rows were computed where they stand, now or earlier; not those that were
    moved there. A chunk is noted as far as it lies in one of these and in whole blocks, if that is worth a run.
    ``since``: so many tokens were noted before, as the whole of a prompt. Noting twice changes nothing.
    """
    size, spans = space.block_tokens, _union(computed)
    stored, more = min(len(keys) * size, len(tokens)), -(-BEHIND // size)
    noted: list[tuple[tuple[int, int], Home]] = []
    at = 0
    for chunk in chunks(tokens, parts):
        while at < len(spans) and spans[at][1] <= chunk.start:
            at += 1
        if at == len(spans) or chunk.start >= stored:
            break
        count = min(chunk.end, spans[at][1], stored) - chunk.start
        # A cut depends on tokens behind it: where a prompt ended, there may be other ones now.
        if chunk.end < since - REACH or spans[at][0] > chunk.start or count < WORTH:
            continue
        block = chunk.start // size
        until = -(-(chunk.start + count) // size)
        noted.append((chunk, Home(tuple(keys[block : until + more]), chunk.start - block * size, count, block * size)))
    names = chunk_keys(space.digest, salt, tokens, [chunk for chunk, _ in noted])
    return index.add_many(list(zip(names, (home for _, home in noted))))


def _union(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Spans in order, those that touch as one."""
    found: list[tuple[int, int]] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        elif end > start:
            found.append((start, end))
    return found

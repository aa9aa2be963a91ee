"""Plans which runs of a prompt a store has somewhere, reads and verifies them, and records where chunks are stored."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ctxreuse.identity.keys import Tokens, chunk_keys
from ctxreuse.reuse.chunking import Chunk, ChunkLocation, chunks
from ctxreuse.reuse.search import BEHIND, SINK, Candidates, ChunkRun, ChunkSearch, extended

if TYPE_CHECKING:
    from ctxreuse.block.format import BlockView
    from ctxreuse.identity.model import ModelSpace
    from ctxreuse.store.base import Reader, Store
    from ctxreuse.store.chunks.index import ChunkIndex

__all__ = ["TAIL", "WORTH", "BlockRows", "forget", "plan", "read", "record", "used"]

#: Fewer tokens are not worth a run: inserting one costs as much as computing a few rows.
WORTH = 16
#: So many tokens at the end of a prompt are never relocated: that is mostly a question, and rows of the same question
#: that were computed behind other documents hold the answer of those.
TAIL = 64
_WORDS = 8


class BlockRows(NamedTuple):
    """Rows ``row`` to ``row + count`` of a block; the view is valid as long as the reader is."""

    view: BlockView
    row: int
    count: int  # type: ignore[assignment]  # not used as a tuple's method


def plan(
    store: Store,
    salt: bytes,
    space: ModelSpace,
    tokens: Tokens,
    start: int,
    parts: Sequence[int] = (),
    max_kl: float | None = None,
) -> list[ChunkRun]:
    """Runs of ``tokens[start:]`` that the store holds somewhere at levels that ``max_kl`` allows, in order, apart.

    ``start``: tokens of the exact prefix. ``parts``: see `chunks`; they should be those that the chunks were recorded
    with. The prompt's last part, at most `TAIL` tokens, is left out. Reads no plane; locations whose blocks have been
    removed are forgotten. A plan is a hint: blocks may go before they are read. Raises StoreError.
    """
    first, limit = max(start, SINK), _tail(len(tokens), parts)
    wanted = [chunk for chunk in chunks(tokens, parts) if chunk.end > first and chunk.start < limit]
    keys = chunk_keys(space.digest, salt, tokens, wanted)
    locations = store.chunks.locations_many(keys)
    candidates = Candidates(wanted, keys, locations)
    search = ChunkSearch(store, space.block_tokens, max_kl, candidates, first, limit)
    runs = search.runs()
    if search.stale:
        store.chunks.forget_many(search.stale)
    if runs:
        with store.read(max_kl) as reader:
            runs = extended(reader, runs, tokens, space, first, limit)
    return [run for run in runs if run.end - run.start >= WORTH]


def _tail(n: int, parts: Sequence[int]) -> int:
    """Where the end begins that is always computed. Parts of a few tokens, such as the opening of an answer, do not
    count as the last one."""
    ends = [at for at in parts if at <= n - _WORDS]
    return max(n - TAIL, max(ends, default=0), 0)


def read(reader: Reader, run: ChunkRun, tokens: Tokens, space: ModelSpace) -> list[BlockRows] | None:
    """The blocks that hold a run's rows, in order, each verified to be of this space and to hold these token ids.

    None if one of them is not (any more): `forget` the run then, and compute its tokens. ``tokens``: the whole prompt.
    """
    pieces: list[BlockRows] = []
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
            pieces.append(BlockRows(view, row, count))
            at, left, row = at + count, left - count, 0
        if left:
            return None
    return pieces if at == run.end else None


def used(store: Store, runs: Sequence[ChunkRun]) -> None:
    """Count the blocks of runs, and all before them in their prompts, as used now, so that eviction keeps them."""
    store.touch([source.keys[-1] for run in runs for source in run.sources], partial=True)


def forget(index: ChunkIndex, run: ChunkRun) -> None:
    """Forget the locations that led to a run which could not be read."""
    removed = {key for source in run.sources for key in source.keys}
    pairs = zip(run.chunks, index.locations_many(run.chunks))
    index.forget_many([(key, one) for key, found in pairs for one in found if not removed.isdisjoint(one.keys)])


def record(
    index: ChunkIndex,
    salt: bytes,
    space: ModelSpace,
    tokens: Tokens,
    keys: Sequence[bytes],
    cut: Sequence[Chunk],
    computed: Sequence[tuple[int, int]],
) -> int:
    """Record where the chunks of a prompt are stored, after its blocks ``keys`` were put; returns how many were.

    Recording twice changes nothing.

    Args:
        cut: the prompt's chunks, see `chunks`.
        computed: spans (start, end) whose rows were computed in place, now or earlier, not relocated. A chunk is
            recorded as far as it lies in one of these and in whole blocks, if that is worth a run.
    """
    size, spans = space.block_tokens, _union(computed)
    stored, more = min(len(keys) * size, len(tokens)), -(-BEHIND // size)
    noted: list[tuple[tuple[int, int], ChunkLocation]] = []
    at = 0
    for chunk in cut:
        while at < len(spans) and spans[at][1] <= chunk.start:
            at += 1
        if at == len(spans) or chunk.start >= stored:
            break
        count = min(chunk.end, spans[at][1], stored) - chunk.start
        if spans[at][0] > chunk.start or count < WORTH:
            continue
        block = chunk.start // size
        until = -(-(chunk.start + count) // size)
        noted.append(
            (chunk, ChunkLocation(tuple(keys[block : until + more]), chunk.start - block * size, count, block * size))
        )
    names = chunk_keys(space.digest, salt, tokens, [chunk for chunk, _ in noted])
    return index.add_many(list(zip(names, (location for _, location in noted))))


def _union(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Spans in order, those that touch as one."""
    found: list[tuple[int, int]] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        elif end > start:
            found.append((start, end))
    return found

"""Which runs of a prompt a store holds somewhere, read and proven; and noting where a prompt's chunks came to lie."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ctxreuse.keys import Tokens, chunk_keys
from ctxreuse.levels import EXACT, fits, rank
from ctxreuse.reuse.card import Kind
from ctxreuse.reuse.chunking import chunks
from ctxreuse.reuse.home import Home

if TYPE_CHECKING:
    from ctxreuse.block import BlockView
    from ctxreuse.model import ModelSpace
    from ctxreuse.store.base import Entry, Reader, WholeStore
    from ctxreuse.store.chunks import ChunkIndex

__all__ = ["SINK", "WORTH", "Piece", "Run", "Source", "forget", "plan", "read", "record", "used"]

#: Fewer tokens are not worth a run: placing one costs as much as computing a few rows.
WORTH = 16
#: So many tokens at the head of a prompt are always computed: all later ones attend to them, and rows that were
#: computed behind others cannot stand in for them.
SINK = 4


class Source(NamedTuple):
    """As `Home`, when every block was held at a level that is allowed."""

    keys: tuple[bytes, ...]
    row: int
    count: int  # type: ignore[assignment]  # no tuple is searched here
    at: int


class Run(NamedTuple):
    """Positions ``start`` to ``end`` of a prompt that are rows which lie together in one other prompt.

    ``sources``: these rows, in order, ``end - start`` of them. ``shift``: new position less old one, the same for all.
    ``kind``: where they stood. ``level``: the worst at which their blocks are held. ``chunks``: keys of the chunks
    that led there.
    """

    start: int
    end: int
    sources: tuple[Source, ...]
    shift: int
    kind: Kind
    level: str = EXACT
    chunks: tuple[bytes, ...] = ()


class Piece(NamedTuple):
    """Rows ``row`` to ``row + count`` of a block; the view is valid as long as the reader is."""

    view: BlockView
    row: int
    count: int  # type: ignore[assignment]  # no tuple is searched here


class _Place(NamedTuple):
    """A home whose blocks were looked up: rows of positions ``start`` to ``end`` of the prompt.

    ``last``: the home's last key that is needed, with where the rows end in its block.
    """

    home: Home
    start: int
    end: int
    level: str
    chunk: bytes

    @property
    def shift(self) -> int:
        return self.start - self.home.first


def plan(
    store: WholeStore,
    salt: bytes,
    space: ModelSpace,
    tokens: Tokens,
    start: int,
    parts: Sequence[int] = (),
    lossy: str | None = None,
) -> list[Run]:
    """Runs of ``tokens[start:-1]`` that the store holds somewhere at levels that ``lossy`` allows, in order, apart.

    ``start``: tokens that are there already (an exact prefix). ``parts``: see `chunks`; they should be those that were
    given when the chunks were recorded. The last token is left out, as its logits are wanted. Reads no value; homes
    that are known to be gone are forgotten. A plan is a hint: blocks may go before they are read.
    """
    first, limit = max(start, SINK), len(tokens) - 1
    wanted = [chunk for chunk in chunks(tokens, parts) if chunk.end > first and chunk.start < limit]
    keys = chunk_keys(space.digest, salt, tokens, wanted)
    found = store.chunks.homes_many(keys)
    named = list(dict.fromkeys(key for homes in found for home in homes for key in home.keys))
    held = dict(zip(named, store.entries(named)))
    places: list[list[_Place]] = []
    stale: list[tuple[bytes, Home]] = []
    for chunk, key, homes in zip(wanted, keys, found):
        here = []
        for home in homes:
            if held[home.keys[0]] is None and store.gone(home.keys[0]) is not None:
                stale.append((key, home))
                continue
            place = _placed(home, held, space.block_tokens, lossy)
            if place is None:
                continue
            count, level = place
            skip = max(first - chunk.start, 0)
            end = min(chunk.start + min(count, chunk.end - chunk.start), limit)
            if skip < end - chunk.start:
                moved = home._replace(row=home.row + skip, count=end - chunk.start - skip)
                here.append(_Place(_tight(moved, space.block_tokens), chunk.start + skip, end, level, key))
        places.append(here)
    if stale:
        store.chunks.forget_many(stale)
    return [run for run in _runs(places, held) if run.end - run.start >= WORTH]


def _placed(home: Home, held: dict[bytes, Entry | None], size: int, lossy: str | None) -> tuple[int, str] | None:
    """How many leading rows of a home are held at levels that are allowed, and the worst of these."""
    level, end = EXACT, 0
    for i, key in enumerate(home.keys):
        entry = held[key]
        # Noted by somebody else, or for blocks of another size: what does not fit is not used.
        if (
            entry is None
            or entry.tokens != size
            or entry.end != home.at + (i + 1) * size
            or not fits(entry.level, lossy)
        ):
            break
        level, end = max(level, entry.level, key=rank), (i + 1) * size
    count = min(home.count, end - home.row)
    return (count, level) if count > 0 else None


def _tight(home: Home, size: int) -> Home:
    """The same rows, named by the blocks that hold them and no others."""
    skip, end = home.row // size, -(-(home.row + home.count) // size)
    return Home(home.keys[skip:end], home.row - skip * size, home.count, home.at + skip * size)


def _runs(places: Sequence[Sequence[_Place]], held: dict[bytes, Entry | None]) -> list[Run]:
    """Of the places of each chunk those that make the longest runs; one at the head of its prompt only if there is no
    other, as it may need more repair than all others, or not be allowed at all."""
    # From the end on: to where a run goes that begins with this place.
    reach: list[list[int]] = [[] for _ in places]
    after: list[list[int | None]] = [[] for _ in places]
    for i in range(len(places) - 1, -1, -1):
        for place in places[i]:
            best, to = place.end, None
            if i + 1 < len(places):
                for j, other in enumerate(places[i + 1]):
                    if reach[i + 1][j] > best and _continues(place, other, held):
                        best, to = reach[i + 1][j], j
            reach[i].append(best)
            after[i].append(to)
    runs: list[Run] = []
    i = 0
    while i < len(places):
        if not places[i]:
            i += 1
            continue
        chosen: int | None = min(
            range(len(places[i])),
            key=lambda j: (places[i][j].home.first == 0, -reach[i][j], rank(places[i][j].level), j),
        )
        chain: list[_Place] = []
        while chosen is not None:
            chain.append(places[i][chosen])
            chosen = after[i][chosen]
            i += 1
        # What follows the chunk at a prompt's head stood behind it, and is as good without it.
        split = 1 if chain[0].home.first == 0 else 0
        runs += [_joined(part) for part in (chain[:split], chain[split:]) if part]
    return runs


def _continues(one: _Place, two: _Place, held: dict[bytes, Entry | None]) -> bool:
    """True if the rows of ``two`` stood right behind those of ``one`` in the same prompt, and do so here."""
    if one.end != two.start or one.shift != two.shift:
        return False
    last, first = one.home.keys[-1], two.home.keys[0]
    entry = held[first]
    return last == first or (entry is not None and entry.parent == last)


def _joined(chain: Sequence[_Place]) -> Run:
    keys: list[bytes] = []
    for place in chain:
        keys += place.home.keys[1:] if keys and keys[-1] == place.home.keys[0] else place.home.keys
    home = chain[0].home
    source = Source(tuple(keys), home.row, chain[-1].end - chain[0].start, home.at)
    level = max((place.level for place in chain), key=rank)
    kind: Kind = "head" if home.first == 0 else "behind"
    chunks_ = tuple(place.chunk for place in chain)
    return Run(chain[0].start, chain[-1].end, (source,), chain[0].shift, kind, level, chunks_)


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
    ``since``: chunks that end before this position are known. Noting twice changes nothing.
    """
    size, spans = space.block_tokens, _union(computed)
    stored = min(len(keys) * size, len(tokens))
    noted: list[tuple[tuple[int, int], Home]] = []
    at = 0
    for chunk in chunks(tokens, parts):
        while at < len(spans) and spans[at][1] <= chunk.start:
            at += 1
        if at == len(spans) or chunk.start >= stored:
            break
        count = min(chunk.end, spans[at][1], stored) - chunk.start
        if chunk.end < since or spans[at][0] > chunk.start or count < WORTH:
            continue
        block = chunk.start // size
        until = -(-(chunk.start + count) // size)
        noted.append((chunk, Home(tuple(keys[block:until]), chunk.start - block * size, count, block * size)))
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

"""Searches a store for the longest runs of a prompt's chunks, and extends them token by token.

Chunks find a run, but do not define its ends: the first and the last chunk of a document without marked parts hold
tokens of its neighbours, and an edit changes a chunk of 65 tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ctxreuse.block.levels import EXACT, allowed_by, is_approx, quality_key
from ctxreuse.identity.keys import ROOT, Tokens
from ctxreuse.identity.model import ModelSpace
from ctxreuse.reuse.chunking import Chunk, ChunkLocation
from ctxreuse.reuse.profile import ChunkKind

if TYPE_CHECKING:
    from ctxreuse.block.format import BlockView
    from ctxreuse.store.base import Reader, Store
    from ctxreuse.store.types import Entry

__all__ = ["BEHIND", "SINK", "Candidates", "ChunkRun", "ChunkSearch", "RowSource", "extended"]

#: So many tokens at the head of a prompt are always computed: all later ones attend to them, and rows that were
#: computed behind others cannot stand in for them.
SINK = 4
#: Tokens behind a chunk whose blocks are recorded with it: about as many as the next chunk has.
BEHIND = 64


class RowSource(NamedTuple):
    """As `ChunkLocation`, with all blocks in the store at a level that is allowed."""

    keys: tuple[bytes, ...]
    row: int
    count: int  # type: ignore[assignment]  # not used as a tuple's method
    at: int


class ChunkRun(NamedTuple):
    """Positions ``start`` to ``end`` of a prompt that are rows which lie together in one other prompt.

    ``sources``: these rows, in order, ``end - start`` of them. ``shift``: new position less old one, the same for all.
    ``kind``: where they stood. ``level``: the worst level of their blocks. ``chunks``: keys of the chunks
    that led there. ``ahead``: blocks behind the last, as far as they are known.
    """

    start: int
    end: int
    sources: tuple[RowSource, ...]
    shift: int
    kind: ChunkKind
    level: str = EXACT
    chunks: tuple[bytes, ...] = ()
    ahead: tuple[bytes, ...] = ()


class _Link(NamedTuple):
    """A location that continues where ``before`` ends."""

    location: ChunkLocation
    before: _Link | None


class _Place(NamedTuple):
    """Positions ``start`` to ``end`` of the prompt are the rows of ``location``, whose blocks are stored."""

    location: ChunkLocation
    start: int
    end: int
    level: str
    chunk: bytes
    ahead: tuple[bytes, ...]


class Candidates(NamedTuple):
    """Chunks of a prompt that follow each other without gaps, with their keys and the locations on record."""

    chunks: Sequence[Chunk]
    keys: Sequence[bytes]
    locations: Sequence[list[ChunkLocation]]


class ChunkSearch:
    """The search for one prompt. Used once, by one thread.

    Rows before position ``first`` and from ``limit`` on are not wanted. After `runs`, ``stale`` names the locations
    whose blocks have been removed.
    """

    def __init__(
        self,
        store: Store,
        size: int,
        max_kl: float | None,
        candidates: Candidates,
        first: int,
        limit: int,
    ) -> None:
        self._store, self._size, self._max_kl = store, size, max_kl
        self._chunks, self._keys, self._locations = candidates
        self._first, self._limit = first, limit
        self._entries: dict[bytes, Entry | None] = {}
        self.stale: list[tuple[bytes, ChunkLocation]] = []

    def runs(self) -> list[ChunkRun]:
        """The runs, in order. A location at the head of its prompt is taken only if there is no other.

        It may need more recomputation than all others, or not be allowed at all.
        """
        found: list[ChunkRun] = []
        i = 0
        while i < len(self._chunks):
            chain = self._longest(i)
            places = self._places(i, chain)
            i += len(places) or not chain
            # What follows the chunk at a prompt's head stood behind it, and is as good without it.
            split = 1 if places and _at_head(places[0].location) else 0
            found += [
                _joined(part) for part in (places[:split], places[split:]) if part and part[0].end > part[0].start
            ]
        return found

    def _longest(self, i: int) -> list[ChunkLocation]:
        """Locations of chunks ``i``, ``i + 1``, … that lay behind each other in one prompt, as many as there are."""
        self._fetch([location.keys[0] for location in self._locations[i]])
        for location in list(self._locations[i]):
            if not self._usable(location, 0):
                self._drop(i, location)
        starts = [one for one in self._locations[i] if not _at_head(one)] or self._locations[i]
        best: list[_Link] = []
        links = [_Link(location, None) for location in starts]
        while links:
            best = links
            i += 1
            links = self._continued(i, best) if i < len(self._chunks) else []
        if not best:
            return []
        chains = [_unrolled(link) for link in best]
        return min(chains, key=lambda chain: quality_key(self._level(chain[0])))

    def _continued(self, i: int, links: Sequence[_Link]) -> list[_Link]:
        """The links that go on with a location of chunk ``i``; where several could, the first of them."""
        length = self._chunks[i - 1].end - self._chunks[i - 1].start
        found: list[_Link] = []
        for location in self._locations[i]:
            at, first = location.at + location.row, location.keys[0]
            if first in self._entries and not self._usable(location, 0):
                continue  # else a chain of locations that are gone would be followed from each of its chunks again
            for link in links:
                before = link.location
                if before.count < length or before.at + before.row + length != at:
                    continue
                last = self._needed(before)[-1]
                if first == last or (not location.row and self._parent(first) == last):
                    found.append(_Link(location, link))
                    break
        return found

    def _places(self, i: int, chain: Sequence[ChunkLocation]) -> list[_Place]:
        """The locations of ``chain``, which begins with chunk ``i``, as far as all their blocks are stored."""
        self._fetch([key for location in chain for key in self._needed(location)])
        found: list[_Place] = []
        for at, location in enumerate(chain, start=i):
            count, level = self._extent(location)
            if count <= 0:
                self._drop(at, location)
                break
            chunk = self._chunks[at]
            skip = max(self._first - chunk.start, 0)
            end = min(chunk.start + min(count, chunk.end - chunk.start), self._limit)
            # Nothing wanted of it is a place as well, an empty one: the chunk is done.
            place = max(end - chunk.start - skip, 0)
            tight, ahead = _tight(location, skip, place, self._size)
            found.append(_Place(tight, chunk.start + skip, chunk.start + skip + place, level, self._keys[at], ahead))
            if chunk.start + count < chunk.end:
                break
        return found

    def _extent(self, location: ChunkLocation) -> tuple[int, str]:
        """How many leading rows of a location are stored at levels that are allowed, and the worst of these."""
        level, blocks, needed = EXACT, 0, len(self._needed(location))
        while blocks < needed and self._usable(location, blocks):
            level = max(level, self._level(location, blocks), key=quality_key)
            blocks += 1
        return min(location.count, blocks * self._size - location.row), level

    def _needed(self, location: ChunkLocation) -> tuple[bytes, ...]:
        """The blocks that hold its rows."""
        return location.keys[: -(-(location.row + location.count) // self._size)]

    def _usable(self, location: ChunkLocation, i: int) -> bool:
        # Locations recorded by other processes, or for blocks of another size, may not fit.
        entry, size = self._entries[location.keys[i]], self._size
        return (
            entry is not None
            and entry.tokens == size
            and entry.end == location.at + (i + 1) * size
            and allowed_by(entry.level, self._max_kl)
        )

    def _level(self, location: ChunkLocation, i: int = 0) -> str:
        entry = self._entries[location.keys[i]]
        return entry.level if entry is not None else EXACT

    def _parent(self, key: bytes) -> bytes | None:
        self._fetch([key])
        entry = self._entries[key]
        return entry.parent if entry is not None else None

    def _fetch(self, keys: Sequence[bytes]) -> None:
        new = [key for key in dict.fromkeys(keys) if key not in self._entries]
        if new:
            self._entries.update(zip(new, self._store.entries(new)))

    def _drop(self, i: int, location: ChunkLocation) -> None:
        """Not this location; for good if its first block is known to have left the store, not only unseen so far."""
        self._locations[i].remove(location)
        if self._entries[location.keys[0]] is None and self._store.removal(location.keys[0]) is not None:
            self.stale.append((self._keys[i], location))


def _unrolled(link: _Link | None) -> list[ChunkLocation]:
    locations = []
    while link is not None:
        locations.append(link.location)
        link = link.before
    return locations[::-1]


def _tight(location: ChunkLocation, skip: int, count: int, size: int) -> tuple[ChunkLocation, tuple[bytes, ...]]:
    """``count`` rows of a location from row ``skip`` on, named by the blocks that hold them, and those behind these."""
    row = location.row + skip
    before, end = row // size, max(-(-(row + count) // size), row // size + 1)
    tight = ChunkLocation(location.keys[before:end], row - before * size, count, location.at + before * size)
    return tight, location.keys[end:]


def _at_head(location: ChunkLocation) -> bool:
    """True for what began its prompt, or stood there behind nothing but the mark that a model begins with."""
    return location.first < SINK


def _joined(places: Sequence[_Place]) -> ChunkRun:
    """One run of places that follow each other, in the prompt and in the one they come from."""
    keys: list[bytes] = []
    for place in places:
        keys += place.location.keys[1:] if keys and keys[-1] == place.location.keys[0] else place.location.keys
    location, start, end = places[0].location, places[0].start, places[-1].end
    source = RowSource(tuple(keys), location.row, end - start, location.at)
    level = max((place.level for place in places), key=quality_key)
    kind: ChunkKind = "head" if _at_head(location) else "behind"
    chunks, ahead = tuple(place.chunk for place in places), places[-1].ahead
    return ChunkRun(start, end, (source,), start - location.first, kind, level, chunks, ahead)


def extended(
    reader: Reader, runs: Sequence[ChunkRun], tokens: Tokens, space: ModelSpace, first: int, limit: int
) -> list[ChunkRun]:
    """These runs, in order and apart, each with as many equal tokens on either side as its source has.

    Between positions ``first`` and ``limit``. Only headers of blocks at the ends of runs are read, some 15 µs each.
    Rows beside a chunk may be relocated ones themselves unless their block is exact, or coded from an exact one: no
    others are taken.
    """
    found: list[ChunkRun] = []
    for i, run in enumerate(runs):
        high = runs[i + 1].start if i + 1 < len(runs) else limit
        low = found[-1].end if found else first
        found.append(_leftwards(reader, _rightwards(reader, run, tokens, space, high), tokens, space, low))
    return found


def _rightwards(reader: Reader, run: ChunkRun, tokens: Tokens, space: ModelSpace, high: int) -> ChunkRun:
    """Within the block in which the run ends, and in those behind it."""
    size, source = space.block_tokens, run.sources[-1]
    row, last = source.row + source.count - (len(source.keys) - 1) * size, len(source.keys) - 1
    for block, key in enumerate((*source.keys[last:], *run.ahead), start=last):
        if row == size:
            row = 0
            continue
        view = _computed(reader, key, space, source.at + (block + 1) * size) if run.end < high else None
        if view is None:
            break
        there, here = view.tokens[row:], tokens[run.end : min(run.end + size - row, high)]
        count = _equal(there[: len(here)], here)
        if count:
            source = source._replace(keys=(*source.keys[:block], key), count=source.count + count)
            level = max(run.level, view.header.level, key=quality_key)
            run = run._replace(end=run.end + count, sources=(*run.sources[:-1], source), level=level)
        row += count
        if row < size:
            break
        row = 0
    return run


def _leftwards(reader: Reader, run: ChunkRun, tokens: Tokens, space: ModelSpace, low: int) -> ChunkRun:
    """Back through the blocks before, but not to where the head of the source's prompt was."""
    size = space.block_tokens
    source = run.sources[0]
    view = _computed(reader, source.keys[0], space, source.at + size) if run.start > low else None
    while view is not None and run.start > low and source.at + source.row > SINK:
        if not source.row:
            key = view.header.parent
            view = _computed(reader, key, space, source.at) if key != ROOT else None
            if view is None:
                break
            source = source._replace(keys=(key, *source.keys), row=size, at=source.at - size)
        most = min(source.row, run.start - low, source.at + source.row - SINK)
        there, here = view.tokens[source.row - most : source.row], tokens[run.start - most : run.start]
        count = _equal(there[::-1], here[::-1])
        if count:
            source = source._replace(row=source.row - count, count=source.count + count)
            level = max(run.level, view.header.level, key=quality_key)
            run = run._replace(start=run.start - count, sources=(source, *run.sources[1:]), level=level)
        if source.row:
            break
    return run


def _computed(reader: Reader, key: bytes, space: ModelSpace, end: int) -> BlockView | None:
    """The block of ``key`` if it ends at this position of its prompt and all of its rows were computed there."""
    view = reader.peek(key)
    if view is None or view.header.space != space.digest or is_approx(view.header.level):
        return None
    return view if view.header.end == end and len(view.tokens) == space.block_tokens else None


def _equal(one: Tokens, two: Tokens) -> int:
    """How many leading ids are the same in both, which are equally long."""
    same = one == two
    return len(same) if same.all() else int(np.argmin(same))

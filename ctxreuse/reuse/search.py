"""Of all homes of a prompt's chunks those that make the longest runs, looked up as far as they are needed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from ctxreuse.levels import EXACT, fits, rank
from ctxreuse.reuse.card import Kind
from ctxreuse.reuse.chunking import Chunk
from ctxreuse.reuse.home import Home

if TYPE_CHECKING:
    from ctxreuse.store.base import Entry, WholeStore

__all__ = ["Run", "Search", "Source"]


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
    that led there. ``ahead``: blocks behind the last, as far as they are known.
    """

    start: int
    end: int
    sources: tuple[Source, ...]
    shift: int
    kind: Kind
    level: str = EXACT
    chunks: tuple[bytes, ...] = ()
    ahead: tuple[bytes, ...] = ()


class _Link(NamedTuple):
    """A home that goes on where ``before`` ends."""

    home: Home
    before: _Link | None


class _Place(NamedTuple):
    """Positions ``start`` to ``end`` of the prompt are the rows of ``home``, whose blocks are held."""

    home: Home
    start: int
    end: int
    level: str
    chunk: bytes
    ahead: tuple[bytes, ...]


class Search:
    """One prompt's. Used once, by one thread.

    ``chunks`` follow each other without gaps; ``keys`` and ``homes`` are theirs. Rows before position ``first`` and
    from ``limit`` on are not wanted. After `runs`, ``stale`` names the homes whose blocks are known to be gone.
    """

    def __init__(
        self,
        store: WholeStore,
        size: int,
        lossy: str | None,
        chunks: Sequence[Chunk],
        keys: Sequence[bytes],
        homes: Sequence[list[Home]],
        first: int,
        limit: int,
    ) -> None:
        self._store, self._size, self._lossy = store, size, lossy
        self._chunks, self._keys, self._homes = chunks, keys, homes
        self._first, self._limit = first, limit
        self._held: dict[bytes, Entry | None] = {}
        self.stale: list[tuple[bytes, Home]] = []

    def runs(self) -> list[Run]:
        """The runs, in order. A home at the head of its prompt is taken only if there is no other: it may need more
        repair than all others, or not be allowed at all."""
        found: list[Run] = []
        i = 0
        while i < len(self._chunks):
            chain = self._longest(i)
            places = self._places(i, chain)
            i += len(places) or not chain
            # What follows the chunk at a prompt's head stood behind it, and is as good without it.
            split = 1 if places and places[0].home.first == 0 else 0
            found += [
                _joined(part) for part in (places[:split], places[split:]) if part and part[0].end > part[0].start
            ]
        return found

    def _longest(self, i: int) -> list[Home]:
        """Homes of chunks ``i``, ``i + 1``, … that lay behind each other in one prompt, as many as there are."""
        self._look([home.keys[0] for home in self._homes[i]])
        for home in list(self._homes[i]):
            if not self._usable(home, 0):
                self._drop(i, home)
        starts = [home for home in self._homes[i] if home.first] or self._homes[i]
        best: list[_Link] = []
        links = [_Link(home, None) for home in starts]
        while links:
            best = links
            i += 1
            links = self._continued(i, best) if i < len(self._chunks) else []
        if not best:
            return []
        chains = [_unrolled(link) for link in best]
        return min(chains, key=lambda chain: rank(self._level(chain[0])))

    def _continued(self, i: int, links: Sequence[_Link]) -> list[_Link]:
        """The links that go on with a home of chunk ``i``; where several could, the first of them."""
        length = self._chunks[i - 1].end - self._chunks[i - 1].start
        found: list[_Link] = []
        for home in self._homes[i]:
            at, first = home.at + home.row, home.keys[0]
            if first in self._held and not self._usable(home, 0):
                continue  # else a chain of homes that are gone would be followed from each of its chunks again
            for link in links:
                before = link.home
                if before.count < length or before.at + before.row + length != at:
                    continue
                last = self._needed(before)[-1]
                if first == last or (not home.row and self._parent(first) == last):
                    found.append(_Link(home, link))
                    break
        return found

    def _places(self, i: int, chain: Sequence[Home]) -> list[_Place]:
        """The homes of ``chain``, which begins with chunk ``i``, as far as all their blocks are held."""
        self._look([key for home in chain for key in self._needed(home)])
        found: list[_Place] = []
        for at, home in enumerate(chain, start=i):
            count, level = self._extent(home)
            if count <= 0:
                self._drop(at, home)
                break
            chunk = self._chunks[at]
            skip = max(self._first - chunk.start, 0)
            end = min(chunk.start + min(count, chunk.end - chunk.start), self._limit)
            # Nothing wanted of it is a place as well, an empty one: the chunk is done.
            place = max(end - chunk.start - skip, 0)
            tight, ahead = _tight(home, skip, place, self._size)
            found.append(_Place(tight, chunk.start + skip, chunk.start + skip + place, level, self._keys[at], ahead))
            if chunk.start + count < chunk.end:
                break
        return found

    def _extent(self, home: Home) -> tuple[int, str]:
        """How many leading rows of a home are held at levels that are allowed, and the worst of these."""
        level, blocks, needed = EXACT, 0, len(self._needed(home))
        while blocks < needed and self._usable(home, blocks):
            level = max(level, self._level(home, blocks), key=rank)
            blocks += 1
        return min(home.count, blocks * self._size - home.row), level

    def _needed(self, home: Home) -> tuple[bytes, ...]:
        """The blocks that hold its rows."""
        return home.keys[: -(-(home.row + home.count) // self._size)]

    def _usable(self, home: Home, i: int) -> bool:
        # Noted by somebody else, or for blocks of another size: what does not fit is not used.
        entry, size = self._held[home.keys[i]], self._size
        return (
            entry is not None
            and entry.tokens == size
            and entry.end == home.at + (i + 1) * size
            and fits(entry.level, self._lossy)
        )

    def _level(self, home: Home, i: int = 0) -> str:
        entry = self._held[home.keys[i]]
        return entry.level if entry is not None else EXACT

    def _parent(self, key: bytes) -> bytes | None:
        self._look([key])
        entry = self._held[key]
        return entry.parent if entry is not None else None

    def _look(self, keys: Sequence[bytes]) -> None:
        new = [key for key in dict.fromkeys(keys) if key not in self._held]
        if new:
            self._held.update(zip(new, self._store.entries(new)))

    def _drop(self, i: int, home: Home) -> None:
        """Not this home; for good if its first block is known to have left the store, not only unseen so far."""
        self._homes[i].remove(home)
        if self._held[home.keys[0]] is None and self._store.gone(home.keys[0]) is not None:
            self.stale.append((self._keys[i], home))


def _unrolled(link: _Link | None) -> list[Home]:
    homes = []
    while link is not None:
        homes.append(link.home)
        link = link.before
    return homes[::-1]


def _tight(home: Home, skip: int, count: int, size: int) -> tuple[Home, tuple[bytes, ...]]:
    """``count`` rows of a home from row ``skip`` on, named by the blocks that hold them, and those behind these."""
    row = home.row + skip
    before, end = row // size, max(-(-(row + count) // size), row // size + 1)
    tight = Home(home.keys[before:end], row - before * size, count, home.at + before * size)
    return tight, home.keys[end:]


def _joined(places: Sequence[_Place]) -> Run:
    """One run of places that follow each other, in the prompt and in the one they come from."""
    keys: list[bytes] = []
    for place in places:
        keys += place.home.keys[1:] if keys and keys[-1] == place.home.keys[0] else place.home.keys
    home, start, end = places[0].home, places[0].start, places[-1].end
    source = Source(tuple(keys), home.row, end - start, home.at)
    level = max((place.level for place in places), key=rank)
    kind: Kind = "head" if home.first == 0 else "behind"
    chunks, ahead = tuple(place.chunk for place in places), places[-1].ahead
    return Run(start, end, (source,), start - home.first, kind, level, chunks, ahead)

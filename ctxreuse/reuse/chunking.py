"""Chunks: where a run of tokens is cut, by the tokens around the cut, so that an edit moves no cut far from it.

A position is a cut if the hash of the ``_WINDOW`` tokens before it is the least among the 65 positions around it
(local minima, as Bjørner, Blass and Gurevich, 2010). So whether there is a cut follows from 70 tokens and from nothing
else: not, as where a rolling hash is compared with a mask and a least length, from the cut before it. Every chunk is
longer than 32 tokens by itself, and 65 long on average: about a block. Shorter ones would make runs that are not worth
moving and split what belongs together; longer ones lose more to each edit and to each block that was evicted.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ctxreuse.identity.keys import Tokens

__all__ = ["LEAST", "MOST", "REACH", "Chunk", "ChunkLocation", "chunks"]

#: Tokens of the shortest chunk, but for parts that are shorter themselves; and of the longest.
LEAST, MOST = 33, 256
#: Tokens on either side of an edit beyond which no chunk changes, if cuts are found by content at all there.
REACH = LEAST - 1 + 4
_WINDOW = 4

_Hashes = npt.NDArray[np.uint64]
# Odd constants of splitmix64 and of Knuth's multiplicative hash; nothing is proven by these hashes.
_SPREAD = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 0xD6E8FEB86659FD93)


class Chunk(NamedTuple):
    """Tokens from position ``start`` (inclusive) to ``end`` (exclusive)."""

    start: int
    end: int


class ChunkLocation(NamedTuple):
    """Rows ``row`` to ``row + count`` of the concatenated tokens of blocks ``keys`` (consecutive ones of one prompt).

    ``at`` is the position of row 0 of ``keys[0]`` in its prompt, so the chunk's first token stood at ``at + row``.
    ``count`` may be less than the chunk's tokens: its end was not stored. The last of ``keys`` may lie behind these
    rows, where the next chunk is. A hint: blocks may have been removed since, so readers compare the token ids.
    """

    keys: tuple[bytes, ...]
    row: int
    count: int  # type: ignore[assignment]  # not used as a tuple's method
    at: int

    @property
    def first(self) -> int:
        """The position at which the chunk's first token stood."""
        return self.at + self.row


def chunks(tokens: Tokens, parts: Sequence[int] = (), since: int = 0) -> list[Chunk]:
    """Cut ``tokens`` (int32 [n]) into chunks, in order.

    ``parts``: positions at which parts (documents, messages) end: each is a cut, and the chunks of a part depend on its
    own tokens only, so a document is cut alike wherever it stands. Positions outside of the array are ignored. A part
    of fewer than twice ``LEAST`` tokens is one chunk. ``since``: chunks that the first ``since`` tokens alone determine
    are left out. 32,768 tokens take about 2 ms.
    """
    n = len(tokens)
    if n == 0:
        return []
    borders = np.unique(np.array([0, n, *(at for at in parts if 0 < at < n)], np.int64))
    hashes = _hashes(tokens)
    for k in range(1, _WINDOW):  # these look at tokens of the part before
        near = borders[:-1] + k
        hashes[near[near < n]] = ~np.uint64(0)
    hashes[borders] = 0
    cuts = np.union1d(np.flatnonzero(_least(hashes)), borders)
    long = np.flatnonzero(np.diff(cuts) > MOST)
    if len(long):
        more = [at for i in long for at in _forced(int(cuts[i]), int(cuts[i + 1]))]
        cuts = np.union1d(cuts, np.array(more, np.int64))
    ends = cuts.tolist()
    # A cut depends on tokens behind it: where a prompt ended, there may be other ones now.
    return [Chunk(a, b) for a, b in pairwise(ends) if not since or b >= since - REACH]


def _hashes(tokens: Tokens) -> _Hashes:
    """One hash a position 0..n, of the tokens before it; never 0."""
    n = len(tokens)
    ids = tokens.astype(np.uint64) + np.uint64(1)
    found = np.zeros(n + 1, np.uint64)
    for k, spread in enumerate(_SPREAD[:_WINDOW]):
        found[k + 1 :] += ids[: n - k] * np.uint64(spread)
    # Without mixing, a low token id would make a low hash: cuts would gather at common words.
    found ^= found >> np.uint64(29)
    found *= np.uint64(_SPREAD[1])
    found ^= found >> np.uint64(32)
    return found | np.uint64(1)


def _least(hashes: _Hashes) -> npt.NDArray[np.bool_]:
    """True where a hash is below all of the 32 before it and none of the 32 after it: of equal ones the first."""
    n, reach = len(hashes), LEAST - 1
    around = np.full(n + 2 * reach, ~np.uint64(0))
    around[reach : reach + n] = hashes
    # Minimum over 32 positions from each one on, by doubling.
    least, width = around, 1
    while width < reach:
        least = np.minimum(least[:-width], least[width:])
        width *= 2
    before, after = least[:n], least[reach + 1 : reach + 1 + n]
    return (hashes < before) & (hashes <= after)


def _forced(start: int, end: int) -> list[int]:
    """Cuts in a stretch where content makes none, such as one token again and again."""
    found = []
    while end - start > MOST:
        start += MOST if end - start >= MOST + LEAST else (end - start) // 2
        found.append(start)
    return found

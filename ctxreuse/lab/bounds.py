"""What no policy can beat: Belady's choice, which knows the future.

Belady evicts the block whose next use is farthest. A block is used whenever a block below it is, so its next use is
never later than theirs: of equal ones the deepest goes first, and the cached set stays closed towards the roots. Blocks
with the same next use are a piece of that request's path; all that has to be kept of the cache is how many each later
request will find, and a request splits into a few pieces. For blocks of one size no policy that sees one request after
another serves more blocks: of the spans from each use of a block to its next, it keeps the most that fit.
"""

from __future__ import annotations

import heapq

import numpy as np
import numpy.typing as npt

from ctxreuse.lab.packed import Ints, Packed

__all__ = ["Future", "belady"]


class Future:
    """When the blocks of each request are used next, as pieces of its path; made once a trace, for all capacities.

    Pieces of request r: numbers ``at[r]`` to ``at[r + 1]`` of ``count`` (blocks) and ``next`` (the request that uses
    them next); blocks that are never used again are in none.
    """

    def __init__(self, trace: Packed) -> None:
        never = len(trace)
        following = np.full(trace.blocks, never, np.int32)
        counts: list[npt.NDArray[np.int32]] = []
        nexts: list[npt.NDArray[np.int32]] = []
        pieces = np.zeros(len(trace) + 1, np.int64)
        for request in range(len(trace) - 1, -1, -1):
            path = trace.array(request)
            uses = following[path]
            following[path] = request
            if not len(uses) or uses[0] == never:
                continue
            # Along a path the next use only moves away.
            edges = np.flatnonzero(uses[1:] != uses[:-1]) + 1
            starts = np.concatenate([[0], edges])
            ends = np.concatenate([edges, [len(uses)]])
            again = uses[starts] != never
            counts.append((ends - starts)[again].astype(np.int32)[::-1])
            nexts.append(uses[starts][again][::-1])
            pieces[request + 1] = int(again.sum())
        empty = np.zeros(0, np.int32)
        self.at = np.cumsum(pieces)
        self.count = np.concatenate([*counts, empty])[::-1].copy()
        self.next = np.concatenate([*nexts, empty])[::-1].copy()
        self._past: tuple[Ints, Ints, Ints, Ints] | None = None

    def past(self) -> tuple[Ints, Ints, Ints, Ints]:
        """Return the same pieces from the other end, root first in each path: the request that uses them, the one that
        used them before, blocks, and blocks of that path ahead of them."""
        if self._past is None:
            makers = np.repeat(np.arange(len(self.at) - 1), np.diff(self.at))
            # Along a path the last use only moves back.
            order = np.lexsort((-makers, self.next))
            users, counts = self.next[order].astype(np.int64), self.count[order].astype(np.int64)
            ahead = np.cumsum(counts) - counts
            firsts = np.concatenate([[True], users[1:] != users[:-1]])[: len(users)]
            ahead -= np.maximum.accumulate(np.where(firsts, ahead, 0)) if len(users) else ahead
            self._past = users, makers[order], counts, ahead
        return self._past


def belady(trace: Packed, future: Future, capacity: int) -> npt.NDArray[np.int32]:
    """Return the leading blocks of each request that Belady serves with room for ``capacity`` blocks."""
    hits = np.zeros(len(trace), np.int32)
    waiting = [0] * len(trace)
    farthest: list[int] = []
    at, counts, nexts = future.at.tolist(), future.count.data, future.next.data
    cached = 0
    for request in range(len(trace)):
        found = waiting[request]
        hits[request] = found
        cached -= found
        waiting[request] = 0
        for piece in range(at[request], at[request + 1]):
            use = nexts[piece]
            if not waiting[use]:
                heapq.heappush(farthest, -use)
            waiting[use] += counts[piece]
            cached += counts[piece]
        while cached > capacity:
            use = -farthest[0]
            freed = min(waiting[use], cached - capacity)
            waiting[use] -= freed
            cached -= freed
            if not waiting[use]:
                heapq.heappop(farthest)
    return hits

"""Replays a trace through a policy of the store with a virtual clock, and counts what it was good for."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from ctxreuse.lab.bounds import Future, belady
from ctxreuse.lab.packed import Packed
from ctxreuse.store.policy.shadow import Shadow

__all__ = ["BOUNDS", "Counting", "Line", "Outcome", "Served", "bound", "count", "serve"]

#: Names of the bounds, which need no policy.
BOUNDS = ("infinite", "belady")

#: Requests between two reports of progress.
_REPORT = 256


class Line(NamedTuple):
    """Seconds to prefill n tokens after p: ``token·n + pair·n·(p + n/2)``, the part of it that reuse can save."""

    token: float = 1e-3
    pair: float = 1e-7

    def rebuild(self, start: int, tokens: int) -> float:
        """Return the price as policies ask for it, see `ctxreuse.store.policy.base.Rebuild`."""
        return self.token * tokens + self.pair * tokens * (start + tokens / 2)

    def saved(self, tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """Return the seconds that leading tokens save, each count for itself."""
        return self.token * tokens + self.pair * tokens.astype(np.float64) ** 2 / 2


class Served(NamedTuple):
    """Per request, in order: leading blocks served, and blocks cached after it."""

    hits: npt.NDArray[np.int32]
    cached: npt.NDArray[np.int32]


class Outcome(msgspec.Struct, frozen=True, kw_only=True, rename={"cached_gbs": "held_gbs"}):
    """One policy at one capacity over the requests ``first`` to ``last``, simulated.

    ``capacity`` in bytes (0: without end). ``token_hit``, ``block_hit``: served share. ``seconds_saved`` of
    ``seconds`` of prefill that all prompts would take. ``bytes_read``: served blocks; ``bytes_written``: blocks that
    came in. ``cached_gbs``: GB·s of memory over the clock of the trace; ``waste_gbs``: the part that no hit followed up
    to the end of the trace. Both, and bytes written, are None for Belady, who may use less than the capacity.
    ``took``: real seconds of the replay.
    """

    policy: str
    capacity: int
    first: int
    last: int
    token_hit: float
    block_hit: float
    seconds: float
    seconds_saved: float
    bytes_read: int
    bytes_written: int | None
    cached_gbs: float | None
    waste_gbs: float | None
    took: float


def serve(
    trace: Packed,
    policy: Any,
    capacity: int,
    *,
    block_bytes: int = 1,
    shadow: Callable[[Any, int], Any] = Shadow,
    progress: Callable[[int], None] = lambda done: None,
) -> Served:
    """Replay all requests through ``shadow(policy, bytes)``, with room for ``capacity`` blocks, all of one size.

    ``policy`` may be a shadow of that capacity itself, such as a native one, which is used as given.
    Where the trace says why a turn stopped, the policy is notified (``mark``) at the moment of the trace's clock when
    the turn had been answered.
    """
    cache = policy if hasattr(policy, "request") else shadow(policy, capacity * block_bytes)
    hits, cached = np.zeros(len(trace), np.int32), np.zeros(len(trace), np.int32)
    size = trace.block_tokens
    times, tokens, lengths = trace.t.tolist(), trace.tokens.tolist(), trace.length.tolist()
    marking = bool(trace.mark.any())
    marks: list[tuple[float, int, int]] = []
    for request in range(len(trace)):
        now = times[request]
        while marks and marks[0][0] <= now:
            at, tip, label = heapq.heappop(marks)
            cache.on_pause(tip, label, at)
        path = trace.path(request)
        blocks = lengths[request]
        filled = tokens[request] - size * (blocks - 1)
        counts = [size] * blocks
        if blocks and filled < size:
            counts[-1] = filled
        hits[request] = cache.request(path, block_bytes, counts, now)[0]
        cached[request] = cache.nbytes // block_bytes
        if marking and path:
            heapq.heappush(marks, (now + float(trace.busy[request]), path[-1], int(trace.mark[request])))
        if request % _REPORT == 0:
            progress(request)
    progress(len(trace))
    return Served(hits, cached)


def bound(trace: Packed, name: str, future: Future, capacity: int) -> Served:
    """Return what ``infinite`` or ``belady`` serves; Belady's cached set is not reported."""
    if name == "infinite":
        return Served(trace.known, np.cumsum(trace.length - trace.known).astype(np.int32))
    return Served(belady(trace, future, capacity), np.zeros(0, np.int32))


class Counting(NamedTuple):
    """How outcomes are counted: bytes of a block, the price of prefill, and the window of requests (None: all).

    Requests before the window have only filled the cache.
    """

    block_bytes: int
    line: Line
    window: tuple[int, int] | None = None


def count(
    trace: Packed, served: Served, future: Future, counting: Counting, *, policy: str, capacity: int, took: float = 0.0
) -> Outcome:
    """Return the figures of one replay."""
    block_bytes, line, window = counting
    first, last = window or (0, len(trace))
    span = slice(first, last)
    hits = served.hits[span].astype(np.int64)
    tokens = trace.hit_tokens(served.hits)[span]
    blocks = trace.length[span].astype(np.int64)
    known = served.cached.size > 0
    cached = _cached(trace, served, first, last) * block_bytes / 1e9 if known else None
    used = _used(trace, served, future, first, last) * block_bytes / 1e9 if known else 0.0
    most = capacity // block_bytes if capacity else np.iinfo(np.int64).max
    return Outcome(
        policy=policy,
        capacity=capacity,
        first=first,
        last=last,
        token_hit=_share(tokens.sum(), trace.tokens[span].sum()),
        block_hit=_share(hits.sum(), blocks.sum()),
        seconds=float(line.saved(trace.tokens[span]).sum()),
        seconds_saved=float(line.saved(tokens).sum()),
        bytes_read=int(hits.sum()) * block_bytes,
        bytes_written=int(np.maximum(np.minimum(blocks, most) - hits, 0).sum()) * block_bytes if known else None,
        cached_gbs=cached,
        waste_gbs=None if cached is None else max(0.0, cached - used),
        took=took,
    )


def _share(part: Any, whole: Any) -> float:
    return float(part / whole) if whole else 0.0


def _cached(trace: Packed, served: Served, first: int, last: int) -> float:
    """Blocks times seconds, from the window's first request to its last."""
    return float((served.cached[first : last - 1] * np.diff(trace.t[first:last])).sum())


def _used(trace: Packed, served: Served, future: Future, first: int, last: int) -> float:
    """Blocks times seconds that ended in a hit: from a block's last use, or the window's begin, to this one."""
    users, before, counts, ahead = future.past()
    hits = served.hits[users].astype(np.int64)
    taken = np.clip(hits - ahead, 0, counts)
    inside = (users >= first) & (users < last)
    begin = np.maximum(trace.t[before], trace.t[first])
    return float((taken * (trace.t[users] - begin))[inside].sum())

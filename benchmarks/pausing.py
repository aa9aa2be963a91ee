"""Simulates a memory of paused sessions: who is kept, who is cut from the end, what the next turns find.

A session's context is a run of blocks of which some leading part is held; a rule says whose goes first. That is coarser
than a store (blocks of different sessions are never shared here, what a turn left behind is dropped first), and so
quick enough to try many rules on one trace.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from ctxreuse.lab.replay import Line
from ctxreuse.lab.trace import Path, Request

__all__ = ["Held", "Memory", "Outcome", "Rule", "Turn", "simulate", "turns_of"]


class Turn(NamedTuple):
    """One request as rules see it: ``blocks`` of its context, the moments when it begins and is answered.

    ``last``: the session never comes back; only rules that are told may look. ``after``: when it does, for oracles.
    """

    request: Request
    blocks: int
    shared: int
    answered: float
    after: float

    @property
    def last(self) -> bool:
        """The session never comes back."""
        return self.after == float("inf")


class Held(NamedTuple):
    """A session in the memory: its leading ``blocks`` are held, last used at ``used``."""

    blocks: int
    used: float


class Rule(Protocol):
    """Decides who goes. All times are of the trace's clock."""

    def begin(self, turn: Turn) -> None:
        """A request begins."""

    def pause(self, turn: Turn) -> bool:
        """It has been answered, at ``turn.answered``; False: what the session holds is dropped at once."""

    def victims(self, now: float, held: Mapping[int, Held]) -> Iterable[tuple[int, int]]:
        """Sessions, first to go first, with the blocks that each may keep; one may come twice, lower."""


class Outcome(NamedTuple):
    """Block hits and blocks of each turn, in order; GB·s that no hit followed, GB·s of contexts being recomputed."""

    hits: npt.NDArray[np.int64]
    blocks: npt.NDArray[np.int64]
    sessions: npt.NDArray[np.int64]
    idle_gbs: float
    recompute_gbs: float

    def share(self, low: int = 0, high: int = 1 << 62) -> float:
        """Hits by blocks of the sessions from ``low`` up to ``high``."""
        of = (self.sessions >= low) & (self.sessions < high)
        return float(self.hits[of].sum() / max(1, self.blocks[of].sum()))

    @property
    def waste_gbs(self) -> float:
        """Both wastes."""
        return self.idle_gbs + self.recompute_gbs


def turns_of(requests: Iterable[Request]) -> list[Turn]:
    """Requests with what they share with their session's last one, and when their session comes back."""
    found: list[Turn] = []
    before: dict[int, int] = {}
    for request in requests:
        shared = 0
        at = before.get(request.session)
        if at is not None:
            shared = _common(found[at].request.path, request.path)
            found[at] = found[at]._replace(after=request.t)
        before[request.session] = len(found)
        found.append(Turn(request, len(request.path), shared, request.t + request.busy, float("inf")))
    return found


def _common(a: Path, b: Path) -> int:
    n = min(len(a), len(b))
    differ = np.flatnonzero(a[:n] != b[:n])
    return int(differ[0]) if len(differ) else n


class Memory:
    """``capacity`` blocks of ``block_gb`` each; counts what it wastes."""

    def __init__(self, capacity: int, block_gb: float) -> None:
        self.capacity, self._gb = capacity, block_gb
        self.held: dict[int, Held] = {}
        self._left: deque[Held] = deque()
        self.used = 0
        self.idle = 0.0

    def hit(self, turn: Turn) -> int:
        """Serve a turn: the blocks that it finds. All of it is held afterwards; `fit` must follow."""
        session, now = turn.request.session, turn.request.t
        before = self.held.get(session, Held(0, now))
        found = min(before.blocks, turn.shared)
        if before.blocks > found:
            # The turn went another way: nobody asks for that branch again.
            self._left.append(Held(before.blocks - found, before.used))
        self.used += turn.blocks - found
        self.held[session] = Held(turn.blocks, now)
        return found

    def cut(self, session: int, keep: int, now: float) -> None:
        """Leave a session its first ``keep`` blocks."""
        held = self.held[session]
        gone = held.blocks - keep
        if gone <= 0:
            return
        self._waste(Held(gone, held.used), now)
        self.used -= gone
        if keep:
            self.held[session] = held._replace(blocks=keep)
        else:
            del self.held[session]

    def _waste(self, gone: Held, now: float) -> None:
        self.idle += gone.blocks * self._gb * (now - gone.used)

    def fit(self, rule: Rule, turn: Turn) -> None:
        """Make what is held fit; what no rule wants to go is the end of the newest context."""
        now = turn.request.t
        while self.used > self.capacity and self._left:
            branch = self._left.popleft()
            gone = min(branch.blocks, self.used - self.capacity)
            self._waste(branch._replace(blocks=gone), now)
            self.used -= gone
            if gone < branch.blocks:
                self._left.appendleft(branch._replace(blocks=branch.blocks - gone))
        if self.used <= self.capacity:
            return
        for session, floor in rule.victims(now, self.held):
            held = self.held.get(session)
            if held is not None:
                self.cut(session, max(floor, held.blocks - (self.used - self.capacity)), now)
            if self.used <= self.capacity:
                return
        own = turn.request.session
        self.cut(own, max(0, self.held[own].blocks - (self.used - self.capacity)), now)

    def end(self, now: float) -> None:
        """The trace is over: what is held was for nothing."""
        for held in (*self.held.values(), *self._left):
            self._waste(held, now)

    def check(self) -> None:
        """Raises AssertionError where counts and capacity disagree."""
        assert self.used == sum(held.blocks for held in (*self.held.values(), *self._left)), "blocks counted wrongly"
        assert self.used <= self.capacity, f"{self.used} blocks held of {self.capacity}"


def simulate(turns: list[Turn], rule: Rule, capacity: int, *, block_gb: float, line: Line) -> Outcome:
    """Run all turns through one memory of ``capacity`` blocks under a rule."""
    memory = Memory(capacity, block_gb)
    hits = np.zeros(len(turns), np.int64)
    recompute = 0.0
    answered: list[tuple[float, int]] = []
    for n, turn in enumerate(turns):
        for other in _answered(answered, turn.request.t):
            ended = turns[other]
            if ended.after <= ended.answered:
                continue  # it was asked again before it had answered
            if not rule.pause(ended) and ended.request.session in memory.held:
                memory.cut(ended.request.session, 0, ended.answered)
        rule.begin(turn)
        hits[n] = memory.hit(turn)
        start, missed = int(hits[n]) * 64, (turn.blocks - int(hits[n])) * 64
        recompute += line.rebuild(start, missed) * turn.blocks * block_gb
        if memory.used > capacity:
            memory.fit(rule, turn)
        heapq.heappush(answered, (turn.answered, n))
    memory.end(turns[-1].request.t if turns else 0.0)
    memory.check()
    blocks = np.array([turn.blocks for turn in turns], np.int64)
    sessions = np.array([turn.request.session for turn in turns], np.int64)
    return Outcome(hits, blocks, sessions, memory.idle, recompute)


def _answered(waiting: list[tuple[float, int]], now: float) -> Iterator[int]:
    while waiting and waiting[0][0] <= now:
        yield heapq.heappop(waiting)[1]

"""Where paused contexts wait: what to encode smaller, move down or drop when memory is short, what to load ahead."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, Literal, NamedTuple, TypeAlias, TypeVar

import numpy as np

from ctxreuse.pauses.hazard import AGES, BUCKETS, Rates, bucket

__all__ = ["Action", "Ahead", "Candidate", "Step", "load_ahead", "make_room", "starts_at"]

S = TypeVar("S")

Action: TypeAlias = Literal["compress", "demote", "drop"]


class Candidate(NamedTuple, Generic[S]):
    """A paused context in memory. ``worth``: returns per second of holding it; ``rebuild``: seconds to compute it anew.

    ``load``: seconds from the tier below; ``copied``: it is there already. ``packed``: share of its bytes that it would
    take if encoded at the worst level that its session allows (1: it allows none), ``unpack``: seconds to decode that.
    """

    session: S
    nbytes: int
    worth: float
    rebuild: float
    load: float
    copied: bool = False
    packed: float = 1.0
    unpack: float = 0.0


class Step(NamedTuple, Generic[S]):
    """One thing to do; ``frees`` bytes here, ``writes`` bytes below, ``loss``: expected seconds per second of it."""

    session: S
    action: Action
    frees: int
    writes: int
    loss: float


def _options(one: Candidate[S], small: bool) -> Iterator[Step[S]]:
    nbytes = int(one.nbytes * one.packed) if small else one.nbytes
    if not small and 0 < one.packed < 1:
        yield Step(one.session, "compress", one.nbytes - int(one.nbytes * one.packed), 0, one.worth * one.unpack)
    if one.load < one.rebuild:
        yield Step(one.session, "demote", nbytes, 0 if one.copied else nbytes, one.worth * one.load)
    yield Step(one.session, "drop", nbytes, 0, one.worth * one.rebuild)


def make_room(candidates: Iterable[Candidate[S]], need: int, *, writes: int) -> list[Step[S]]:
    """What to do, in order, so that ``need`` bytes become free: least expected seconds lost per byte freed first.

    ``writes``: bytes that the tier below can take in this round. What would go beyond that is not moved: it is dropped,
    if it is worth so little, or another one goes. A context may be compressed first and go later. Fewer bytes than
    ``need`` become free only if there are no more. O(n log n).
    """
    found = list(candidates)
    queue: list[tuple[float, int, int, bool, Step[S]]] = []
    ticket = 0

    def offer(n: int, small: bool) -> None:
        nonlocal ticket
        for step in _options(found[n], small):
            if step.frees > 0:
                ticket += 1
                heapq.heappush(queue, (step.loss / step.frees, ticket, n, small, step))

    for n in range(len(found)):
        offer(n, False)
    gone: set[int] = set()
    packed: set[int] = set()
    steps: list[Step[S]] = []
    while need > 0 and queue:
        _, _, n, small, step = heapq.heappop(queue)
        if n in gone or small != (n in packed) or step.writes > writes:
            continue
        steps.append(step)
        need -= step.frees
        writes -= step.writes
        if step.action == "compress":
            packed.add(n)
            offer(n, True)
        else:
            gone.add(n)
    return steps


def starts_at(rates: Rates, age: float, *, saves: float, cost: float) -> float | None:
    """The age from which on a context should be back in memory: when ``rate · saves`` exceeds ``cost``.

    ``saves``: seconds that its session does not wait then; ``cost``: seconds a second that the memory is worth
    otherwise. The loading itself takes ``saves``, so it begins that much before: the rate then counts. None if the
    chance never pays from ``age`` on.
    """
    first = bucket(age + saves)
    pays = np.flatnonzero(rates[first:] * saves > cost)
    if not len(pays):
        return None
    at = first + int(pays[0])
    return max(age, float(AGES[min(at, BUCKETS)]) - saves)


class Ahead(NamedTuple, Generic[S]):
    """A context that waits below: loading it ahead takes ``load`` seconds and ``nbytes`` of memory and of the link."""

    session: S
    nbytes: int
    load: float
    age: float
    rates: Rates


def load_ahead(
    waiting: Iterable[Ahead[S]], *, room: int, link: int, price: float, allowed: Callable[[S], bool] = lambda _: True
) -> list[S]:
    """Whom to load now, most expected gain per byte first, within ``room`` bytes of memory and ``link`` bytes to move.

    ``price``: seconds a second that a byte of memory is worth otherwise. ``allowed``: a last say.
    """
    due: list[tuple[float, int, Ahead[S]]] = []
    for n, one in enumerate(waiting):
        start = starts_at(one.rates, one.age, saves=one.load, cost=price * one.nbytes)
        if start is not None and start <= one.age and allowed(one.session):
            rate = float(one.rates[bucket(one.age + one.load)])
            due.append((-rate * one.load / max(one.nbytes, 1), n, one))
    chosen: list[S] = []
    for _, _, one in sorted(due, key=lambda entry: entry[:2]):
        if one.nbytes <= min(room, link):
            chosen.append(one.session)
            room -= one.nbytes
            link -= one.nbytes
    return chosen

"""Bounds hold: nobody serves more than Belady, Belady is the true optimum, and an endless cache is above all."""

from __future__ import annotations

import itertools
from functools import cache
from random import Random
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from ctxreuse.lab.bounds import Future, belady
from ctxreuse.lab.packed import Packed
from ctxreuse.lab.replay import serve
from ctxreuse.store.policy import NAMES, Shadow, make_policy
from support.examples import examples
from support.traces import forests, packed


def optimum(trace: Packed, capacity: int) -> int:
    """Most blocks that anyone could serve: tries every closed set of blocks after every request."""
    paths = [trace.path(i) for i in range(len(trace))]
    parent = trace.parent.tolist()

    @cache
    def best(request: int, held: frozenset[int]) -> int:
        if request == len(paths):
            return 0
        path = paths[request]
        hits = sum(1 for _ in itertools.takewhile(held.__contains__, path))
        room = held | set(path)
        choices = (
            frozenset(kept)
            for size in range(min(capacity, len(room)) + 1)
            for kept in itertools.combinations(sorted(room), size)
            if all(parent[b] < 0 or parent[b] in kept for b in kept)
        )
        return hits + max(best(request + 1, kept) for kept in choices)

    return best(0, frozenset())


@examples("normal")
@given(paths=forests(6), capacity=st.integers(0, 5))
def test_belady_is_the_optimum(paths: list[list[int]], capacity: int) -> None:
    trace = packed([path[:4] for path in paths])
    if trace.blocks > 8:
        return
    assert int(belady(trace, Future(trace), capacity).sum()) == optimum(trace, capacity)


@examples("heavy")
@given(paths=forests(60), capacity=st.integers(1, 20))
def test_nobody_is_above_the_bounds(paths: list[list[int]], capacity: int) -> None:
    trace = packed(paths)
    future = Future(trace)
    bound, endless = belady(trace, future, capacity), trace.known
    assert (bound <= endless).all()
    assert bound.sum() <= belady(trace, future, capacity + 1).sum()
    assert belady(trace, future, trace.blocks).tolist() == endless.tolist()
    for name in NAMES:
        held: list[Any] = []

        def checked(policy: Any, size: int, held: list[Any] = held) -> Any:
            held.append(Shadow(policy, size))
            return held[0]

        served = serve(trace, make_policy(name, capacity, rng=Random(1)), capacity, shadow=checked)
        held[0].check()
        assert (served.hits <= endless).all(), name
        assert served.hits.sum() <= bound.sum(), name
        assert (served.cached <= capacity).all(), name
        assert serve(trace, make_policy(name, trace.blocks, rng=Random(1)), trace.blocks).hits.tolist() == (
            endless.tolist()
        ), name


def test_pieces_of_the_future() -> None:
    trace = packed([[0, 1, 2], [0, 3], [0, 1, 2], [0, 1]])
    future = Future(trace)
    pieces = [
        list(zip(future.next[a:b].tolist(), future.count[a:b].tolist()))
        for a, b in itertools.pairwise(future.at.tolist())
    ]
    assert pieces == [[(1, 1), (2, 2)], [(2, 1)], [(3, 2)], []]
    users, makers, counts, ahead = (column.tolist() for column in future.past())
    assert list(zip(users, makers, counts, ahead)) == [(1, 0, 1, 0), (2, 1, 1, 0), (2, 0, 2, 1), (3, 2, 2, 0)]


def test_a_long_trace_takes_no_time() -> None:
    # 2,000 requests over few blocks: pieces, not blocks, are what is worked on.
    paths = [list(range(i % 7 * 1000, i % 7 * 1000 + 200)) for i in range(2000)]
    trace = packed(paths)
    future = Future(trace)
    assert len(future.count) == 2000 - 7
    hits = belady(trace, future, 600)
    # Three of seven contexts fit: those whose turn is next.
    assert 0.3 < hits.sum() / trace.length.sum() < 3 / 7

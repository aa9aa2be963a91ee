"""Making room by least loss, and loading before the return, by hand and over any input."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxreuse.pauses import Ahead, Candidate, load_ahead, make_room
from ctxreuse.pauses.hazard import AGES, BUCKETS, bucket
from ctxreuse.pauses.tiers import starts_at

MB = 1 << 20
candidates = st.lists(
    st.builds(
        Candidate,
        session=st.integers(0, 1 << 30),
        nbytes=st.integers(1, 100 * MB),
        worth=st.floats(0, 10),
        rebuild=st.floats(0, 100),
        load=st.floats(0, 10),
        copied=st.booleans(),
        packed=st.floats(0.1, 1.0),
        unpack=st.floats(0, 1),
    ),
    max_size=20,
    unique_by=lambda one: one.session,
)


@given(candidates, st.integers(0, 500 * MB), st.integers(0, 200 * MB))
def test_room_is_made_within_the_budget_and_never_twice_from_one(
    found: list[Candidate[int]], need: int, writes: int
) -> None:
    steps = make_room(found, need, writes=writes)
    by = {one.session: one for one in found}
    freed = dict.fromkeys(by, 0)
    for step in steps:
        freed[step.session] += step.frees
    assert all(freed[name] <= by[name].nbytes for name in by)
    assert sum(step.writes for step in steps) <= writes
    total = sum(one.nbytes for one in found)
    assert sum(freed.values()) >= min(need, total), "dropping is always possible"
    if steps:
        assert sum(step.frees for step in steps[:-1]) < need, "it stops when there is room"
    for name in by:
        done = [step.action for step in steps if step.session == name]
        assert done in ([], ["compress"], ["demote"], ["drop"], ["compress", "demote"], ["compress", "drop"])


def test_the_least_loss_for_each_byte_goes_first() -> None:
    hot = Candidate("hot", 10 * MB, worth=1.0, rebuild=2.0, load=0.1, copied=True)
    cold = Candidate("cold", 10 * MB, worth=0.001, rebuild=2.0, load=0.1, copied=True)
    cheap = Candidate("cheap", 10 * MB, worth=1.0, rebuild=0.0001, load=0.1)
    assert [(s.session, s.action) for s in make_room([hot, cold, cheap], 25 * MB, writes=0)] == [
        ("cold", "demote"),  # 0.0001 a second: as little as recomputing the cheap one
        ("cheap", "drop"),
        ("hot", "demote"),
    ]


def test_what_the_disk_cannot_take_in_time_is_not_moved() -> None:
    cold = [Candidate(n, 10 * MB, worth=0.01, rebuild=50.0, load=0.1) for n in range(3)]
    warm = Candidate(9, 10 * MB, worth=0.02, rebuild=1.0, load=0.1)
    steps = make_room([*cold, warm], 30 * MB, writes=20 * MB)
    assert [step.action for step in steps] == ["demote", "demote", "drop"]
    assert steps[-1].session == 9, "cheaper to recompute than the third cold one"


def test_packing_comes_first_where_its_session_allows_it() -> None:
    one = Candidate("lossy", 10 * MB, worth=0.1, rebuild=5.0, load=0.5, packed=0.25, unpack=0.01)
    assert [step.action for step in make_room([one], 5 * MB, writes=100 * MB)] == ["compress"]
    steps = make_room([one], 10 * MB, writes=100 * MB)
    assert [step.action for step in steps] == ["compress", "demote"]
    assert steps[1].writes == int(2.5 * MB), "what goes down is small by then"


def test_loading_begins_so_early_that_it_is_done_when_the_return_is_likely() -> None:
    rates = np.full(BUCKETS, 1e-4)
    busy = bucket(100.0)
    rates[busy:] = 0.1
    start = starts_at(rates, 0.0, saves=4.0, cost=0.01)
    assert start == pytest.approx(AGES[busy] - 4.0)
    assert starts_at(rates, 200.0, saves=4.0, cost=0.01) == 200.0
    assert starts_at(rates, 0.0, saves=4.0, cost=1.0) is None, "memory is worth more than that"
    assert starts_at(np.full(BUCKETS, 0.1), 0.0, saves=1.0, cost=0.0) == 0.0


@given(st.floats(0, 1e5), st.floats(0.001, 50), st.floats(1e-6, 1.0))
def test_no_start_lies_in_the_past(age: float, saves: float, cost: float) -> None:
    rates = (1.0 / (10.0 + np.arange(BUCKETS) ** 3)).astype(np.float64)
    start = starts_at(rates, age, saves=saves, cost=cost)
    assert start is None or start >= age


def test_the_likeliest_are_loaded_within_room_and_link() -> None:
    soon, later = np.full(BUCKETS, 1.0), np.full(BUCKETS, 0.1)
    never = np.zeros(BUCKETS)
    waiting = [
        Ahead("later", 10 * MB, 0.1, 5.0, later),
        Ahead("soon", 10 * MB, 0.1, 5.0, soon),
        Ahead("never", 10 * MB, 0.1, 5.0, never),
    ]
    assert load_ahead(waiting, room=100 * MB, link=100 * MB, price=1e-12) == ["soon", "later"]
    assert load_ahead(waiting, room=15 * MB, link=100 * MB, price=1e-12) == ["soon"]
    assert load_ahead(waiting, room=100 * MB, link=5 * MB, price=1e-12) == []
    assert load_ahead(waiting, room=100 * MB, link=100 * MB, price=5e-9) == ["soon"]
    assert load_ahead(waiting, room=100 * MB, link=100 * MB, price=1e-12, allowed=lambda s: s != "soon") == ["later"]

"""Fairness: nobody starves, nothing stands idle while something waits, totals stay below their limits."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxreuse.fair import FairQueue, Shares, Turns

NAMES = st.sampled_from("abcd")
COSTS = st.integers(1, 50)
#: (name, cost) is pushed, None pops.
STEPS = st.lists(st.one_of(st.none(), st.tuples(NAMES, COSTS)), max_size=200)


@given(STEPS, st.integers(0, 12))
def test_a_queue_keeps_order_limits_and_shares(steps: list[tuple[str, int] | None], limit: int) -> None:
    queue, model = FairQueue[str, tuple[str, int]](limit), dict[str, list[tuple[str, int]]]()
    for number, step in enumerate(steps):
        if step is None:
            found = queue.pop()
            assert (found is None) == (not any(model.values()))  # it never stands idle
            if found is not None:
                assert found[1] == model[found[0]].pop(0)  # in its order within a name
        else:
            (name, cost), item = step, (step[0], number)
            before, line = len(queue), model.setdefault(name, [])
            names = len({*(one for one, items in model.items() if items), name})
            may = len(line) < limit // names
            displaced = queue.push(name, item, cost)
            assert (displaced is None) == (before < limit)  # one name alone may have all of it
            assert not (may and displaced == item)  # nobody is refused within its share
            if displaced != item:
                line.append(item)
            if displaced is not None and displaced != item:
                assert displaced == model[displaced[0]].pop()
                assert len(model[displaced[0]]) >= len(line)
        assert len(queue) == sum(map(len, model.values())) <= limit
        assert all(queue.waiting(name) == len(items) for name, items in model.items())
        queue.check()


@given(st.dictionaries(NAMES, st.lists(COSTS, min_size=1, max_size=60), min_size=2), st.integers(0, 100))
def test_names_with_work_are_served_alike(costs: dict[str, list[int]], burst: int) -> None:
    queue, served = FairQueue[str, int](1000, burst), dict.fromkeys(costs, 0)
    for name, own in costs.items():
        for cost in own:
            assert queue.push(name, cost, cost) is None
    largest = max(max(own) for own in costs.values())
    while all(queue.waiting(name) for name in costs):
        found = queue.pop()
        assert found is not None
        served[found[0]] += found[1]
        assert max(served.values()) - min(served.values()) <= 2 * largest


@given(st.lists(COSTS, max_size=100), st.lists(COSTS, min_size=1, max_size=5), st.integers(0, 200))
def test_one_that_comes_waits_for_one_item_of_each_other_at_most(flood: list[int], own: list[int], burst: int) -> None:
    queue = FairQueue[str, int](1000, burst)
    for at, cost in enumerate(flood):
        queue.push("one", cost, cost)
        queue.push("two", cost, cost)
        if at % 2:
            queue.pop()
    queue.push("late", 0, own[0])
    waited = 0
    while (found := queue.pop()) is not None and found[0] != "late":
        waited += 1
    assert found is not None
    assert waited <= 2


@given(st.lists(st.tuples(NAMES, st.integers(-2, 2)), max_size=40))
def test_within_a_name_the_lower_rank_goes_first_and_the_higher_leaves(pushed: list[tuple[str, int]]) -> None:
    queue, limit = FairQueue[str, tuple[int, int]](8), 8
    for number, (name, rank) in enumerate(pushed):
        alone = len(queue) == queue.waiting(name) == limit
        displaced = queue.push(name, (rank, number), rank=rank)
        if alone:
            assert displaced is not None
            assert displaced[0] >= rank
        queue.check()
    for name in "abcd":
        served = []
        while queue.waiting(name):
            head = queue.next(name)
            found = queue.pop(lambda one, name=name: one == name)  # type: ignore[misc]
            assert found == (name, head)
            served.append(head)
        assert served == sorted(served)


def test_idle_time_earns_the_burst_and_no_more() -> None:
    turns = Turns[str](burst=100)
    for _ in range(1000):
        turns.charge("busy", 50)
    ahead = 0
    while turns.order(["busy", "back"])[0] == "back":
        turns.charge("back", 10)
        ahead += 10
    assert 100 <= ahead <= 160
    first = [turns.order(["busy", "back"])[0]]
    for _ in range(40):
        turns.charge(first[-1], 10)
        first.append(turns.order(["busy", "back"])[0])
    assert abs(first.count("busy") - first.count("back")) <= 2


def test_names_that_are_past_are_forgotten() -> None:
    turns = Turns[int]()
    for name in range(5000):
        turns.charge(name, 1)
        turns.charge(-1, 1)
    assert len(turns._ends) <= 1025


def test_what_was_popped_in_vain_goes_back_to_the_front() -> None:
    queue = FairQueue[str, str](2)
    assert queue.push("a", "first", 5) is None
    assert queue.push("a", "second", 5) is None
    found = queue.pop(lambda name: name == "a")
    assert found == ("a", "first")
    assert queue.pop(lambda name: name != "a") is None
    queue.put_back(*found)
    assert not queue.remove("b", "first")
    assert queue.remove("a", "second")
    assert queue.clear() == ["first"]
    assert len(queue) == 0


@given(st.lists(st.tuples(NAMES, st.integers(-30, 60)), max_size=100), st.integers(50, 100), st.booleans())
def test_shares_leave_room_and_stay_below_the_total(steps: list[tuple[str, int]], total: int, alone: bool) -> None:
    shares = Shares[str](total, lambda: alone)
    for name, amount in steps:
        if amount < 0:
            shares.give_back(name, min(-amount, shares.of(name)))
        elif shares.fits(name, amount):
            first = not shares.of(name)
            shares.take(name, amount)
            assert shares.taken <= total or shares.of(name) == shares.taken
            assert alone or first or shares.of(name) <= (total - shares.taken + shares.of(name)) // 2
        shares.check()


@pytest.mark.parametrize("alone", [False, True])
def test_who_uses_up_its_share_is_refused_while_others_go_on(alone: bool) -> None:
    shares = Shares[str](100, lambda: alone)
    while shares.fits("flood", 1):
        shares.take("flood", 1)
    assert shares.of("flood") == (100 if alone else 50)
    for other, amount in pairwise(["other", "third", "fourth"]):
        assert shares.fits(other, 10) != alone
        if not alone:
            shares.take(other, 10)
        assert not shares.fits("flood", 1), amount


def test_what_exceeds_the_whole_is_taken_if_nothing_else_is() -> None:
    shares = Shares[str](10)
    assert shares.fits("a", 20)
    shares.take("a", 20)
    assert not shares.fits("b", 1)
    shares.give_back("a", 20)
    assert shares.fits("b", 10)

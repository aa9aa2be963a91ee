"""Many requests at once: what is promised is what a cache serves, nothing is lost, and relatives stand together."""

from __future__ import annotations

import random
from collections.abc import Hashable, Mapping, Sequence
from itertools import pairwise, permutations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from ctxreuse.planner import BatchPlan, plan_batch
from ctxreuse.planner.batch import MOST_TOGETHER


def served(requests: Sequence[Sequence[Hashable]], tokens: Mapping[Hashable, float]) -> float:
    """Tokens that a prefix cache without bounds serves: each beginning that an earlier request had."""
    known: set[tuple[Hashable, ...]] = set()
    total = 0.0
    for request in requests:
        for end in range(1, len(request) + 1):
            start = tuple(request[:end])
            total += tokens[request[end - 1]] if start in known else 0
            known.add(start)
    return total


def planned(plan: BatchPlan, requests: Sequence[Sequence[Hashable]]) -> list[list[Hashable]]:
    return [plan.documents[index].apply(requests[index]) for index in plan.schedule.order]


ITEMS = st.integers(0, 9)
REQUESTS = st.lists(st.lists(ITEMS, max_size=6), max_size=12)
TOKENS = st.fixed_dictionaries({item: st.integers(1, 500) for item in range(10)})


@given(REQUESTS, TOKENS)
def test_what_is_promised_is_served_and_no_less_than_as_given(
    requests: list[list[int]], tokens: dict[int, int]
) -> None:
    plan = plan_batch(requests, tokens)
    found = planned(plan, requests)
    assert sorted(map(sorted, found)) == sorted(map(sorted, requests))
    assert served(requests, tokens) <= plan.shared <= served(found, tokens)
    if all(len(set(request)) == len(request) for request in requests):
        assert plan.shared == served(found, tokens)


@given(st.lists(st.sets(ITEMS, max_size=4).map(sorted), max_size=4))
def test_few_requests_share_nearly_what_the_best_order_of_all_shares(requests: list[list[int]]) -> None:
    tokens = dict.fromkeys(range(10), 1)
    best = 0.0
    orders = [list(permutations(request)) for request in requests]
    pending: list[list[Sequence[int]]] = [[]]
    for choices in orders:
        pending = [[*one, choice] for one in pending for choice in (choices if len(pending) < 2000 else choices[:6])]
    for one in pending:
        best = max(best, served(one, tokens))
    assert plan_batch(requests, tokens).shared >= 0.6 * best


def test_requests_that_share_nothing_stay_as_given() -> None:
    plan = plan_batch([["c", "a"], ["b"], ["d", "e"]], dict.fromkeys("abcde", 10))
    assert not plan.schedule.moves
    assert not any(one.moves for one in plan.documents)
    assert plan.shared == 0


def test_long_documents_count_more_than_many() -> None:
    tokens = {"long": 900, "a": 10, "b": 10, "c": 10, "d": 10}
    plan = plan_batch([["a", "b", "c", "long"], ["a", "b", "c"], ["long", "d"]], tokens)
    assert plan.documents[0].apply(["a", "b", "c", "long"])[0] == "long"
    assert plan.documents[2].apply(["long", "d"])[0] == "long"
    assert plan.shared == 900


def test_a_document_that_comes_twice_is_shared_once() -> None:
    tokens = {"a": 1, "b": 2}
    requests = [["a", "b", "a"], ["b", "a", "a"]]
    plan = plan_batch(requests, tokens)
    assert [sorted(one) for one in planned(plan, requests)] == [["a", "a", "b"]] * 2
    assert plan.shared == 3 <= served(planned(plan, requests), tokens)


def test_relatives_stand_beside_each_other() -> None:
    rng = random.Random(3)
    topics = [[f"{topic}{n}" for n in range(6)] for topic in "xyz"]
    requests = [rng.sample(rng.choice(topics), 5) for _ in range(60)]
    plan = plan_batch(requests, {name: 1 for topic in topics for name in topic})
    found = [one[0][0] for one in planned(plan, requests)]  # type: ignore[index]
    assert sum(before != after for before, after in pairwise(found)) < 8
    assert plan.shared > 3 * served(requests, {name: 1 for topic in topics for name in topic})


@pytest.mark.parametrize("count", [0, 1, MOST_TOGETHER + 5])
def test_any_number_of_requests(count: int) -> None:
    requests = [[n % 7, 7 + n % 3] for n in range(count)]
    plan = plan_batch(requests, dict.fromkeys(range(10), 1))
    assert sorted(plan.schedule.order) == list(range(count))
    assert plan.shared == served(planned(plan, requests), dict.fromkeys(range(10), 1))

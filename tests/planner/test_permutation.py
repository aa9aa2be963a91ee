"""The permutation: nothing lost, nothing twice, and the inverse restores the order."""

from __future__ import annotations

import random

import hypothesis.strategies as st
import pytest
from hypothesis import given

from ctxreuse.planner import Permutation


@given(st.permutations(range(12)))
def test_the_inverse_restores_the_order(order: list[int]) -> None:
    found = Permutation(tuple(order))
    items = [f"document {i}" for i in range(12)]
    assert found.inverse.apply(found.apply(items)) == items
    assert found.inverse.inverse == found
    assert found.moves == (order != sorted(order))


@pytest.mark.parametrize("order", [(0, 0), (1, 2), (0, 2), (-1, 0), (0, 1, 1)])
def test_what_loses_or_repeats_something_is_no_permutation(order: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="no permutation"):
        Permutation(order)


def test_another_number_of_items_is_refused() -> None:
    with pytest.raises(ValueError, match="3 items"):
        Permutation.identity(2).apply([1, 2, 3])


def test_random_orders_of_any_size_come_back() -> None:
    rng = random.Random(3)
    for n in range(40):
        items = list(range(n))
        order = rng.sample(items, n)
        assert Permutation(tuple(order)).inverse.apply(Permutation(tuple(order)).apply(items)) == items

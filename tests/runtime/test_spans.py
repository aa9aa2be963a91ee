"""Spans against plain sets of positions."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from ctxreuse.cost import CostModel
from ctxreuse.runtime.spans import Spans, difference, intersection, positions, union

spans = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=8)


def members(given: list[tuple[int, int]] | Spans) -> set[int]:
    return {at for start, end in given for at in range(start, end)}


def sound(found: Spans) -> Spans:
    assert all(start < end for start, end in found)
    assert all(one[1] < two[0] for one, two in pairwise(found))
    return found


@given(spans, spans)
def test_they_are_sets_of_positions(one: list[tuple[int, int]], two: list[tuple[int, int]]) -> None:
    assert members(sound(union(one))) == members(one)
    assert members(sound(difference(one, two))) == members(one) - members(two)
    assert members(sound(intersection(one, two))) == members(one) & members(two)
    assert positions(one).tolist() == sorted(members(one))
    assert positions(one).dtype == "<i4"


def test_moving_has_a_price_once_some_moves_were_seen() -> None:
    cost = CostModel()
    for n in (16, 64, 300):
        cost.prefill.observe(n, 0, 1e-3 * n)
    for seen in range(3):
        assert cost.relocation_pays(1000, 300, 30, 0)
        cost.relocate.observe(1000, 0.5 + 0.01 * seen)
    assert not cost.relocation_pays(1000, 300, 30, 0)
    assert cost.relocation_pays(100, 300, 30, 0)
    assert cost.relocation_pays(1000, 3000, 30, 0)

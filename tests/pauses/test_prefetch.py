"""Loading before the return, by hand and over any input."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxreuse.pauses import Ahead, load_ahead
from ctxreuse.pauses.hazard import AGES, BUCKETS, bucket, starts_at

MB = 1 << 20


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

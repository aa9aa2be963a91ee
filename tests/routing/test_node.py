"""How much of the time requests wait at a node."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxreuse.cost.lines import PrefillLine
from ctxreuse.routing.node import _BEGINNING, _BUSY_SECONDS, NodeLoad


def integral(spans: list[tuple[float, float]], first: float, now: float) -> float:
    """The share of the time from ``first`` to ``now`` in these spans, a second by what it counts for now."""

    def weight(start: float, end: float) -> float:
        return _BUSY_SECONDS * (math.exp((end - now) / _BUSY_SECONDS) - math.exp((start - now) / _BUSY_SECONDS))

    least = _BUSY_SECONDS * (1 - math.exp(-_BEGINNING / _BUSY_SECONDS))
    return sum(weight(start, end) for start, end in spans) / max(weight(first, now), least)


@given(st.lists(st.tuples(st.floats(0, 300), st.floats(0, 300)), max_size=8), st.floats(0, 2000))
def test_the_busy_share_is_that_of_the_time_with_requests(steps: list[tuple[float, float]], idle: float) -> None:
    load, now, spans = NodeLoad(PrefillLine()), 1000.0, list[tuple[float, float]]()
    for number, (work, pause) in enumerate(steps):
        load.begin(number, 1.0, now)
        assert load.busy(now + work) == pytest.approx(integral([*spans, (now, now + work)], 1000.0, now + work))
        spans.append((now, now + work))
        load.end(number, now + work)
        now += work + pause
    if spans:
        assert load.busy(now + idle) == pytest.approx(integral(spans, 1000.0, now + idle), abs=1e-9)
    else:
        assert load.busy(now) == 0


def test_a_node_that_is_always_busy_is_known_as_such_after_a_minute() -> None:
    """However little was measured of what its prompts take: work done twice costs others from then on."""
    load = NodeLoad(PrefillLine())
    load.begin(1, 1e-4, 0.0)
    assert load.busy(6.0) == pytest.approx(0.1, rel=0.1)
    assert load.busy(60.0) == pytest.approx(1.0)
    assert load.busy(6000.0) == pytest.approx(1.0)

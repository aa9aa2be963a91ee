"""The simulation behind ``python -m benchmarks order``: where its figures can be worked out by hand, they are right."""

from __future__ import annotations

import pytest

from benchmarks import order


@pytest.fixture(scope="module")
def held() -> order._Held:
    return order._Held()


def test_one_fetch_takes_what_the_bound_says(held: order._Held) -> None:
    for blocks in (1, 17, 100):
        link, first = order._alone(held, blocks)
        assert link == pytest.approx(blocks * held.offsets[-1] / order._BANDWIDTH)
        assert first >= max(link, order._LAYERS * order._LAYER_SECONDS)
        # A layer is seen when the payload that ends it is: at most one payload late.
        late = order._scheduled(held, [blocks], [5.0]) - first
        assert -1e-9 <= late <= order._PAYLOAD / order._BANDWIDTH


def test_the_baseline_waits_for_all_before_it(held: order._Held) -> None:
    link, first = order._alone(held, 50)
    layered, whole = order._in_turn(held, [50, 50, 50], [0.0, 0.0, 10.0])
    assert layered == pytest.approx(first + link / 3)
    assert whole == pytest.approx(link + order._LAYERS * order._LAYER_SECONDS + link / 3)


def test_a_small_fetch_does_not_wait_behind_a_large_one(held: order._Held) -> None:
    (large, _), (_, small) = order._alone(held, 250), order._alone(held, 5)
    ours = order._scheduled(held, [250, 5], [0.0, 0.1])
    fifo, _ = order._in_turn(held, [250, 5], [0.0, 0.1])
    payload = order._PAYLOAD / order._BANDWIDTH
    assert fifo - ours > 0.9 * (large - 0.1 - 0.02) / 2 - 3 * payload
    assert ours <= (order._alone(held, 255)[1] + small + 4 * payload) / 2

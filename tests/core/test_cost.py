"""Predictions follow what was observed, survive outliers and restarts, and the least predicted seconds win."""

from __future__ import annotations

import math
import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxreuse.cost import CostModel, DecisionLog, DecisionRecord, FetchPath, LinkEstimate, PrefillLine

A, B, C = 0.008, 0.0018, 2e-7


def real(n: int, p: int = 0) -> float:
    return A + B * n + C * n * (p + n / 2) if n else 0.0


def taught(noise: float = 0.0, seed: int = 1, count: int = 60) -> CostModel:
    model, rng = CostModel(), random.Random(seed)
    for _ in range(count):
        n, p = rng.choice([1, 32, 64, 200, 512, 2048]), rng.choice([0, 0, 64, 512, 2048])
        model.prefill.observe(n, p, real(n, p) * (1 + noise * rng.uniform(-1, 1)))
    return model


@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_a_prefill_line_finds_what_the_machine_does(noise: float) -> None:
    line = taught(noise).prefill
    line.check()
    for n, p in ((16, 0), (100, 1000), (1000, 0), (4096, 0), (64, 4096)):
        assert line.seconds(n, p) == pytest.approx(real(n, p), rel=0.02 + noise)


def test_a_busy_machine_now_and_then_does_not_move_the_line() -> None:
    model = taught(0.03)
    for _ in range(12):
        model.prefill.observe(512, 0, 5 * real(512))
        model.prefill.observe(64, 0, real(64))
        model.prefill.observe(2048, 0, real(2048))
        model.prefill.observe(200, 512, real(200, 512))
    assert model.prefill.seconds(512) == pytest.approx(real(512), rel=0.15)


def test_a_machine_that_stays_slower_is_believed() -> None:
    model = taught()
    for n in (64, 512, 200) * 14:
        model.prefill.observe(n, 0, 3 * real(n))
    assert model.prefill.seconds(512) == pytest.approx(3 * real(512), rel=0.2)


def test_one_observation_serves_other_lengths_in_proportion() -> None:
    line = PrefillLine()
    assert line.seconds(100) is None
    assert line.coefficients is None
    line.observe(2048, 0, 4.0)
    assert line.seconds(1024) == pytest.approx(2.0, rel=0.1)
    assert line.seconds(0) == 0.0


@given(
    st.lists(
        st.tuples(st.integers(-2, 9000), st.integers(-2, 9000), st.floats(allow_nan=True, allow_infinity=True)),
        max_size=120,
    )
)
def test_no_observation_makes_a_prediction_negative(seen: list[tuple[int, int, float]]) -> None:
    line = PrefillLine()
    for n, p, seconds in seen:
        line.observe(n, p, min(seconds, 1e6) if seconds == seconds else seconds)
    line.check()
    predicted = line.seconds(100, 50)
    assert predicted is None or (math.isfinite(predicted) and predicted >= 0)


def test_a_model_survives_a_restart_and_strange_bytes() -> None:
    model, later = taught(), CostModel()
    model.decode.observe(100, 0.02)
    model.disk.observe(1 << 20, 0.001)
    assert later.restore(model.dump())
    assert later.prefill.coefficients == model.prefill.coefficients
    assert later.decode.seconds(100) == pytest.approx(0.02, rel=0.05)
    assert later.disk.seconds(1 << 20) == pytest.approx(0.001, rel=0.05)
    for strange in (b"", b"\xc1", b"hello", msgspec.msgpack.encode([9, [], [], []]), msgspec.msgpack.encode([1, 2])):
        before = later.dump()
        assert not later.restore(strange)
        assert later.dump() == before
    # Rows of the right type that make no sense are left out one by one.
    row = (1.0, 5.0, 5.0, 0.1)
    bad = [(1.0,), (1.0, float("nan"), 1.0, 1.0), (1.0, 1.0, 1.0, -1.0), row]
    fresh = CostModel()
    assert fresh.restore(msgspec.msgpack.encode([1, bad, [], []]))
    assert fresh.prefill.dump() == [row]


def test_bandwidth_follows_a_link_and_drops_at_once() -> None:
    link = LinkEstimate()
    assert (link.bandwidth, link.rtt) == (0.0, 0.0)
    for i in range(100):  # bursts: the mean is 10 MB/s
        link.bytes_seen(1_500_000 if i % 3 else 0, 0.1)
    assert link.bandwidth == pytest.approx(1e7, rel=0.3)
    for _ in range(8):
        link.bytes_seen(10_000, 0.1)
    assert link.bandwidth < 1.5e6
    for _ in range(40):
        link.bytes_seen(1_000_000, 0.1)
    assert link.bandwidth == pytest.approx(1e7, rel=0.1)
    link.bytes_seen(5, 0)
    link.bytes_seen(-5, 1)
    link.bytes_seen(5, math.nan)
    assert link.bandwidth == pytest.approx(1e7, rel=0.1)


def test_how_a_peer_encodes_is_what_it_said_last() -> None:
    link = LinkEstimate()
    packed, lossy = link.encoding
    assert 0 < packed < lossy < 1e-7, "a guess"
    link.encoding_seen(2e-9, 5e-9)
    for bad in ((-1.0, 1.0), (1.0, math.inf), (math.nan, 0.0)):
        link.encoding_seen(*bad)
    assert link.encoding == (2e-9, 5e-9)


def test_rtt_is_the_smallest_of_late() -> None:
    link = LinkEstimate(rtt=0.001)
    for seconds in (0.040, 0.300, 0.045):
        link.rtt_seen(seconds)
    assert link.rtt == 0.001
    for _ in range(16):
        link.rtt_seen(0.050)
    assert link.rtt == 0.050


TOKEN = 46_080.0  # bytes of a token of SmolLM2 in float32


def mbit(rate: float, rtt: float = 0.002) -> FetchPath:
    return FetchPath(TOKEN, rate * 1e6 / 8, rtt)


def test_the_way_follows_the_link() -> None:
    model = taught()
    ways = [model.choose(0, 2048, 2080, mbit(rate), 30).way for rate in (1, 200, 100_000)]
    assert ways[0] == "recompute"
    assert ways[1] == "tail"
    assert ways[2] in ("layers", "tail")
    # A long rest can be computed behind the layers as they come; the ends can only meet in what is fetched.
    assert model.choose(0, 2048, 2500, mbit(20_000), 30).way == "layers"
    # A short prompt never pays a round trip.
    assert model.choose(0, 64, 80, mbit(1000, rtt=0.5), 30).way == "recompute"


@given(
    st.integers(0, 3000),
    st.integers(1, 3000),
    st.integers(1, 800),
    st.floats(1e3, 1e11),
    st.floats(0, 1),
    st.booleans(),
)
def test_the_chosen_way_is_the_cheapest_and_never_dearer_than_computing(
    cached: int, missing: int, rest: int, bandwidth: float, rtt: float, computes: bool
) -> None:
    decision = taught().choose(
        cached, cached + missing, cached + missing + rest, FetchPath(TOKEN, bandwidth, rtt, computes=computes), 30
    )
    assert decision.predicted is not None
    assert decision.deadline == decision.ways["recompute"]
    assert decision.predicted <= decision.ways["recompute"]
    assert decision.predicted <= 1.11 * min(decision.ways.values())
    assert ("tail" in decision.ways) != computes


def test_both_at_once_meets_where_the_times_are_equal() -> None:
    model = taught()
    x = model.meeting_point(0, 2048, 500.0, 0.1)
    assert x is not None
    assert real(x) == pytest.approx(0.1 + (2048 - x) / 500, abs=0.01)
    assert model.meeting_point(0, 2048, 0.0, 0.1) == 2048
    assert model.meeting_point(0, 2048, 1e12, 0.0) <= 1  # type: ignore[operator]
    assert CostModel().meeting_point(0, 64, 1.0, 0.0) is None


def test_nothing_known_means_the_way_that_cannot_lose() -> None:
    assert CostModel().choose(0, 640, 700, mbit(100), 30).way == "tail"
    assert taught().choose(0, 640, 700, FetchPath(TOKEN, 0.0), 30).way == "tail"
    # What the peer makes front to end cannot be met from the front.
    assert CostModel().choose(0, 640, 700, FetchPath(TOKEN, 1e6, computes=True), 30).way == "recompute"
    assert CostModel().patience(1000, 0) == pytest.approx(0.05)
    assert taught().patience(1000, 0) == pytest.approx(0.05 * real(1000), rel=0.05)
    assert CostModel().loads(64, 1 << 20)
    assert CostModel().local(1, 1, 0) is None


def test_a_slow_disk_loses_to_computing() -> None:
    model = taught()
    for _ in range(5):
        model.disk.observe(64 << 20, 30.0)
    assert not model.loads(512, 23 << 20)
    for _ in range(60):
        model.disk.observe(64 << 20, 0.01)
    assert model.loads(512, 23 << 20)
    assert model.local(23 << 20, 100, 512) == pytest.approx(0.0036 + real(100, 512), rel=0.05)


def test_the_log_keeps_the_last_and_its_median_error() -> None:
    log = DecisionLog(capacity=3)
    assert log.error() is None
    for predicted, took in ((9.0, 1.0), (None, 1.0), (1.1, 1.0), (2.0, 1.0)):
        log.add(DecisionRecord("tail", "tail", 640, predicted, took, "cloud"))
    assert [record.predicted for record in log.records()] == [None, 1.1, 2.0]
    assert log.error() == pytest.approx(0.55)

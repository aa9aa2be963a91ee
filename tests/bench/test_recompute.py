"""Recompute policies that only benchmarks know."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.rivals.recompute import parse
from ctxreuse.errors import ConfigError
from ctxreuse.reuse import parse_policy
from support.examples import examples
from support.made_up import Span, never

RUNS = [Span(10, 110), Span(200, 300)]
NEAR = [Span(5, 10), Span(20, 30)]
NAMES = [
    "random-15%",
    "last-5%",
    "v-15%>8%",
    "v-15%>8%@2>6",
    "v-30%>20%>12.5%",
    "v-25%@2/8",
    "first-4+v-5%@3+random-1%",
    "ask*v-10%",
    "ask*k-7.5%@3",
    "first-4+ask*v-8%+last-9",
    "v-8%>5%+drift",
]


@pytest.mark.parametrize("name", NAMES)
def test_names(name: str) -> None:
    assert parse(name).name == name
    assert parse(parse(name).name) == parse(name)
    with pytest.raises(ConfigError, match="no such recompute policy"):
        parse_policy(name)


def test_kinds_of_the_product_are_known_too() -> None:
    for name in ("rotate", "first-4+ask-5%+drift", "k-5%@3"):
        assert parse(name) == parse_policy(name)


@pytest.mark.parametrize(
    "name",
    [
        *(
            "v-5%>8%",
            "v-8%>5%@3",
            "v-8%>5%@3>3",
            "v-8%>5%@3>2",
            "v-5%@2>3",
            "random-0%",
            "v-5%/",
            "v-5%/0",
            "v-5%@2/-1",
        ),
        *(
            "ask*-5%",
            "ask*q-5%",
            "ask*v-5%@",
            "ask-10%>5%",
            "ask-5%/64",
            "v-5%@2/-1",
            "last-0%",
            "last-101%",
            "v-5%/x",
            "none+v-5%",
        ),
    ],
)
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="no such recompute policy"):
        parse(name)


@examples("light")
@given(data=st.data(), name=st.sampled_from(NAMES), budget=st.integers(-3, 500))
def test_rows_lie_in_the_runs_and_in_the_budget(data: st.DataObject, name: str, budget: int) -> None:
    runs, at = [], data.draw(st.integers(0, 50))
    for length, gap in data.draw(st.lists(st.tuples(st.integers(1, 80), st.integers(0, 9)), max_size=6)):
        runs.append(Span(at + gap, at + gap + length))
        at = runs[-1].end
    seed = data.draw(st.integers(0, 99))

    def deviations(rows, layer, role):
        return np.random.default_rng([seed, layer]).random(1 << 10, np.float32)[rows % 1024]

    def attention(rows):
        return deviations(rows, 99, "v")

    policy = parse(name)
    rows = policy.rows(runs, budget, deviations, attention)
    assert rows.dtype == np.int32
    assert (np.diff(rows) > 0).all()
    assert set(rows.tolist()) <= {position for run in runs for position in range(run.start, run.end)}
    assert (rows == policy.rows(runs, budget, deviations, attention)).all()
    most = policy.rows(runs, 10_000, deviations, attention)
    assert len(rows) == min(len(most), max(budget, 0))


def test_random_rows_hang_on_the_seed() -> None:
    one, two = (parse("random-15%", seed=seed).rows(RUNS, 100, never, never) for seed in (1, 2))
    assert len(one) == len(two) == 30
    assert one.tolist() != two.tolist()
    assert len(parse("first-3+random-10%").rows(RUNS, 100, never, never)) >= 20


def test_deviation_layer_after_layer() -> None:
    seen = []

    def deviations(rows, layer, role):
        seen.append((len(rows), layer, role))
        return rows.astype(np.float32) * (1 if layer % 2 == 0 else -1)

    # 20 rows that are early at layer 1, of these the 8 that are late at layer 4.
    assert parse("k-10%>4%").rows(RUNS, 100, deviations, never).tolist() == list(range(22, 30))
    assert seen == [(200, 1, "k"), (20, 4, "k")]


def test_deviation_among_the_nearest() -> None:
    seen: list[list[int]] = []

    def far(rows, layer, role):
        seen.append(rows.tolist())
        return np.abs(rows - 25).astype(np.float32)

    policy = parse("v-25%@2/8")
    assert policy.rows(NEAR, 100, far, never).tolist() == [22, 29]  # of equal ones the first
    assert seen == [list(range(22, 30))]
    assert policy.work(80, 2, 20) == pytest.approx(0.1 * (2 / 20 + 0.25))
    assert policy.work(4, 2, 20) == pytest.approx(2 / 20 + 0.25)
    assert parse("first-2+v-25%/8").rows(NEAR, 100, far, never).tolist() == [5, 6, 20, 21, 22, 29]
    assert parse("v-50%/100").rows(NEAR, 100, far, never).tolist() == [5, 6, 7, 8, 9, 20, 21, 29]
    assert parse("last-20%").rows(NEAR, 100, never, never).tolist() == [27, 28, 29]
    assert parse("first-8+last-20%").rows(NEAR, 100, never, never).tolist() == [*range(5, 10), *range(20, 30)]


def test_attention_times_deviation() -> None:
    probed = [Span(5, 10), Span(20, 35)]

    def attention(rows):
        weights = {7: 9.0, 24: 4.0, 31: 3.0}
        return np.array([weights.get(int(row), 1 / (1 + row)) for row in rows], np.float32)

    def far(rows, layer, role):
        """Row 7 is as it would be computed; row 31 lies 100 times as far as the others."""
        assert (layer, role) in ((1, "v"), (3, "k"))
        return np.where(rows == 7, 0, np.where(rows == 31, 100, 1)).astype(np.float32)

    assert parse("ask*v-5%").rows(probed, 1000, far, attention).tolist() == [31]
    assert parse("ask*k-10%@3").rows(probed, 1000, far, attention).tolist() == [24, 31]


@pytest.mark.parametrize(
    ("name", "work"),
    [("random-15%", 0.15), ("v-15%>8%", 1 / 30 + 0.15 * 3 / 30 + 0.08), ("last-10%", 0.1)],
)
def test_work(name: str, work: float) -> None:
    assert parse(name).work(200, 2, 30) == pytest.approx(work)
    assert parse("ask*v-10%@3").work(1000, 4, 30) == pytest.approx(parse("ask-10%").work(1000, 4, 30) + 3 / 30)

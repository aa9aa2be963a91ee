"""Repairs choose rows of runs within their budget, are what their names say, and cost what they say."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_up import Span, never

from ctxreuse.cost import PrefillLine
from ctxreuse.errors import ConfigError
from ctxreuse.reuse import budget_tokens, parse

RUNS = [Span(10, 110), Span(200, 300)]
NAMES = [
    "none",
    "rotate",
    "first-8",
    "every-8",
    "last-8",
    "last-5%",
    "v-5%",
    "k-15%",
    "random-15%",
    "v-5%@3",
    "v-15%>8%",
    "v-15%>8%@2>6",
    "v-30%>20%>12.5%",
    "v-25%@2/8",
    "first-4+v-5%",
    "first-4+v-5%@3+random-1%",
    "ask-10%",
    "ask*v-10%",
    "ask*k-7.5%@3",
    "first-4+ask*v-8%+last-9",
    "v-5%+drift",
    "every-12+drift",
    "first-4+every-24+ask-5%",
    "first-4+ask-8%+drift",
]


def by_position(rows, layer, role):
    """Later rows deviate more at even layers, earlier ones at odd layers."""
    return rows.astype(np.float32) * (1 if layer % 2 == 0 else -1)


@pytest.mark.parametrize("name", NAMES)
def test_a_name_names_one_repair(name: str) -> None:
    repair = parse(name)
    assert repair.name == name
    assert parse(repair.name) == repair
    assert repair.turned == (name != "none")
    assert [other for other in NAMES if parse(other) == repair] == [name]


@pytest.mark.parametrize(
    "name",
    [
        *("", "first", "first-", "first-0", "first--1", "last-0", "v", "v-", "v-5", "v-0%", "v-101%", "q-5%", "v-5%@"),
        *("v-5%>8%", "v-8%>5%@3", "v-8%>5%@3>3", "v-8%>5%@3>2", "v-5%@2>3", "random-0%", "none+v-5%", "rotate+first-4"),
        *(
            "first-4+",
            "+",
            "v-5%@a",
            "v-5%@99999",
            "V-5%",
            "v-5 %",
            "v-5%\n",
            "ｖ-5%",
            "first-٣",
            "first-4+" * 40 + "first-4",
        ),
        *("v-5%/", "v-5%/0", "v-5%@2/-1"),
        *("ask", "ask-", "ask-0%", "ask*-5%", "ask*q-5%", "ask-5%@2", "ask*v-5%@", "ask-5", "ask-10%>5%", "ask-5%/64"),
        *("every", "every-0", "every--2", "every-5%"),
        *("drift", "+drift", "rotate+drift", "drift+v-5%", "v-5%+drift+drift", "v-5%+drift+first-4"),
    ],
)
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="no such repair"):
        parse(name)


@settings(max_examples=150, deadline=None)
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

    repair = parse(name)
    rows = repair.rows(runs, budget, deviations, attention)
    assert rows.dtype == np.int32
    assert (np.diff(rows) > 0).all()
    assert len(rows) <= max(budget, 0)
    inside = {position for run in runs for position in range(run.start, run.end)}
    assert set(rows.tolist()) <= inside
    assert (rows == repair.rows(runs, budget, deviations, attention)).all()
    # The budget is used where the repair wants it, and more budget takes nothing away.
    most = repair.rows(runs, 10_000, deviations, attention)
    assert len(rows) == min(len(most), max(budget, 0))


def test_nothing() -> None:
    for name in ("none", "rotate"):
        assert parse(name).rows(RUNS, 100, never, never).tolist() == []
        assert parse(name).work(200, 2, 30) == 0


def test_first_rows_of_each_run() -> None:
    assert parse("first-3").rows(RUNS, 100, never, never).tolist() == [10, 11, 12, 200, 201, 202]
    assert parse("first-3").rows(RUNS, 3, never, never).tolist() == [10, 11, 200]  # the first ones matter most
    assert parse("first-9").rows([Span(5, 8)], 100, never, never).tolist() == [5, 6, 7]


def test_the_rows_that_deviate_most() -> None:
    assert parse("v-2%@2").rows(RUNS, 100, by_position, never).tolist() == [296, 297, 298, 299]
    assert parse("v-2%").rows(RUNS, 100, by_position, never).tolist() == [10, 11, 12, 13]
    assert parse("v-2%").rows(RUNS, 2, by_position, never).tolist() == [10, 11]
    asked = []

    def deviations(rows, layer, role):
        asked.append((len(rows), layer, role))
        return by_position(rows, layer, role)

    # 20 rows that are early at layer 1, of these the 8 that are late at layer 4.
    assert parse("k-10%>4%").rows(RUNS, 100, deviations, never).tolist() == list(range(22, 30))
    assert asked == [(200, 1, "k"), (20, 4, "k")]


def test_rows_that_are_no_number_deviate_most() -> None:
    def deviations(rows, layer, role):
        return np.where(rows == 250, np.nan, 0.0).astype(np.float32)

    assert parse("v-0.5%").rows(RUNS, 100, deviations, never).tolist() == [250]


def test_of_a_sum_each_part_adds_rows_of_its_own() -> None:
    rows = parse("first-3+v-2%").rows(RUNS, 100, by_position, never)
    assert rows.tolist() == [10, 11, 12, 13, 14, 15, 16, 200, 201, 202]
    assert parse("first-3+v-2%").rows(RUNS, 7, by_position, never).tolist() == [10, 11, 12, 13, 200, 201, 202]
    assert len(parse("first-3+random-10%").rows(RUNS, 100, never, never)) >= 20


def test_random_rows_hang_on_the_seed() -> None:
    one, two = (parse("random-15%", seed=seed).rows(RUNS, 100, never, never) for seed in (1, 2))
    assert len(one) == len(two) == 30
    assert one.tolist() != two.tolist()


@pytest.mark.parametrize(
    ("name", "work"),
    [
        ("first-8", 16 / 200),
        ("random-15%", 0.15),
        ("v-15%", 1 / 30 + 0.15),
        ("v-15%@3", 3 / 30 + 0.15),
        ("v-15%>8%", 1 / 30 + 0.15 * 3 / 30 + 0.08),
        ("first-4+v-5%", 8 / 200 + 1 / 30 + 0.05),
        ("first-200", 1.0),
        ("last-10", 0.05),
    ],
)
def test_work_counts_layers(name: str, work: float) -> None:
    """Rows that are compared go through the layers before the check layer, those that are chosen through all."""
    assert parse(name).work(200, 2, 30) == pytest.approx(work)
    assert parse(name).work(0, 0, 30) <= 1


def test_budgets() -> None:
    line = PrefillLine()
    for n in (16, 64, 256, 1024):
        line.observe(n, 0, 0.01 + 0.001 * n)
    assert budget_tokens("10%", 200) == 20
    assert budget_tokens("0.3%", 1000) == 3
    assert budget_tokens("64", 200) == 64
    assert budget_tokens("64", 20) == 20
    assert budget_tokens("110ms", 1000, line) == pytest.approx(100, abs=2)
    assert budget_tokens("1ms", 1000, line) == 0
    assert budget_tokens("1h", 1000, line) == 1000
    assert budget_tokens("1s", 1000) == budget_tokens("1s", 1000, PrefillLine()) == 0  # nothing is known yet
    assert budget_tokens("1s", 0, line) == 0


@pytest.mark.parametrize("budget", ["", "%", "-5", "5 %", "1000.5%", "much", "9" * 40, "²", "3 apples", "1e3", "٣%"])
def test_other_budgets_are_refused(budget: str) -> None:
    with pytest.raises(ConfigError, match="no budget"):
        budget_tokens(budget, 100)

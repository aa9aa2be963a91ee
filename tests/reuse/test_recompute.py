"""Recompute policies choose rows within their budget, are what their names say, and cost what they say."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from ctxreuse.cost import PrefillLine
from ctxreuse.errors import ConfigError
from ctxreuse.identity.model import LayerSpec
from ctxreuse.reuse import (
    Attention,
    Deviations,
    MaxSeconds,
    MaxTokens,
    Share,
    parse_budget,
    parse_policy,
    probe_layers,
)
from ctxreuse.reuse.recompute import _PROBE_DEPTH, PROBE_QUERIES
from support.examples import examples
from support.made_up import SPACE, Span, never

RUNS = [Span(10, 110), Span(200, 300)]
NAMES = [
    "none",
    "rotate",
    "first-8",
    "every-8",
    "last-8",
    "v-5%",
    "k-15%",
    "v-5%@3",
    "first-4+v-5%",
    "first-4+ask-8%+last-9",
    "k-7.5%@3",
    "ask-10%",
    "v-5%+drift",
    "every-12+drift",
    "first-4+every-24+ask-5%",
    "first-4+ask-8%+drift",
]


def by_position(rows, layer, role):
    """Later rows deviate more at even layers, earlier ones at odd layers."""
    return rows.astype(np.float32) * (1 if layer % 2 == 0 else -1)


@pytest.mark.parametrize("name", NAMES)
def test_a_name_names_one_policy(name: str) -> None:
    policy = parse_policy(name)
    assert policy.name == name
    assert parse_policy(policy.name) == policy
    assert policy.rotates == (name != "none")
    assert [other for other in NAMES if parse_policy(other) == policy] == [name]


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
        *("last-5%", "random-5%", "v-8%>5%", "v-5%/64", "ask*v-5%"),
        *("drift", "+drift", "rotate+drift", "drift+v-5%", "v-5%+drift+drift", "v-5%+drift+first-4"),
    ],
)
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="no such recompute policy"):
        parse_policy(name)


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

    policy = parse_policy(name)
    rows = policy.rows(runs, budget, deviations, attention)
    assert rows.dtype == np.int32
    assert (np.diff(rows) > 0).all()
    assert len(rows) <= max(budget, 0)
    inside = {position for run in runs for position in range(run.start, run.end)}
    assert set(rows.tolist()) <= inside
    assert (rows == policy.rows(runs, budget, deviations, attention)).all()
    # The budget is used where the repair wants it, and more budget takes nothing away.
    most = policy.rows(runs, 10_000, deviations, attention)
    assert len(rows) == min(len(most), max(budget, 0))


def test_nothing() -> None:
    for name in ("none", "rotate"):
        assert parse_policy(name).rows(RUNS, 100, never, never).tolist() == []
        assert parse_policy(name).work(200, 2, 30) == 0


def test_first_rows_of_each_run() -> None:
    assert parse_policy("first-3").rows(RUNS, 100, never, never).tolist() == [10, 11, 12, 200, 201, 202]
    assert parse_policy("first-3").rows(RUNS, 3, never, never).tolist() == [10, 11, 200]  # the first ones matter most
    assert parse_policy("first-9").rows([Span(5, 8)], 100, never, never).tolist() == [5, 6, 7]


def test_the_rows_that_deviate_most() -> None:
    assert parse_policy("v-2%@2").rows(RUNS, 100, by_position, never).tolist() == [296, 297, 298, 299]
    assert parse_policy("v-2%").rows(RUNS, 100, by_position, never).tolist() == [10, 11, 12, 13]
    assert parse_policy("v-2%").rows(RUNS, 2, by_position, never).tolist() == [10, 11]


def test_rows_that_are_no_number_deviate_most() -> None:
    def deviations(rows, layer, role):
        return np.where(rows == 250, np.nan, 0.0).astype(np.float32)

    assert parse_policy("v-0.5%").rows(RUNS, 100, deviations, never).tolist() == [250]


def test_of_a_sum_each_part_adds_rows_of_its_own() -> None:
    rows = parse_policy("first-3+v-2%").rows(RUNS, 100, by_position, never)
    assert rows.tolist() == [10, 11, 12, 13, 14, 15, 16, 200, 201, 202]
    assert parse_policy("first-3+v-2%").rows(RUNS, 7, by_position, never).tolist() == [10, 11, 12, 13, 200, 201, 202]


@pytest.mark.parametrize(
    ("name", "work"),
    [
        ("first-8", 16 / 200),
        ("v-15%", 1 / 30 + 0.15),
        ("v-15%@3", 3 / 30 + 0.15),
        ("first-4+v-5%", 8 / 200 + 1 / 30 + 0.05),
        ("first-200", 1.0),
        ("last-10", 0.05),
    ],
)
def test_work_counts_layers(name: str, work: float) -> None:
    """Rows that are compared go through the layers before the check layer, those that are chosen through all."""
    assert parse_policy(name).work(200, 2, 30) == pytest.approx(work)
    assert parse_policy(name).work(0, 0, 30) <= 1


def test_budgets() -> None:
    line = PrefillLine()
    for n in (16, 64, 256, 1024):
        line.observe(n, 0, 0.01 + 0.001 * n)
    assert Share(0.1).tokens(200) == 20
    assert Share(0.003).tokens(1000) == 3
    assert MaxTokens(64).tokens(200) == 64
    assert MaxTokens(64).tokens(20) == 20
    assert MaxSeconds(0.11).tokens(1000, line) == pytest.approx(100, abs=2)
    assert MaxSeconds(0.001).tokens(1000, line) == 0
    assert MaxSeconds(3600).tokens(1000, line) == 1000
    assert MaxSeconds(1).tokens(1000) == MaxSeconds(1).tokens(1000, PrefillLine()) == 0  # nothing is known yet
    assert MaxSeconds(1).tokens(0, line) == 0
    for share in (-0.1, 1.1, math.nan):
        with pytest.raises(ConfigError, match="no share"):
            Share(share)


def test_budgets_as_settings_write_them() -> None:
    assert [parse_budget(text) for text in ("", "10%", "64", "110ms")] == [
        None,
        Share(0.1),
        MaxTokens(64),
        MaxSeconds(0.11),
    ]


@pytest.mark.parametrize("budget", ["%", "-5", "5 %", "1000.5%", "much", "9" * 40, "²", "3 apples", "1e3", "٣%"])
def test_other_budgets_are_refused(budget: str) -> None:
    with pytest.raises(ConfigError, match="no budget"):
        parse_budget(budget)


NEAR = [Span(5, 10), Span(20, 30)]


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("last-3", [27, 28, 29]),
        ("last-12", [8, 9, *range(20, 30)]),
        ("last-100", [*range(5, 10), *range(20, 30)]),
        ("first-2+last-4", [5, 6, 20, 21, 26, 27, 28, 29]),
        ("first-8+last-3", [*range(5, 10), *range(20, 30)]),
    ],
)
def test_last_rows(name: str, rows: list[int]) -> None:
    policy = parse_policy(name)
    found = policy.rows(NEAR, 100, never, never)
    assert (found.dtype, found.tolist()) == (np.dtype(np.int32), rows)
    assert policy.work(15, 2, 30) == pytest.approx(min(len(rows) / 15, 1), abs=0.21)  # parts that overlap count twice
    assert policy.rows(NEAR, 0, never, never).tolist() == []


def test_a_small_budget_takes_the_nearest() -> None:
    assert parse_policy("last-6").rows(NEAR, 2, never, never).tolist() == [28, 29]
    assert parse_policy("first-2+last-4").rows(NEAR, 6, never, never).tolist() == [5, 6, 20, 21, 28, 29]


PROBED = [Span(5, 10), Span(20, 35)]


def attention(rows: np.ndarray) -> np.ndarray:
    """Most of it falls on 7, 24 and 31, in this order."""
    weights = {7: 9.0, 24: 4.0, 31: 3.0}
    return np.array([weights.get(int(row), 1 / (1 + row)) for row in rows], np.float32)


def rows(name: str, budget: int = 1000, deviations: Deviations = never, attention: Attention = attention) -> list[int]:
    return parse_policy(name).rows(PROBED, budget, deviations, attention).tolist()


def test_rows_that_get_most_attention() -> None:
    assert rows("ask-15%") == [7, 24, 31]
    assert rows("ask-10%") == [7, 24]
    assert rows("ask-15%", 1) == [7]
    assert rows("ask-15%", 0, attention=never) == []
    assert parse_policy("ask-15%").rows([], 9, never, never).tolist() == []


def test_beside_others_the_next_ones_are_taken() -> None:
    assert rows("last-4+ask-10%") == [7, 24, 31, 32, 33, 34]
    assert rows("first-3+ask-10%") == [5, 6, 7, 20, 21, 22, 24, 31]


def test_rows_that_are_no_numbers_are_computed() -> None:
    def damaged(rows: np.ndarray) -> np.ndarray:
        return np.where(rows == 8, np.nan, attention(rows)).astype(np.float32)

    assert rows("ask-5%", attention=damaged) == [8]


def test_one_row_of_every_few() -> None:
    assert rows("every-6") == [8, 23, 29]
    assert rows("every-6", 2) == [8, 23]
    assert rows("every-1") == [*range(5, 10), *range(20, 35)]
    assert rows("every-40") == []
    assert rows("every-6+ask-10%") == [7, 8, 23, 24, 29]
    assert rows("every-6", 0) == []
    assert parse_policy("every-6").rows([], 9, never, never).tolist() == []
    assert parse_policy("every-6").work(600, 3, 30) == pytest.approx(1 / 6)


def test_what_an_attention_probe_costs() -> None:
    probe = PROBE_QUERIES * _PROBE_DEPTH
    assert parse_policy("ask-10%").work(1000, 4, 30) == pytest.approx(0.1 + probe / 1000)
    assert parse_policy("ask-10%").work(2, 1, 30) == 1.0


@pytest.mark.parametrize(
    ("layers", "probed"),
    [("f", 1), ("f" * 30, 20), ("f" * 31, 21), ("sssssf" * 3, 12), ("s" * 30, 20), ("l" * 8 + "f", 9)],
)
def test_one_probed_layer_sees_all_tokens_if_there_is_one(layers: str, probed: int) -> None:
    kinds = {
        "f": LayerSpec("full", 1, 8, 8),
        "s": LayerSpec("full", 1, 8, 8, window=16),
        "l": LayerSpec("linear"),
    }
    assert probe_layers(structs.replace(SPACE, layers=tuple(kinds[kind] for kind in layers))) == probed


def test_drift_changes_no_rows() -> None:
    policy = parse_policy("first-4+ask-5%+drift")
    assert policy.corrects_drift
    assert not parse_policy("first-4+ask-5%").corrects_drift
    assert rows("first-4+ask-5%+drift") == rows("first-4+ask-5%")
    assert policy.work(200, 2, 30) == parse_policy("first-4+ask-5%").work(200, 2, 30)

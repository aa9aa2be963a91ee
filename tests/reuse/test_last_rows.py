"""Repairs that recompute the rows nearest to what is said next: which rows, what budget, what names."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from made_up import Span, never

from ctxreuse.errors import ConfigError
from ctxreuse.reuse import parse

RUNS = [Span(5, 10), Span(20, 30)]


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("last-3", [27, 28, 29]),
        ("last-12", [8, 9, *range(20, 30)]),
        ("last-100", [*range(5, 10), *range(20, 30)]),
        ("last-20%", [27, 28, 29]),
        ("first-2+last-4", [5, 6, 20, 21, 26, 27, 28, 29]),
        ("first-8+last-20%", [*range(5, 10), *range(20, 30)]),
    ],
)
def test_rows_and_work(name: str, rows: list[int]) -> None:
    repair = parse(name)
    assert repair.name == name
    found = repair.rows(RUNS, 100, never, never)
    assert (found.dtype, found.tolist()) == (np.dtype(np.int32), rows)
    assert repair.work(15, 2, 30) == pytest.approx(min(len(rows) / 15, 1), abs=0.21)  # parts that overlap count twice
    assert repair.rows(RUNS, 0, never, never).tolist() == []


def test_a_small_budget_takes_the_nearest() -> None:
    assert parse("last-6").rows(RUNS, 2, never, never).tolist() == [28, 29]
    assert parse("first-2+last-4").rows(RUNS, 6, never, never).tolist() == [5, 6, 20, 21, 28, 29]


def test_deviation_among_the_nearest() -> None:
    looked: list[list[int]] = []

    def far(rows: Any, layer: int, role: str) -> np.ndarray:
        looked.append(rows.tolist())
        return np.abs(rows - 25).astype(np.float32)

    repair = parse("v-25%@2/8")
    assert repair == parse(repair.name)
    assert repair.rows(RUNS, 100, far, never).tolist() == [22, 29]  # of equal ones the first
    assert looked == [list(range(22, 30))]
    assert repair.work(80, 2, 20) == pytest.approx(0.1 * (2 / 20 + 0.25))
    assert repair.work(4, 2, 20) == pytest.approx(2 / 20 + 0.25)
    assert parse("first-2+v-25%/8").rows(RUNS, 100, far, never).tolist() == [5, 6, 20, 21, 22, 29]
    assert parse("v-50%/100").rows(RUNS, 100, far, never).tolist() == [5, 6, 7, 8, 9, 20, 21, 29]
    assert parse("v-5%") != parse("v-5%/64")


@pytest.mark.parametrize(
    "name", ["v-5%/0", "v-5%/", "v-5%/x", "last-0", "last-", "last-0%", "last-101%", "last-1234567", "last-3@2"]
)
def test_names_that_are_none(name: str) -> None:
    with pytest.raises(ConfigError, match="no such repair"):
        parse(name)

"""No window of tokens has more wrong ones than the budget, whatever is taken, verified or lost."""

from __future__ import annotations

from math import floor
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxreuse.errors import ConfigError
from ctxreuse.exits import WINDOW, BudgetLedger, check_budget
from support.examples import examples


def worst(wrong: list[bool], window: int) -> int:
    """The most wrong ones in a window, by counting all of them."""
    return max(sum(wrong[start : start + window]) for start in range(max(len(wrong) - window, 0) + 1))


@examples("light")
@given(
    budget=st.sampled_from([0.002, 0.01, 0.02, 0.05, 0.2]),
    bad=st.sampled_from([0.0, 0.02, 0.5, 1.0]),
    lost=st.sampled_from([0.0, 0.3]),
    seed=st.integers(0, 1 << 20),
    closed=st.booleans(),
)
def test_no_window_exceeds_the_budget(budget: float, bad: float, lost: float, seed: int, closed: bool) -> None:
    rng, ledger = Random(seed), BudgetLedger(budget, closed=closed)
    before = [True] * ledger.spent + [False] * (WINDOW - ledger.spent) if closed else []
    before.reverse()
    wrong, pending = list[bool](), list[tuple[int, bool]]()
    for _ in range(1600):
        if ledger.room and rng.random() < 0.6:
            pending.append((ledger.take(), rng.random() < bad))
            wrong.append(pending[-1][1])
        else:
            ledger.exact()
            wrong.append(False)
        if rng.random() < 0.3:
            for place, is_wrong in pending:
                if not is_wrong and rng.random() >= lost:
                    ledger.verify(place)
            pending = []
        ledger.check()
        if rng.random() < 0.01:
            ledger = BudgetLedger.restore(*ledger.dump())
    assert worst(before + wrong, WINDOW) <= floor(budget * WINDOW + 1e-9)
    if not closed:
        for n in (1, 50, 99, 100, 250, 499):
            assert sum(wrong[:n]) <= floor(budget * n + 1e-9)


def test_what_is_verified_can_be_taken_again() -> None:
    ledger = BudgetLedger(0.01)
    for _ in range(99):
        assert not ledger.room
        ledger.exact()
    place = ledger.take()
    assert not ledger.room
    ledger.verify(place)
    assert ledger.room
    ledger.verify(place)  # twice is once


def test_a_closed_ledger_takes_nothing_for_a_window() -> None:
    ledger = BudgetLedger(0.2, closed=True)
    for _ in range(WINDOW - 1):
        assert not ledger.room
        ledger.exact()
    ledger.exact()
    assert ledger.room


@pytest.mark.parametrize("budget", [0.0, -0.01, 0.3, float("nan"), float("inf")])
def test_budgets_without_a_meaning(budget: float) -> None:
    with pytest.raises(ConfigError, match="exits is"):
        check_budget(budget)


@pytest.mark.parametrize(
    "dumped",
    [(0.0, 1, []), (0.01, -1, []), (0.01, 5, [3, 1]), (0.01, 5, [5]), (0.01, 5, [-1]), (0.01, 9**9, list(range(501)))],
)
def test_what_is_no_ledger_is_refused(dumped: tuple[float, int, list[int]]) -> None:
    with pytest.raises(ValueError, match="ledger"):
        BudgetLedger.restore(*dumped)

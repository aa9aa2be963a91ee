"""Rates of return against closed forms, by hand and over any counts."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxreuse.pauses import Estimator, Pause
from ctxreuse.pauses.hazard import AGES, BUCKETS, bucket, cumulated, exposure, prior, shrink, survival, worth

ages = st.floats(0, 1e6)
counts = st.lists(st.integers(0, 50), min_size=BUCKETS, max_size=BUCKETS).map(lambda x: np.array(x, float))
rates = st.lists(st.floats(1e-9, 10.0), min_size=BUCKETS, max_size=BUCKETS).map(np.array)


@given(age=ages)
def test_an_age_lies_in_its_bucket(age: float) -> None:
    at = bucket(age)
    assert AGES[at] <= age
    assert age < AGES[at + 1] or at == BUCKETS - 1


@given(since=ages, more=ages)
def test_no_second_is_lost_or_counted_twice(since: float, more: float) -> None:
    seconds = exposure(since, since + more)
    assert seconds.min() >= 0
    assert seconds.sum() == pytest.approx(more, rel=1e-9, abs=1e-6)
    half = exposure(since, since + more / 2) + exposure(since + more / 2, since + more)
    assert half == pytest.approx(seconds, rel=1e-9, abs=1e-5)


@pytest.mark.parametrize("rate", [1e-4, 0.01, 0.3])
def test_without_memory_survival_and_worth_are_those_of_the_exponential(rate: float) -> None:
    flat = np.full(BUCKETS, rate)
    for age, more in ((0.0, 1.0), (3.7, 20.0), (100.0, 1000.0)):
        assert survival(flat, age, more) == pytest.approx(math.exp(-rate * more), rel=1e-9)
        assert cumulated(flat, age) == pytest.approx(rate * age, rel=1e-12)
    # Whoever waits without memory is worth the same at any age: the rate.
    assert worth(flat) == pytest.approx(flat, rel=1e-9)


def test_worth_is_the_best_of_all_plans() -> None:
    rng = np.random.default_rng(3)
    for _ in range(20):
        some = rng.exponential(0.05, BUCKETS)
        best = worth(some)
        for a in (0, 5, 17, 39):
            reached, held, returned, plans = 1.0, 0.0, 0.0, []
            for b in range(a, BUCKETS):
                width = AGES[b + 1] - AGES[b]
                chance = -math.expm1(-some[b] * width)
                returned += reached * chance
                held += reached * chance / some[b]
                reached *= 1 - chance
                plans.append(returned / held)
            assert best[a] == pytest.approx(max(plans), rel=1e-6)


@given(rates)
def test_worth_is_at_least_the_rate_of_now_and_at_most_the_best_to_come(some: np.ndarray) -> None:
    best = worth(some)
    later = np.maximum.accumulate(some[::-1])[::-1]
    assert (best >= some * (1 - 1e-6)).all()
    assert (best <= later * (1 + 1e-6)).all()


@given(counts, rates, st.floats(0.1, 100.0))
def test_shrinkage_lies_between_what_was_counted_and_the_coarser_rate(
    returns: np.ndarray, coarser: np.ndarray, strength: float
) -> None:
    seconds = returns * 7.0 + 1.0
    found = shrink(returns, seconds, coarser, strength)
    wide = returns.copy()
    wide[1:] += returns[:-1]
    wide[:-1] += returns[1:]
    expected = seconds * coarser
    around = expected.copy()
    around[1:] += expected[:-1]
    around[:-1] += expected[1:]
    own = coarser * wide / around
    assert (found >= np.minimum(own, coarser) * (1 - 1e-9)).all()
    assert (found <= np.maximum(own, coarser) * (1 + 1e-9)).all()
    assert shrink(np.zeros(BUCKETS), np.zeros(BUCKETS), coarser, strength) == pytest.approx(coarser)


def test_shrinkage_by_hand() -> None:
    returns, seconds = np.zeros(BUCKETS), np.zeros(BUCKETS)
    returns[10], seconds[10] = 6.0, 100.0
    found = shrink(returns, seconds, np.full(BUCKETS, 0.02), strength=4.0)
    # Two returns were expected: (6 + 4) / (2 + 4); the neighbours take part, the rest does not.
    assert found[9:12] == pytest.approx([0.02 * 10 / 6] * 3)
    assert found[[8, 12]] == pytest.approx([0.02, 0.02])


def test_the_rate_of_an_exponential_is_found_although_most_pauses_are_cut_off() -> None:
    rng, truth = np.random.default_rng(1), 0.02
    estimator, pause = Estimator(), Pause("tool")
    for length in rng.exponential(1 / truth, 4000):
        # Each is watched for 20 seconds: two of three are seen to last longer, and no more.
        estimator.away(pause, 0.0, min(length, 20.0))
        if length < 20.0:
            estimator.returned(pause, length)
    found = estimator.rates(pause)
    assert found[2 : bucket(15.0)] == pytest.approx(np.full(bucket(15.0) - 2, truth), rel=0.3)
    assert estimator.survival(pause, 0.0, 15.0) == pytest.approx(math.exp(-truth * 15.0), rel=0.03)
    # Without the censored seconds it would be found three times as high.
    seen = [length for length in rng.exponential(1 / truth, 4000) if length < 20.0]
    assert 1 / np.mean(seen) > 3 * truth


def test_a_mixture_is_told_apart_by_age() -> None:
    rng, estimator, pause = np.random.default_rng(2), Estimator(), Pause("tool")
    for _ in range(3000):
        length = rng.exponential(2.0) if rng.random() < 0.8 else rng.exponential(2000.0)
        estimator.away(pause, 0.0, length)
        estimator.returned(pause, length)
    fresh, old = estimator.survival(pause, 0.0, 60.0), estimator.survival(pause, 60.0, 60.0)
    assert fresh == pytest.approx(0.2 * math.exp(-60 / 2000), abs=0.03)
    assert old == pytest.approx(math.exp(-60 / 2000), abs=0.05)
    assert estimator.worth(pause)[0] > 20 * estimator.worth(pause)[bucket(60.0)]


def test_the_prior_says_the_longer_away_the_longer_still() -> None:
    assert (np.diff(prior()) < 0).all()
    assert Estimator().rates(Pause("anything")) == pytest.approx(prior())

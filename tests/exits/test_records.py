"""Thresholds are the best of all, found by trying all."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxreuse.exits.plan import RampCost
from ctxreuse.exits.records import Records
from support.examples import examples

COSTS = (RampCost(0.5, 0.01), RampCost(0.2, 0.01))


def made(seed: int, rows: int) -> Records:
    rng, records = np.random.default_rng(seed), Records(2)
    for _ in range(rows):
        sure = rng.random(2)
        records.add(sure.tolist(), (rng.random(2) < 0.5 + sure / 2).tolist())
    return records


def outcome(records: Records, least: dict[int, float]) -> tuple[float, float]:
    """What thresholds give by going through the rows one by one: the share saved, and that of wrong ones."""
    rows = min(records.count, len(records.scores))
    weights = 0.5 ** ((records.count - 1 - np.arange(rows)) % len(records.scores) / 1024)
    saved = wrong = 0.0
    for scores, right, weight in zip(records.scores[:rows], records.right[:rows], weights):
        for ramp in sorted(least):
            saved -= weight * COSTS[ramp].cost
            if scores[ramp] >= least[ramp]:
                saved += weight * COSTS[ramp].saved
                wrong += weight * (not right[ramp])
                break
    return saved / weights.sum(), wrong / weights.sum()


@examples("light")
@given(seed=st.integers(0, 999), rate=st.sampled_from([0.01, 0.05, 0.2]))
def test_the_best_thresholds_keep_the_rate_and_say_what_they_save(seed: int, rate: float) -> None:
    records = made(seed, 300)
    found = records.best(COSTS, rate)
    if not found.least:
        assert found.saved == 0
        return
    saved, wrong = outcome(records, found.least)
    assert wrong <= rate
    assert saved == pytest.approx(found.saved, abs=1e-9)
    margin = rate - 1 / 300  # one more counts as wrong
    for ramp in (0, 1):
        for least in records.scores[:300:12, ramp]:
            other, errors = outcome(records, {ramp: least})
            assert other <= found.saved + 1e-9 or errors > margin * 0.9


def test_few_records_allow_nothing() -> None:
    records = Records(2)
    assert not records.best(COSTS, 0.2).least
    for _ in range(4):
        records.add([0.0, 0.0], [True, True])
    assert not records.best(COSTS, 0.2).least
    for _ in range(2):
        records.add([0.0, 0.0], [True, True])
    assert records.best(COSTS, 0.2).least


def test_a_ramp_that_costs_more_than_it_saves_is_dropped() -> None:
    records = made(1, 400)
    assert records.best(COSTS, 0.2).least
    assert not records.best((RampCost(0.5, 0.6), RampCost(0.2, 0.3)), 0.2).least


def test_a_ramp_stays_unless_another_is_a_tenth_better() -> None:
    records = Records(2)
    for _ in range(600):
        records.add([0.0, 0.0], [True, True])
    alike = (RampCost(0.5, 0.01), RampCost(0.52, 0.01))
    assert set(records.best(alike, 0.1).least) == {1}
    assert set(records.best(alike, 0.1, (0,)).least) == {0}


def test_records_survive_a_dump_and_refuse_what_is_none() -> None:
    records, other = made(2, 100), Records(2)
    other.restore(*records.dump())
    assert other.best(COSTS, 0.2).saved == pytest.approx(records.best(COSTS, 0.2).saved)
    assert np.array_equal(other.right, records.right)
    scores, right, count = records.dump()
    for bad in ((scores[:-4], right, count), (scores, right[:-1], count), (scores, right, -1), (b"", b"", 0)):
        with pytest.raises(ValueError, match="records"):
            Records(2).restore(*bad)
    endless = np.full(len(scores) // 4, np.inf, "<f4").tobytes()
    with pytest.raises(ValueError, match="records"):
        Records(2).restore(endless, right, count)

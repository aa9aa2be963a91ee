"""Types of pauses: thin ones lean on coarser ones, what was learnt is kept, and hostile bytes change nothing."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxreuse.pauses import Estimator, Pause
from ctxreuse.pauses.hazard import BUCKETS, bucket
from support.examples import examples


def taught(*pauses: tuple[Pause, float, int]) -> Estimator:
    estimator = Estimator()
    for pause, seconds, times in pauses:
        for _ in range(times):
            estimator.away(pause, 0.0, seconds)
            estimator.returned(pause, seconds)
    estimator.check()
    return estimator


def test_a_tool_never_seen_returns_as_tools_do_and_one_seen_often_as_itself() -> None:
    estimator = taught((Pause("tool", "read"), 2.0, 60), (Pause("tool", "shell"), 90.0, 60))
    read, shell, new = (estimator.survival(Pause("tool", tool), 0.0, 10.0) for tool in ("read", "shell", "web"))
    assert read < 0.1
    assert shell > 0.8
    assert read < new < shell
    assert new == pytest.approx(estimator.survival(Pause("tool"), 0.0, 10.0))
    # One return says little: the type stays near what tools do.
    estimator.away(Pause("tool", "web"), 0.0, 2.0)
    estimator.returned(Pause("tool", "web"), 2.0)
    assert read < estimator.survival(Pause("tool", "web"), 0.0, 10.0) <= new


def test_tenants_and_sessions_have_their_own_tempo() -> None:
    quick, slow = Pause("tool", "shell", "one", "a"), Pause("tool", "shell", "two", "b")
    estimator = taught((quick, 1.0, 40), (slow, 60.0, 40))
    assert estimator.survival(quick, 0.0, 5.0) < 0.1 < 0.8 < estimator.survival(slow, 0.0, 5.0)
    unknown = estimator.survival(Pause("tool", "shell", "one", "z"), 0.0, 5.0)
    assert unknown < estimator.survival(Pause("tool", "shell", "three"), 0.0, 5.0)


def test_who_never_returned_is_learnt_from() -> None:
    estimator = taught((Pause("end_of_turn"), 30.0, 20))
    before = estimator.survival(Pause("end_of_turn"), 30.0, 600.0)
    for _ in range(40):
        estimator.away(Pause("end_of_turn"), 0.0, 5000.0)
    estimator.returned(Pause("end_of_turn"), 30.0)
    for _ in range(4):  # enough to have the rates made anew
        estimator.returned(Pause("end_of_turn"), 30.0)
    assert estimator.survival(Pause("end_of_turn"), 30.0, 600.0) > before


def test_counts_of_long_ago_fade() -> None:
    estimator = taught((Pause("tool"), 1.0, 6000))
    for _ in range(6000):
        estimator.away(Pause("tool"), 0.0, 100.0)
        estimator.returned(Pause("tool"), 100.0)
    assert estimator.survival(Pause("tool"), 0.0, 5.0) > 0.5
    estimator.check()


@pytest.mark.parametrize(("since", "until"), [(5.0, 1.0), (0.0, float("inf")), (float("nan"), 3.0), (3.0, 3.0)])
def test_times_that_make_no_sense_change_nothing(since: float, until: float) -> None:
    estimator = Estimator()
    estimator.away(Pause("tool"), since, until)
    assert len(estimator) == 0


def test_memory_is_bounded() -> None:
    estimator = Estimator(most=50)
    for n in range(500):
        estimator.returned(Pause("tool", "shell", f"tenant {n}", f"session {n}"), 1.0)
        estimator.rates(Pause("tool", "shell", f"tenant {n}", f"session {n}"))
    assert len(estimator) <= 50
    assert len(estimator.dump()) < 1 << 16
    estimator.check()


def test_what_was_learnt_is_kept_but_for_sessions() -> None:
    estimator = taught((Pause("tool", "read", "one", "a"), 2.0, 30), (Pause("end_of_turn"), 300.0, 10))
    other = Estimator()
    assert other.load(estimator.dump())
    for pause in (Pause("tool", "read", "one"), Pause("tool"), Pause("end_of_turn"), Pause("")):
        assert other.rates(pause) == pytest.approx(estimator.rates(pause), rel=1e-4)
    assert other.dump() == estimator.dump()
    assert len(other) == len(estimator) - 1


def test_a_thousand_tenants_fit() -> None:
    estimator = Estimator()
    for n in range(1000):
        estimator.returned(Pause("tool", "shell", f"tenant {n}"), 1.0)
    estimator.returned(Pause("tool", "shell", "x" * 10_000), 1.0)
    raw = estimator.dump()
    assert len(raw) <= 1 << 16
    assert Estimator().load(raw)


@examples("light")
@given(st.data())
def test_hostile_bytes_change_nothing_or_load_something_sound(data: st.DataObject) -> None:
    raw = bytearray(taught((Pause("tool", "read", "one"), 2.0, 30)).dump())
    kind = data.draw(st.sampled_from(("noise", "cut", "flip")))
    if kind == "noise":
        raw = bytearray(data.draw(st.binary(max_size=300)))
    elif kind == "cut":
        del raw[data.draw(st.integers(0, len(raw) - 1)) :]
    else:
        for at in data.draw(st.lists(st.integers(0, len(raw) - 1), min_size=1, max_size=4)):
            raw[at] ^= data.draw(st.integers(1, 255))
    estimator = taught((Pause("tool"), 5.0, 3))
    before = estimator.dump()
    if not estimator.load(bytes(raw)):
        assert estimator.dump() == before
    estimator.check()
    found = estimator.rates(Pause("tool", "read", "one"))
    assert np.isfinite(found).all()
    assert found.min() >= 0
    assert 0 <= estimator.survival(Pause("tool"), 1.0, 10.0) <= 1


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0, 1e30])
def test_numbers_that_cannot_be_counts_are_refused(value: float) -> None:
    numbers = np.zeros(BUCKETS, "<f4")
    good = numbers.tobytes()
    numbers[bucket(3.0)] = value
    bad = numbers.tobytes()
    for rows in (
        [[["tool"], bad, good]],
        [[["tool"], good, bad]],
        [[["tool"], good, good[:-4]]],
        [[["a"] * 4, good, good]],
    ):
        assert not Estimator().load(msgspec.msgpack.encode([1, BUCKETS, rows]))
    assert Estimator().load(msgspec.msgpack.encode([1, BUCKETS, [[["tool"], good, good]]]))
    assert not Estimator().load(msgspec.msgpack.encode([2, BUCKETS, []]))

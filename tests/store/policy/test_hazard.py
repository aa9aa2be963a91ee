"""The policy that learns when blocks come back."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from itertools import count
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxreuse.store.policy import Facts, Policy, Shadow
from ctxreuse.store.policy.base import prefill_line
from ctxreuse.store.policy.hazard_counts import AGES, CLASSES
from ctxreuse.testing.policy import PolicyContract, traffic
from oracle.policy.hazard import Hazard, class_of, coarse_of
from oracle.policy.hazard_table import EDGES, LEVELS, HazardTable, best_rates, level_of
from oracle.policy.lru import LRU
from support.examples import examples


class _Checked(Hazard[int]):
    """Checks itself whenever it is asked for the order, which the contract does after each step."""

    def order(self) -> Iterator[int]:
        self.check()
        return super().order()


class TestHazard(PolicyContract):
    def make(self) -> Policy[int]:
        return _Checked()


class TestHazardOfFewGhosts(PolicyContract):
    def make(self) -> Policy[int]:
        return _Checked(ghosts=3, ratio=0.5)


class TestHazardByPrice(PolicyContract):
    def make(self) -> Policy[int]:
        return _Checked(prefill_line(1e-3, 1e-4))


chances = st.floats(0.0, 0.99)


@given(st.lists(st.tuples(chances, st.floats(0.1, 1e4)), min_size=1, max_size=12))
def test_the_best_rate_is_the_best_over_all_times_to_give_up(cells: list[tuple[float, float]]) -> None:
    hazards, widths = [hazard for hazard, _ in cells], [width for _, width in cells]
    for age, rate in enumerate(best_rates(hazards, widths)):
        best, use, time, left = 0.0, 0.0, 0.0, 1.0
        for hazard, width in cells[age:]:
            use, time, left = use + left * hazard, time + left * width * (1 - hazard / 2), left * (1 - hazard)
            best = max(best, use / time)
        assert rate == pytest.approx(best, rel=1e-9, abs=1e-300)


@given(st.floats(1e-7, 100.0), st.floats(1.0, 4.0))
def test_levels_rise_with_rates(rate: float, factor: float) -> None:
    assert 0 <= level_of(rate) <= level_of(rate * factor) < LEVELS
    assert level_of(rate * 2) in (level_of(rate) + 8, LEVELS - 1)


def test_classes_are_apart_and_lean_on_those_of_any_length() -> None:
    seen = {
        class_of(turn, hits, new, label, short)
        for turn in (1, 2, 3, 5)
        for hits in (1, 2, 3, 4, 7, 13)
        for new in (1, 513, 2561, 8193)
        for label in range(32)
        for short in (False, True)
    }
    assert seen == set(range(CLASSES))
    assert coarse_of(class_of(2, 4, 1, 7, True)) == coarse_of(class_of(2, 4, 9_000, 7, True))
    assert len({coarse_of(which) for which in seen}) == CLASSES // 4


def test_counts_become_chances() -> None:
    table = HazardTable([0, 0])
    for age in range(AGES):
        table.count(0, age, 10_000, False)
        table.count(0, age, 1_000 if age == 7 else 0, True)
    hazards = table.hazards(0)
    assert hazards[7] == pytest.approx(1 / 11, rel=0.02)
    assert max(hazards[:7] + hazards[8:]) < 1e-3
    assert table.hazards(1)[7] == pytest.approx(1 / 11, rel=0.02), "an unseen class leans on the coarser one"


def test_where_nothing_was_seen_the_rate_falls_with_age_as_in_lru() -> None:
    table = HazardTable([0])
    levels = [table.level(0, age) for age in range(AGES)]
    assert levels == sorted(levels, reverse=True)
    assert levels[0] > levels[-1]


def test_what_was_learnt_fades() -> None:
    table = HazardTable([0])
    for age in range(AGES):
        table.count(0, age, 1_000, True)
    before = table.hazards(0)[0]
    for _ in range(100_000):
        table.tick()
    for age in range(AGES):
        table.count(0, age, 1_000, False)
    assert before > 0.9
    assert table.hazards(0)[0] < 0.1
    table.check()


@examples("light")
@given(st.data())
def test_a_damaged_dump_is_refused(data: st.DataObject) -> None:
    table = HazardTable([0, 0, 0])
    for which in range(3):
        table.count(which, 5, 10 + which, True)
        table.count(which, 4, 20, False)
    raw = bytearray(table.dump())
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= data.draw(st.integers(1, 255))
    fresh = HazardTable([0, 0, 0])
    assert fresh.load(bytes(raw)) is False
    assert fresh.hazards(1) == HazardTable([0, 0, 0]).hazards(1)
    assert fresh.load(table.dump()) is True
    assert fresh.hazards(1) == pytest.approx(table.hazards(1), rel=1e-6)


def test_a_dump_of_impossible_counts_is_refused() -> None:
    for used, seen in ((2.0, 1.0), (-1.0, 1.0), (float("nan"), 1.0), (0.0, float("inf"))):
        body = struct.pack("<HB2f", 0, 1, used, seen)
        assert HazardTable([0]).load(struct.pack("<4sBI", b"hzrd", 1, zlib.crc32(body)) + body) is False


def test_a_dump_stays_small() -> None:
    table = HazardTable(range(CLASSES))
    for which in range(CLASSES):
        table.count(which, AGES - 1, 1 + which, False)
    assert 60_000 < len(table.dump()) <= 1 << 16
    assert HazardTable(range(CLASSES)).load(table.dump()) is True


def _talks(seconds: int) -> list[tuple[float, tuple[int, ...], int]]:
    """Each second one prompt of 4 blocks that never returns, and a talk that returns each minute; labels 1 and 2."""
    numbers = count(1_000)
    asked: list[tuple[float, tuple[int, ...], int]] = []
    talks = {second: tuple(next(numbers) for _ in range(4)) for second in range(0, 60, 6)}
    for now in range(seconds):
        asked.append((float(now), tuple(next(numbers) for _ in range(4)), 1))
        if now % 60 in talks:
            asked.append((now + 0.5, talks[now % 60], 2))
    return asked


def _served(policy: Policy[int], capacity: int, asked: list[tuple[float, tuple[int, ...], int]]) -> int:
    shadow, half, hits = Shadow(policy, capacity), len(asked) // 2, 0
    for number, (now, path, label) in enumerate(asked):
        served = shadow.request(path, 1, 64, now).blocks
        shadow.on_pause(path[-1], label, now)
        hits += served * (number >= half)
    return hits


def test_it_learns_who_returns() -> None:
    asked = _talks(1_200)
    everything = sum(4 for _, _, label in asked[len(asked) // 2 :] if label == 2)
    assert _served(LRU(), 60, asked) == 0
    assert _served(Hazard(), 60, asked) > 0.9 * everything


def test_what_is_not_worth_its_room_is_not_admitted() -> None:
    policy = Hazard[int]()
    shadow = Shadow(policy, 12)
    for now in range(0, 600, 10):
        shadow.request((1, 2, 3, 4), 1, 16, now)
        shadow.request([*range(1_000 * now + 10, 1_000 * now + 20)], 1, 16, now + 1)
    assert shadow.match((1, 2, 3, 4)) == 4, "what returns gave way to what never did"
    assert shadow.match(range(590_010, 590_020)) == 8
    policy.check()


def test_a_label_tells_apart_what_nothing_else_does() -> None:
    numbers = count()
    asked: list[tuple[float, tuple[int, ...], int]] = []
    waiting: dict[int, tuple[int, ...]] = {}
    rng = Random(1)
    for now in range(2_000):
        back = waiting.pop(now, None)
        path = back if back is not None else tuple(next(numbers) for _ in range(3))
        label = 1 if back is None and rng.random() < 0.3 else 2
        if label == 1:
            waiting[now + 40] = path
        asked.append((float(now), path, label))
    blind = [(now, path, 0) for now, path, _ in asked]
    assert _served(Hazard(), 45, asked) > 1.5 * _served(Hazard(), 45, blind)


def test_a_mark_is_for_the_tip_of_the_last_use_only() -> None:
    policy = Hazard[int]()
    shadow = Shadow(policy, 10)
    shadow.request((1, 2, 3), 1, 16, 0.0)
    shadow.request((1, 2, 4), 1, 16, 1.0)
    policy.on_pause(2, 5, 2.0)
    policy.check()
    for path in traffic(200, seed=9):
        shadow.request([key + 10 for key in path], 1, 16, 3.0)
        if path:
            shadow.on_pause(path[-1] + 10, 3, 3.0)
        shadow.check()
        policy.check()


def test_ghosts_are_bounded() -> None:
    policy = Hazard[int](ghosts=50, ratio=1.0)
    shadow = Shadow(policy, 20)
    for number in range(400):
        shadow.request(range(5 * number, 5 * number + 5), 1, 16, float(number))
    policy.check()
    assert len(policy) == 20
    assert policy.ghosts == 70


def test_what_saves_more_seconds_a_byte_stays_longer() -> None:
    for rebuild, first in ((None, 1), (prefill_line(), 2)):
        policy = Hazard[int](rebuild)
        for key, nbytes in ((1, 100), (2, 900), (3, 100)):
            policy.insert(Facts(key, None, 16, 16, nbytes), 0.0)
            policy.access([key], float(key))
        assert next(iter(policy.order())) == first


def test_a_price_that_is_measured_later_counts_from_then_on() -> None:
    policy = Hazard[int](prefill_line(1e-3, 0.0))
    policy.set_recompute_cost(0.0, 1.0)
    for key, depth in ((1, 16), (2, 1_600)):
        policy.insert(Facts(key, None, 16, depth, 100), 0.0)
        policy.access([key], 1.0 - key)
    assert list(policy.order()) == [1, 2]


def test_uses_that_begin_below_the_root_count_for_all_above() -> None:
    policy = Hazard[int]()
    shadow = Shadow(policy, 10)
    shadow.request((1, 2, 3), 1, 16, 0.0)
    shadow.request((7, 8, 9), 1, 16, 0.0)
    policy.access([3], 100.0)
    policy.check()
    assert list(policy.order()) == [9, 8, 7, 3, 2, 1]


def test_ages_reach_from_seconds_to_a_day() -> None:
    assert EDGES[0] == 4.0
    assert 70_000 < EDGES[-1] < 90_000

"""The adaptive policy is never much worse than an expert: the bound of `shortfall`, on adversarial traffic."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxreuse.store.policy import AdaptivePolicy, NativeShadow, Shadow
from ctxreuse.store.policy.regret import EPSILON, RegretGuard, shortfall
from ctxreuse.testing.policy import traffic
from oracle.policy.arc import ARC
from oracle.policy.lfu import LFU
from oracle.policy.lru import LRU
from oracle.policy.residents import ResidentSet
from support.examples import examples

NAMES = ("lru", "lfu", "arc")


def play(paths: list[tuple[int, ...]], capacity: int, seed: int = 0) -> tuple[int, dict[str, int], dict[str, float]]:
    """Hits of the cache's cache, of each expert, and by how much each was behind the best, request by request."""
    policy: AdaptivePolicy[int] = AdaptivePolicy(
        [NativeShadow[int](name, capacity) for name in NAMES], capacity, Random(seed)
    )
    cache, alone = Shadow(policy, capacity), [NativeShadow[int](name, capacity) for name in NAMES]
    real, hits, lost = 0, dict.fromkeys(NAMES, 0), dict.fromkeys(NAMES, 0.0)
    for now, path in enumerate(paths):
        real += cache.request(path, 1, 1, now).blocks
        found = [shadow.request(path, 1, 1, now).blocks for shadow in alone]
        for name, blocks in zip(NAMES, found):
            hits[name] += blocks
            lost[name] += max(found) - blocks
    assert policy.stats.hit_tokens == real
    assert policy.stats.expert_hit_tokens == hits
    policy.check()
    return real, hits, lost


def phases(rounds: int, length: int, capacity: int) -> Iterator[tuple[int, ...]]:
    """Now recency is right and frequency wrong, now the other way round, for as long as it takes to be believed."""
    fresh = 1_000_000
    for turn in range(rounds):
        for i in range(length):
            if turn % 2:
                yield (turn * 1000 + i % (capacity - 1),)
            else:
                yield (i % (capacity // 2),)
                yield (fresh,)
                fresh += 1


@pytest.mark.parametrize("length", [30, 200, 1000])
@pytest.mark.parametrize("capacity", [10, 40])
def test_never_much_worse_on_phases_that_fool_it(length: int, capacity: int) -> None:
    paths = list(phases(max(4, 3000 // length), length, capacity))
    mean = sum(play(paths, capacity, seed)[0] for seed in range(2)) / 2
    _, hits, lost = play(paths, capacity)
    for name in NAMES:
        assert mean >= hits[name] - shortfall(lost[name], capacity, len(NAMES))
    # Measured it is far better than proven.
    assert mean >= max(hits.values()) - 0.02 * len(paths) - 3 * capacity


@examples("heavy")
@given(seed=st.integers(0, 10_000), capacity=st.integers(5, 60), longest=st.integers(1, 20))
def test_never_much_worse_on_any_traffic(seed: int, capacity: int, longest: int) -> None:
    paths = traffic(300, seed=seed, longest=longest)
    real, hits, lost = play(paths, capacity)
    for name in NAMES:
        assert real >= hits[name] - shortfall(lost[name], capacity, len(NAMES))
    asked = sum(map(len, paths))
    assert real >= max(hits.values()) - 0.02 * asked - 2 * capacity


@pytest.mark.parametrize("follows", range(3))
def test_following_costs_at_most_a_full_cache(follows: int) -> None:
    """Step (1) of the proof: after a change of leader no block that it holds is missed twice."""
    capacity, paths = 40, traffic(800, seed=9)
    shadows: list[Shadow[int]] = [Shadow(LRU(), capacity), Shadow(LFU(), capacity), Shadow(ARC(), capacity)]
    policy = AdaptivePolicy(shadows, capacity, Random(0), ResidentSet())
    cache = Shadow(policy, capacity)
    for now, path in enumerate(paths[:400]):
        cache.request(path, 1, 1, now)
    lacking = sum(key not in cache for key in shadows[follows].order())
    behind = 0
    for now, path in enumerate(paths[400:]):
        policy._lead(follows)
        ahead = shadows[follows].match(path)
        behind += ahead - cache.request(path, 1, 1, now).blocks
        policy.check()
    assert behind <= lacking <= capacity


def adversary(guard_seed: int, steps: int) -> tuple[float, list[float]]:
    """Contenders of which the one that the swift rule follows is always wrong; it changes its mind each time."""
    guard, rng, room = RegretGuard(3, Random(guard_seed)), Random(7), 20.0
    real, totals = 0.0, [0.0] * 3
    followed, swift = 0, 0
    for _ in range(steps):
        hits = [1.0 if i != swift and rng.random() < (0.9, 0.8, 0.7)[i] else 0.0 for i in range(3)]
        real += hits[followed]
        totals = [total + hit for total, hit in zip(totals, hits)]
        guard.note(hits, swift, room, room)
        swift = (swift + 1) % 3
        now = swift if guard.followed == RegretGuard.GREEDY else guard.followed
        real -= room * (now != followed)
        followed = now
    return real, totals


def test_a_swift_rule_that_is_always_wrong_is_left() -> None:
    steps, outcomes = 10_000, [adversary(seed, 10_000) for seed in range(5)]
    mean = sum(real for real, _ in outcomes) / len(outcomes)
    best = max(outcomes[0][1])
    assert mean >= best - shortfall(steps * 0.5, 20.0, 3)
    assert mean >= 0.85 * best


def test_weights_are_restored_or_refused() -> None:
    guard, other = RegretGuard(2, Random(0)), RegretGuard(2, Random(0))
    for _ in range(50):
        guard.note([1.0, 0.0], 1, 0.0, 10.0)
    assert other.restore(guard.dump(), 1)
    assert other.followed == 1
    assert other.weights == pytest.approx(guard.weights)
    assert other.weights[0] > 1.5 * other.weights[1]
    for bad in ([], [0.0], [1.0, -1.0, -1.0], [float("nan")] * 3, [-1e9, 0.0, 0.0]):
        assert not other.restore(bad, 0)
    assert not other.restore(guard.dump(), 2)
    assert EPSILON <= 0.2

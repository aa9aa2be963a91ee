"""Shadows that share an arena decide as each alone, and an adaptive policy of them stays small."""

from __future__ import annotations

from itertools import islice
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxreuse.store.policy import (
    DEFAULT_EXPERTS,
    NATIVE,
    AdaptivePolicy,
    Facts,
    NativeResidentSet,
    NativeShadow,
    Shadow,
    make_policy,
)
from ctxreuse.testing.policy import traffic
from oracle.policy.kinds import REFERENCE
from support.examples import examples

#: Bytes that all arenas of the default adaptive policy may take, a block of a full cache.
MOST_BYTES = 200


def family(capacity: int, names: tuple[str, ...] = NATIVE) -> list[NativeShadow[int]]:
    shadows: list[NativeShadow[int]] = []
    for name in names:
        ghosts = (10, 0.5) if name == "hazard" else None
        beside = shadows[0] if shadows else None
        shadows.append(NativeShadow(name, capacity, alpha=0.7, ghosts=ghosts, beside=beside))
    return shadows


@examples("normal")
@given(seed=st.integers(0, 10_000), capacity=st.integers(1, 60), longest=st.integers(1, 40))
def test_shadows_that_share_decide_as_each_alone(seed: int, capacity: int, longest: int) -> None:
    rng = Random(seed)
    size = [rng.randint(1, 9) for _ in range(3_000)]
    shared = family(capacity)
    alone = [family(capacity, (name,))[0] for name in NATIVE]
    for now, path in enumerate(traffic(150, seed=seed, longest=longest)):
        sizes, tokens = [size[key] for key in path], [16 + key % 3 for key in path]
        for mine, theirs in zip(shared, alone):
            # Not all see all of it: what one has gone without, another may still have.
            if rng.random() < 0.2:
                continue
            got, want = mine.request(path, sizes, tokens, now), theirs.request(path, sizes, tokens, now)
            assert (got.blocks, list(got.evicted), mine.nbytes) == (want.blocks, list(want.evicted), theirs.nbytes)
    for mine, theirs in zip(shared, alone):
        mine.check()
        assert list(mine.order()) == list(theirs.order())


def test_a_shadow_that_ends_leaves_the_others_theirs() -> None:
    shadows = family(40)
    paths = traffic(200, seed=3)
    for now, path in enumerate(paths[:100]):
        for one in shadows:
            one.request(path, 1, 16, now)
    before = [list(one.order()) for one in shadows[1:]]
    del shadows[0]
    assert [list(one.order()) for one in shadows] == before
    # Its place is free for another one, which begins empty.
    fresh: NativeShadow[int] = NativeShadow("lru", 40, beside=shadows[0])
    assert (len(fresh), list(fresh.order())) == (0, [])
    for now, path in enumerate(paths[100:], 100):
        for one in (fresh, *shadows):
            one.request(path, 1, 16, now)
            one.check()


def test_more_shadows_than_can_share_have_an_arena_of_their_own() -> None:
    shadows = family(40, (*NATIVE, *NATIVE))
    for now, path in enumerate(traffic(100, seed=4)):
        for one in shadows:
            one.request(path, 1, 16, now)
    for first, second in zip(shadows, shadows[len(NATIVE) :]):
        second.check()
        assert list(first.order()) == list(second.order())


def test_the_first_to_take_a_block_in_says_its_size() -> None:
    first, second = family(1_000, ("lru", "lfu"))
    first.request((1, 2), [10, 20], [16, 16], 0.0)
    second.request((1, 2, 3), [7, 7, 7], [16, 16, 16], 0.0)
    assert (first.nbytes, second.nbytes) == (30, 37)
    for one, key in ((first, 2), (second, 3), (second, 2)):
        one.remove(key, 1.0)
    second.request((1, 2), [7, 7], [16, 16], 2.0)
    assert second.nbytes == 17, "nobody had it: so it is as large as it is now"


@pytest.mark.parametrize("name", NATIVE)
def test_a_block_with_very_many_children(name: str) -> None:
    mine, theirs = NativeShadow[int](name, 700, alpha=0.7), Shadow(REFERENCE[name](), 700)
    rng = Random(5)
    for now in range(1_500):
        path = (0, 1 + now % 2, 10 + 2 * rng.randrange(1_200) + now % 2)
        got, want = mine.request(path, 1, 16, now), theirs.request(path, 1, 16, now)
        assert (got.blocks, list(got.evicted)) == (want.blocks, list(want.evicted))
        if now % 100 == 0:
            mine.check()
            assert list(mine.order()) == list(theirs.order())
    mine.check()


def test_memory_of_the_adaptive_policy() -> None:
    """A full cache as bench ``policy`` makes it, with as many ghosts a block as a million blocks have."""
    blocks, length = 1 << 18, 24
    shadows: list[NativeShadow[int]] = []
    for name in DEFAULT_EXPERTS:
        ghosts = (0, 1 / 3) if name == "hazard" else None
        shadows.append(NativeShadow(name, blocks, ghosts=ghosts, beside=shadows[0] if shadows else None))
    residents: NativeResidentSet[int] = NativeResidentSet()
    policy: AdaptivePolicy[int] = AdaptivePolicy(shadows, blocks, Random(0), residents)
    for context in range(-(-blocks * 3 // (2 * length))):
        path = range(context * length, (context + 1) * length)
        policy.on_lookup(path, [1] * length, [16] * length, context / 2)
        for i, key in enumerate(path):
            policy.insert(Facts(key, path[i - 1] if i else None, 16, 16 * (i + 1), 1), context / 2)
        for key in list(islice(policy.order(), max(len(policy) - blocks, 0))):
            policy.remove(key, context / 2)
    assert len(policy) == blocks
    memory = residents.memory + sum(one.memory for one in shadows)
    assert memory / blocks < MOST_BYTES


def test_experts_of_a_named_policy_share() -> None:
    policy = make_policy("adaptive", 1 << 20)
    assert isinstance(policy, AdaptivePolicy)
    for now, path in enumerate(traffic(2_000, seed=6)):
        policy.on_lookup(path, [1] * len(path), [16] * len(path), now)
    alone = NativeShadow[int]("lru", 1 << 20)
    for now, path in enumerate(traffic(2_000, seed=6)):
        alone.request(path, 1, 16, now)
    (lru,) = (one for one in policy.experts if one.name == "lru")
    assert isinstance(lru, NativeShadow)
    assert lru.memory < 0.7 * alone.memory

"""The native arenas answer as the Python reference does."""

from __future__ import annotations

import hashlib
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxreuse import _native
from ctxreuse.errors import ConfigError
from ctxreuse.store.policy import (
    NATIVE,
    AdaptivePolicy,
    Facts,
    NativePolicy,
    NativeShadow,
    Shadow,
)
from ctxreuse.store.policy.base import prefill_line
from ctxreuse.store.policy.shadow import ids_of
from ctxreuse.testing.policy import traffic
from oracle.policy.arc import ARC
from oracle.policy.gdsf import GDSF
from oracle.policy.hazard import Hazard
from oracle.policy.kinds import REFERENCE
from oracle.policy.lfu import LFU
from oracle.policy.lru import LRU
from oracle.policy.residents import ResidentSet
from support.examples import examples


def native(name: str, capacity: int) -> NativeShadow[int]:
    return NativeShadow(name, capacity, alpha=0.7)


@pytest.mark.parametrize("name", NATIVE)
@examples("normal")
@given(
    seed=st.integers(0, 10_000), capacity=st.integers(1, 60), most=st.sampled_from((1, 9)), longest=st.integers(1, 40)
)
def test_same_victims(name: str, seed: int, capacity: int, most: int, longest: int) -> None:
    rng = Random(seed)
    size = [rng.randint(1, most) for _ in range(3_000)]
    mine, theirs = native(name, capacity), Shadow(REFERENCE[name](), capacity)
    for now, path in enumerate(traffic(150, seed=seed, longest=longest)):
        sizes, tokens = [size[key] for key in path], [16 + key % 3 for key in path]
        got, want = mine.request(path, sizes, tokens, now), theirs.request(path, sizes, tokens, now)
        assert (got.blocks, got.tokens, list(got.evicted)) == (want.blocks, want.tokens, list(want.evicted))
        assert mine.nbytes == theirs.nbytes
        if rng.random() < 0.05 and path and mine.match(path) == len(path) and theirs.leaf(path[-1]):
            mine.remove(path[-1], now)
            theirs.remove(path[-1], now)
    mine.check()
    theirs.check()
    assert list(mine.order()) == list(theirs.order())


@pytest.mark.parametrize("name", NATIVE)
@examples("normal")
@given(seed=st.integers(0, 10_000), capacity=st.integers(1, 60))
def test_same_victims_as_the_policy_of_a_cache(name: str, seed: int, capacity: int) -> None:
    rng = Random(seed)
    size = [rng.randint(1, 9) for _ in range(3_000)]
    policies = NativePolicy[int](name, alpha=0.7), REFERENCE[name]()
    mine, theirs = (Shadow(policy, capacity) for policy in policies)
    for now, path in enumerate(traffic(150, seed=seed)):
        sizes, tokens = [size[key] for key in path], [16 + key % 3 for key in path]
        assert mine.request(path, sizes, tokens, now) == theirs.request(path, sizes, tokens, now)
        if path and rng.random() < 0.1:
            mine.on_pause(path[-1], now % 9, now)
            theirs.on_pause(path[-1], now % 9, now)
    policies[0].check()
    assert list(mine.order()) == list(theirs.order())


def test_a_policy_without_alpha_finds_the_same() -> None:
    mine, theirs = NativePolicy[int]("gdsf", per_token=1e-3, per_pair=1e-4), GDSF(prefill_line(1e-3, 1e-4))
    caches = Shadow(mine, 100), Shadow(theirs, 100)
    for now, path in enumerate(traffic(800, seed=2)):
        got, want = (cache.request(path, 1, 64, now) for cache in caches)
        assert got == want
    assert mine._shadow.tuned
    assert theirs.tuned
    assert mine._shadow.alpha == theirs.alpha


@pytest.mark.parametrize("name", NATIVE)
def test_a_parent_may_be_dropped_while_its_child_is_evicted(name: str) -> None:
    policy = NativePolicy[int](name)
    facts = [Facts(key, key - 1 if key > 1 else None, 4, 4 * key, 10) for key in (1, 2, 3)]
    policy.fill([*facts, Facts(9, None, 4, 4, 10)], [[1, 2, 3], [9]], 0.0)
    for key in (1, 2):
        policy.remove(key, 1.0)
        policy.check()
    assert sorted(policy.order()) == [3, 9]
    with pytest.raises(KeyError):
        policy.remove(1, 1.0)
    policy.insert(facts[0], 2.0)
    policy.access([1], 2.0)
    assert sorted(policy.order()) == [1, 3, 9]
    policy.remove(3, 3.0)
    policy.check()
    assert sorted(policy.order()) == [1, 9]
    policy.remove(1, 3.0)
    policy.check()
    assert list(policy.order()) == [9]


@pytest.mark.parametrize("name", NATIVE)
def test_children_go_before_parents(name: str) -> None:
    shadow = native(name, 200)
    parent: dict[int, int | None] = {}
    for now, path in enumerate(traffic(600, seed=1)):
        parent |= dict(zip(path, (None, *path)))
        shadow.request(path, 1, 16, now)
    place = {key: i for i, key in enumerate(shadow.order())}
    assert len(place) == len(shadow) > 100
    assert all(place[key] < place[above] for key in place if (above := parent[key]) is not None)


def test_trials_find_the_same() -> None:
    mine: NativeShadow[int] = NativeShadow("gdsf", 100, per_token=1e-3, per_pair=1e-4)
    policy: GDSF[int] = GDSF(lambda start, tokens: 1e-3 * tokens + 1e-4 * tokens * (start + tokens / 2))
    theirs = Shadow(policy, 100)
    for now, path in enumerate(traffic(800, seed=2)):
        got, want = mine.request(path, 1, 64, now), theirs.request(path, 1, 64, now)
        assert (got.blocks, list(got.evicted)) == (want.blocks, list(want.evicted))
    assert mine.alpha == policy.alpha
    assert mine.tuned
    assert policy.tuned


def test_paths_that_make_no_sense() -> None:
    for shadow in (native("lru", 10), native("hazard", 10), Shadow[int](LRU(), 10)):
        shadow.request((1, 2, 3), 1, 1, 0.0)
        assert shadow.request((4, 3, 5), 1, 1, 1.0).blocks == 0
        assert shadow.match((4,)) == 1
        assert 5 not in shadow
        assert shadow.request((7, 7, 7), 1, 1, 2.0).blocks == 0
        assert shadow.request((7, 7, 7), 1, 1, 3.0).blocks == 3
        shadow.request(range(100, 120), 1, 1, 4.0)
        shadow.request((7, 7), 9, 1, 5.0)
        shadow.check()


def test_arguments_are_checked() -> None:
    with pytest.raises(ConfigError, match="lru"):
        NativeShadow("belady", 5)
    shadow = native("arc", 5)
    with pytest.raises(OverflowError):
        shadow.request((-1,), 1, 1, 0.0)
    with pytest.raises(ValueError, match="multiple"):
        shadow.request((b"short",), 1, 1, 0.0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="sizes"):
        shadow.request((1, 2), [1], [1, 1], 0.0)
    with pytest.raises(KeyError):
        shadow.remove(1, 0.0)
    assert len(shadow) == 0


def key(number: int) -> bytes:
    return hashlib.sha256(number.to_bytes(8, "little")).digest()


def adaptive_pair(capacity: int) -> tuple[AdaptivePolicy[bytes], AdaptivePolicy[bytes]]:
    names = ("lru", "lfu", "arc", "hazard")
    mine: list[NativeShadow[bytes]] = []
    for name in names:
        mine.append(NativeShadow(name, capacity, beside=mine[0] if mine else None))
    theirs = [Shadow[bytes](make(), capacity) for make in (LRU, LFU, ARC, Hazard)]
    return (
        AdaptivePolicy(mine, capacity, Random(1)),
        AdaptivePolicy(theirs, capacity, Random(1), ResidentSet()),
    )


@examples("heavy")
@given(seed=st.integers(0, 10_000), capacity=st.integers(5, 60))
def test_same_adaptive(seed: int, capacity: int) -> None:
    mine, theirs = adaptive_pair(capacity)
    caches = Shadow(mine, capacity), Shadow(theirs, capacity)
    for now, path in enumerate(traffic(250, seed=seed)):
        keys = [key(number) for number in path]
        got, want = (cache.request(keys, 1, 16, now) for cache in caches)
        assert got == want
        assert mine.stats == theirs.stats
    mine.check()
    theirs.check()
    for cache in caches:
        cache.check()


def test_a_filled_policy_has_these_blocks() -> None:
    facts = [Facts(key(i), key(i - 1) if i % 5 else None, 16, 16 * (i % 5 + 1), 10) for i in range(40)]
    uses = [[key(i + j) for j in range(5)] for i in range(0, 40, 5)]
    for policy in adaptive_pair(300):
        policy.fill(facts, uses, 0.0)
        policy.check()
        assert len(policy) == 40
        order = list(policy.order())
        assert set(order) == {one.key for one in facts}
        assert order[:10] == [key(i) for i in (4, 3, 2, 1, 0, 9, 8, 7, 6, 5)]
        policy.remove(key(4), 1.0)
        with pytest.raises(KeyError):
            policy.remove(key(4), 1.0)


def test_a_sample_has_the_same_blocks_whatever_the_keys() -> None:
    keys = [key(number) for number in range(4_000)]
    ids = [int.from_bytes(one[:8], "little") for one in keys]
    assert _native.ids_sampled(*ids_of(keys), 0) == list(range(4_000))
    for bits in (1, 5):
        found = _native.ids_sampled(*ids_of(keys), bits)
        assert found == _native.ids_sampled(*ids_of(ids), bits)
        assert len(found) == pytest.approx(4_000 >> bits, rel=0.3)
    assert 90 < len(_native.ids_sampled(*ids_of(range(4_000)), 5)) < 160, "numbers that follow each other are spread"
    with pytest.raises(ValueError, match="bits"):
        _native.ids_sampled(b"", 8, 32)


def test_ids() -> None:
    assert ids_of((1, 2)) == (b"\x01" + bytes(7) + b"\x02" + bytes(7), 8)
    assert ids_of((key(1), key(2))) == (key(1) + key(2), 32)

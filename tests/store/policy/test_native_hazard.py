"""The native twin of the policy that learns when blocks come back: the same to the bit."""

from __future__ import annotations

import struct
import zlib
from array import array
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxreuse import _native
from ctxreuse.lab.generate import generate
from ctxreuse.lab.packed import pack
from ctxreuse.lab.replay import serve
from ctxreuse.store.policy import (
    DEFAULT_EXPERTS,
    NATIVE,
    AdaptivePolicy,
    Facts,
    NativeShadow,
    Policy,
    Shadow,
    make_policy,
)
from ctxreuse.testing.policy import traffic
from oracle.policy.hazard import Hazard
from support.examples import examples

_GHOSTS = ((65_536, 2.0), (40, 1.0), (5, 0.5), (0, 0.0))


class Pair:
    """Both, asked the same."""

    def __init__(self, capacity: int, ghosts: tuple[int, float] = _GHOSTS[0]) -> None:
        self.policy: Hazard[int] = Hazard(ghosts=ghosts[0], ratio=ghosts[1])
        self.theirs = Shadow(self.policy, capacity)
        self.mine: NativeShadow[int] = NativeShadow("hazard", capacity, ghosts=ghosts)
        self.went = self.hits = 0

    def request(self, path: tuple[int, ...], sizes: list[int], tokens: list[int], now: float) -> None:
        got, want = (one.request(path, sizes, tokens, now) for one in (self.mine, self.theirs))
        assert (got.blocks, got.tokens, list(got.evicted)) == (want.blocks, want.tokens, list(want.evicted))
        self.went, self.hits = self.went + len(want.evicted), self.hits + want.blocks

    def on_pause(self, key: int, label: int, now: float) -> None:
        for one in (self.mine, self.theirs):
            one.on_pause(key, label, now)

    def drop(self, key: int, now: float) -> None:
        for one in (self.mine, self.theirs):
            one.remove(key, now)

    def check(self) -> None:
        self.mine.check()
        self.theirs.check()
        self.policy.check()
        assert self.mine.nbytes == self.theirs.nbytes
        assert list(self.mine.order()) == list(self.theirs.order())
        assert self.mine.dump() == self.theirs.dump()


def run(pair: Pair, seed: int, *, requests: int, most: int, longest: int, start: float = 0.0) -> None:
    """Time stands still, goes back, jumps by minutes and now and then by a day; labels reach tips and other blocks."""
    rng, now = Random(seed), start
    size = [rng.randint(1, most) for _ in range(4 * requests)]
    for number, path in enumerate(traffic(requests, seed=seed, longest=longest)):
        now += rng.choice((0.0, 0.3, 2.0, -1.0, rng.expovariate(1 / 50), 8e4 if rng.random() < 0.02 else 7.0))
        tokens = [16 + key % 3 + (900 if key % 11 == 0 else 0) for key in path]
        pair.request(path, [size[key] for key in path], tokens, now)
        if path and rng.random() < 0.7:
            pair.on_pause(rng.choice(path) if rng.random() < 0.3 else path[-1], rng.randrange(256), now)
        if path and rng.random() < 0.05 and pair.theirs.match(path) == len(path) and pair.theirs.leaf(path[-1]):
            pair.drop(path[-1], now)
        if number % 40 == 0:
            pair.check()
    pair.check()


@examples("normal")
@given(
    seed=st.integers(0, 10_000),
    capacity=st.integers(1, 80),
    most=st.sampled_from((1, 9)),
    longest=st.integers(1, 40),
    ghosts=st.sampled_from(_GHOSTS),
)
def test_same_to_the_bit(seed: int, capacity: int, most: int, longest: int, ghosts: tuple[int, float]) -> None:
    run(Pair(capacity, ghosts), seed, requests=160, most=most, longest=longest)


def test_same_over_many_uses() -> None:
    pair = Pair(150, (200, 2.0))
    run(pair, 7, requests=2_500, most=1, longest=12)
    assert pair.went > 1_000
    assert pair.hits > 1_000
    assert len(pair.mine.dump()) > 2_000, "little was learnt"


def test_a_replay_serves_the_same() -> None:
    trace = pack(generate("chat", requests=500))
    capacity = 400
    mine = serve(trace, NativeShadow("hazard", capacity), capacity, block_bytes=1)
    theirs = serve(trace, make_policy("hazard", capacity), capacity, block_bytes=1)
    assert mine.hits.tolist() == theirs.hits.tolist()
    assert mine.cached.tolist() == theirs.cached.tolist()
    assert 0 < mine.hits.sum() < trace.known.sum()


@examples("heavy")
@given(seed=st.integers(0, 1_000))
def test_either_goes_on_from_what_the_other_learnt(seed: int) -> None:
    first, second = Pair(30), Pair(30)
    run(first, seed, requests=120, most=1, longest=9)
    assert second.mine.load(first.theirs.dump()) is True
    assert second.theirs.load(first.mine.dump()) is True
    run(second, seed + 1, requests=120, most=1, longest=9)


@pytest.fixture(scope="module")
def learnt() -> bytes:
    pair = Pair(20)
    run(pair, 3, requests=60, most=1, longest=9)
    return pair.mine.dump()


@examples("normal")
@given(data=st.data())
def test_damaged_bytes_are_refused(learnt: bytes, data: st.DataObject) -> None:
    raw, fresh = learnt, NativeShadow[int]("hazard", 20)
    at = data.draw(st.integers(0, len(raw) - 1))
    bad = bytearray(raw)
    bad[at] ^= data.draw(st.integers(1, 255))
    before = fresh.dump()
    for junk in (bytes(bad), raw[:at], raw + b"\0", bytes(len(raw))):
        assert fresh.load(junk) is False
    assert fresh.dump() == before
    other: Hazard[int] = Hazard()
    assert fresh.load(raw) is other.load(raw) is True
    assert fresh.dump() == other.dump()


@pytest.mark.parametrize(
    ("which", "used", "seen"),
    [(6_144, 1.0, 1.0), (0, 2.0, 1.0), (0, -1.0, 1.0), (0, float("nan"), 1.0), (0, 0.0, float("inf")), (0, 1e13, 1e13)],
)
def test_counts_that_cannot_be_are_refused(which: int, used: float, seen: float) -> None:
    shadow = NativeShadow[int]("hazard", 20)
    body = struct.pack("<HB2f", which, 1, used, seen)
    assert shadow.load(struct.pack("<4sBI", b"hzrd", 1, zlib.crc32(body)) + body) is False


@pytest.mark.parametrize("row", [(6_144, 1.0, 1.0), (0, -1.0, 1.0), (0, float("nan"), 1.0), (0, 0.0, float("inf"))])
def test_the_core_looks_at_counts_too(row: tuple[int, float, float]) -> None:
    shadow = NativeShadow[int]("hazard", 20)
    which, used, seen = row
    counts = array("d", (which, used, *[0.0] * 55, seen, *[0.0] * 55))
    with pytest.raises(ValueError, match="counts by class"):
        _native.shadow_teach(shadow.arena, counts)


def test_only_learners_learn() -> None:
    lru = NativeShadow[int]("lru", 5)
    assert lru.dump() == b""
    assert lru.load(NativeShadow[int]("hazard", 5).dump()) is False
    with pytest.raises(ValueError, match="learns nothing"):
        _native.shadow_teach(lru.arena, array("d"))
    with pytest.raises(ValueError, match="learns nothing"):
        NativeShadow[int]("lru", 5, ghosts=(1, 1.0))


def test_made_up_keys_do_no_harm() -> None:
    rng = Random(1)
    shadow = NativeShadow[int]("hazard", 25, ghosts=(20, 0.5))
    for now in range(3_000):
        path = [rng.randrange(60) for _ in range(rng.randrange(9))]
        shadow.request(path, 1, rng.randrange(1 << 32), now * rng.choice((1.0, 30.0)))
        for key in path:
            shadow.on_pause(key, rng.randrange(1 << 10), now)
        shadow.check()


def test_what_it_holds_at_first() -> None:
    facts = [Facts(i, i - 1 if i % 5 else None, 16, 16 * (i % 5 + 1), 10) for i in range(40)]
    uses = [tuple(range(i, i + 5)) for i in range(0, 35, 5)]
    pair = Pair(300)
    gone = [list(one.fill(facts, uses, 3.0)) for one in (pair.mine, pair.theirs)]
    assert gone[0] == gone[1]
    assert len(gone[0]) == 10
    pair.check()


def test_the_default_policy_is_native() -> None:
    assert set(DEFAULT_EXPERTS) <= set(NATIVE)
    policy: Policy[int] = make_policy("adaptive", 100)
    assert isinstance(policy, AdaptivePolicy)
    assert all(isinstance(expert, NativeShadow) for expert in policy.experts)


def test_one_that_learnt_nothing_yet_can_be_recalled() -> None:
    """A store that is closed before its first return, and opened again."""
    young = NativeShadow("hazard", 100)
    assert NativeShadow("hazard", 100).load(young.dump())
    assert NativeShadow("hazard", 100).load(Hazard().dump())

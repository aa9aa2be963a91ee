"""Where states are kept, which of them go while their blocks stay, and that memory and disk agree about it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path as Folder

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.hybrid import HybridCache
from ctxreuse.identity.keys import ROOT
from ctxreuse.store import BlockStore
from ctxreuse.store.lmdb.records import footprint
from ctxreuse.store.policy.states import Path, StatePolicy, spare
from ctxreuse.testing.clock import FakeClock
from ctxreuse.testing.store import Context
from ctxreuse.tree import ContextTree, Match
from support.examples import examples

SIZE = 4


def key(number: int) -> bytes:
    return (number + 1).to_bytes(32, "big")  # ROOT is no block


def grow(tree: ContextTree, path: Sequence[bytes]) -> None:
    parent = ROOT
    for one in path:
        tree.insert(one, parent, SIZE, 100)
        parent = one


def test_a_prefix_has_its_state_on_the_second_appearance() -> None:
    tree, policy = ContextTree(), StatePolicy()
    first = [key(i) for i in range(6)]
    assert policy.points(Path(first, SIZE), tree) == (24,)
    grow(tree, first)
    tree.set_state(first[-1], 7)
    # The same conversation goes on: nobody parted from it.
    longer = [*first, key(6), key(7)]
    assert policy.points(Path(longer, SIZE), tree) == (32,)
    # Another one parts after three blocks: these are needed for the second time.
    other = [*first[:3], key(13), key(14)]
    assert policy.points(Path(other, SIZE), tree) == (12, 20)
    grow(tree, other)
    tree.set_state(other[2], 7)
    tree.set_state(other[-1], 7)
    # The third finds it there; one that parts elsewhere proves another place.
    assert policy.points(Path([*first[:3], key(23)], SIZE), tree) == (16,)
    assert policy.points(Path([*first[:4], key(33)], SIZE), tree) == (16, 20)
    # A prompt that is held as a whole ends at a split as well.
    assert policy.points(Path(first[:2], SIZE), tree) == (8,)


def test_what_is_replayed_sooner_than_kept() -> None:
    tree = ContextTree()
    first = [key(i) for i in range(6)]
    grow(tree, first)
    tree.set_state(first[-1], 7)
    longer = [*first, key(6), key(7)]
    assert StatePolicy(replay=7).points(Path(longer, SIZE), tree) == (32,)
    assert StatePolicy(replay=8).points(Path(longer, SIZE), tree) == ()
    parted = [*first[:5], key(13)]
    assert StatePolicy(replay=4).points(Path(parted, SIZE), tree) == (20,)
    assert StatePolicy(replay=3).points(Path(parted, SIZE), tree) == (20, 24)


def test_known_branches_are_rounded_down_to_their_blocks() -> None:
    path = Path([key(i) for i in range(6)], SIZE)
    assert StatePolicy().points(path, ContextTree(), branches=(3, 7, 8, 99)) == (4, 8, 24)


@examples("light")
@given(
    blocks=st.integers(0, 400),
    held=st.integers(0, 400),
    state=st.integers(0, 400),
    split=st.booleans(),
    replay=st.integers(0, 40),
    worth=st.integers(0, 30),
    branches=st.lists(st.integers(0, 2000), max_size=4),
)
def test_points_are_few_and_apart(
    blocks: int, held: int, state: int, split: bool, replay: int, worth: int, branches: list[int]
) -> None:
    held, state = min(held, blocks), min(held, state, blocks)

    class Tree:
        def match(self, keys: Sequence[int], /) -> Match:
            assert len(keys) == blocks
            return Match(held, held * SIZE, state, state * SIZE, split)

    policy = StatePolicy(replay=replay, worth=worth)
    path = Path(range(blocks), SIZE)
    points = policy.points(path, Tree(), branches=branches)
    assert list(points) == sorted(set(points))
    assert all(at % SIZE == 0 and 0 < at <= blocks * SIZE for at in points)
    below = [state * SIZE, *points]
    assert all(b - a >= max(replay, SIZE) for a, b in pairwise(below))
    if blocks * SIZE - state * SIZE > replay + SIZE and not branches and not split:
        assert points[-1] == blocks * SIZE
    # Rungs: each is further from the end, so that their bytes stay a small share of those of what is new.
    alone = StatePolicy(replay=replay).points(path, Tree(), branches=branches)
    rungs = set(points) - set(alone)
    assert set(alone) <= set(points)
    assert all(at > held * SIZE for at in rungs)
    assert len(rungs) * worth * 8 <= max((blocks - held) * SIZE, 0)


@examples("normal")
@given(data=st.data())
def test_spare_states_are_those_of_least_worth_inside_contexts(data: st.DataObject) -> None:
    tree = ContextTree()
    keys: list[bytes] = []
    for i in range(data.draw(st.integers(1, 30))):
        parent = data.draw(st.sampled_from([ROOT, *keys]))
        tree.insert(key(i + 1), parent, SIZE, 100)
        if data.draw(st.booleans()):
            tree.set_state(key(i + 1), data.draw(st.sampled_from([10, 50])))
        keys.append(key(i + 1))
    tree.pin(data.draw(st.lists(st.sampled_from(keys), max_size=3, unique=True)))
    keep = data.draw(st.frozensets(st.sampled_from(keys), max_size=3))
    need, most = data.draw(st.integers(0, 200)), data.draw(st.integers(0, 200))
    victims = spare(tree.stated, need, most, keep)
    assert all(node.state_nbytes and node.children and not node.pins and node.key not in keep for node in victims)
    inner = [node for node in tree.stated if node.children]
    left = sum(node.state_nbytes for node in inner) - sum(node.state_nbytes for node in victims)
    freed = sum(node.state_nbytes for node in victims)
    spared = [node for node in inner if node not in victims and not node.pins and node.key not in keep]
    assert freed >= need or left <= most or not spared
    if victims:
        assert freed - victims[-1].state_nbytes < need
    tokens = tree.tokens
    for node in victims:
        tree.set_state(node.key, 0)
        tree.check()
    assert tree.tokens == tokens


def test_spare_takes_the_state_that_costs_least_to_replay() -> None:
    tree, path = ContextTree(), [key(i) for i in range(8)]
    grow(tree, path)
    for at in (1, 2, 6, 7):
        tree.set_state(path[at], 10)
    # From 1 to 2 it is one block, from the start to 1 two, from 2 to 6 four; 7 ends the context.
    assert [node.key for node in spare(tree.stated, 99, 0)] == [path[2], path[1], path[6]]
    # Two contexts would have to replay what leads to a branch.
    for n in (20, 21):
        tree.insert(key(n), path[2], SIZE, 100)
    assert [node.key for node in spare(tree.stated, 99, 0)] == [path[1], path[2], path[6]]


def fill(store: BlockStore, context: Context, states: Sequence[int]) -> None:
    context.fill(store)
    for i in states:
        assert store.put(context.keys[i], context.state(i), kind="state")
    store.flush(60)


def test_a_state_goes_and_its_block_stays(tmp_path: Folder) -> None:
    """A byte is missing: of three states the one goes that is a block behind another; no block does."""
    first, second = Context(8, floats=1000), Context(5, seed=1, floats=1000)
    block, state = footprint(first.block(0).nbytes), footprint(first.state(0).nbytes)
    capacity = 13 * block + 3 * state - 1
    with BlockStore.open(tmp_path, capacity=capacity, policy="lru") as store:
        fill(store, first, (1, 2, 7))
        assert store.stats().states == 3
        fill(store, second, ())
        assert (store.match(first.keys).blocks, store.match(second.keys).blocks) == (8, 5)
        assert [store.match(first.keys[:n]).state_blocks for n in (2, 3, 8)] == [2, 2, 8]
        assert store.stats().evicted == 1
        store.check()
    with BlockStore.open(tmp_path, capacity=capacity, policy="lru") as store:
        assert [store.match(first.keys[:n]).state_blocks for n in (2, 3, 8)] == [2, 2, 8]
        assert first.intact(store)
        store.check()


def test_a_state_that_was_given_up_comes_back_if_the_disk_fails(tmp_path: Folder, monkeypatch) -> None:
    import lmdb

    import ctxreuse.store.blocks.store as blocks

    clock = FakeClock()
    first, second = Context(8, floats=1000), Context(30, seed=1, floats=1000)
    with BlockStore.open(tmp_path, capacity=300_000, policy="lru", clock=clock) as store:
        fill(store, first, (1, 2, 7))
        before = store.match(first.keys[:3])
        assert before.state_blocks == 3
        real = blocks.write_plan

        def fails(*_: object) -> None:
            raise lmdb.DiskError("no room")

        monkeypatch.setattr(blocks, "write_plan", fails)
        second.fill(store)
        assert store.stats().errors
        assert store.match(first.keys[:3]) == before
        monkeypatch.setattr(blocks, "write_plan", real)
        clock.advance(60)
        second.fill(store)
        store.check()
        assert store.match(second.keys).blocks > 0


@examples("normal")
@given(data=st.data())
def test_the_simulated_cache_serves_what_a_tree_would(data: st.DataObject) -> None:
    """With room for everything it reuses up to the deepest state; with little it never holds more than it may."""
    paths: list[list[int]] = []
    for i in range(data.draw(st.integers(1, 12))):
        base = data.draw(st.sampled_from([[], *paths]))
        shared = base[: data.draw(st.integers(0, len(base)))]
        paths.append([*shared, *(1000 * (i + 1) + n for n in range(data.draw(st.integers(0, 12))))])
    policy = StatePolicy(worth=data.draw(st.sampled_from([0, 1, 2])))
    small = HybridCache(data.draw(st.integers(100, 4000)), SIZE, 100, 70, policy=policy)
    large, tree = HybridCache(10**9, SIZE, 100, 70, policy=policy), ContextTree()
    for now, path in enumerate(paths):
        small.request(path, float(now))
        small.check()
        names = [key(n) for n in path]
        expected, points = tree.match(names), policy.points(Path(names, SIZE), tree)
        assert large.match(path) == expected
        assert large.request(path, float(now)) == expected.state_blocks
        grow(tree, names)
        for at in points:
            tree.set_state(names[at // SIZE - 1], 70)
        large.check()
        tree.check()


@pytest.mark.parametrize("every", [0.5, 1.0, 8.25])
def test_a_state_each_so_many_blocks(every: float) -> None:
    cache = HybridCache(10**9, 64, 100, 70, every=every)
    assert cache.request(list(range(40)), 0.0) == 0
    assert cache.request(list(range(40)), 1.0) == int(int(40 / every) * every)
    assert cache.nbytes == 40 * (100 + 70 / every)
    cache.check()

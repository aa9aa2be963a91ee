"""What is used as part of no prompt counts as a use under every policy, and spoils nothing that prompts taught."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ctxreuse.keys import ROOT
from ctxreuse.store.index import Index
from ctxreuse.store.policy import Facts, make_policy
from ctxreuse.store.policy.base import Policy
from ctxreuse.store.records import Record

SIZE, BLOCKS = 100, 4


def path(context: int, blocks: int = BLOCKS) -> list[bytes]:
    return [bytes([context + 1, i]) * 16 for i in range(blocks)]


def hold(policy: Policy[bytes], context: int, now: float, *, told: bool) -> None:
    keys = path(context)
    if told:
        policy.asked(keys, [SIZE] * BLOCKS, [16] * BLOCKS, now)  # type: ignore[attr-defined]
    for i, key in enumerate(keys):
        policy.insert(Facts(key, keys[i - 1] if i else None, 16, 16 * (i + 1), SIZE), now)
    policy.access(keys, now)


@pytest.mark.parametrize("told", [True, False])
def test_the_path_goes_last(told: bool) -> None:
    policy = make_policy("duel:lru,arc", SIZE * BLOCKS * 6, rng=Random(1))
    for context in range(5):
        hold(policy, context, float(context), told=told)
    assert set(list(policy.order())[:BLOCKS]) == set(path(0))
    before = policy.standing
    policy.needed(path(0, 3), 9.0)
    policy.check()
    order = list(policy.order())
    assert set(order[-3:]) == set(path(0, 3))
    assert order.index(path(1)[0]) < order.index(path(0)[0])
    assert policy.standing.asked == before.asked + 3 * 16
    policy.needed([], 10.0)
    assert policy.standing.asked == before.asked + 3 * 16


@settings(max_examples=40, deadline=None)
@given(steps=st.lists(st.tuples(st.sampled_from(["ask", "need", "drop"]), st.integers(0, 9)), max_size=40))
def test_any_mixture_keeps_the_duel_whole(steps: list[tuple[str, int]]) -> None:
    policy = make_policy("duel", SIZE * BLOCKS * 3, rng=Random(2))
    held: set[int] = set()
    for now, (what, context) in enumerate(steps):
        if what == "need" and context in held:
            policy.needed(path(context), float(now))
        elif what == "drop" and context in held:
            for key in reversed(path(context)):
                policy.remove(key, float(now))
            held.discard(context)
        elif what == "ask" and context not in held:
            hold(policy, context, float(now), told=True)
            held.add(context)
        policy.check()
        assert len(policy) == BLOCKS * len(held)


@pytest.mark.parametrize("name", ["lru", "lfu", "arc", "hazard", "pauses", "duel"])
def test_an_index_tells_every_policy(name: str) -> None:
    index = Index(1 << 20, make_policy(name, 1 << 20), lambda: 0.0)
    records = [
        (key, Record(path(context)[i - 1] if i else ROOT, 16, 16 * (i + 1), SIZE, 0, 10 * context + i))
        for context in range(3)
        for i, key in enumerate(path(context))
    ]
    assert index.load(records) == []
    first = next(iter(index.policy.order()))
    index.touch([path(first[0] - 1)[-1], b"?" * 32], needed=True)
    index.check()
    assert next(iter(index.policy.order()))[0] != first[0]
    assert {key for key in index.renewals() if key[0] == first[0]} == set(path(first[0] - 1))

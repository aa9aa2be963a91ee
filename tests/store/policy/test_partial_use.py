"""What is used as part of no prompt counts as a use under every policy, and spoils nothing that prompts taught."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxreuse.identity.keys import ROOT
from ctxreuse.store.blocks.index import Index
from ctxreuse.store.lmdb.records import ROW, Record
from ctxreuse.store.policy import Facts, make_policy
from ctxreuse.store.policy.base import Policy
from ctxreuse.tree import NodeKind
from support.examples import examples

SIZE, BLOCKS = 100, 4


def path(context: int, blocks: int = BLOCKS) -> list[bytes]:
    return [bytes([context + 1, i]) * 16 for i in range(blocks)]


def hold(policy: Policy[bytes], context: int, now: float, *, told: bool) -> None:
    keys = path(context)
    if told:
        policy.on_lookup(keys, [SIZE] * BLOCKS, [16] * BLOCKS, now)  # type: ignore[attr-defined]
    for i, key in enumerate(keys):
        policy.insert(Facts(key, keys[i - 1] if i else None, 16, 16 * (i + 1), SIZE), now)
    policy.access(keys, now)


@pytest.mark.parametrize("told", [True, False])
def test_the_path_goes_last(told: bool) -> None:
    policy = make_policy("adaptive:lru,arc", SIZE * BLOCKS * 6, rng=Random(1))
    for context in range(5):
        hold(policy, context, float(context), told=told)
    assert set(list(policy.order())[:BLOCKS]) == set(path(0))
    before = policy.stats
    policy.on_partial_use(path(0, 3), 9.0)
    policy.check()
    order = list(policy.order())
    assert set(order[-3:]) == set(path(0, 3))
    assert order.index(path(1)[0]) < order.index(path(0)[0])
    assert policy.stats.lookup_tokens == before.lookup_tokens + 3 * 16
    policy.on_partial_use([], 10.0)
    assert policy.stats.lookup_tokens == before.lookup_tokens + 3 * 16


@examples("normal")
@given(steps=st.lists(st.tuples(st.sampled_from(["ask", "need", "drop"]), st.integers(0, 9)), max_size=40))
def test_any_mixture_keeps_the_policy_consistent(steps: list[tuple[str, int]]) -> None:
    policy = make_policy("adaptive", SIZE * BLOCKS * 3, rng=Random(2))
    held: set[int] = set()
    for now, (what, context) in enumerate(steps):
        if what == "need" and context in held:
            policy.on_partial_use(path(context), float(now))
        elif what == "drop" and context in held:
            for key in reversed(path(context)):
                policy.remove(key, float(now))
            held.discard(context)
        elif what == "ask" and context not in held:
            hold(policy, context, float(now), told=True)
            held.add(context)
        policy.check()
        assert len(policy) == BLOCKS * len(held)


@pytest.mark.parametrize("name", ["lru", "lfu", "arc", "hazard", "pauses", "adaptive"])
def test_an_index_reports_to_every_policy(name: str) -> None:
    index = Index(1 << 20, make_policy(name, 1 << 20), lambda: 0.0)
    records = [
        (key, Record(path(context)[i - 1] if i else ROOT, 16, 16 * (i + 1), SIZE, 0, 10 * context + i))
        for context in range(3)
        for i, key in enumerate(path(context))
    ]
    rows = np.zeros(len(records), ROW)
    for row, (key, record) in zip(rows, records, strict=True):
        row["key"], row["parent"] = np.void(key), np.void(record.parent)
        for field in ("tokens", "depth", "nbytes", "used"):
            row[field] = getattr(record, field)
    assert index.load(bytearray(rows.tobytes()), [NodeKind()]) == []
    first = next(iter(index.policy.order()))
    index.touch([path(first[0] - 1)[-1], b"?" * 32], partial=True)
    index.check()
    assert next(iter(index.policy.order()))[0] != first[0]
    assert {key for key in index.renewals() if key[0] == first[0]} == set(path(first[0] - 1))

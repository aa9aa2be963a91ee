"""A policy that is filled from a store's tree at once is the same as one that is told of each block."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxreuse.identity.keys import ROOT
from ctxreuse.store.blocks.index import Index
from ctxreuse.store.lmdb.records import ROW
from ctxreuse.store.policy import Policy, make_policy
from ctxreuse.store.policy.base import StoreContents
from ctxreuse.tree import ContextTree, NodeKind
from support.examples import examples

POLICIES = ["lru", "lfu", "s3fifo", "arc", "gdsf", "hazard", "pauses", "adaptive", "adaptive:lru,pauses"]
KINDS = [NodeKind(), NodeKind("kl-0.05@x", max_kl=0.1)]


class Recorded(Policy[bytes]):
    """Keeps what a policy would be filled with."""

    name = "recorded"
    stored: StoreContents | None = None

    def fill_stored(self, stored: StoreContents, now: float) -> None:
        self.stored = stored

    def insert(self, facts, now) -> None: ...  # type: ignore[no-untyped-def]
    def access(self, path, now) -> None: ...  # type: ignore[no-untyped-def]
    def remove(self, key, now) -> None: ...  # type: ignore[no-untyped-def]
    def order(self):  # type: ignore[no-untyped-def]
        return iter(())

    def __len__(self) -> int:
        return 0


def key(i: int, alike: bool) -> bytes:
    return (b"same" * 2 if alike else b"%08d" % i) + i.to_bytes(24, "big")


def rows_of(parents: list[int], uses: list[int], alike: bool) -> bytearray:
    """One row a block: its parent is an earlier one or none (-1); in an order that says nothing."""
    rows, depths = np.zeros(len(parents), ROW), list[int]()
    for i, (parent, used) in enumerate(zip(parents, uses, strict=True)):
        depths.append(16 + (depths[parent] if parent >= 0 else 0))
        above = key(parent, alike) if parent >= 0 else ROOT
        rows[i] = (key(i, alike), above, depths[i], 4096, 0 if i % 3 else 100, used, 16, i % 2)
    return bytearray(rows[Random(1).sample(range(len(rows)), len(rows))].tobytes())


@st.composite
def forests(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    count = draw(st.integers(1, 60))
    parents = [draw(st.integers(-1, i - 1)) if draw(st.booleans()) else i - 1 for i in range(count)]
    return parents, draw(st.lists(st.integers(0, 99), min_size=count, max_size=count))


@pytest.mark.parametrize("name", POLICIES)
@examples("light")
@given(forest=forests(), room=st.sampled_from([1 << 40, 4096 * 20]), alike=st.sampled_from([False, False, True]))
def test_filled_at_once_or_told_of_each(name: str, forest: tuple[list[int], list[int]], room: int, alike: bool) -> None:
    parents, uses = forest
    rows = rows_of(parents, uses, alike)
    recorded = Recorded()
    assert Index(room, recorded, lambda: 5.0).load(bytearray(rows), KINDS) == []
    stored = recorded.stored
    assert stored is not None
    assert stored.unique == (not alike or len(parents) == 1)
    told, filled = (make_policy(name, room, rng=Random(1)) for _ in range(2))
    told.fill(*stored.unpacked(), 5.0)
    filled.fill_stored(stored, 5.0)
    assert list(filled.order()) == list(told.order())
    assert filled.dump() == told.dump()
    if not alike:
        filled.check()
    tip = stored.unpacked()[1][-1]
    for now, policy in ((6.0, told), (6.0, filled)):
        policy.on_lookup(tip, [4096] * len(tip), [16] * len(tip), now)
        policy.access(tip, now)
    assert list(filled.order()) == list(told.order())


@examples("light")
@given(forest=forests(), cut=st.integers(0, 59), wrong=st.sampled_from(["parent", "depth", "nbytes", "twice", "kind"]))
def test_rows_that_make_no_sense_are_lost_with_all_below(
    forest: tuple[list[int], list[int]], cut: int, wrong: str
) -> None:
    parents, uses = forest
    cut %= len(parents)
    table = np.frombuffer(rows_of(parents, uses, False), ROW)
    at = next(i for i, row in enumerate(table) if row["key"].tobytes() == key(cut, False))
    below = {cut}
    for i, parent in enumerate(parents):
        if parent in below:
            below.add(i)
    if wrong == "parent":
        table[at]["parent"] = np.void(b"?" * 32)
    elif wrong == "depth":
        table[at]["depth"] += 1
    elif wrong == "nbytes":
        table[at]["nbytes"] = 1 << 60
    elif wrong == "kind":
        table[at]["kind"] = 1
        below.clear()
    else:
        table = np.concatenate([table, table[at : at + 1]])
        below = {cut}
    index = Index(1 << 40, make_policy("adaptive", 1 << 40), lambda: 5.0)
    lost = index.load(bytearray(table.tobytes()), KINDS)
    assert set(lost) == {key(i, False) for i in below}
    gone = set() if wrong == "twice" else below
    assert {node.key for node in index.tree} == {key(i, False) for i in range(len(parents)) if i not in gone}
    index.check()
    fresh = ContextTree()
    assert len(fresh) == fresh.tokens == fresh.nbytes == fresh.states == 0

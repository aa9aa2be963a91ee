"""Runs of blocks: each block is in one, they add up to the store, and end exactly where contexts part or differ."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ctxreuse.identity.keys import ROOT
from ctxreuse.store import BlockStore
from ctxreuse.store.blocks.pending import Put
from ctxreuse.store.runs import NO_RUN, RUN, joined_runs, tree_runs
from ctxreuse.store.tiered import TieredStore
from ctxreuse.testing.store import Context
from ctxreuse.tree import ContextTree


def key(n: int) -> bytes:
    return n.to_bytes(32, "big")[::-1]


def id_of(name: bytes) -> int:
    return int.from_bytes(name[:8], "little")


STEPS = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 64), st.sampled_from(["exact", "packed"])), max_size=40)


@given(STEPS, st.sets(st.integers(1, 40)), st.sets(st.integers(1, 40)))
def test_runs_are_the_nodes_in_a_line_that_are_alike(
    steps: list[tuple[int, int, str]], pinned: set[int], removed: set[int]
) -> None:
    tree = ContextTree()
    for number, (parent, tokens, level) in enumerate(steps, start=1):
        above = key(parent) if 0 < parent < number else ROOT
        tree.insert(key(number), above, tokens, 10 * tokens, level)
    for number in sorted(removed, reverse=True):  # places are free, and given again
        node = tree.get(key(number))
        if node is not None and not node.children:
            tree.remove(key(number))
    tree.insert(key(99), ROOT, 5, 50)
    tree.pin(map(key, pinned))
    nodes = {node.key: node for node in tree}
    runs, numbers = tree_runs(tree, [*nodes, key(77)])
    assert numbers.pop() == NO_RUN
    run_of = dict(zip(nodes, numbers))
    rows = runs.rows
    assert set(run_of.values()) == set(range(len(rows)))
    for name, node in nodes.items():
        row, parent = rows[run_of[name]], node.parent
        assert row["start"] < node.depth <= row["start"] + row["tokens"]
        assert (runs.levels[run_of[name]], bool(row["pinned"])) == (node.level, node.pins > 0)
        goes_on = parent is not None and parent.children == 1 and parent.level == node.level
        goes_on = goes_on and parent is not None and (parent.pins > 0) == (node.pins > 0)
        if goes_on and parent is not None:
            assert run_of[name] == run_of[parent.key]
        else:
            assert row["head"] == id_of(name)
            assert row["parent"] == (NO_RUN if parent is None else run_of[parent.key])
    for column, whole in (("tokens", tree.tokens), ("nbytes", tree.nbytes), ("blocks", len(tree))):
        assert rows[column].sum() == whole


def test_both_tiers_are_seen_as_one_tree(tmp_path: Path) -> None:
    trunk, side = Context(6), Context(6, branch=1, fork=2)
    with TieredStore(1 << 30, BlockStore.open(tmp_path / "store", capacity=1 << 24)) as store:
        for block in range(4):
            assert store.put(trunk.keys[block], trunk.block(block))
        store.flush()
        store.pin(trunk.keys[:1])
        found = store.runs()
        assert (found.disk, found.rows["blocks"].tolist()) == (2, [1, 3])
        assert store.disk is not None
        below, numbers = store.disk.runs(trunk.keys)
        assert numbers == [0, 1, 1, 1, NO_RUN, NO_RUN]
        # What the disk has not committed yet: the end of one context, and another that parts from it after two blocks.
        known = {name: number for name, number in zip(trunk.keys, numbers) if number != NO_RUN}
        late = [(trunk, 4), (trunk, 5), *((side, block) for block in (2, 3, 4, 5))]
        items = [Put.parse(one.keys[block], one.block(block), "block", False) for one, block in late]
        orphan = Context(3, seed=9)  # its parent left between the two looks
        items.append(Put.parse(orphan.keys[2], orphan.block(2), "block", False))
        joined = joined_runs(below, known, filter(None, items), [side.keys[2]])
    rows = joined.rows[joined.disk :]
    by_head = {int(row["head"]): row for row in rows}
    assert set(by_head) == {id_of(trunk.keys[4]), id_of(side.keys[2]), id_of(side.keys[3])}
    end, pinned, rest = (by_head[id_of(name)] for name in (trunk.keys[4], side.keys[2], side.keys[3]))
    assert (end["parent"], end["start"], end["blocks"], end["pinned"]) == (1, 16, 2, 0)
    assert (pinned["parent"], pinned["start"], pinned["blocks"], pinned["pinned"]) == (1, 8, 1, 1)
    assert (joined.rows[rest["parent"]]["head"], rest["start"], rest["blocks"]) == (pinned["head"], 12, 3)
    assert len(joined.levels) == len(joined.rows)


def test_without_a_disk_all_runs_are_in_memory() -> None:
    one, two = Context(4), Context(4, branch=1, fork=2)
    store = TieredStore(1 << 30)
    for context in (one, two):
        for block in range(4):
            store.put(context.keys[block], context.block(block))
    store.pin(two.keys[2:])
    found = store.runs()
    assert found.disk == 0
    assert found.rows.dtype == RUN
    assert found.rows["blocks"].tolist() == [2, 2, 2]
    assert np.count_nonzero(found.rows["pinned"]) == 1
    store.close()
    assert TieredStore(1 << 20).runs().rows.tolist() == []

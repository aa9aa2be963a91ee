"""What a store contains as runs of blocks: one row where contexts go on together, for those who look at all of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ctxreuse.identity.keys import ROOT
from ctxreuse.store.blocks.pending import Put
from ctxreuse.tree import ContextTree

__all__ = ["NO_RUN", "RUN", "ContextRuns", "joined_runs", "tree_runs"]

#: One run: ids of its first and last key (their first 8 bytes), bytes, the number of the run that it continues, tokens
#: before it and in it, its blocks and states, children of the last, and whether it is pinned.
RUN = np.dtype(
    [("head", "<u8"), ("tip", "<u8"), ("nbytes", "<u8")]
    + [(name, "<u4") for name in ("parent", "start", "tokens", "blocks", "states", "kind", "children", "pinned")]
)
#: The parent of runs that continue none.
NO_RUN = 0xFFFFFFFF
# Stands for blocks on disk that blocks in memory continue.
_BELOW = "below"


class ContextRuns(NamedTuple):
    """Runs of a store at one moment: ``rows`` of `RUN`, the level of each; the first ``disk`` of them are on disk, the
    others in memory only."""

    rows: NDArray[np.void]
    levels: Sequence[str]
    disk: int = 0


def tree_runs(tree: ContextTree, keys: Sequence[bytes] = ()) -> tuple[ContextRuns, list[int]]:
    """Return the runs of a tree, and the number of the run of each key (`NO_RUN`: not in the tree)."""
    raw, numbers = tree.runs()
    rows, run_of = np.frombuffer(raw, RUN), np.frombuffer(numbers, "<u4")
    names = [kind.level for kind in tree.kinds]
    levels = [names[kind] for kind in rows["kind"].tolist()]
    nodes = [tree.get(key) for key in keys]
    return ContextRuns(rows, levels), [int(run_of[one.place]) if one is not None else NO_RUN for one in nodes]


def joined_runs(
    below: ContextRuns, found: dict[bytes, int], items: Iterable[Put], pins: Iterable[bytes]
) -> ContextRuns:
    """Return the runs on disk and those of blocks in memory; ``found``: the run on disk of keys that have one."""
    tree, parents = ContextTree(), dict[bytes, int]()
    for item in sorted(items, key=lambda item: item.end):
        if item.key in found:
            continue
        parent = item.parent
        if parent != ROOT and parent not in tree:
            if parent not in found:
                continue  # it was released meanwhile, and is seen the next time
            tree.insert(parent, ROOT, item.end - item.tokens, 0, _BELOW)
            parents[parent] = found[parent]
        tree.insert(item.key, parent, item.tokens, len(item.data), item.level)
    tree.pin(pins)
    above, numbers = tree_runs(tree, list(parents))
    rows, base = above.rows.copy(), len(below.rows)
    # What stands for blocks on disk becomes the run that these are in.
    stands = [name == _BELOW for name in above.levels]
    places = np.arange(len(rows) + 1, dtype=np.int64) - np.cumsum([0, *stands]) + base
    places[-1] = NO_RUN
    for key, number in zip(parents, numbers):
        places[number] = parents[key]
    rows["parent"] = places[np.where(rows["parent"] == NO_RUN, len(rows), rows["parent"])]
    kept = ~np.array(stands, bool)
    levels = [*below.levels, *(name for name in above.levels if name != _BELOW)]
    return ContextRuns(np.concatenate([below.rows, rows[kept]]), levels, base)

"""Panels that both daemons have: the store with what leaves it, and the tree of contexts."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ctxreuse.daemon.page.feed import Panels, Rows
from ctxreuse.store import TieredStore
from ctxreuse.store.runs import NO_RUN, ContextRuns

__all__ = [
    "MOST_RUNS",
    "ContextPanel",
    "KnownUse",
    "StorePanels",
    "block_id",
    "removal_rows",
    "shown_text",
    "store_figures",
]

#: Runs of contexts that a page gets at most, those with the most tokens.
MOST_RUNS = 10_000
_REMOVALS = 64
#: Letters of a name that are sent.
_NAME = 120


def block_id(key: bytes) -> str:
    """Return what stands for a key in rows."""
    return f"{int.from_bytes(key[:8], 'little'):016x}"


def shown_text(text: str, most: int = _NAME) -> str:
    """Return the beginning of a text of others, as JSON can have it."""
    short = text if len(text) <= most else text[: most - 1] + "…"
    return short.encode("utf-8", "replace").decode()


def store_figures(store: TieredStore) -> dict[str, Any]:
    """Sizes by tier, blocks by level, and how many left or were refused, by reason."""
    whole, disk = store.stats(), store.disk.stats() if store.disk is not None else None
    less = (disk.nbytes, disk.capacity, disk.blocks) if disk is not None else (0, 0, 0)
    sizes = (whole.nbytes, whole.capacity, whole.blocks)
    tiers: dict[str, Any] = {"host": [max(one - other, 0) for one, other in zip(sizes, less)]}
    if disk is not None:
        tiers["disk"] = list(less)
    return {
        "tiers": tiers,
        "tokens": whole.tokens,
        "states": whole.states,
        "levels": {name: count for name, count in whole.levels.items() if count},
        "hits": whole.hits,
        "evicted": whole.evicted,
        "recompressed": sum(whole.recompressed.values()),
        "dropped": dict(whole.dropped),
        "refused": dict(whole.refused),
        "failing": whole.failing,
        "unwritten": whole.unwritten_bytes,
        "policy": whole.policy.leader if whole.policy is not None else "",
    }


def removal_rows(store: TieredStore) -> Rows:
    """The last removals: when, how, why, how many blocks, and the first bytes of the key that needed the room."""
    return Rows(
        (str(number), [round(one.at, 1), one.how, one.why, blocks, block_id(one.by) if one.by else ""])
        for number, one, blocks in store.removals.newest(_REMOVALS)
    )


class KnownUse(NamedTuple):
    """A use of a context: when (seconds since 1970), by whom (a session, else a request), and the first 8 bytes of the
    keys of its blocks, as one text."""

    at: float
    who: str
    keys: bytes


class ContextPanel:
    """The tree of contexts of a store as rows, made again only where the store or the uses have changed. One thread.

    A row: the id of the row that it continues ("": none), tokens before it and in it, blocks, bytes, tier, level, flags
    (1: pinned, 2: has a state, 4: more below than is sent), tokens below that are not sent, last use, by whom.

    Args:
        store: whose contexts.
        uses: recent uses, newest first.
        resident: the keys of each context in the engine's memory.
        most: rows at most.
    """

    def __init__(
        self,
        store: TieredStore,
        uses: Callable[[], Sequence[KnownUse]] = tuple,
        resident: Callable[[], Iterable[Sequence[bytes]]] = tuple,
        *,
        most: int = MOST_RUNS,
    ) -> None:
        self._store, self._uses, self._resident, self._most = store, uses, resident, most
        self._changed = threading.Event()
        self._changed.set()
        self._unwatch: Callable[[], None] | None = None
        self._rows, self._state = Rows(), object()
        #: The number of each run by its first key.
        self._number: dict[int, int] = {}
        self._names: list[str] = []

    def rows(self) -> Rows:
        """Return the rows; the same object as before if nothing has changed."""
        if self._unwatch is None:
            self._unwatch = self._store.watch(lambda _: self._changed.set())
        uses, resident = self._uses(), [list(keys) for keys in self._resident()]
        state = [(one.at, one.who) for one in uses[:1]], [(len(keys), keys[-1:]) for keys in resident]
        if self._changed.is_set() or state != self._state:
            self._changed.clear()
            self._state, self._rows = state, self._made(self._store.runs(), uses, resident)
        return self._rows

    def _made(self, runs: ContextRuns, uses: Sequence[KnownUse], resident: Sequence[Sequence[bytes]]) -> Rows:
        table = runs.rows
        kept, hidden = _largest(table, self._most)
        names = self._names = [f"{head:016x}" for head in table["head"].tolist()]
        number = self._number = {head: at for at, head in enumerate(table["head"].tolist())}
        tiers = np.where(np.arange(len(table)) < runs.disk, "disk", "host").tolist()
        for keys in resident:
            for key in keys:
                at = number.get(int.from_bytes(key[:8], "little"))
                if at is not None:
                    tiers[at] = "device"
        used: dict[int, tuple[float, str]] = {}
        for use in uses:
            if (at := self._run(use.keys)) >= 0:
                used.setdefault(at, (round(use.at, 1), shown_text(use.who)))
        found = Rows()
        columns = ("parent", "start", "tokens", "blocks", "nbytes", "pinned", "states")
        lists = [table[name].tolist() for name in columns]
        for at in kept:
            parent, start, tokens, blocks, nbytes, pinned, states = (column[at] for column in lists)
            flags = bool(pinned) + 2 * bool(states) + 4 * bool(hidden[at])
            when, who = used.get(at, (0, ""))
            above = names[parent] if parent != NO_RUN else ""
            row = [above, start, tokens, blocks, nbytes, tiers[at], runs.levels[at], flags, hidden[at], when, who]
            found[names[at]] = row
        return found

    def run_of(self, keys: bytes) -> str:
        """Return the id of the row in which a context of these keys (see `KnownUse`) ends as far as it is stored."""
        at = self._run(keys)
        return self._names[at] if at >= 0 else ""

    def _run(self, keys: bytes) -> int:
        for end in range(len(keys), 0, -8):
            at = self._number.get(int.from_bytes(keys[end - 8 : end], "little"))
            if at is not None:
                return at
        return -1

    def close(self) -> None:
        """Stop listening to the store and forget the rows, until they are wanted again. A second call does nothing."""
        if self._unwatch is not None:
            self._unwatch()
            self._unwatch, self._rows, self._number, self._names = None, Rows(), {}, []
            self._changed.set()


class StorePanels:
    """The panels of a store that may not be open yet, until when they are empty. One thread at a time.

    Args:
        store: the store; None: it is not open.
        uses, resident: see `ContextPanel`.
    """

    def __init__(
        self,
        store: Callable[[], TieredStore | None],
        uses: Callable[[], Sequence[KnownUse]] = tuple,
        resident: Callable[[], Iterable[Sequence[bytes]]] = tuple,
    ) -> None:
        self._store, self._uses, self._resident = store, uses, resident
        self._tree: ContextPanel | None = None

    def all(self) -> Panels:
        """What makes each panel."""
        return {"store": self.store, "contexts": self.contexts, "removals": self.removals}

    def store(self) -> dict[str, Any]:
        """See `store_figures`."""
        store = self._store()
        return store_figures(store) if store is not None else {}

    def removals(self) -> Rows:
        """See `removal_rows`."""
        store = self._store()
        return removal_rows(store) if store is not None else Rows()

    def contexts(self) -> Rows:
        """See `ContextPanel.rows`."""
        tree = self._opened()
        return tree.rows() if tree is not None else Rows()

    def run_of(self, keys: bytes) -> str:
        """See `ContextPanel.run_of`."""
        tree = self._opened()
        return tree.run_of(keys) if tree is not None else ""

    def _opened(self) -> ContextPanel | None:
        store = self._store()
        if self._tree is None and store is not None:
            self._tree = ContextPanel(store, self._uses, self._resident)
        return self._tree

    def close(self) -> None:
        """Stop following the store until the panels are wanted again."""
        if self._tree is not None:
            self._tree.close()


def _largest(table: NDArray[np.void], most: int) -> tuple[list[int], list[int]]:
    """Numbers of the runs with the most tokens in and below them, parents first, and for each run the tokens below it
    that are left out."""
    count = len(table)
    tokens = table["tokens"].astype(np.int64)
    parents = np.where(table["parent"] == NO_RUN, -1, table["parent"].astype(np.int64))
    # Parents begin before their children do.
    order = np.argsort(table["start"], kind="stable")
    below = tokens.copy()
    steps = list(zip(order[::-1].tolist(), parents[order[::-1]].tolist()))
    sums: list[int] = below.tolist()
    for at, parent in steps:
        if parent >= 0:
            sums[parent] += sums[at]
    hidden = [0] * count
    if count <= most:
        return order.tolist(), hidden
    # A run has at least the tokens of those below it, so whose are the most contain their parents.
    chosen = set(sorted(order.tolist(), key=lambda at: -sums[at])[:most])
    for at, parent in steps:
        if at not in chosen and parent >= 0:
            hidden[parent] += int(tokens[at]) + hidden[at]
    return [at for at in order.tolist() if at in chosen], hidden

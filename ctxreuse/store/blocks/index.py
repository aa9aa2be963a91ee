"""What a block store knows in memory: the context tree, the eviction order, and the plan of the next transaction."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ctxreuse.block.format import Kind
from ctxreuse.block.levels import allowed_by, stricter
from ctxreuse.identity.keys import ROOT
from ctxreuse.store.blocks.pending import PendingPauseLabels, Put
from ctxreuse.store.lmdb.records import ROW, Record
from ctxreuse.store.policy import Facts, Policy
from ctxreuse.store.policy.base import StoreContents
from ctxreuse.store.policy.states import SHARE, spare
from ctxreuse.tree import ContextTree, Node, NodeKind

__all__ = ["Index", "Plan", "Removed", "facts"]


class Removed(NamedTuple):
    """A node that left the tree, with its record to restore it."""

    key: bytes
    record: Record

    @property
    def nbytes(self) -> int:
        """Bytes of its block and its state."""
        return self.record.nbytes + self.record.state_nbytes


class Plan(NamedTuple):
    """One transaction: values to write, entries to delete, records to renew.

    ``known``: keys of ``records`` that were stored when it was made. ``stripped``: entries that lose their state only.
    ``declined``: blocks that the policy does not admit to a full store.
    """

    puts: list[Put]
    evicted: list[Removed]
    records: dict[bytes, Record]
    known: set[bytes]
    stripped: Sequence[Removed] = ()
    declined: frozenset[bytes] = frozenset()


def facts(node: Node) -> Facts[bytes]:
    """Return a stored node as the policy sees it: its block and its state together."""
    row = node.row
    parent = row.parent if row.parent != ROOT else None
    return Facts(row.key, parent, row.tokens, row.depth, row.nbytes + row.state_nbytes)


class _Loaded(StoreContents):
    """See `StoreContents`."""

    def __init__(self, tree: ContextTree, order: NDArray[np.uint32], unique: bool) -> None:
        self._nodes, self.tree, self.order, self.unique = tree, tree.arena, order, unique

    def unpacked(self) -> tuple[list[Facts[bytes]], list[list[bytes]]]:
        paths: list[list[bytes]] = []
        above: Node | None = None
        for node in map(self._nodes.at, self.order.tolist()):
            if above is None or node != above:
                paths.append([])
            paths[-1].append(node.key)
            above = node.parent
        return [facts(node) for node in self._nodes], [path[::-1] for path in paths]


class Index:
    """Tree and policy in step. Not thread-safe: the store's lock guards it, and is free between plan and settle."""

    def __init__(self, capacity: int, policy: Policy[bytes], clock: Callable[[], float]) -> None:
        """``clock``: seconds, for the policy."""
        self.tree, self.policy, self.capacity, self.clock = ContextTree(), policy, capacity, clock
        #: See `Store.share_by`.
        self.over: Callable[[int], Callable[[bytes], bool] | None] = lambda need: None
        self._sequence, self._labels = 0, PendingPauseLabels()
        self._touched: dict[bytes, int] = {}
        #: Partial blocks, which have fewer tokens than the block before them, by that one's key.
        self._partial: dict[bytes, set[bytes]] = {}

    def load(self, rows: bytearray, kinds: Sequence[NodeKind], bad: Container[bytes] = frozenset()) -> list[bytes]:
        """Rebuild from the records on disk, without those whose keys are ``bad``.

        Args:
            rows: of `ROW`, as `lmdb.recovery.scan` gives them.
            kinds: by number.
            bad: keys.

        Returns keys that cannot be reached and should be deleted.
        """
        if not rows:
            return []
        table = np.frombuffer(rows, ROW)
        known: dict[NodeKind, int] = {}
        numbers = [known.setdefault(kind, len(known)) for kind in kinds]
        table["kind"] = np.array(numbers, np.uint32)[table["kind"]]
        order = np.argsort(table["depth"], kind="stable").astype(np.uint32)
        if bad:
            order = order[[table["key"][i].tobytes() not in bad for i in order]]
        used, lost = np.zeros(len(table), np.uint64), np.zeros(len(table), np.uint8)
        unique = self.tree.load(rows, order, list(known), used, lost)
        used = used[: len(self.tree)]
        # In the order of use, of equal ones the deepest first: each node stands once, with its most recent child.
        last = len(used) - 1
        by_use = (last - np.argsort(used[::-1], kind="stable")).astype(np.uint32)
        self.policy.fill_stored(_Loaded(self.tree, by_use, unique), self.clock())
        self._sequence = int(used.max(initial=0))
        for i in np.flatnonzero(table["tokens"] < table["tokens"].max()):
            if (node := self.tree.get(table["key"][i].tobytes())) is not None:
                self._note_partial(node)
        return [table["key"][i].tobytes() for i in np.flatnonzero(lost)]

    def _insert(self, key: bytes, record: Record) -> None:
        node = self.tree.insert(key, record.parent, record.tokens, record.nbytes, record.level)
        if node.state_nbytes != record.state_nbytes or node.state_level != record.state_level:
            self.tree.set_state(key, record.state_nbytes, record.state_level)
        if node.max_kl != record.max_kl:
            node.max_kl = record.max_kl
        self._note_partial(node)

    def _note_partial(self, node: Node) -> None:
        above = node.parent
        if above is not None and node.tokens < above.tokens:
            self._partial.setdefault(above.key, set()).add(node.key)

    def record(self, node: Node, used: int) -> Record:
        """Return the record of a stored node."""
        row = node.row
        return Record(row.parent, row.tokens, row.depth, row.nbytes, row.state_nbytes, used, *row.kind)

    def limit(self, keys: Iterable[bytes], max_kl: float | None) -> None:
        """Keep the stored blocks among ``keys`` at least as good as a caller with the limit ``max_kl`` needs.

        Call it before `touch`, which has the records renewed.
        """
        for key in keys:
            node = self.tree.get(key)
            if node is not None and node.max_kl != max_kl:
                node.max_kl = stricter(node.max_kl, max_kl)

    def touch(self, keys: Iterable[bytes], partial: bool = False) -> None:
        """Count the stored blocks among ``keys`` and their ancestors as used; their records follow with `renewals`.

        ``partial``: see `Store.touch`.
        """
        now = self.clock()
        use = self.policy.on_partial_use if partial else self.policy.access
        nodes = [(node.depth, key, node) for key in keys if (node := self.tree.get(key)) is not None]
        seen: set[bytes] = set()
        for _, key, tip in sorted(nodes, key=lambda found: -found[0]):
            if key in seen:
                continue
            path = tip.line
            seen.update(path)
            for key in path:
                self._sequence += 1
                self._touched[key] = self._sequence
            use(path[::-1], now)

    def on_lookup(self, keys: Sequence[bytes], tokens: int) -> None:
        """See `Store.on_lookup`."""
        tree = self.tree
        self._labels.discard(keys)
        if not len(tree) or not self.policy.wants_lookups:
            return
        # The size of a block that is not stored is unknown; most blocks have the same.
        usual = tree.nbytes // len(tree)
        nodes = [tree.get(key) for key in keys]
        sizes = [node.nbytes + node.state_nbytes if node is not None else usual for node in nodes]
        self.policy.on_lookup(keys, sizes, [tokens] * len(keys), self.clock())

    def on_pause(self, keys: Sequence[bytes], label: int) -> None:
        """See `Store.on_pause`: report it for the deepest stored block, and for the last once that is stored."""
        stored = self.tree.path(keys)
        if stored:
            self.policy.on_pause(stored[-1].key, label, self.clock())
        if len(stored) < len(keys):
            self._labels.add(keys[-1], label)

    def renewals(self) -> dict[bytes, Record]:
        """Return the records of nodes touched since the last call."""
        touched, self._touched = self._touched, {}
        tree = self.tree
        return {key: self.record(node, used) for key, used in touched.items() if (node := tree.get(key)) is not None}

    def plan(self, puts: Sequence[Put], refused: Counter[str]) -> Plan:
        """Choose which of ``puts`` to store, and remove from the tree what must make room.

        Follow with `settle` after the commit or `restore` if it failed; the policy is informed then. Counts in
        ``refused``.
        """
        tree = self.tree
        keep = {put.parent for put in puts} | {put.key for put in puts}
        staged: dict[bytes, Record] = {}
        chosen: list[Put] = []
        evicted: list[Removed] = []
        free = self.capacity - tree.nbytes
        stuck = False
        known: set[bytes] = set()
        declined: set[bytes] = set()
        stripped = self._strip(self.shortage(puts), keep)
        free += sum(removed.record.state_nbytes for removed in stripped)
        for put in puts:
            before = staged.get(put.key)
            node = tree.get(put.key)
            if before is None and node is not None:
                before = self.record(node, 0)
                known.add(put.key)
            reason = self._reason_against(put, before, staged)
            new = not reason and before is None
            if put.parent in declined or (new and put.size > free and self.policy.declines(put.key)):
                declined.add(put.key)
                reason = "declined"
            if reason:
                if reason != "duplicate":
                    refused[reason] += 1
                continue
            present = 0
            if before is not None:
                present = before.nbytes if put.kind == "block" else before.state_nbytes
            need = put.size - present
            if need > free:
                more = [] if stuck else self._evict(need - free, keep)
                stuck = stuck or not more
                evicted += more
                free += sum(removed.nbytes for removed in more)
            if need > free:
                refused["no_room"] += 1
                continue
            free -= need
            if before is None:
                before = Record(put.parent, put.tokens, put.end, 0, 0, 0, max_kl=put.max_kl)
            self._sequence += 1
            max_kl = stricter(before.max_kl, put.max_kl)
            before = before._replace(used=self._sequence, max_kl=max_kl)
            if put.kind == "block":
                # A block that replaces a lossy one is its own owner's.
                max_kl = max_kl if present and allowed_by(before.level, None) else put.max_kl
                staged[put.key] = before._replace(nbytes=put.size, level=put.level, max_kl=max_kl)
            else:
                staged[put.key] = before._replace(state_nbytes=put.size, state_level=put.level)
            chosen.append(put)
        return Plan(chosen, evicted, staged, known, stripped, frozenset(declined))

    def _reason_against(self, put: Put, before: Record | None, staged: dict[bytes, Record]) -> str:
        if put.kind == "state":
            if before is None:
                return "orphan"
            return "duplicate" if before.state_nbytes and not put.beats(before.state_level) else ""
        if before is not None:
            return "duplicate" if before.nbytes and not put.beats(before.level) else ""
        above = self.tree.get(put.parent)
        depth = above.depth if above is not None else staged[put.parent].depth if put.parent in staged else 0
        if put.parent != ROOT and above is None and put.parent not in staged:
            return "orphan"
        return "" if put.end == depth + put.tokens else "malformed"

    def _strip(self, need: int, keep: set[bytes]) -> list[Removed]:
        """Remove states that are worth less than what they would displace; their blocks stay."""
        stripped = []
        for node in spare(self.tree.stated, need, self.capacity // SHARE, keep) if need > 0 else ():
            stripped.append(Removed(node.key, self.record(node, 0)))
            self.tree.set_state(node.key, 0)
        return stripped

    def _evict(self, need: int, keep: set[bytes]) -> list[Removed]:
        """Remove the first nodes to go until ``need`` bytes are free; none if that cannot be reached."""
        victims, freed, order = list[Node](), 0, self.policy.order
        over = self.over(need)
        orders = [order] if over is None else [lambda: filter(over, order()), order]
        for one in orders:
            victims = self.tree.evictable(one, need, keep)
            freed = sum(node.nbytes + node.state_nbytes for node in victims)
            if freed >= need:
                return [self._take(node) for node in victims]
        return []

    def shrink(self) -> list[bytes]:
        """Evict down to the capacity, which may be lower than when the store was last open; returns the keys."""
        over = self.tree.nbytes - self.capacity
        evicted = self._evict(over, set()) if over > 0 else []
        self._remove_from_policy(evicted)
        return [removed.key for removed in evicted]

    def _remove_from_policy(self, evicted: Sequence[Removed]) -> None:
        now = self.clock()
        for removed in evicted:
            self.policy.remove(removed.key, now)

    def remove(self, node: Node) -> Removed:
        """Take one leaf out of tree and policy, pinned or not."""
        self.policy.remove(node.key, self.clock())
        return self._take(node)

    def _take(self, node: Node) -> Removed:
        removed = Removed(node.key, self.record(node, 0))
        if node.pins:
            self.tree.unpin([removed.key] * node.pins)
        self.tree.remove(removed.key)
        self._touched.pop(removed.key, None)
        parent = removed.record.parent
        if parent in self._partial:
            self._partial[parent].discard(removed.key)
            if not self._partial[parent]:
                del self._partial[parent]
        return removed

    def shortage(self, puts: Sequence[Put]) -> int:
        """Return the bytes that must become free before all of ``puts`` fit; 0 or less if there is room."""
        need = 0
        for put in puts:
            node = self.tree.get(put.key)
            present = 0 if node is None else node.nbytes if put.kind == "block" else node.state_nbytes
            level = "" if node is None else node.level if put.kind == "block" else node.state_level
            if not present or put.beats(level):
                need += put.size - present
        return need - (self.capacity - self.tree.nbytes)

    def update(self, kind: Kind, key: bytes, record: Record) -> None:
        """Take over the size and level of a value that was encoded again."""
        node = self.tree.get(key)
        if node is not None and kind == "block":
            self.tree.insert(key, record.parent, record.tokens, record.nbytes, record.level)
        elif node is not None and node.state_nbytes:
            self.tree.set_state(key, record.state_nbytes, record.state_level)

    def drop(self, key: bytes) -> list[bytes]:
        """Remove an entry and all below it; returns their keys, children first, or nothing if it is not stored."""
        if key not in self.tree:
            return []
        return [self.remove(node).key for node in self.tree.subtree(key)]

    def forget(self, keys: Sequence[bytes]) -> list[bytes]:
        """Remove the end of the path ``keys`` up to the first node with other children or pins; returns their keys.

        Partial blocks below it go as well, also where the path stays: they are the ends of contexts.
        """
        removed: list[bytes] = []
        for node in reversed(self.tree.path(keys)):
            below = map(self.tree.get, sorted(self._partial.get(node.key, ())))
            removed += [self.remove(one).key for one in below if one is not None and not (one.children or one.pins)]
            if node.children or node.pins:
                break
            removed.append(self.remove(node).key)
        return removed

    def settle(self, plan: Plan) -> list[bytes]:
        """Take over a committed plan; what it wrote counts as just used.

        Returns keys to delete again, because they or a parent were dropped meanwhile.
        """
        tree, lost, now = self.tree, [], self.clock()
        self._remove_from_policy(plan.evicted)
        for key, record in plan.records.items():
            if (key in plan.known) != (key in tree) or (record.parent != ROOT and record.parent not in tree):
                lost.append(key)
                continue
            fresh = key not in tree
            self._insert(key, record)
            node = tree.get(key)
            if fresh and node is not None:
                self.policy.insert(facts(node), now)
        self.touch(plan.records)
        for key, label in self._labels.pop(plan.records):
            if key in tree:
                self.policy.on_pause(key, label, now)
        return lost

    def restore(self, plan: Plan) -> list[bytes]:
        """Undo a plan whose transaction failed: what it would have evicted is still on disk.

        Returns keys to delete, because a parent was dropped meanwhile.
        """
        lost: list[bytes] = []
        for removed in reversed(plan.evicted):
            if removed.record.parent != ROOT and removed.record.parent not in self.tree:
                lost.append(removed.key)
                self._remove_from_policy([removed])
                continue
            self._insert(removed.key, removed.record)
        for removed in plan.stripped:
            if removed.key in self.tree:
                self._insert(removed.key, removed.record)
        return lost

    def check(self) -> None:
        """Raise AssertionError where tree, policy, counts or capacity disagree. O(entries)."""
        tree = self.tree
        tree.check()
        assert len(self.policy) == len(tree), f"the policy orders {len(self.policy)} keys, the tree has {len(tree)}"
        partial = {(node.parent.key, node.key) for node in tree if node.parent and node.tokens < node.parent.tokens}
        assert partial == {(parent, key) for parent, keys in self._partial.items() for key in keys}, "partial blocks"
        assert tree.nbytes <= self.capacity, f"{tree.nbytes} bytes stored, capacity is {self.capacity}"
        place = {key: i for i, key in enumerate(self.policy.order())}
        assert all(node.key in place for node in tree), "a stored key has no place in the eviction order"
        if self.policy.name == "lru":
            for node in tree:
                above = node.parent
                assert above is None or place[above.key] > place[node.key], f"{node!r} is newer than its parent"

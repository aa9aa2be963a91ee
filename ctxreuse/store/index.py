"""What a block store knows in memory: the context tree, the eviction order, and the plan of the next transaction."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from ctxreuse.keys import ROOT
from ctxreuse.levels import fits, worst
from ctxreuse.store.base import Kind
from ctxreuse.store.early import EarlyMarks
from ctxreuse.store.policy import LRU, Facts, Policy, fill
from ctxreuse.store.policy.states import SHARE, spare
from ctxreuse.store.put import Put
from ctxreuse.store.records import Record
from ctxreuse.tree import ContextTree, Node

__all__ = ["Gone", "Index", "Plan", "facts"]


class Gone(NamedTuple):
    """What must be known of a removed node to delete its values, or to bring it back."""

    key: bytes
    record: Record

    @property
    def nbytes(self) -> int:
        """Bytes of its block and its state."""
        return self.record.nbytes + self.record.state_nbytes


class Plan(NamedTuple):
    """One transaction: values to write, entries to delete, records to renew; ``known`` were held when it was made.

    ``stripped``: what goes on without its state; ``declined``: blocks that the policy would not have in a full store.
    """

    puts: list[Put]
    evicted: list[Gone]
    records: dict[bytes, Record]
    known: set[bytes]
    stripped: Sequence[Gone] = ()
    declined: frozenset[bytes] = frozenset()


def facts(node: Node) -> Facts[bytes]:
    """What the policy is told of a held node: its block and its state together."""
    above = node.parent
    parent = above.key if above is not None else None
    return Facts(node.key, parent, node.tokens, node.depth, node.nbytes + node.state_nbytes)


class Index:
    """Tree and policy in step. Not thread-safe: the store's lock guards it, and is free between plan and settle."""

    def __init__(self, capacity: int, policy: Policy[bytes], clock: Callable[[], float]) -> None:
        """``clock``: seconds, told to the policy."""
        self.tree, self.policy, self.capacity, self.clock = ContextTree(), policy, capacity, clock
        self.states = 0
        self._sequence, self._early = 0, EarlyMarks()
        self._touched: dict[bytes, int] = {}

    def load(self, records: Iterable[tuple[bytes, Record]]) -> list[bytes]:
        """Rebuild from the records on disk; returns keys that cannot be reached and should be deleted."""
        tree = self.tree
        lost: list[bytes] = []
        used: dict[bytes, int] = {}
        by_depth = sorted(records, key=lambda entry: entry[1].depth)
        for key, record in by_depth:
            parent = tree.get(record.parent)
            depth = record.tokens + (parent.depth if parent is not None else 0)
            if (parent is None and record.parent != ROOT) or depth != record.depth:
                lost.append(key)
                continue
            self._hold(key, record)
            used[key] = record.used
        # A parent is as new as its newest child, also where a crash lost the renewed number.
        for key, _ in reversed(by_depth):
            node = tree.get(key)
            if node is not None and node.parent is not None:
                used[node.parent.key] = max(used[node.parent.key], used[key])
        self._order(used)
        self._sequence = max(used.values(), default=0)
        return lost

    def _order(self, used: dict[bytes, int]) -> None:
        """Tell the policy what is held, then which path was used after which: each node once, with its newest child."""
        now = self.clock()
        path: list[Node] = []
        uses: list[list[bytes]] = []
        for node in sorted(self.tree, key=lambda node: (used[node.key], -node.depth, node.key)):
            if path and path[-1].parent is not node:
                uses.append([step.key for step in reversed(path)])
                path = []
            path.append(node)
        if path:
            uses.append([step.key for step in reversed(path)])
        fill(self.policy, [facts(node) for node in self.tree], uses, now)

    def _hold(self, key: bytes, record: Record) -> None:
        node = self.tree.insert(key, record.parent, record.tokens, record.nbytes, record.level)
        self.states += bool(record.state_nbytes) - bool(node.state_nbytes)
        self.tree.set_state(key, record.state_nbytes, record.state_level)
        node.lossy = record.lossy

    def record(self, node: Node, used: int) -> Record:
        """The record of a held node."""
        parent = node.parent.key if node.parent is not None else ROOT
        sizes = node.tokens, node.depth, node.nbytes, node.state_nbytes
        return Record(parent, *sizes, used, node.level, node.state_level, node.lossy)

    def limit(self, keys: Iterable[bytes], lossy: str | None) -> None:
        """Somebody who allows ``lossy`` at worst uses the held ones of ``keys``: keep them at least as good as that.

        Call it before `touch`, which has the records renewed.
        """
        for key in keys:
            node = self.tree.get(key)
            if node is not None and node.lossy:
                node.lossy = worst(node.lossy, lossy) or ""

    def touch(self, keys: Iterable[bytes], needed: bool = False) -> None:
        """Renew the held ones among ``keys`` and all their ancestors; the record on disk follows with ``renewals``.

        ``needed``: no prompt announced this use (`asked`), and a policy that goes by prompts should hear of it.
        """
        now = self.clock()
        use = getattr(self.policy, "needed", self.policy.access) if needed else self.policy.access
        nodes = [node for key in keys if (node := self.tree.get(key)) is not None]
        seen: set[bytes] = set()
        for tip in sorted(nodes, key=lambda node: -node.depth):
            if tip.key in seen:
                continue
            path: list[bytes] = []
            step: Node | None = tip
            while step is not None:
                path.append(step.key)
                step = step.parent
            seen.update(path)
            for key in path:
                self._sequence += 1
                self._touched[key] = self._sequence
            use(path[::-1], now)

    def asked(self, keys: Sequence[bytes], tokens: int) -> None:
        """Somebody needs the context of blocks ``keys``, each of ``tokens`` tokens, whether they are held or not."""
        policy, tree = self.policy, self.tree
        self._early.void(keys)
        if not len(tree) or not hasattr(policy, "asked"):
            return
        # What a block that is not held would take is not known; most blocks take the same.
        usual = tree.nbytes // len(tree)
        nodes = [tree.get(key) for key in keys]
        sizes = [node.nbytes + node.state_nbytes if node is not None else usual for node in nodes]
        policy.asked(keys, sizes, [tokens] * len(keys), self.clock())

    def mark(self, keys: Sequence[bytes], label: int) -> None:
        """The context of ``keys`` paused for the reason ``label``: its deepest held block is told, and its last."""
        held = self.tree.path(keys)
        if held:
            self.policy.mark(held[-1].key, label, self.clock())
        if len(held) < len(keys):
            self._early.note(keys[-1], label)

    def renewals(self) -> dict[bytes, Record]:
        """The records of nodes touched since the last call."""
        touched, self._touched = self._touched, {}
        tree = self.tree
        return {key: self.record(node, used) for key, used in touched.items() if (node := tree.get(key)) is not None}

    def plan(self, puts: Sequence[Put], refused: Counter[str]) -> Plan:
        """Choose what of ``puts`` can be held, removing from the tree what must make room.

        Follow with ``settle`` after the commit or ``restore`` if it failed: the policy hears of it then.
        """
        tree = self.tree
        keep = {put.parent for put in puts} | {put.key for put in puts}
        staged: dict[bytes, Record] = {}
        chosen: list[Put] = []
        evicted: list[Gone] = []
        free = self.capacity - tree.nbytes
        stuck = False
        known: set[bytes] = set()
        declined: set[bytes] = set()
        stripped = self._strip(self.shortage(puts), keep)
        free += sum(gone.record.state_nbytes for gone in stripped)
        for put in puts:
            before = staged.get(put.key)
            node = tree.get(put.key)
            if before is None and node is not None:
                before = self.record(node, 0)
                known.add(put.key)
            reason = self._reason(put, before, staged)
            if put.parent in declined or (not reason and before is None and put.size > free and self._declines(put)):
                declined.add(put.key)
                reason = "declined"
            if reason:
                if reason != "duplicate":
                    refused[reason] += 1
                continue
            held = 0
            if before is not None:
                held = before.nbytes if put.kind == "block" else before.state_nbytes
            need = put.size - held
            if need > free:
                more = [] if stuck else self._evict(need - free, keep)
                stuck = stuck or not more
                evicted += more
                free += sum(gone.nbytes for gone in more)
            if need > free:
                refused["no_room"] += 1
                continue
            free -= need
            if before is None:
                before = Record(put.parent, put.tokens, put.end, 0, 0, 0, lossy=put.lossy)
            self._sequence += 1
            lossy = worst(before.lossy or None, put.lossy or None) or ""
            before = before._replace(used=self._sequence, lossy=lossy)
            if put.kind == "block":
                # What is better than all that its owners took so far is its own owner's.
                lossy = lossy if held and fits(before.level, None) else put.lossy
                staged[put.key] = before._replace(nbytes=put.size, level=put.level, lossy=lossy)
            else:
                staged[put.key] = before._replace(state_nbytes=put.size, state_level=put.level)
            chosen.append(put)
        return Plan(chosen, evicted, staged, known, stripped, frozenset(declined))

    def _declines(self, put: Put) -> bool:
        """True if the policy would rather keep what is held."""
        declines: Callable[[bytes], bool] | None = getattr(self.policy, "declines", None)
        return declines is not None and declines(put.key)

    def _reason(self, put: Put, before: Record | None, staged: dict[bytes, Record]) -> str:
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

    def _strip(self, need: int, keep: set[bytes]) -> list[Gone]:
        """Remove states that are worth less than what they would displace; their blocks stay."""
        stripped = []
        for node in spare(self.tree.stated.values(), need, self.capacity // SHARE, keep) if need > 0 else ():
            stripped.append(Gone(node.key, self.record(node, 0)))
            self.tree.set_state(node.key, 0)
            self.states -= 1
        return stripped

    def _evict(self, need: int, keep: set[bytes]) -> list[Gone]:
        """Remove the first to go until ``need`` bytes are free; nothing if that cannot be reached."""
        victims = self.tree.evictable(self.policy.order, need, keep)
        freed = sum(node.nbytes + node.state_nbytes for node in victims)
        return [self._take(node) for node in victims] if freed >= need else []

    def shrink(self) -> list[bytes]:
        """Evict down to the capacity, which may be lower than when the store was last open; returns the keys."""
        over = self.tree.nbytes - self.capacity
        evicted = self._evict(over, set()) if over > 0 else []
        self._part(evicted)
        return [gone.key for gone in evicted]

    def _part(self, evicted: Sequence[Gone]) -> None:
        """The policy parts with what was evicted."""
        now = self.clock()
        for gone in evicted:
            self.policy.remove(gone.key, now)

    def remove(self, node: Node) -> Gone:
        """Take one leaf out of tree and policy, pinned or not."""
        self.policy.remove(node.key, self.clock())
        return self._take(node)

    def _take(self, node: Node) -> Gone:
        if node.pins:
            self.tree.unpin([node.key] * node.pins)
        gone = Gone(node.key, self.record(node, 0))
        self.states -= bool(node.state_nbytes)
        self.tree.remove(node.key)
        self._touched.pop(node.key, None)
        return gone

    def shortage(self, puts: Sequence[Put]) -> int:
        """Bytes that must become free before all of ``puts`` can be held; 0 or less if there is room."""
        need = 0
        for put in puts:
            node = self.tree.get(put.key)
            held = 0 if node is None else node.nbytes if put.kind == "block" else node.state_nbytes
            level = "" if node is None else node.level if put.kind == "block" else node.state_level
            if not held or put.beats(level):
                need += put.size - held
        return need - (self.capacity - self.tree.nbytes)

    def reshape(self, kind: Kind, key: bytes, record: Record) -> None:
        """The block or state of a held key was written anew, at another level: ``record`` says which."""
        node = self.tree.get(key)
        if node is not None and kind == "block":
            self.tree.insert(key, record.parent, record.tokens, record.nbytes, record.level)
        elif node is not None and node.state_nbytes:
            self.tree.set_state(key, record.state_nbytes, record.state_level)

    def drop(self, key: bytes) -> list[bytes]:
        """Remove an entry and all below it; returns their keys, children first, or nothing if it is not held."""
        if key not in self.tree:
            return []
        return [self.remove(node).key for node in self.tree.subtree(key)]

    def forget(self, keys: Sequence[bytes]) -> list[bytes]:
        """Remove the end of the path ``keys`` up to the first node with other children or pins; returns their keys."""
        gone: list[bytes] = []
        for node in reversed(self.tree.path(keys)):
            if node.children or node.pins:
                break
            gone.append(self.remove(node).key)
        return gone

    def settle(self, plan: Plan) -> list[bytes]:
        """The plan's transaction is committed: hold what it wrote, as just used.

        Returns keys to delete again, because they or a parent were dropped meanwhile.
        """
        tree, lost, now = self.tree, [], self.clock()
        self._part(plan.evicted)
        for key, record in plan.records.items():
            if (key in plan.known) != (key in tree) or (record.parent != ROOT and record.parent not in tree):
                lost.append(key)
                continue
            fresh = key not in tree
            self._hold(key, record)
            node = tree.get(key)
            if fresh and node is not None:
                self.policy.insert(facts(node), now)
        self.touch(plan.records)
        for key, label in self._early.take(plan.records):
            if key in tree:
                self.policy.mark(key, label, now)
        return lost

    def restore(self, plan: Plan) -> list[bytes]:
        """The transaction failed: what it would have evicted is still on disk.

        Returns keys to delete, because a parent was dropped meanwhile.
        """
        lost: list[bytes] = []
        for gone in reversed(plan.evicted):
            if gone.record.parent != ROOT and gone.record.parent not in self.tree:
                lost.append(gone.key)
                self._part([gone])
                continue
            self._hold(gone.key, gone.record)
        for gone in plan.stripped:
            if gone.key in self.tree:
                self._hold(gone.key, gone.record)
        return lost

    def check(self) -> None:
        """Raises AssertionError where tree, policy, counts or capacity disagree. O(entries)."""
        tree = self.tree
        tree.check()
        assert len(self.policy) == len(tree), f"the policy orders {len(self.policy)} keys, the tree holds {len(tree)}"
        assert tree.nbytes <= self.capacity, f"{tree.nbytes} bytes held, capacity is {self.capacity}"
        assert self.states == sum(bool(node.state_nbytes) for node in tree), "states are counted wrongly"
        place = {key: i for i, key in enumerate(self.policy.order())}
        assert all(node.key in place for node in tree), "a held key has no place in the eviction order"
        if isinstance(self.policy, LRU):
            for node in tree:
                above = node.parent
                assert above is None or place[above.key] > place[node.key], f"{node!r} is newer than its parent"

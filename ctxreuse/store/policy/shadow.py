"""A cache without contents: what a policy would have held and served at a given capacity, from metadata alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import repeat
from typing import Generic, NamedTuple

from ctxreuse.store.policy.base import Facts, K, Policy

__all__ = ["Served", "Shadow"]


class Served(NamedTuple, Generic[K]):
    """What one request met: leading blocks and tokens that were held, the keys that came in and those that went."""

    blocks: int
    tokens: int
    inserted: Sequence[K]
    evicted: Sequence[K]


class _Held(NamedTuple, Generic[K]):
    parent: K | None
    nbytes: int


class Shadow(Generic[K]):
    """A cache of ``capacity`` (in whatever unit the sizes have) under one policy. Not thread-safe.

    As in the store, what is held is closed towards the roots, only leaves are evicted, and the blocks of the request
    itself stay as long as anything else can go, unless the policy is ``choosy``. The lab replays through it, and the
    duel's contenders run in it.
    """

    def __init__(self, policy: Policy[K], capacity: int) -> None:
        self.policy, self.capacity, self.nbytes = policy, capacity, 0
        self._asked: Callable[..., None] | None = getattr(policy, "asked", None)
        #: One victim at a time where the choice of one changes what the next should be.
        self._restless: bool = getattr(policy, "restless", False)
        #: The request's own blocks may go like all others: the policy decides what is admitted.
        self.choosy: bool = getattr(policy, "choosy", False)
        self._held: dict[K, _Held[K]] = {}
        self._children: dict[K, int] = {}

    @property
    def name(self) -> str:
        """The policy's."""
        return self.policy.name

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, key: K) -> bool:
        return key in self._held

    def match(self, path: Sequence[K]) -> int:
        """How many leading blocks of ``path`` are held. Pure."""
        held, blocks = self._held, 0
        for key in path:
            if key not in held:
                break
            blocks += 1
        return blocks

    def leaf(self, key: K) -> bool:
        """True if no held block hangs on it."""
        return key not in self._children

    def request(
        self, path: Sequence[K], sizes: Sequence[int] | int, tokens: Sequence[int] | int, now: float
    ) -> Served[K]:
        """Serve one prompt and hold all of it, as far as there is room: the end of a too long path is left out.

        ``sizes`` and ``tokens``: one a block, or one number for all.
        """
        size = [sizes] * len(path) if isinstance(sizes, int) else sizes
        count = [tokens] * len(path) if isinstance(tokens, int) else tokens
        if self._asked is not None:
            self._asked(path, size, count, now)
        blocks = self.match(path)
        found = sum(count[:blocks])
        fresh: list[K] = []
        depth, parent = found, path[blocks - 1] if blocks else None
        for key, nbytes, more in zip(path[blocks:], size[blocks:], count[blocks:]):
            if key in self._held:
                # Held, but not behind this: keys that were made up. The rest cannot be placed.
                path = path[: blocks + len(fresh)]
                break
            fresh.append(key)
            depth += more
            self._hold(Facts(key, parent, more, depth, nbytes), now)
            parent = key
        self.policy.access(path, now)
        evicted = self._fit(path, now) if self.nbytes > self.capacity else []
        return Served(blocks, found, fresh, evicted)

    def fill(self, facts: Sequence[Facts[K]], uses: Sequence[Sequence[K]], now: float) -> Sequence[K]:
        """Hold what another cache holds, parents first, used in the order of ``uses``; returns what had no room."""
        for one in facts:
            self._hold(one, now)
        for path in uses:
            self.policy.access(path, now)
        return self._fit((), now)

    def price(self, per_token: float, per_pair: float) -> None:
        """Tell the policy, if it wants to know, what computing takes: see `prefill_line`."""
        if hasattr(self.policy, "price"):
            self.policy.price(per_token, per_pair)

    def _hold(self, facts: Facts[K], now: float) -> None:
        self._held[facts.key] = _Held(facts.parent, facts.nbytes)
        self.nbytes += facts.nbytes
        if facts.parent is not None:
            self._children[facts.parent] = self._children.get(facts.parent, 0) + 1
        self.policy.insert(facts, now)

    def _fit(self, path: Sequence[K], now: float) -> list[K]:
        keep: frozenset[K] = frozenset() if self.choosy else frozenset(path)
        gone: list[K] = []
        while self.nbytes > self.capacity:
            victims = self._victims(keep)
            for key in victims:
                self.remove(key, now)
            gone += victims
            if not victims:
                break
        for key in reversed(path):
            if self.nbytes <= self.capacity or key in self._children:
                break
            if key not in self._held:
                continue
            self.remove(key, now)
            gone.append(key)
        return gone

    def _victims(self, keep: frozenset[K]) -> list[K]:
        held, children = self._held, self._children
        lost: dict[K, int] = {}
        victims: list[K] = []
        need = self.nbytes - self.capacity
        for key in self.policy.order():
            if key in keep or children.get(key, 0) > lost.get(key, 0):
                continue
            parent, nbytes = held[key]
            victims.append(key)
            need -= nbytes
            if parent is not None:
                lost[parent] = lost.get(parent, 0) + 1
            if need <= 0 or self._restless:
                break
        return victims

    def remove(self, key: K, now: float) -> None:
        """Forget one leaf, which `_fit` does by itself. Raises KeyError if it is not held."""
        parent, nbytes = self._held.pop(key)
        self.nbytes -= nbytes
        if parent is not None:
            left = self._children[parent] - 1
            if left:
                self._children[parent] = left
            else:
                del self._children[parent]
        self.policy.remove(key, now)

    def order(self) -> Iterator[K]:
        """What is held, first to go first."""
        return self.policy.order()

    def mark(self, tip: K, label: int, now: float) -> None:
        """See `Policy.mark`."""
        self.policy.mark(tip, label, now)

    def beyond(self, other: Shadow[K]) -> int:
        """Bytes of what is held here and not in ``other``. O(blocks)."""
        return sum(block.nbytes for key, block in self._held.items() if key not in other)

    def dump(self) -> bytes:
        """What the policy learnt; b"" if it learns nothing."""
        return self.policy.dump() if hasattr(self.policy, "dump") else b""

    def load(self, raw: bytes) -> bool:
        """See `Learner.load`; False for a policy that learns nothing."""
        return bool(self.policy.load(raw)) if hasattr(self.policy, "load") else False

    def check(self) -> None:
        """Raises AssertionError where counts, contents and the policy disagree. O(blocks)."""
        held, children = self._held, dict(zip(self._children, repeat(0)))
        assert self.nbytes == sum(block.nbytes for block in held.values()), "bytes are counted wrongly"
        assert self.nbytes <= self.capacity, f"{self.nbytes} held, capacity is {self.capacity}"
        for key, block in held.items():
            if block.parent is not None:
                assert block.parent in held, f"the parent of {key!r} is not held"
                children[block.parent] = children.get(block.parent, 0) + 1
        assert children == self._children, "children are counted wrongly"
        order = list(self.policy.order())
        assert len(order) == len(set(order)) == len(self.policy) == len(held), "the policy orders other keys"
        assert set(order) == held.keys(), "the policy orders other keys"

"""A cache without contents: what a policy would have cached and served at a given capacity, from metadata alone."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from itertools import islice, repeat
from typing import Any, Generic, NamedTuple

from ctxreuse.store.policy.base import Facts, K, Policy

__all__ = ["NumberedShadow", "Served", "Shadow", "ids_of"]

_ID, _KEY, _BATCH = 8, 32, 256


def ids_of(path: Sequence[Any]) -> tuple[bytes, int]:
    """Join keys to one buffer; also their distance in bytes: 8 for numbers below 2**64, 32 for the store's."""
    if len(path) and isinstance(path[0], bytes):
        return b"".join(path), _KEY
    return array("Q", path).tobytes(), _ID


class Served(NamedTuple, Generic[K]):
    """The outcome of one request: leading blocks and tokens that were cached, the keys that came in and that went."""

    blocks: int
    tokens: int
    inserted: Sequence[K]
    evicted: Sequence[K]


class _Block(NamedTuple, Generic[K]):
    parent: K | None
    nbytes: int


class Shadow(Generic[K]):
    """A cache of ``capacity`` (in the unit of the sizes) under one policy. Not thread-safe.

    As in the store, the cached set is closed towards the roots, only leaves are evicted, and the blocks of the request
    itself stay as long as anything else can go, unless the policy has ``has_admission``. The lab replays through it.
    """

    def __init__(self, policy: Policy[K], capacity: int) -> None:
        self.policy, self.capacity, self.nbytes = policy, capacity, 0
        self._blocks: dict[K, _Block[K]] = {}
        self._children: dict[K, int] = {}

    @property
    def name(self) -> str:
        """The policy's."""
        return self.policy.name

    @property
    def has_admission(self) -> bool:
        """See `Policy.has_admission`."""
        return self.policy.has_admission

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, key: K) -> bool:
        return key in self._blocks

    def match(self, path: Sequence[K]) -> int:
        """Return the number of leading blocks of ``path`` that are cached. Pure."""
        cached, blocks = self._blocks, 0
        for key in path:
            if key not in cached:
                break
            blocks += 1
        return blocks

    def leaf(self, key: K) -> bool:
        """Return True if the block has no cached child."""
        return key not in self._children

    def request(
        self, path: Sequence[K], sizes: Sequence[int] | int, tokens: Sequence[int] | int, now: float
    ) -> Served[K]:
        """Serve one prompt and cache all of it, as far as there is room: the end of a too long path is left out.

        ``sizes`` and ``tokens``: one a block, or one number for all.
        """
        size = [sizes] * len(path) if isinstance(sizes, int) else sizes
        count = [tokens] * len(path) if isinstance(tokens, int) else tokens
        self.policy.on_lookup(path, size, count, now)
        blocks = self.match(path)
        found = sum(count[:blocks])
        fresh: list[K] = []
        depth, parent = found, path[blocks - 1] if blocks else None
        for key, nbytes, more in zip(path[blocks:], size[blocks:], count[blocks:]):
            if key in self._blocks:
                # Cached, but behind another block: made-up keys. The rest cannot be placed.
                path = path[: blocks + len(fresh)]
                break
            fresh.append(key)
            depth += more
            self._insert(Facts(key, parent, more, depth, nbytes), now)
            parent = key
        self.policy.access(path, now)
        evicted = self._fit(path, now) if self.nbytes > self.capacity else []
        return Served(blocks, found, fresh, evicted)

    def fill(self, facts: Sequence[Facts[K]], uses: Sequence[Sequence[K]], now: float) -> Sequence[K]:
        """Add what another cache holds, parents first, used in the order of ``uses``; returns what had no room."""
        for one in facts:
            self._insert(one, now)
        for path in uses:
            self.policy.access(path, now)
        return self._fit((), now)

    def _insert(self, facts: Facts[K], now: float) -> None:
        self._blocks[facts.key] = _Block(facts.parent, facts.nbytes)
        self.nbytes += facts.nbytes
        if facts.parent is not None:
            self._children[facts.parent] = self._children.get(facts.parent, 0) + 1
        self.policy.insert(facts, now)

    def _fit(self, path: Sequence[K], now: float) -> list[K]:
        keep: frozenset[K] = frozenset() if self.has_admission else frozenset(path)
        evicted: list[K] = []
        while self.nbytes > self.capacity:
            victims = self._victims(keep)
            for key in victims:
                self.remove(key, now)
            evicted += victims
            if not victims:
                break
        for key in reversed(path):
            if self.nbytes <= self.capacity or key in self._children:
                break
            if key in self._blocks:
                self.remove(key, now)
                evicted.append(key)
        return evicted

    def _victims(self, keep: frozenset[K]) -> list[K]:
        lost: dict[K, int] = {}
        victims: list[K] = []
        need = self.nbytes - self.capacity
        for key in self.policy.order():
            if key in keep or self._children.get(key, 0) > lost.get(key, 0):
                continue
            parent, nbytes = self._blocks[key]
            victims.append(key)
            need -= nbytes
            if parent is not None:
                lost[parent] = lost.get(parent, 0) + 1
            if need <= 0 or self.policy.evicts_one_at_a_time:
                break
        return victims

    def remove(self, key: K, now: float) -> None:
        """Remove one leaf. Raises KeyError if it is not cached."""
        parent, nbytes = self._blocks.pop(key)
        self.nbytes -= nbytes
        if parent is not None:
            left = self._children[parent] - 1
            if left:
                self._children[parent] = left
            else:
                del self._children[parent]
        self.policy.remove(key, now)

    def order(self) -> Iterator[K]:
        """Iterate over the cached keys, first to go first."""
        return self.policy.order()

    def on_pause(self, tip: K, label: int, now: float) -> None:
        """See `Policy.on_pause`."""
        self.policy.on_pause(tip, label, now)

    def set_recompute_cost(self, per_token: float, per_pair: float) -> None:
        """See `Policy.set_recompute_cost`."""
        self.policy.set_recompute_cost(per_token, per_pair)

    def beyond(self, other: Any) -> int:
        """Return the bytes of blocks that are cached here and not in ``other``. O(blocks)."""
        return sum(block.nbytes for key, block in self._blocks.items() if key not in other)

    def dump(self) -> bytes:
        """See `Policy.dump`."""
        return self.policy.dump()

    def load(self, raw: bytes) -> bool:
        """See `Policy.load`."""
        return self.policy.load(raw)

    def check(self) -> None:
        """Raise AssertionError where counts, contents and the policy disagree. O(blocks)."""
        cached, children = self._blocks, dict(zip(self._children, repeat(0)))
        assert self.nbytes == sum(block.nbytes for block in cached.values()), "bytes are counted wrongly"
        assert self.nbytes <= self.capacity, f"{self.nbytes} bytes cached, capacity is {self.capacity}"
        for key, block in cached.items():
            if block.parent is not None:
                assert block.parent in cached, f"the parent of {key!r} is not cached"
                children[block.parent] = children.get(block.parent, 0) + 1
        assert children == self._children, "children are counted wrongly"
        order = list(self.policy.order())
        assert len(order) == len(set(order)) == len(self.policy) == len(cached), "the policy orders other keys"
        assert set(order) == cached.keys(), "the policy orders other keys"


class NumberedShadow(Shadow[Any]):
    """A `Shadow` that takes the store's keys and works on their 8-byte ids, as a `NativeShadow` does.

    So a policy without a native implementation can be an expert beside those that have one.
    """

    arena = None

    def __contains__(self, key: Any) -> bool:
        return super().__contains__(_numbers((key,))[0])

    def request(
        self, path: Sequence[Any], sizes: Sequence[int] | int, tokens: Sequence[int] | int, now: float
    ) -> Served[Any]:
        return super().request(_numbers(path), sizes, tokens, now)

    def fill(self, facts: Sequence[Facts[Any]], uses: Sequence[Sequence[Any]], now: float) -> Sequence[Any]:
        numbered = [
            one._replace(key=_numbers((one.key,))[0], parent=None if one.parent is None else _numbers((one.parent,))[0])
            for one in facts
        ]
        return super().fill(numbered, [_numbers(path) for path in uses], now)

    def on_pause(self, tip: Any, label: int, now: float) -> None:
        super().on_pause(_numbers((tip,))[0], label, now)

    def batches(self) -> Iterator[bytes]:
        """See `NativeShadow.batches`."""
        ids = self.order()
        while batch := list(islice(ids, _BATCH)):
            yield array("Q", batch).tobytes()


def _numbers(path: Sequence[Any]) -> Sequence[int]:
    raw, stride = ids_of(path)
    return path if stride == _ID else memoryview(raw).cast("Q")[:: stride // _ID].tolist()

"""Values in host memory: a bounded map in order of last use, from which only leaves are evicted."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence

from ctxreuse.block.format import Kind
from ctxreuse.store.blocks.pending import Put

__all__ = ["HostTier", "Name"]

Name = tuple[Kind, bytes]


class HostTier:
    """Blocks and states by (kind, key). Not thread-safe: its store's lock guards it.

    Parents, and the block of a state, may be stored elsewhere (on disk); children in memory keep their parent here.
    """

    def __init__(
        self,
        capacity: int,
        notify: Callable[[Sequence[bytes]], None] = lambda _: None,
        on_evict: Callable[[Sequence[bytes], bytes], None] = lambda *_: None,
    ) -> None:
        """Create an empty tier of ``capacity`` bytes.

        ``notify`` is called with each key of which a value came or went; ``on_evict`` with keys of evicted blocks and
        the key that needed the room.
        """
        self.capacity, self.nbytes, self.evicted = capacity, 0, 0
        self._notify, self._on_evict = notify, on_evict
        self._values: dict[Name, Put] = {}
        self._order: OrderedDict[bytes, None] = OrderedDict()
        self._children: Counter[bytes] = Counter()
        self.pins: Counter[bytes] = Counter()

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, name: Name) -> bool:
        return name in self._values

    def get(self, name: Name) -> Put | None:
        """Return the value, or None. Pure."""
        return self._values.get(name)

    def items(self) -> dict[Name, Put]:
        """Return a copy of the map, not of the values."""
        return dict(self._values)

    def put(self, item: Put) -> bool:
        """Add one value, evicting the least recently used leaves; False, with no change, if there is no room."""
        name, key = item.name, item.key
        before = self._values.get(name)
        more = len(item.data) - (len(before.data) if before is not None else 0)
        need = self.nbytes + more - self.capacity
        victims = self._victims(need, {item.parent, key}) if need > 0 else []
        if victims is None:
            return False
        for victim in victims:
            self.remove(victim)
            self.evicted += 1
        self._on_evict([lost for kind, lost in victims if kind == "block"], key)
        self.nbytes += more
        self._values[name] = item
        if before is None and item.kind == "block":
            self._children[item.parent] += 1
        if before is None and len(self._names(key)) == 1:
            self._order[key] = None
        self._notify((key,))
        return True

    def _victims(self, need: int, keep: set[bytes]) -> list[Name] | None:
        lost: Counter[bytes] = Counter()
        names: list[Name] = []
        chosen: set[bytes] = set()
        grown = True
        while need > 0 and grown:
            grown = False
            for key in self._order:
                if need <= 0:
                    break
                if key in keep or key in chosen or self.pins[key] > 0 or self._children[key] > lost[key]:
                    continue
                block = self._values.get(("block", key))
                chosen.add(key)
                grown = True
                if block is not None:
                    lost[block.parent] += 1
                for name in self._names(key):
                    names.append(name)
                    need -= len(self._values[name].data)
        return names if need <= 0 else None

    def _names(self, key: bytes) -> list[Name]:
        names: list[Name] = [("state", key), ("block", key)]
        return [name for name in names if name in self._values]

    def remove(self, name: Name) -> None:
        """Remove one value; unknown ones are ignored."""
        item = self._values.pop(name, None)
        if item is None:
            return
        self.nbytes -= len(item.data)
        if not self._names(item.key):
            del self._order[item.key]
        if item.kind == "block":
            self._children[item.parent] -= 1
            if not self._children[item.parent]:
                del self._children[item.parent]
        self._notify((item.key,))

    def is_free_leaf(self, key: bytes) -> bool:
        """Return True if the block is in memory with neither a child nor a pin."""
        return ("block", key) in self._values and not self._children[key] and not self.pins[key]

    def partials(self, key: bytes) -> list[bytes]:
        """Return the keys of partial blocks after this one: of fewer tokens, and without children and pins."""
        block = self._values.get(("block", key))
        if block is None or not self._children[key]:
            return []
        return [
            item.key
            for item in self._values.values()
            if item.parent == key and item.tokens < block.tokens and self.is_free_leaf(item.key)
        ]

    def split(self, key: bytes) -> bool:
        """Return True if blocks after this one are in memory."""
        return self._children[key] > 0

    def recent(self) -> list[bytes]:
        """Return the keys, the last used first."""
        return list(self._order)[::-1]

    def subtree(self, key: bytes) -> list[bytes]:
        """Return the key and all keys below it."""
        below = {key}
        for item in sorted(self._values.values(), key=lambda item: item.end):
            if item.kind == "block" and item.parent in below:
                below.add(item.key)
        return list(below)

    def touch(self, keys: Iterable[bytes]) -> None:
        """Count the values of ``keys`` and their ancestors in memory as used now."""
        tips = [(self._values[names[0]].end, key) for key in keys if (names := self._names(key))]
        seen: set[bytes] = set()
        for _, tip in sorted(tips, reverse=True):
            key: bytes | None = tip if tip not in seen else None
            while key is not None:
                # The leaf first, so that a parent is always more recent than its children.
                self._order.move_to_end(key)
                seen.add(key)
                block = self._values.get(("block", key))
                key = block.parent if block is not None and ("block", block.parent) in self._values else None

    def counts(self, names: Sequence[Name]) -> tuple[int, int, int]:
        """Return blocks, states and tokens among ``names``, which are in memory."""
        blocks = [self._values[name] for name in names if name[0] == "block"]
        return len(blocks), len(names) - len(blocks), sum(block.tokens for block in blocks)

    def check(self) -> None:
        """Raise AssertionError where counts and contents disagree."""
        blocks = [item for item in self._values.values() if item.kind == "block"]
        assert self.nbytes == sum(len(item.data) for item in self._values.values()) <= max(self.capacity, 0)
        assert set(self._order) == {key for _, key in self._values}, "the order of eviction has other keys"
        assert +self._children == Counter(block.parent for block in blocks), "children are counted wrongly"

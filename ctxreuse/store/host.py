"""Values in host memory: a bounded map in order of last use, in which only what nothing hangs on may go."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from ctxreuse.store.base import Kind
from ctxreuse.store.policy import LRU, Facts
from ctxreuse.store.put import Put

__all__ = ["Held", "HostTier", "Name"]

Name = tuple[Kind, bytes]


class Held(NamedTuple):
    """One value in memory and what its header says."""

    data: memoryview
    parent: bytes
    tokens: int
    end: int
    level: str

    @property
    def nbytes(self) -> int:
        return len(self.data)


class HostTier:
    """Blocks and states by (kind, key). Not thread-safe: its store's lock guards it.

    Parents, and the block of a state, may be held elsewhere (on disk); children held here keep their parent here.
    """

    def __init__(
        self,
        capacity: int,
        tell: Callable[[Sequence[bytes]], None] = lambda _: None,
        made_room: Callable[[Sequence[bytes], bytes], None] = lambda *_: None,
    ) -> None:
        """``tell`` is called with each key of which something came or went; ``made_room`` with keys whose blocks went
        to make room, and the key that they went for."""
        self.capacity, self.nbytes, self.evicted, self._tell = capacity, 0, 0, tell
        self._made_room = made_room
        self._values: dict[Name, Held] = {}
        self._order: LRU[bytes] = LRU()
        self._children: Counter[bytes] = Counter()
        self.pins: Counter[bytes] = Counter()

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, name: Name) -> bool:
        return name in self._values

    def get(self, name: Name) -> Held | None:
        """The value, or None. Pure."""
        return self._values.get(name)

    def items(self) -> dict[Name, Held]:
        """What is held now: a copy of the map, not of the values."""
        return dict(self._values)

    def put(self, item: Put) -> bool:
        """Hold one value, evicting the least recently used that may go; False (and no change) if there is no room."""
        kind, key, data = item.kind, item.key, item.data
        name = kind, key
        before = self._values.get(name)
        need = self.nbytes + len(data) - (before.nbytes if before is not None else 0) - self.capacity
        victims = self._victims(need, {item.parent, key}) if need > 0 else []
        if victims is None:
            return False
        for victim in victims:
            self.remove(victim)
            self.evicted += 1
        self._made_room([lost for of, lost in victims if of == "block"], key)
        self.nbytes += len(data) - (before.nbytes if before is not None else 0)
        self._values[name] = Held(data, item.parent, item.tokens, item.end, item.level)
        if before is None and kind == "block":
            self._children[item.parent] += 1
        if before is None and len(self._names(key)) == 1:
            # The owner touches the key next; neither time nor size matters to this order.
            self._order.insert(Facts(key, None, item.tokens, item.end, len(data)), 0.0)
        self._tell((key,))
        return True

    def _victims(self, need: int, keep: set[bytes]) -> list[Name] | None:
        lost: Counter[bytes] = Counter()
        chosen: list[Name] = []
        gone: set[bytes] = set()
        grown = True
        while need > 0 and grown:
            grown = False
            for key in self._order.order():
                if need <= 0:
                    break
                if key in keep or key in gone or self.pins[key] > 0 or self._children[key] > lost[key]:
                    continue
                block = self._values.get(("block", key))
                gone.add(key)
                grown = True
                if block is not None:
                    lost[block.parent] += 1
                for name in self._names(key):
                    chosen.append(name)
                    need -= self._values[name].nbytes
        return chosen if need <= 0 else None

    def _names(self, key: bytes) -> list[Name]:
        names: list[Name] = [("state", key), ("block", key)]
        return [name for name in names if name in self._values]

    def remove(self, name: Name) -> None:
        """Forget one value; unknown ones are ignored."""
        held = self._values.pop(name, None)
        if held is None:
            return
        self.nbytes -= held.nbytes
        kind, key = name
        if not self._names(key):
            self._order.remove(key, 0.0)
        if kind == "block":
            self._children[held.parent] -= 1
            if not self._children[held.parent]:
                del self._children[held.parent]
        self._tell((key,))

    def lone(self, key: bytes) -> bool:
        """True if the block is held and neither a child nor a pin holds on to it."""
        return ("block", key) in self._values and not self._children[key] and not self.pins[key]

    def split(self, key: bytes) -> bool:
        """True if blocks that follow this one are held."""
        return self._children[key] > 0

    def recent(self) -> list[bytes]:
        """Held keys, the last used first."""
        return list(self._order.order())[::-1]

    def subtree(self, key: bytes) -> list[bytes]:
        """The key and all held below it."""
        below = {key}
        for (kind, child), held in sorted(self._values.items(), key=lambda entry: entry[1].end):
            if kind == "block" and held.parent in below:
                below.add(child)
        return list(below)

    def touch(self, keys: Iterable[bytes]) -> None:
        """Count the held ones of ``keys`` and their held ancestors as used now."""
        tips = [(self._values[names[0]].end, key) for key in keys if (names := self._names(key))]
        seen: set[bytes] = set()
        for _, tip in sorted(tips, reverse=True):
            if tip in seen:
                continue
            path, key = [tip], tip
            while (held := self._values.get(("block", key))) is not None and ("block", held.parent) in self._values:
                key = held.parent
                path.append(key)
            seen.update(path)
            self._order.access(path[::-1], 0.0)

    def counts(self, names: Sequence[Name]) -> tuple[int, int, int]:
        """Blocks, states and tokens among ``names``, which are held."""
        blocks = [self._values[name] for name in names if name[0] == "block"]
        return len(blocks), len(names) - len(blocks), sum(held.tokens for held in blocks)

    def check(self) -> None:
        """Raises AssertionError where counts and contents disagree."""
        blocks = {key: held for (kind, key), held in self._values.items() if kind == "block"}
        assert self.nbytes == sum(held.nbytes for held in self._values.values()) <= max(self.capacity, 0)
        assert set(self._order.order()) == {key for _, key in self._values}, "the order of eviction holds other keys"
        assert +self._children == Counter(held.parent for held in blocks.values()), "children are counted wrongly"

"""The context tree: which prefixes are cached, as one radix tree over block keys with token counts.

A prefix key already hashes everything before it, so the tree is a hash map from key to node plus parent links: matching
walks the keys of a request until one is missing. Store, eviction, planner, router and fork all read this one structure.
Its nodes lie in a native arena, some 70 bytes each; what many of them have in common is kept once.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from ctxreuse.block.levels import EXACT, allowed_by
from ctxreuse.identity.keys import ROOT
from ctxreuse.kernels.dispatch import native as _native

__all__ = ["Branch", "ContextTree", "Match", "Node", "NodeKind", "NodeRow"]

# Fields of a node in the arena.
_PARENT, _DEPTH, _TOKENS, _CHILDREN, _NBYTES, _STATE_NBYTES, _KIND = range(7)


class NodeKind(NamedTuple):
    """What many nodes have in common.

    ``level`` and ``state_level`` say how the block and the state are encoded, and ``max_kl`` within which KL their
    owner lets them be kept (None: exactly).
    """

    level: str = EXACT
    state_level: str = EXACT
    max_kl: float | None = None


class NodeRow(NamedTuple):
    """All of a node at one moment; ``parent`` is ROOT for the first of a context."""

    key: bytes
    parent: bytes
    tokens: int
    depth: int
    children: int
    nbytes: int
    state_nbytes: int
    kind: NodeKind


class Node:
    """One cached block: the run of ``tokens`` tokens that ends here. Valid until it is removed from its tree.

    ``nbytes`` and ``state_nbytes`` are the sizes of its block and of the state at its end (0: there is none); for
    ``level``, ``state_level`` and ``max_kl`` see `NodeKind`. ``children`` counts cached children, ``pins`` protects
    from eviction, ``branches`` counts the branches whose tip it is.
    """

    __slots__ = ("_tree", "place")

    def __init__(self, tree: ContextTree, place: int) -> None:
        self._tree: Final = tree
        #: Where it lies in the arena.
        self.place: Final = place

    def _field(self, field: int) -> int:
        return _native.tree_field(self._tree.arena, self.place, field)

    @property
    def row(self) -> NodeRow:
        """All of it at once."""
        row = _native.tree_row_of(self._tree.arena, self.place)
        return NodeRow(*row[:7], self._tree.kinds[row[7]])

    @property
    def key(self) -> bytes:
        """Its key."""
        return _native.tree_row_of(self._tree.arena, self.place)[0]

    @property
    def parent(self) -> Node | None:
        """The block before it."""
        place = self._field(_PARENT)
        return Node(self._tree, place) if place >= 0 else None

    @property
    def line(self) -> list[bytes]:
        """The keys from its own up to the first of the context."""
        return _native.tree_line(self._tree.arena, self.place)

    @property
    def tokens(self) -> int:
        """Its own tokens."""
        return self._field(_TOKENS)

    @property
    def depth(self) -> int:
        """Tokens of the context up to its end."""
        return self._field(_DEPTH)

    @property
    def children(self) -> int:
        """Cached children."""
        return self._field(_CHILDREN)

    @property
    def nbytes(self) -> int:
        """Bytes of its block."""
        return self._field(_NBYTES)

    @property
    def state_nbytes(self) -> int:
        """Bytes of its state."""
        return self._field(_STATE_NBYTES)

    @property
    def kind(self) -> NodeKind:
        """What it has in common with others."""
        return self._tree.kinds[self._field(_KIND)]

    @property
    def level(self) -> str:
        """How its block is encoded."""
        return self.kind.level

    @property
    def state_level(self) -> str:
        """How its state is encoded."""
        return self.kind.state_level

    @property
    def max_kl(self) -> float | None:
        """The limit of its owner."""
        return self.kind.max_kl

    @max_kl.setter
    def max_kl(self, max_kl: float | None) -> None:
        self._tree.set_kind(self.place, self.kind._replace(max_kl=max_kl))

    @property
    def pins(self) -> int:
        """Pins that hold it."""
        return self._tree.pins.get(self.place, 0)

    @property
    def branches(self) -> int:
        """Branches that end here."""
        return len(self._tree.tips.get(self.place, ()))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Node) and other._tree is self._tree and other.place == self.place

    def __hash__(self) -> int:
        return hash((id(self._tree), self.place))

    def __repr__(self) -> str:
        return f"Node({self.key.hex()[:12]}, depth={self.depth}, children={self.children}, pins={self.pins})"


class Match(msgspec.Struct, frozen=True):
    """The longest cached prefix of a request.

    ``blocks``: how many leading keys are cached; ``tokens``: how many tokens these are. ``state_blocks`` and
    ``state_tokens``: the same up to the deepest state inside that run, where a model with states can resume. ``split``:
    other contexts go on from the last of these blocks, so that what comes after it makes a branch.
    """

    blocks: int
    tokens: int
    state_blocks: int
    state_tokens: int
    split: bool = False


class Branch:
    """The deepest cached block of one session. Forking copies a pointer."""

    __slots__ = ("tip",)

    def __init__(self, tip: Node | None) -> None:
        self.tip = tip


#: Limits whose masks are kept.
_MASKS = 64


class ContextTree:
    """Cached prefixes with pins and branches. Not thread-safe: its owner (the store) serialises the calls."""

    def __init__(self) -> None:
        self.arena: Any = _native.tree_new()
        #: What nodes have in common, by its number; numbers of kinds that no node has are given again.
        self.kinds: list[NodeKind] = []
        self._numbers: dict[NodeKind, int] = {}
        self._uses: list[int] = []
        #: Which kinds may be used, by limit; see `_allowed`.
        self._masks: dict[float | None, bytes] = {}
        # Kept beside the nodes, by place: few of them have any.
        self.pins: dict[int, int] = {}
        self.tips: dict[int, set[Branch]] = {}
        self._branches: set[Branch] = set()
        self._stated: set[int] = set()

    def __len__(self) -> int:
        return _native.tree_figures(self.arena)[0]

    @property
    def tokens(self) -> int:
        """Tokens of all nodes."""
        return _native.tree_figures(self.arena)[1]

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks and states."""
        return _native.tree_figures(self.arena)[2]

    @property
    def memory(self) -> int:
        """Bytes that the nodes take themselves."""
        return _native.tree_figures(self.arena)[3]

    @property
    def states(self) -> int:
        """Number of nodes with a state."""
        return len(self._stated)

    @property
    def stated(self) -> Iterator[Node]:
        """The nodes with a state."""
        return (Node(self, place) for place in self._stated)

    @property
    def levels(self) -> Counter[str]:
        """Number of cached blocks by level."""
        found: Counter[str] = Counter()
        for kind, uses in zip(self.kinds, self._uses):
            if uses:
                found[kind.level] += uses
        return found

    def __contains__(self, key: bytes) -> bool:
        return _native.tree_find(self.arena, key) >= 0

    def __iter__(self) -> Iterator[Node]:
        """Iterate over the nodes, in no order; those that come meanwhile may be left out."""
        return (Node(self, place) for place in range(_native.tree_figures(self.arena)[4]) if self.has(place))

    def has(self, place: int) -> bool:
        """Return True if there is a node at a place."""
        return _native.tree_has(self.arena, place)

    def get(self, key: bytes) -> Node | None:
        """Return the node of a key, or None. Pure."""
        place = _native.tree_find(self.arena, key)
        return Node(self, place) if place >= 0 else None

    def at(self, place: int) -> Node:
        """Return the node at a place."""
        return Node(self, place)

    def _node(self, key: bytes) -> Node:
        place = _native.tree_find(self.arena, key)
        if place < 0:
            raise KeyError(key)
        return Node(self, place)

    def match(self, keys: Sequence[bytes], max_kl: float | None = None) -> Match:
        """How many of the leading ``keys`` a caller with the limit ``max_kl`` may use. Pure; O(cached keys)."""
        blocks, last, stated, deepest = _native.tree_match(self.arena, keys, self._allowed(max_kl))
        tokens = _native.tree_field(self.arena, last, _DEPTH) if blocks else 0
        state_tokens = _native.tree_field(self.arena, deepest, _DEPTH) if stated else 0
        split = blocks > 0 and _native.tree_field(self.arena, last, _CHILDREN) > 0
        return Match(blocks, tokens, stated, state_tokens, split)

    def _allowed(self, max_kl: float | None) -> bytes:
        """A byte for each kind: bit 0 if a caller with that limit may use its block, bit 1 its state."""
        mask = self._masks.get(max_kl)
        if mask is None:
            if len(self._masks) >= _MASKS:
                self._masks.clear()
            may = [(allowed_by(one.level, max_kl), allowed_by(one.state_level, max_kl)) for one in self.kinds]
            mask = self._masks[max_kl] = bytes(block + 2 * state for block, state in may)
        return mask

    def path(self, keys: Sequence[bytes]) -> list[Node]:
        """The nodes of the longest cached prefix, root first. Pure."""
        found = []
        for key in keys:
            place = _native.tree_find(self.arena, key)
            if place < 0:
                break
            found.append(Node(self, place))
        return found

    def insert(self, key: bytes, parent: bytes, tokens: int, nbytes: int, level: str = EXACT) -> Node:
        """Hold one more block after ``parent`` (ROOT for the first); a known key keeps its node and takes the new size
        and level.

        Raises KeyError if the parent is not cached: an unreachable block could never be matched.
        """
        node = self.get(key)
        if node is not None:
            _native.tree_set(self.arena, node.place, _NBYTES, nbytes)
            kind = node.kind
            if kind.level != level:
                self.set_kind(node.place, kind._replace(level=level))
            return node
        above = -1 if parent == ROOT else self._node(parent).place
        number = self._number(NodeKind(level))
        node = Node(self, _native.tree_add(self.arena, key, above, tokens, nbytes, number))
        self._uses[number] += 1
        return node

    def _number(self, kind: NodeKind) -> int:
        number = self._numbers.get(kind)
        if number is not None:
            return number
        number = next((n for n, uses in enumerate(self._uses) if not uses), len(self._uses))
        if number == len(self._uses):
            self._uses.append(0)
            self.kinds.append(kind)
        else:
            del self._numbers[self.kinds[number]]
            self.kinds[number] = kind
        self._numbers[kind] = number
        self._masks.clear()
        return number

    def set_kind(self, place: int, kind: NodeKind) -> None:
        """Change what a node has in common with others."""
        number = self._number(kind)
        self._uses[_native.tree_field(self.arena, place, _KIND)] -= 1
        self._uses[number] += 1
        _native.tree_set(self.arena, place, _KIND, number)

    def set_state(self, key: bytes, nbytes: int, level: str = EXACT) -> None:
        """Record that a state of ``nbytes`` is stored at the end of ``key`` (0: none). Raises KeyError if unknown."""
        node = self._node(key)
        _native.tree_set(self.arena, node.place, _STATE_NBYTES, nbytes)
        kind = node.kind
        if kind.state_level != level:
            self.set_kind(node.place, kind._replace(state_level=level))
        (self._stated.add if nbytes else self._stated.discard)(node.place)

    def remove(self, key: bytes) -> None:
        """Remove one leaf, block and state; branches that end here fall back to its parent. O(these branches).

        Raises KeyError if it is unknown, ValueError if it has children or pins.
        """
        node = self._node(key)
        if node.children or node.pins:
            raise ValueError(f"{node!r} is in use")
        # A branch survives the loss of its KV: its tip falls back to the deepest block still cached.
        for branch in tuple(self.tips.get(node.place, ())):
            self._move(branch, node.parent)
        self._stated.discard(node.place)
        self._uses[node._field(_KIND)] -= 1
        _native.tree_remove(self.arena, node.place)

    def load(self, rows: Any, order: Any, kinds: Sequence[NodeKind], used: Any, lost: Any) -> bool:
        """Fill an empty tree with records as they lie on disk. Returns False if two keys begin with the same 8 bytes.

        Places are given in the order of the rows that are not lost.

        Args:
            rows: a buffer of 104 bytes each; what they name as their kind is an index of ``kinds``.
            order: their numbers, parents first; uint32.
            kinds: all different.
            used: room for a uint64 a row: gets the last use of each place.
            lost: room for a byte a row: gets 1 if it cannot be reached, or makes no sense.
        """
        uses = array("Q", bytes(8 * len(kinds)))
        alike = _native.tree_load(self.arena, rows, order, used, lost, uses)
        self.kinds, self._uses = list(kinds), list(uses)
        self._numbers = {kind: number for number, kind in enumerate(kinds)}
        self._masks.clear()
        self._stated = set(memoryview(_native.tree_stated(self.arena)).cast("I"))
        return not alike

    def runs(self) -> tuple[bytes, bytes]:
        """Return the runs of nodes in a line that are alike, and for each place the number of its run, a uint32.

        A run ends where contexts part, and where the kind of blocks or their protection changes. Its row is that of
        `ctxreuse.store.runs.RUN`. O(nodes), some 10 ns each.
        """
        return _native.tree_runs(self.arena, self.pins)

    def subtree(self, key: bytes) -> list[Node]:
        """Return the node and all below it, children before parents. O(all nodes): not for the hot path."""
        top = self._node(key)
        inside, below = {top.place}, [top]
        for node in sorted(self, key=lambda n: n.depth):
            if node._field(_PARENT) in inside:
                inside.add(node.place)
                below.append(node)
        return below[::-1]

    def pin(self, keys: Iterable[bytes]) -> int:
        """Protect the cached blocks among ``keys`` from eviction until `unpin`. Returns the number pinned."""
        return self._count(keys, 1)

    def unpin(self, keys: Iterable[bytes]) -> int:
        """Undo one `pin`. Returns the number unpinned."""
        return self._count(keys, -1)

    def _count(self, keys: Iterable[bytes], step: int) -> int:
        reached = 0
        for key in keys:
            place = _native.tree_find(self.arena, key)
            pins = self.pins.get(place, 0) + step
            if place < 0 or pins < 0:
                continue
            reached += 1
            if pins:
                self.pins[place] = pins
            else:
                del self.pins[place]
        return reached

    def evictable(
        self, order: Callable[[], Iterable[bytes]], need: int, keep: Container[bytes] = frozenset()
    ) -> list[Node]:
        """Nodes that may go so that ``need`` bytes are free, children before parents; fewer if there are no more. Pure.

        ``order`` gives the policy's keys, first to go first; it is read again when the loss of children has freed
        parents that it named before. Nodes with pins or in ``keep`` stay, and so do their ancestors.
        """
        lost: dict[int, int] = {}
        victims: dict[int, Node] = {}
        freed, grown = 0, True
        while freed < need and grown:
            grown = False
            for key in order():
                place = _native.tree_find(self.arena, key)
                if place < 0 or place in self.pins or key in keep or place in victims:
                    continue
                node = Node(self, place)
                if node.children > lost.get(place, 0):
                    continue
                victims[place] = node
                grown = True
                freed += node.nbytes + node.state_nbytes
                above = node._field(_PARENT)
                lost[above] = lost.get(above, 0) + 1
                if freed >= need:
                    break
        return list(victims.values())

    def branch(self, keys: Sequence[bytes] = ()) -> Branch:
        """A new branch whose tip is the end of the longest cached prefix of ``keys``."""
        path = self.path(keys)
        branch = Branch(None)
        self._branches.add(branch)
        self._move(branch, path[-1] if path else None)
        return branch

    def fork(self, branch: Branch) -> Branch:
        """Create a second branch at the same tip. O(1): nothing is copied."""
        child = Branch(None)
        self._branches.add(child)
        self._move(child, branch.tip)
        return child

    def grow(self, branch: Branch, key: bytes) -> None:
        """Move a branch's tip to a cached node. Raises KeyError if the key is not cached or the branch was closed."""
        if branch not in self._branches:
            raise KeyError("the branch is closed")
        self._move(branch, self._node(key))

    def close(self, branch: Branch) -> None:
        """End a branch; its blocks stay until they are evicted."""
        self._move(branch, None)
        self._branches.discard(branch)

    def _move(self, branch: Branch, tip: Node | None) -> None:
        if branch.tip is not None:
            tips = self.tips[branch.tip.place]
            tips.discard(branch)
            if not tips:
                del self.tips[branch.tip.place]
        branch.tip = tip
        if tip is not None:
            self.tips.setdefault(tip.place, set()).add(branch)

    def check(self) -> None:
        """Raise AssertionError where a count differs from what it counts. O(nodes)."""
        nodes = {node.place: node.row for node in self}
        parents = {place: Node(self, place)._field(_PARENT) for place in nodes}
        children = Counter(parents.values())
        for place, row in nodes.items():
            above = parents[place]
            assert _native.tree_find(self.arena, row.key) == place, f"{row.key.hex()[:12]} is filed elsewhere"
            assert above < 0 or above in nodes, f"the parent of {row.key.hex()[:12]} is not cached"
            depth = row.tokens + (nodes[above].depth if above >= 0 else 0)
            assert row.depth == depth, f"{row.key.hex()[:12]} has the wrong depth"
            assert row.children == children[place], f"{row.key.hex()[:12]} counts its children wrongly"
        for place, pins in self.pins.items():
            assert place in nodes, f"pins at place {place}, where nothing is cached"
            assert pins > 0, f"{pins} pins at place {place}"
        for place in self.tips:
            assert place in nodes, f"branches end at place {place}, where nothing is cached"
        for branch in self._branches:
            tip = branch.tip
            assert tip is None or branch in self.tips.get(tip.place, ()), f"a branch is not filed under its tip {tip!r}"
        filed = sum(map(len, self.tips.values()))
        ended = sum(branch.tip is not None for branch in self._branches)
        assert filed == ended, "branches are filed under nodes where they do not end"
        count, tokens, nbytes, _, _ = _native.tree_figures(self.arena)
        assert count == len(nodes), f"the tree counts {count} nodes and has {len(nodes)}"
        total = sum(row.tokens for row in nodes.values())
        assert tokens == total, f"the tree counts {tokens} tokens, its nodes have {total}"
        total = sum(row.nbytes + row.state_nbytes for row in nodes.values())
        assert nbytes == total, f"the tree counts {nbytes} bytes, its nodes have {total}"
        stated = {place for place, row in nodes.items() if row.state_nbytes}
        assert self._stated == stated, "nodes with states are filed wrongly"
        kinds = Counter(row.kind for row in nodes.values())
        counted = {kind: uses for kind, uses in zip(self.kinds, self._uses) if uses}
        assert counted == kinds, f"the tree counts {counted}, its nodes have {kinds}"
        assert all(self.kinds[number] == kind for kind, number in self._numbers.items()), "a kind has another number"

"""The context tree: which prefixes are held, as one radix tree over block keys with token counts.

A prefix key already hashes everything before it, so the tree is a hash map from key to node plus parent links: matching
walks the keys of a request until one is missing. Store, eviction, planner, router and fork all read this one structure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Sequence

import msgspec

from ctxreuse.keys import ROOT
from ctxreuse.levels import EXACT, fits

__all__ = ["Branch", "ContextTree", "Match", "Node"]


class Node:
    """One held block: the run of ``tokens`` tokens that ends here. Fields change only through the tree's methods.

    ``nbytes`` and ``state_nbytes`` are the sizes of its block and of the state at its end (0: none is held).
    ``level`` and ``state_level`` say how they are encoded, and ``lossy`` the worst level that their owner allows ("":
    exact ones only). ``children`` counts held children, ``pins`` holds eviction off, ``branches`` counts the branches
    whose tip it is.
    """

    __slots__ = (
        "branches", "children", "depth", "key", "level", "lossy", "nbytes", "parent", "pins", "state_level",
        "state_nbytes", "tokens",
    )  # fmt: skip

    def __init__(self, key: bytes, parent: Node | None, tokens: int, nbytes: int) -> None:
        self.key, self.parent, self.tokens, self.nbytes = key, parent, tokens, nbytes
        self.depth: int = tokens + (parent.depth if parent is not None else 0)
        self.children = self.pins = self.branches = self.state_nbytes = 0
        self.level = self.state_level = EXACT
        self.lossy = ""

    def __repr__(self) -> str:
        return f"Node({self.key.hex()[:12]}, depth={self.depth}, children={self.children}, pins={self.pins})"


class Match(msgspec.Struct, frozen=True):
    """The longest held prefix of a request.

    ``blocks``: how many leading keys are held; ``tokens``: how many tokens these are. ``state_blocks`` and
    ``state_tokens``: the same up to the deepest state inside that run, where a model with states can resume. ``split``:
    other contexts go on from the last of these blocks, so that what comes after it makes a branch.
    """

    blocks: int
    tokens: int
    state_blocks: int
    state_tokens: int
    split: bool = False


class Branch:
    """A named line of growth: its tip is the deepest block known of one session. Forking copies a pointer."""

    __slots__ = ("tip",)

    def __init__(self, tip: Node | None) -> None:
        self.tip = tip


class ContextTree:
    """Held prefixes with pins and branches. Not thread-safe: its owner (the store) serialises the calls."""

    def __init__(self) -> None:
        self._nodes: dict[bytes, Node] = {}
        self._branches: set[Branch] = set()
        # Kept beside the nodes: few of them are tips, and a set in each would double a node's memory.
        self._tips: dict[bytes, set[Branch]] = {}
        self.tokens = 0
        self.nbytes = 0
        #: Nodes with a state, by key.
        self.stated: dict[bytes, Node] = {}
        #: How many blocks are held at each level.
        self.levels: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, key: bytes) -> bool:
        return key in self._nodes

    def __iter__(self) -> Iterator[Node]:
        return iter(self._nodes.values())

    def get(self, key: bytes) -> Node | None:
        """The node of a key, or None. Pure."""
        return self._nodes.get(key)

    def match(self, keys: Sequence[bytes], lossy: str | None = None) -> Match:
        """How many of the leading ``keys`` are held at levels that ``lossy`` allows. Pure; O(held keys)."""
        nodes = self._nodes
        node = deepest = None
        blocks = state_blocks = 0
        for key in keys:
            found = nodes.get(key)
            if found is None or not fits(found.level, lossy):
                break
            node = found
            blocks += 1
            if node.state_nbytes and fits(node.state_level, lossy):
                deepest, state_blocks = node, blocks
        tokens, state_tokens = node.depth if node else 0, deepest.depth if deepest else 0
        return Match(blocks, tokens, state_blocks, state_tokens, node is not None and node.children > 0)

    def path(self, keys: Sequence[bytes]) -> list[Node]:
        """The nodes of the longest held prefix, root first. Pure."""
        found = []
        for key in keys:
            node = self._nodes.get(key)
            if node is None:
                break
            found.append(node)
        return found

    def insert(self, key: bytes, parent: bytes, tokens: int, nbytes: int, level: str = EXACT) -> Node:
        """Hold one more block after ``parent`` (ROOT for the first); a known key keeps its node and takes the new size
        and level.

        Raises KeyError if the parent is not held: an unreachable block could never be matched.
        """
        node = self._nodes.get(key)
        if node is None:
            above = None if parent == ROOT else self._nodes[parent]
            node = Node(key, above, tokens, nbytes)
            self._nodes[key] = node
            if above is not None:
                above.children += 1
            self.tokens += tokens
        else:
            self.nbytes -= node.nbytes
            node.nbytes = nbytes
            self._uncount(node.level)
        node.level = level
        self.levels[level] += 1
        self.nbytes += nbytes
        return node

    def _uncount(self, level: str) -> None:
        self.levels[level] -= 1
        if not self.levels[level]:
            del self.levels[level]

    def set_state(self, key: bytes, nbytes: int, level: str = EXACT) -> None:
        """Record that a state of ``nbytes`` is held at the end of ``key`` (0: none). Raises KeyError if unknown."""
        node = self._nodes[key]
        node.state_level = level
        self.nbytes += nbytes - node.state_nbytes
        node.state_nbytes = nbytes
        if nbytes:
            self.stated[key] = node
        else:
            self.stated.pop(key, None)

    def remove(self, key: bytes) -> Node:
        """Forget one leaf, block and state. O(branches that end there). KeyError if unknown, ValueError if in use.

        In use means children or pins. Branches do not hold a block: those that end here fall back to its parent.
        """
        node = self._nodes[key]
        if node.children or node.pins:
            raise ValueError(f"{node!r} is in use")
        del self._nodes[key]
        self.stated.pop(key, None)
        if node.parent is not None:
            node.parent.children -= 1
        self.tokens -= node.tokens
        self.nbytes -= node.nbytes + node.state_nbytes
        self._uncount(node.level)
        # A branch survives the loss of its KV: its tip falls back to the deepest block still held.
        for branch in tuple(self._tips.get(key, ())):
            self._move(branch, node.parent)
        return node

    def subtree(self, key: bytes) -> list[Node]:
        """The node and everything below it, children before parents. O(all nodes): for repair, not for the hot path."""
        top = self._nodes[key]
        inside = {id(top)}
        below = [top]
        for node in sorted(self._nodes.values(), key=lambda n: n.depth):
            if node.parent is not None and id(node.parent) in inside:
                inside.add(id(node))
                below.append(node)
        return below[::-1]

    def pin(self, keys: Iterable[bytes]) -> int:
        """Hold eviction off the held ones among ``keys`` until ``unpin``; returns how many."""
        return self._count(keys, 1)

    def unpin(self, keys: Iterable[bytes]) -> int:
        """Undo one ``pin``; returns how many nodes it reached."""
        return self._count(keys, -1)

    def _count(self, keys: Iterable[bytes], step: int) -> int:
        reached = 0
        for key in keys:
            node = self._nodes.get(key)
            if node is not None and node.pins + step >= 0:
                node.pins += step
                reached += 1
        return reached

    def evictable(
        self, order: Callable[[], Iterable[bytes]], need: int, keep: Container[bytes] = frozenset()
    ) -> list[Node]:
        """Nodes that may go so that ``need`` bytes are free, children before parents; fewer if there are no more. Pure.

        ``order`` gives the policy's keys, first to go first; it is asked again when the loss of children has freed
        parents that it named before. Nodes with pins or in ``keep`` stay, and so do their ancestors.
        """
        lost: dict[bytes, int] = {}
        victims: dict[bytes, Node] = {}
        freed, grown = 0, True
        while freed < need and grown:
            grown = False
            for key in order():
                node = self._nodes.get(key)
                if node is None or node.pins or key in keep or key in victims or node.children > lost.get(key, 0):
                    continue
                victims[key] = node
                grown = True
                freed += node.nbytes + node.state_nbytes
                if node.parent is not None:
                    lost[node.parent.key] = lost.get(node.parent.key, 0) + 1
                if freed >= need:
                    break
        return list(victims.values())

    def branch(self, keys: Sequence[bytes] = ()) -> Branch:
        """A new branch whose tip is the end of the longest held prefix of ``keys``."""
        path = self.path(keys)
        branch = Branch(None)
        self._branches.add(branch)
        self._move(branch, path[-1] if path else None)
        return branch

    def fork(self, branch: Branch) -> Branch:
        """A second branch at the same tip. O(1) whatever the length: nothing is copied."""
        child = Branch(None)
        self._branches.add(child)
        self._move(child, branch.tip)
        return child

    def grow(self, branch: Branch, key: bytes) -> None:
        """Move a branch's tip to a held node. Raises KeyError if the key is not held or the branch was closed."""
        if branch not in self._branches:
            raise KeyError("the branch is closed")
        self._move(branch, self._nodes[key])

    def close(self, branch: Branch) -> None:
        """End a branch; its blocks stay until they are evicted."""
        self._move(branch, None)
        self._branches.discard(branch)

    def _move(self, branch: Branch, tip: Node | None) -> None:
        if branch.tip is not None:
            branch.tip.branches -= 1
            tips = self._tips[branch.tip.key]
            tips.discard(branch)
            if not tips:
                del self._tips[branch.tip.key]
        branch.tip = tip
        if tip is not None:
            tip.branches += 1
            self._tips.setdefault(tip.key, set()).add(branch)

    def check(self) -> None:
        """Compare every count with what it counts; raises AssertionError at the first difference. O(nodes)."""
        children: dict[int, int] = {}
        for key, node in self._nodes.items():
            above = node.parent
            assert node.key == key, f"{node!r} is filed under {key.hex()[:12]}"
            assert node.depth == node.tokens + (above.depth if above else 0), f"{node!r} has the wrong depth"
            if above is not None:
                assert self._nodes.get(above.key) is above, f"the parent of {node!r} is not held"
                children[id(above)] = children.get(id(above), 0) + 1
        tips: dict[int, int] = {}
        for branch in self._branches:
            tip = branch.tip
            if tip is not None:
                assert self._nodes.get(tip.key) is tip, f"a branch ends at {tip!r}, which is not held"
                assert branch in self._tips.get(tip.key, ()), f"a branch is not filed under its tip {tip!r}"
                tips[id(tip)] = tips.get(id(tip), 0) + 1
        filed = sum(map(len, self._tips.values()))
        assert sum(tips.values()) == filed, "branches are filed under nodes where they do not end"
        for node in self._nodes.values():
            held = children.get(id(node), 0), tips.get(id(node), 0)
            assert (node.children, node.branches) == held, f"{node!r} counts its children or branches wrongly"
            assert node.pins >= 0, f"{node!r} has fewer than no pins"
        tokens = sum(node.tokens for node in self._nodes.values())
        assert self.tokens == tokens, f"the tree counts {self.tokens} tokens, its nodes have {tokens}"
        nbytes = sum(node.nbytes + node.state_nbytes for node in self._nodes.values())
        stated = {key: node for key, node in self._nodes.items() if node.state_nbytes}
        assert self.stated == stated, "nodes with states are filed wrongly"
        levels = Counter(node.level for node in self._nodes.values())
        assert self.levels == levels, f"the tree counts {self.levels}, its nodes have {levels}"
        assert self.nbytes == nbytes, f"the tree counts {self.nbytes} bytes, its nodes have {nbytes}"

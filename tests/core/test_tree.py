"""The context tree against a model that is too simple to be wrong."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from ctxreuse.identity.keys import ROOT
from ctxreuse.kernels.dispatch import native
from ctxreuse.tree import Branch, ContextTree
from support.examples import examples

PICK = st.integers(0, 1000)
WORDS = st.lists(st.integers(0, 2), min_size=1, max_size=6).map(tuple)


def key(path: tuple[int, ...]) -> bytes:
    return bytes(path).ljust(32, b"\xff")


def keys(path: tuple[int, ...]) -> list[bytes]:
    return [key(path[: i + 1]) for i in range(len(path))]


class TreeAgainstDict(RuleBasedStateMachine):
    """The model: a dict from path to sizes; branches are paths. Everything is found by scanning all of it."""

    branches = Bundle("branches")

    def __init__(self) -> None:
        super().__init__()
        self.tree = ContextTree()
        self.held: dict[tuple[int, ...], list[int]] = {}  # path -> [tokens, nbytes, state, pins]
        self.tips: dict[Branch, tuple[int, ...]] = {}

    def prefix(self, path: tuple[int, ...]) -> tuple[int, ...]:
        n = 0
        while n < len(path) and path[: n + 1] in self.held:
            n += 1
        return path[:n]

    def depth(self, path: tuple[int, ...]) -> int:
        return sum(self.held[path[: i + 1]][0] for i in range(len(path)))

    def free(self) -> set[tuple[int, ...]]:
        parents = {path[:-1] for path in self.held}
        return {path for path, row in self.held.items() if path not in parents and not row[3]}

    @rule(path=WORDS, tokens=st.integers(1, 64), nbytes=st.integers(0, 1000))
    def insert(self, path: tuple[int, ...], tokens: int, nbytes: int) -> None:
        parent = key(path[:-1]) if len(path) > 1 else ROOT
        if path not in self.held and len(path) > 1 and path[:-1] not in self.held:
            with pytest.raises(KeyError):
                self.tree.insert(key(path), parent, tokens, nbytes)
            return
        node = self.tree.insert(key(path), parent, tokens, nbytes)
        row = self.held.setdefault(path, [tokens, nbytes, 0, 0])
        row[1] = nbytes
        assert (node.tokens, node.nbytes, node.depth) == (row[0], nbytes, self.depth(path))

    @rule(pick=PICK, word=st.integers(0, 2), nbytes=st.integers(0, 1000))
    @precondition(lambda self: self.held)
    def extend(self, pick: int, word: int, nbytes: int) -> None:
        paths = sorted(self.held)
        self.insert((*paths[pick % len(paths)][:5], word), 64, nbytes)

    @rule(pick=PICK)
    @precondition(lambda self: self.free())
    def evict(self, pick: int) -> None:
        """Random paths are seldom leaves; these always are."""
        paths = sorted(self.free())
        self.remove(paths[pick % len(paths)])

    @rule(pick=PICK, nbytes=st.integers(0, 1000))
    @precondition(lambda self: self.free())
    def state_at_a_leaf(self, pick: int, nbytes: int) -> None:
        paths = sorted(self.free())
        self.set_state(paths[pick % len(paths)], nbytes)

    @rule(branch=branches, pick=PICK)
    @precondition(lambda self: self.free())
    def grow_to_a_leaf(self, branch: Branch, pick: int) -> None:
        paths = sorted(self.free())
        self.grow(branch, paths[pick % len(paths)])

    @rule(path=WORDS, nbytes=st.integers(0, 1000))
    def set_state(self, path: tuple[int, ...], nbytes: int) -> None:
        if path not in self.held:
            with pytest.raises(KeyError):
                self.tree.set_state(key(path), nbytes)
            return
        self.tree.set_state(key(path), nbytes)
        self.held[path][2] = nbytes

    @rule(path=WORDS)
    def remove(self, path: tuple[int, ...]) -> None:
        if path not in self.free():
            with pytest.raises(KeyError if path not in self.held else ValueError):
                self.tree.remove(key(path))
            return
        self.tree.remove(key(path))
        del self.held[path]
        self.tips = {branch: tip[:-1] if tip == path else tip for branch, tip in self.tips.items()}

    @rule(path=WORDS)
    def pin(self, path: tuple[int, ...]) -> None:
        inside = self.prefix(path)
        assert self.tree.pin(keys(inside)) == len(inside)
        for i in range(len(inside)):
            self.held[inside[: i + 1]][3] += 1

    @rule(path=WORDS)
    def unpin(self, path: tuple[int, ...]) -> None:
        rows = [self.held[p] for p in (path[: i + 1] for i in range(len(path))) if p in self.held]
        pinned = [row for row in rows if row[3]]
        assert self.tree.unpin(keys(path)) == len(pinned)
        for row in pinned:
            row[3] -= 1

    @rule(target=branches, path=WORDS)
    def branch(self, path: tuple[int, ...]) -> Branch:
        branch = self.tree.branch(keys(path))
        self.tips[branch] = self.prefix(path)
        return branch

    @rule(target=branches, branch=branches)
    def fork(self, branch: Branch) -> Branch:
        child = self.tree.fork(branch)
        self.tips[child] = self.tips[branch]
        return child

    @rule(branch=branches, path=WORDS)
    def grow(self, branch: Branch, path: tuple[int, ...]) -> None:
        if path not in self.held:
            with pytest.raises(KeyError):
                self.tree.grow(branch, key(path))
            return
        self.tree.grow(branch, key(path))
        self.tips[branch] = path

    @rule(branch=consumes(branches))
    def close(self, branch: Branch) -> None:
        self.tree.close(branch)
        del self.tips[branch]

    @rule(path=WORDS)
    def match(self, path: tuple[int, ...]) -> None:
        inside = self.prefix(path)
        states = [n for n in range(1, len(inside) + 1) if self.held[inside[:n]][2]]
        found = self.tree.match(keys(path))
        assert (found.blocks, found.tokens) == (len(inside), self.depth(inside))
        deepest = states[-1] if states else 0
        assert (found.state_blocks, found.state_tokens) == (deepest, self.depth(inside[:deepest]))
        assert [node.key for node in self.tree.path(keys(path))] == keys(inside)

    @rule(path=WORDS)
    @precondition(lambda self: self.held)
    def subtree(self, path: tuple[int, ...]) -> None:
        top = self.prefix(path)
        if not top:
            return
        below = self.tree.subtree(key(top))
        assert {node.key for node in below} == {key(p) for p in self.held if p[: len(top)] == top}
        seen: set[bytes] = set()
        for node in below:
            assert node.parent is None or node.parent.key not in seen
            seen.add(node.key)

    @invariant()
    def agrees(self) -> None:
        self.tree.check()
        assert {node.key for node in self.tree} == {key(path) for path in self.held}
        assert len(self.tree) == len(self.held)
        assert self.tree.tokens == sum(row[0] for row in self.held.values())
        assert self.tree.nbytes == sum(row[1] + row[2] for row in self.held.values())
        order = [key(path) for path in sorted(self.held)]
        free = {node.key for node in self.tree if not node.children and not node.pins}
        assert free == {key(path) for path in self.free()}
        # Everything but pinned nodes and what stands above them can go, each after all its children.
        gone = [node.key for node in self.tree.evictable(lambda: [*order, bytes(32)], 1 << 60)]
        pinned = {node.key for node in self.tree if node.pins}
        stays = {key(path[:n]) for path in self.held if key(path) in pinned for n in range(1, len(path) + 1)}
        assert len(gone) == len(set(gone))
        assert set(gone) == set(order) - stays
        for path in self.held:
            if len(path) > 1 and key(path[:-1]) in gone:
                assert gone.index(key(path)) < gone.index(key(path[:-1]))
        # No more than is needed: without the last one the bytes would not do.
        need = 1 + self.tree.nbytes // 3
        some = [
            node.nbytes + node.state_nbytes for node in self.tree.evictable(lambda: order, need, keep=set(order[:1]))
        ]
        assert sum(some[:-1]) < need
        assert all(node.key != order[0] for node in self.tree.evictable(lambda: order, need, keep=set(order[:1])))
        for branch, tip in self.tips.items():
            assert (branch.tip.key if branch.tip else None) == (key(tip) if tip else None)


TestTreeAgainstDict = TreeAgainstDict.TestCase
TestTreeAgainstDict.settings = examples("normal", stateful_step_count=40)


def test_a_closed_branch_cannot_grow() -> None:
    tree = ContextTree()
    tree.insert(key((1,)), ROOT, 64, 1)
    branch = tree.branch()
    tree.close(branch)
    with pytest.raises(KeyError):
        tree.grow(branch, key((1,)))
    tree.check()


def test_a_fork_is_one_pointer_whatever_the_length() -> None:
    tree = ContextTree()
    path = [bytes([i % 256, i // 256]).ljust(32, b"\x01") for i in range(1000)]
    for above, below in zip([ROOT, *path], path, strict=False):
        tree.insert(below, above, 64, 10)
    before = tree.nbytes, tree.tokens, len(tree)
    trunk = tree.branch(path)
    forks = [tree.fork(trunk) for _ in range(100)]
    assert all(fork.tip is trunk.tip for fork in forks)
    assert (tree.nbytes, tree.tokens, len(tree)) == before
    assert trunk.tip is not None
    assert trunk.tip.branches == 101


@pytest.mark.parametrize(
    "damage",
    [
        lambda tree, node: native.tree_set(tree.arena, node.place, 1, 7),  # its depth
        lambda tree, node: native.tree_set(tree.arena, node.place, 3, 7),  # its children
        lambda tree, node: native.tree_set(tree.arena, node.place, 5, 7),  # its state
        lambda tree, node: tree.kinds.append(tree.kinds.pop()._replace(level="exact+rans")),
        lambda tree, node: tree._uses.__setitem__(0, 2),
        lambda tree, node: tree._branches.add(Branch(node)),
        lambda tree, node: tree.pins.update({node.place: -1}),
        lambda tree, node: tree.pins.update({node.place + 1: 1}),
        lambda tree, node: tree.tips.clear(),
    ],
)
def test_check_sees_damage(damage) -> None:  # type: ignore[no-untyped-def]
    tree = ContextTree()
    node = tree.insert(key((1,)), ROOT, 64, 100)
    tree.branch([key((1,))])
    tree.check()
    damage(tree, node)
    with pytest.raises(AssertionError):
        tree.check()

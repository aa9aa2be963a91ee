"""A cache of blocks and states without contents, as a radix tree of runs of blocks: what a hybrid model would reuse.

Runs instead of blocks, because a simulation touches thousands of blocks a request. Eviction is LRU over the ends of
contexts; where a context may keep states, and which states go first, is asked of the policy that the store runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ctxreuse.store.policy.states import SHARE, Path, StatePolicy, spare
from ctxreuse.tree import Match

__all__ = ["HybridCache", "Run"]


class Run:
    """Consecutive blocks ``ids`` that every context through one of them shares, and the state at their end, if any."""

    __slots__ = ("depth", "ids", "key", "kids", "parent", "pins", "size", "state_nbytes", "used")

    def __init__(self, parent: Run | None, ids: list[int], size: int, used: float) -> None:
        self.parent, self.ids, self.size, self.used = parent, ids, size, used
        self.depth: int = len(ids) * size + (parent.depth if parent is not None else 0)
        self.key = ids[-1] if ids else -1
        self.kids: dict[int, Run] = {}
        self.pins = self.state_nbytes = 0

    @property
    def children(self) -> int:
        """How many runs go on from here."""
        return len(self.kids)


class HybridCache:
    """``capacity`` bytes of blocks of ``block_tokens`` tokens and ``block_nbytes`` bytes, and of states.

    ``policy``: where states of ``state_nbytes`` are kept (None: no model state; every held block is of use). ``every``:
    a state each so many blocks instead, its bytes counted with theirs; a request then goes on at a multiple of that.
    """

    def __init__(
        self,
        capacity: int,
        block_tokens: int,
        block_nbytes: float,
        state_nbytes: int = 0,
        *,
        policy: StatePolicy | None = None,
        every: float = 0.0,
    ) -> None:
        self.capacity, self.policy, self.every = capacity, policy, every
        self._size, self._state_nbytes = block_tokens, state_nbytes
        self._block_nbytes = block_nbytes + (state_nbytes / every if every else 0.0)
        self._root = Run(None, [], block_tokens, 0.0)
        self._leaves: dict[int, Run] = {}
        self.stated: dict[int, Run] = {}
        self.blocks = 0

    @property
    def nbytes(self) -> float:
        """Bytes of all blocks and states held."""
        return self.blocks * self._block_nbytes + len(self.stated) * self._state_nbytes

    def match(self, keys: Sequence[int], /) -> Match:
        """See `ctxreuse.tree.ContextTree.match`."""
        blocks = state = 0
        last, inside = self._root, 0
        for last, inside in self._walk(keys):
            blocks += inside
            if last.state_nbytes and inside == len(last.ids):
                state = blocks
        split = blocks > 0 and (inside < len(last.ids) or last.children > 0)
        return Match(blocks, blocks * self._size, state, state * self._size, split)

    def _walk(self, path: Sequence[int]) -> Iterator[tuple[Run, int]]:
        """Runs along the path, root first, and how many blocks of each are on it."""
        at, run = 0, self._root
        while at < len(path) and (kid := run.kids.get(path[at])) is not None:
            run, whole = kid, len(kid.ids)
            if path[at : at + whole] == run.ids:
                yield run, whole
                at += whole
                continue
            same = 0
            while same < min(whole, len(path) - at) and run.ids[same] == path[at + same]:
                same += 1
            yield run, same
            return

    def request(self, path: list[int], now: float) -> int:
        """Serve one prompt and hold it; returns from how many leading blocks it went on without computing them."""
        held = self.match(path)
        points: tuple[int, ...] = ()
        if self.every:
            reused = int(held.blocks / self.every + 1e-9) * self.every
        else:
            reused = held.blocks if self.policy is None else held.state_blocks
        if self.policy is not None:
            points = self.policy.points(Path(path, self._size), self)
        runs = self._hold(path, held.blocks, now)
        for at in points:
            self._state(path, at, runs)
        self._fit({id(run) for run in runs})
        return int(reused)

    def _hold(self, path: list[int], held: int, now: float) -> list[Run]:
        runs = []
        for run, inside in list(self._walk(path)):
            runs.append(run if inside == len(run.ids) else self._cut(run, inside))
            runs[-1].used = now
        if held < len(path):
            above = runs[-1] if runs else self._root
            run = Run(above, path[held:], self._size, now)
            above.kids[run.ids[0]] = run
            self._leaves.pop(id(above), None)
            self._leaves[id(run)] = run
            self.blocks += len(run.ids)
            runs.append(run)
        return runs

    def _cut(self, run: Run, blocks: int) -> Run:
        """Make the first ``blocks`` of a run a run of its own, which is returned."""
        assert run.parent is not None
        upper = Run(run.parent, run.ids[:blocks], self._size, run.used)
        run.parent.kids[upper.ids[0]] = upper
        run.ids, run.parent = run.ids[blocks:], upper
        upper.kids[run.ids[0]] = run
        return upper

    def _state(self, path: list[int], at: int, runs: list[Run]) -> None:
        """Keep a state at token ``at`` of the path, whose runs these are."""
        for i, run in enumerate(runs):
            if run.depth < at:
                continue
            if run.depth > at:
                run = self._cut(run, len(run.ids) - (run.depth - at) // self._size)
                runs.insert(i, run)
            run.state_nbytes = self._state_nbytes
            self.stated[id(run)] = run
            return

    def _fit(self, keep: set[int]) -> None:
        over = int(self.nbytes) - self.capacity
        if over > 0:
            held = {run.key for run in self.stated.values() if id(run) in keep}
            for run in spare(self.stated.values(), over, self.capacity // SHARE, held):
                self._strip(run)
        while self._leaves and self.nbytes > self.capacity:
            others = [run for key, run in self._leaves.items() if key not in keep]
            self._trim(min(others or self._leaves.values(), key=lambda run: run.used))

    def _strip(self, run: Run) -> None:
        if run.state_nbytes:
            run.state_nbytes = 0
            del self.stated[id(run)]

    def _trim(self, leaf: Run) -> None:
        """Take the end of a context: its state, and blocks until it fits, or all that no state makes use of."""
        self._strip(leaf)
        over = self.nbytes - self.capacity
        count = len(leaf.ids)
        if self.policy is None:
            count = min(count, -int(-over // self._block_nbytes))
        self.blocks -= count
        if count < len(leaf.ids):
            del leaf.ids[-count:]
            leaf.depth -= count * self._size
            leaf.key = leaf.ids[-1]
            return
        above = leaf.parent
        assert above is not None
        del above.kids[leaf.ids[0]], self._leaves[id(leaf)]
        if above is not self._root and not above.kids:
            self._leaves[id(above)] = above

    def check(self) -> None:
        """Raises AssertionError where counts, states and the tree disagree. O(runs)."""
        found: list[Run] = []
        below = list(self._root.kids.values())
        while below:
            run = below.pop()
            assert run.parent is not None
            assert run.ids, "a run without blocks"
            assert run.parent.kids[run.ids[0]] is run, "a run is not filed under its parent"
            assert run.depth == run.parent.depth + len(run.ids) * self._size, "a run ends elsewhere"
            found.append(run)
            below += run.kids.values()
        assert self.blocks == sum(len(run.ids) for run in found), "blocks are counted wrongly"
        assert self._leaves == {id(run): run for run in found if not run.kids}, "ends are filed wrongly"
        assert self.stated == {id(run): run for run in found if run.state_nbytes}, "states are filed wrongly"
        assert self.nbytes <= self.capacity or not found, f"{self.nbytes} bytes in {self.capacity}"

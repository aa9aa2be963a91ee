"""Evict what is least likely to be used soon for the room that it takes, as learnt from what came back so far."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Generic

from ctxreuse.store.policy.base import Facts, K, Policy, RecomputeCost, prefill_line
from ctxreuse.store.policy.hazard_counts import AGES, CLASSES
from oracle.policy.hazard_table import EDGES, LEVELS, HazardTable, level_of

__all__ = ["Hazard", "class_of", "coarse_of"]

_TURNS, _HITS, _NEWS, _LABELS = (2, 3, 5), (2, 3, 4, 7, 13), (513, 2561, 8193), 32
#: Ghosts for each held block end here: what they cost would grow with the cache, what they teach would not.
_MOST_GHOSTS = 1 << 18


def _step(value: int, steps: Sequence[int]) -> int:
    return sum(value >= step for step in steps)


def class_of(turn: int, hits: int, new: int, label: int, short: bool) -> int:
    """The class of a block by what its last use was.

    ``turn``: of the conversation (1, 2, 3-4, 5 on); ``hits``: uses of the block (1, 2, 3, 4-6, 7-12, 13 on); ``new``:
    tokens that nobody had asked for before (to 512, 2560, 8192, more); ``label``: why it paused (the low five bits);
    ``short``: it has fewer tokens than its parent, so what comes next will replace rather than follow it.
    """
    which = _step(turn, _TURNS) * (len(_HITS) + 1) + _step(hits, _HITS)
    return ((which * (len(_NEWS) + 1) + _step(new, _NEWS)) * _LABELS + label % _LABELS) * 2 + short


def coarse_of(which: int) -> int:
    """The class without its ``new``: what a class leans on while it was seldom seen."""
    rest, tail = divmod(which, 2 * _LABELS)
    return rest // (len(_NEWS) + 1) * 2 * _LABELS + tail


class _Use(Generic[K]):
    """One use of a path: ``tip`` its last block, ``blocks`` how many, ``runs`` what is left of it."""

    __slots__ = ("blocks", "label", "new", "runs", "tip", "turn")

    def __init__(self, tip: K, blocks: int, turn: int, new: int) -> None:
        self.tip, self.blocks, self.turn, self.new, self.label = tip, blocks, turn, new, 0
        self.runs: list[_Run[K]] = []


class _Run(Generic[K]):
    """Neighbours on a path with the same last use and class: ``keys[low:high]`` are held, ``[high:end]`` are ghosts.

    A later use takes blocks from its front, eviction from its back, so it stays one piece. ``level`` is -1 while it is
    in no queue of levels (nothing is held, or its last block has children).
    """

    __slots__ = ("age", "end", "high", "hits", "keys", "level", "low", "price", "short", "time", "use", "which")

    def __init__(self, use: _Use[K], hits: int, short: bool, price: int, time: float) -> None:
        self.use, self.hits, self.short, self.price, self.time = use, hits, short, price, time
        self.keys: list[K] = []
        self.low = self.high = self.end = self.age = self.which = 0
        self.level = -1


class _Block(Generic[K]):
    __slots__ = ("children", "facts", "held", "hits", "run")

    def __init__(self, facts: Facts[K]) -> None:
        self.facts, self.held, self.hits, self.children = facts, True, 0, 0
        self.run: _Run[K] | None = None


class Hazard(Policy[K]):
    """Value of a block = the best ratio of uses to seconds of holding that its class offers from its age on.

    Classes are those of `class_of`, ages those of `EDGES`, and the chances are counted as blocks come back or fail to
    (`HazardTable`), for evicted blocks too: 65,536 and twice as many ghosts as there are held blocks are remembered,
    which is what the classes need (with as many as are held, 2 to 3 of 13 points at small sizes are lost), but at most
    262,144 beyond the 65,536. The lowest value goes first, the tail of a path before what it hangs on.

    ``rebuild``: weigh values by the seconds that a byte saves. Without it all tokens count the same. On a chat trace
    the weight took one to two points of hits at small sizes; of the seconds of prefill it saved more at 0.5M tokens
    (7.6 instead of 6.2 %) and fewer at 1M (9.6 instead of 10.4 %), so it is not the default. It is for blocks whose
    seconds a byte really differ, such as states.

    Blocks are kept in runs (of one class and last use). A run is in the queue of its age, in order of last use, and in
    the queue of its level, which it gets when it enters an age. A step so costs O(path) look-ups and, amortised, O(1)
    for each run and age: no sorting, no scan over what is held. No thread but the owner's may call.
    """

    name = "hazard"
    #: What was just used may be the first to go: so much of a long prompt as is not worth its room is not kept at all.
    has_admission = True

    def __init__(self, rebuild: RecomputeCost | None = None, *, ghosts: int = 65_536, ratio: float = 2.0) -> None:
        self._rebuild, self._least, self._ratio = rebuild, ghosts, ratio
        self._table = HazardTable([coarse_of(which) for which in range(CLASSES)])
        self._blocks: dict[K, _Block[K]] = {}
        #: Held and not used yet; a use follows at once as a rule.
        self._fresh: OrderedDict[K, None] = OrderedDict()
        #: Evicted, the longest ago first.
        self._ghosts: OrderedDict[K, None] = OrderedDict()
        self._ages: list[OrderedDict[_Run[K], None]] = [OrderedDict() for _ in range(AGES)]
        self._levels: list[OrderedDict[_Run[K], None]] = [OrderedDict() for _ in range(LEVELS)]
        self._held = 0
        self._now = self._usual = 0.0

    def __len__(self) -> int:
        return self._held

    @property
    def ghosts(self) -> int:
        """How many evicted blocks it remembers."""
        return len(self._ghosts)

    @property
    def _remembered(self) -> float:
        return self._least + min(self._ratio * self._held, _MOST_GHOSTS)

    def insert(self, facts: Facts[K], now: float) -> None:
        block = self._blocks.get(facts.key)
        if block is not None and block.held:
            block.facts = facts
            return
        if block is None:
            block = self._blocks[facts.key] = _Block(facts)
        else:
            block.facts, block.held = facts, True
            del self._ghosts[facts.key]
        self._held += 1
        self._fresh[facts.key] = None
        if facts.parent is not None:
            self._blocks[facts.parent].children += 1

    def access(self, path: Sequence[K], now: float) -> None:
        """See `Policy.access`; blocks before the path's first are needed to reach it, so here they count as used."""
        if not path:
            return
        self._now = max(self._now, now)
        self._table.tick()
        self._grow_old()
        whole = [*self._above(path[0]), *path]
        use = self._use(whole)
        run: _Run[K] | None = None
        before = 0
        self._take(whole)
        for key in whole:
            block = self._blocks[key]
            block.hits += 1
            tokens = block.facts.tokens
            hits, short, price = _step(block.hits, _HITS), tokens < before, self._price(block.facts)
            before = tokens
            if run is None or (run.hits, run.short, run.price) != (hits, short, price):
                run = _Run(use, hits, short, price, self._now)
                use.runs.append(run)
            block.run = run
            run.keys.append(key)
        for run in reversed(use.runs):
            run.high = run.end = len(run.keys)
            self._classify(run)
            self._ages[0][run] = None
            self._file(run)

    def on_pause(self, tip: K, label: int, now: float) -> None:
        block = self._blocks.get(tip)
        if block is None or block.run is None or block.run.use.tip != tip:
            return
        use = block.run.use
        use.label = label
        for run in reversed(use.runs):
            if run.low < run.end:
                self._classify(run)
                if run.level >= 0:
                    self._file(run)

    def remove(self, key: K, now: float) -> None:
        block = self._blocks.get(key)
        if block is None or not block.held:
            raise KeyError(key)
        self._held -= 1
        block.held = False
        run = block.run
        if key in self._fresh:
            del self._fresh[key]
        elif run is not None:
            run.high -= 1
        if run is None:
            del self._blocks[key]
        else:
            self._ghosts[key] = None
            if run.high == run.low:
                self._unfile(run)
        parent = block.facts.parent
        if parent is not None:
            above = self._blocks[parent]
            above.children -= 1
            if not above.children and above.run is not None and above.run.level < 0 and parent not in self._fresh:
                self._file(above.run, first=True)
        self._settle()
        while len(self._ghosts) > self._remembered:
            self._forget(next(iter(self._ghosts)))

    def order(self) -> Iterator[K]:
        """By level; a run whose last block has children waits for them and then goes at once."""
        lost: dict[K, int] = {}
        waiting: dict[_Run[K], int] = {}
        for queue in self._levels:
            for run in queue:
                yield from self._walk(run, run.high - 1, lost, waiting)
        for key in reversed(self._fresh):
            yield key
            yield from self._released(key, lost, waiting)

    def dump(self) -> bytes:
        """See `HazardTable.dump`; blocks and ghosts are not in it."""
        return self._table.dump()

    def load(self, raw: bytes) -> bool:
        """See `HazardTable.load`."""
        return self._table.load(raw)

    def check(self) -> None:
        """Raises AssertionError where counts, runs and queues disagree. O(blocks)."""
        self._table.check()
        held = {key for key, block in self._blocks.items() if block.held}
        assert self._held == len(held), "held blocks are counted wrongly"
        assert self._ghosts.keys() == self._blocks.keys() - held, "ghosts are others than they should be"
        assert len(self._ghosts) <= self._remembered + 1, "too many ghosts"
        children = dict.fromkeys(self._blocks, 0)
        for key in held:
            parent = self._blocks[key].facts.parent
            if parent is not None:
                assert parent in held, f"the parent of {key!r} is not held"
                children[parent] += 1
        for key, block in self._blocks.items():
            assert block.children == children[key], f"children of {key!r} are counted wrongly"
            assert (block.run is None) <= (key in self._fresh), f"{key!r} is in no run"
        for age, queue in enumerate(self._ages):
            for run in queue:
                assert run.age == age, "a run is in another age's queue"
                assert run.low < run.end, "an empty run is kept"
                assert (run in self._levels[run.level]) if run.level >= 0 else True, "a run is in another level's queue"
        assert sum(map(len, self._levels)) == sum(run.level >= 0 for queue in self._ages for run in queue)

    def _above(self, key: K) -> list[K]:
        """The blocks before one, root first."""
        above: list[K] = []
        parent = self._blocks[key].facts.parent
        while parent is not None:
            above.append(parent)
            parent = self._blocks[parent].facts.parent
        return above[::-1]

    def _use(self, path: Sequence[K]) -> _Use[K]:
        """This use: a further turn if more than the first block of the path is known, and what is new in it."""
        known, new = 0, 0
        for key in path:
            block = self._blocks[key]
            if block.run is None:
                new += block.facts.tokens
            elif not new:
                known += 1
        turn = 1
        if known > 1:
            run = self._blocks[path[known - 1]].run
            turn = run.use.turn + 1 if run is not None else 1
        return _Use(path[-1], len(path), min(turn, _TURNS[-1]), new)

    def _price(self, facts: Facts[K]) -> int:
        """Levels to add for the seconds that a byte of this block saves, against those of the first one seen."""
        if self._rebuild is None:
            return 0
        seconds = self._rebuild(facts.start, facts.tokens) / max(facts.nbytes, 1)
        if not seconds > 0:
            return -LEVELS
        if not self._usual:
            self._usual = seconds
        return level_of(seconds / self._usual) - level_of(1.0)

    def set_recompute_cost(self, per_token: float, per_pair: float) -> None:
        """What computing takes on this device, as is known from now on, if values are weighed by it."""
        if self._rebuild is not None:
            self._rebuild, self._usual = prefill_line(per_token, per_pair), 0.0

    def _grow_old(self) -> None:
        """Move runs on whose age has ended: they outlived it."""
        for age, end in enumerate(EDGES):
            queue = self._ages[age]
            while queue:
                run = next(iter(queue))
                if self._now - run.time < end:
                    break
                del queue[run]
                self._table.count(run.which, age, (run.end - run.low) / run.use.blocks, False)
                run.age = age + 1
                self._ages[age + 1][run] = None
                if run.level >= 0:
                    self._file(run)

    def _take(self, path: Sequence[K]) -> None:
        """A use takes blocks from the front of the runs that they were in."""
        taken: dict[_Run[K], int] = {}
        for key in path:
            self._fresh.pop(key, None)
            run = self._blocks[key].run
            if run is not None:
                taken[run] = taken.get(run, 0) + 1
        for run, blocks in taken.items():
            self._table.count(run.which, run.age, blocks / run.use.blocks, True)
            run.low += blocks
            run.high = max(run.high, run.low)
            if run.low == run.high:
                self._unfile(run)
            if run.low == run.end:
                del self._ages[run.age][run]
            elif 2 * run.low > len(run.keys):
                del run.keys[: run.low]
                run.high, run.end, run.low = run.high - run.low, run.end - run.low, 0

    def _classify(self, run: _Run[K]) -> None:
        use = run.use
        hits = (1, *_HITS)[run.hits]
        run.which = class_of(use.turn, hits, use.new, use.label, run.short)

    def _file(self, run: _Run[K], *, first: bool = False) -> None:
        """Put a run at the end (or the head) of the queue of its level as of now."""
        self._unfile(run)
        if run.low == run.high:
            return
        run.level = min(max(self._table.level(run.which, run.age) + run.price, 0), LEVELS - 1)
        self._levels[run.level][run] = None
        if first:
            self._levels[run.level].move_to_end(run, last=False)

    def _unfile(self, run: _Run[K]) -> None:
        if run.level >= 0:
            del self._levels[run.level][run]
            run.level = -1

    def _settle(self) -> None:
        """Park runs at the head of the lowest level whose last block has children: they come back with the last."""
        for queue in self._levels:
            while queue:
                run = next(iter(queue))
                if not self._blocks[run.keys[run.high - 1]].children:
                    return
                self._unfile(run)

    def _forget(self, key: K) -> None:
        """Forget the oldest ghost, which is the last of its run: eviction takes runs from the back."""
        run = self._blocks.pop(key).run
        del self._ghosts[key]
        if run is None:
            return
        run.end -= 1
        run.keys.pop()
        if run.low == run.end:
            del self._ages[run.age][run]

    def _walk(self, run: _Run[K], at: int, lost: dict[K, int], waiting: dict[_Run[K], int]) -> Iterator[K]:
        """The blocks of a run from its back, and of what then is free above it; or note where it waits."""
        while True:
            while at >= run.low:
                key = run.keys[at]
                if self._blocks[key].children > lost.get(key, 0):
                    waiting[run] = at
                    return
                yield key
                at -= 1
                if at >= run.low:
                    lost[run.keys[at]] = lost.get(run.keys[at], 0) + 1
            above = self._free(run.keys[run.low], lost, waiting)
            if above is None:
                return
            run, at = above

    def _free(self, key: K, lost: dict[K, int], waiting: dict[_Run[K], int]) -> tuple[_Run[K], int] | None:
        """Where to go on above a block that went: in the parent's run, if that waited for this only."""
        parent = self._blocks[key].facts.parent
        if parent is None:
            return None
        lost[parent] = lost.get(parent, 0) + 1
        above = self._blocks[parent]
        run = above.run
        if run is None or parent in self._fresh or above.children > lost[parent]:
            return None
        if run.level < 0:
            waiting.setdefault(run, run.high - 1)
        at = waiting.get(run)
        if at is None or run.keys[at] != parent:
            return None
        del waiting[run]
        return run, at

    def _released(self, key: K, lost: dict[K, int], waiting: dict[_Run[K], int]) -> Iterator[K]:
        above = self._free(key, lost, waiting)
        if above is not None:
            yield from self._walk(*above, lost, waiting)

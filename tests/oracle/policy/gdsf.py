"""What is cheap to compute again goes sooner: recency against seconds of prefill per byte, balanced by experiment."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ctxreuse.store.policy.base import Facts, K, Policy, RecomputeCost, prefill_line
from ctxreuse.store.policy.ghosts import GhostScores
from ctxreuse.store.policy.shadow import Shadow
from oracle.policy.leaves import Leaves

__all__ = ["GDSF", "MOST_CLASSES", "efficiency_class"]

#: Classes of efficiency, four to each doubling; the first and the last take what lies beyond.
MOST_CLASSES = 64
_STEPS, _MIDDLE = 4, 32


def efficiency_class(seconds: float, nbytes: int) -> int:
    """The class, 0 to ``MOST_CLASSES - 1``, of a block that costs ``seconds`` to compute again; 32: 1 s for 1 MiB."""
    ratio = seconds * (1 << 20) / max(nbytes, 1)
    if not ratio > 0:
        return 0
    return min(max(_MIDDLE + math.floor(_STEPS * math.log2(ratio)), 0), MOST_CLASSES - 1)


class _Held(NamedTuple):
    level: int
    nbytes: int
    tokens: int


class GDSF(Policy[K]):
    """The published utility of FLOP-aware eviction (Marconi, MLSys 2025), from its formulas:

        score = norm(1 / age) + alpha * norm(seconds of prefill saved by the block / its bytes)

    where ``norm`` stretches the values of the present candidates over 0 to 1, and the lowest score goes first. Seconds
    are those of this device (``rebuild``) instead of FLOPs, age is counted in uses of the cache, and efficiency in
    classes of a quarter of a doubling, of which only the oldest leaf of each can have the lowest score. So a step costs
    O(classes), where the formula as published costs O(blocks).

    ``alpha`` None: 0 until the first eviction, and then found by trial over a window of requests, see `GhostScores`.
    """

    #: What goes next depends on what went before: ask for the order anew after each removal.
    evicts_one_at_a_time = True
    name = "gdsf"

    def __init__(self, rebuild: RecomputeCost | None = None, alpha: float | None = None) -> None:
        self._rebuild = rebuild if rebuild is not None else prefill_line()
        self.alpha = alpha if alpha is not None else 0.0
        self._trials: GhostScores[K] | None = None
        if alpha is None:
            self._trials = GhostScores(
                lambda alpha, capacity: Shadow(GDSF(self._rebuild, alpha), capacity), self._rebuild
            )
        self._held: dict[K, _Held] = {}
        self._leaves: Leaves[K] = Leaves()
        self._used: dict[K, int] = {}
        #: By class, the least recently used first.
        self._queues: list[OrderedDict[K, None]] = [OrderedDict() for _ in range(MOST_CLASSES)]
        self._uses = 0

    def __len__(self) -> int:
        return len(self._held)

    @property
    def tuned(self) -> bool:
        """False while trials for ``alpha`` are still to come or running."""
        return self._trials is None

    def insert(self, facts: Facts[K], now: float) -> None:
        key = facts.key
        level = efficiency_class(self._rebuild(facts.start, facts.tokens), facts.nbytes)
        before = self._held.get(key)
        if before is not None:
            self._queues[before.level].pop(key, None)
        else:
            self._leaves.add(key, facts.parent)
        self._held[key] = _Held(level, facts.nbytes, facts.tokens)
        self._used[key] = self._uses
        self._leaves.parked.discard(key)
        self._queues[level][key] = None

    def access(self, path: Sequence[K], now: float) -> None:
        self._uses += 1
        for key in reversed(path):
            self._used[key] = self._uses
            queue = self._queues[self._held[key].level]
            self._leaves.parked.discard(key)
            queue[key] = None
            queue.move_to_end(key)
        if self._trials is not None:
            held = [self._held[key] for key in path]
            alpha = self._trials.request(path, [one.nbytes for one in held], [one.tokens for one in held], now)
            if alpha is not None:
                self.alpha, self._trials = alpha, None

    def set_recompute_cost(self, per_token: float, per_pair: float) -> None:
        """What computing takes on this device, as is known from now on: see `prefill_line`."""
        self._rebuild = prefill_line(per_token, per_pair)

    def remove(self, key: K, now: float) -> None:
        if self._trials is not None:
            self._trials.start(sum(one.nbytes for one in self._held.values()), len(self._held))
        level = self._held.pop(key).level
        del self._used[key]
        self._queues[level].pop(key, None)
        parent = self._leaves.remove(key)
        if parent is not None:
            queue = self._queues[self._held[parent].level]
            queue[parent] = None
            queue.move_to_end(parent, last=False)

    def order(self) -> Iterator[K]:
        """Exact for its first key; what follows would be next as far as that makes no parent a leaf."""
        yield from self._leaves.and_above(self._in_turn())

    def _in_turn(self) -> Iterator[K]:
        lines: dict[int, Iterator[K]] = {}
        heads: dict[int, K] = {}
        for level, queue in enumerate(self._queues):
            while queue and self._leaves.settle(queue):
                pass
            if queue:
                lines[level] = iter(queue)
                self._advance(level, lines, heads)
        while heads:
            level = self._lowest(heads)
            yield heads[level]
            self._advance(level, lines, heads)

    def _advance(self, level: int, lines: dict[int, Iterator[K]], heads: dict[int, K]) -> None:
        for key in lines[level]:
            if self._leaves.is_leaf(key):
                heads[level] = key
                return
        heads.pop(level, None)

    def _lowest(self, heads: dict[int, K]) -> int:
        """The class whose oldest leaf has the lowest score."""
        recency = {level: 1 / (1 + self._uses - self._used[key]) for level, key in heads.items()}
        low, cheap, dear = min(recency.values()), 2.0 ** (min(heads) / _STEPS), 2.0 ** (max(heads) / _STEPS)
        span, spread = 1.0 - low, dear - cheap

        def score(level: int) -> float:
            fresh = (recency[level] - low) / span if span > 0 else 0.0
            worth = (2.0 ** (level / _STEPS) - cheap) / spread if spread > 0 else 0.0
            return fresh + self.alpha * worth

        return min(sorted(heads), key=score)

"""Several eviction policies, each in a shadow cache, and a real cache that follows the one that serves best."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import TypeAlias

import msgspec

from ctxreuse.store.policy.base import Facts, K, Policy, PolicyStats, StoreContents
from ctxreuse.store.policy.greedy import GreedyRule, LeadingHits
from ctxreuse.store.policy.native import NativeResidentSet, NativeShadow, counts_of
from ctxreuse.store.policy.regret import RegretGuard
from ctxreuse.store.policy.shadow import NumberedShadow

__all__ = ["AdaptivePolicy", "Expert"]

#: A policy in a shadow cache of the real one's capacity.
Expert: TypeAlias = NativeShadow[K] | NumberedShadow

#: The expert that leads before anything has been learnt, where it is among them: whoever leads first on a loop cannot
#: give the lead away without missing all of it once, and hazard serves up to 2 points of it less (bench ``shapes``).
_FIRST = "pauses"
#: Prompts that are remembered until their blocks have been stored.
_RECENT = 16


class _Learnt(msgspec.Struct, frozen=True, rename={"greedy": "swift", "lookups": "asked", "cached": "real"}):
    """What is kept over a restart; the encoded field names are those of version 0.1.0."""

    names: list[str]
    greedy: str
    followed: int
    switches: int
    lookups: int
    cached: int
    hits: list[int]
    scores: list[float]
    logs: list[float]
    inner: list[bytes]


class AdaptivePolicy(Policy[K]):
    """The policy of the expert that leads; blocks that it does not cache go first. Not thread-safe.

    Each prompt is served in each expert's shadow (`on_lookup`). `GreedyRule` changes the followed expert where that
    would have paid. `RegretGuard` follows that rule as long as it serves well, and else an expert; its docstring bounds
    what that can lose. Without calls of `on_lookup`, each access counts as a request.
    """

    name = "adaptive"
    #: Blocks that the leader does not cache go first, also if they have just come in: so the leader may decline them.
    has_admission = True
    wants_lookups = True

    def __init__(
        self,
        experts: Sequence[Expert[K]],
        capacity: int,
        rng: Random,
        residents: NativeResidentSet[K] | None = None,
        worth: Callable[[int, int], float] | None = None,
    ) -> None:
        """Create a policy without blocks.

        Args:
            experts: empty shadows of ``capacity``.
            capacity: bytes of the cache.
            rng: see `RegretGuard`.
            residents: an empty set.
            worth: ``worth(start, tokens)`` of tokens of a context after its first ``start``; default: their number.
        """
        self.experts, self.capacity = tuple(experts), capacity
        self._residents: NativeResidentSet[K] = NativeResidentSet() if residents is None else residents
        self._worth = worth
        self._guard = RegretGuard(len(self.experts), rng)
        self._hits = [0] * len(self.experts)
        self._lookups = self._cached = self._switches = 0
        self._leader = next((i for i, one in enumerate(self.experts) if one.name == _FIRST), 0)
        self._greedy = GreedyRule(len(self.experts), self._leader)
        self._per_byte = self._block = 0.0
        self._has_lookups = False
        #: The last prompt: what of it a shadow does not cache had no room there.
        self._prompt: frozenset[K] = frozenset()
        #: The last prompts, whose blocks may still be queued.
        self._recent: deque[frozenset[K]] = deque(maxlen=_RECENT)
        #: The last prompt if the leader caches all of it, which saves looking up its blocks.
        self._kept: frozenset[K] = frozenset()

    @property
    def leader(self) -> Expert[K]:
        """The expert that the cache follows."""
        return self.experts[self._leader]

    @property
    def stored_name(self) -> str:
        return "duel"  # as version 0.1.0 called it

    @property
    def description(self) -> str:
        return f"{self.name} ({self.leader.name} led)"

    def __len__(self) -> int:
        return len(self._residents)

    def insert(self, facts: Facts[K], now: float) -> None:
        self._residents.insert(facts, facts.key in self._kept or facts.key in self.leader)

    def access(self, path: Sequence[K], now: float) -> None:
        """Count a use of cached blocks, unless its prompt was counted; serve it in shadows that do not cache it."""
        if not path or path[-1] in self._prompt:
            return
        missing = [i for i, expert in enumerate(self.experts) if path[-1] not in expert]
        if self._has_lookups and not missing:
            return
        sizes, tokens = self._residents.sizes(path)
        if not self._has_lookups:
            self._serve(path, sizes, tokens, now)
            return
        self._kept = frozenset()
        for i in missing:
            self._feed(i, path, sizes, tokens, now)

    def on_lookup(self, path: Sequence[K], sizes: Sequence[int], tokens: Sequence[int], now: float) -> None:
        self._has_lookups = True
        self._prompt = frozenset(path)
        self._recent.append(self._prompt)
        if path:
            self._serve(path, sizes, tokens, now)

    def on_partial_use(self, path: Sequence[K], now: float) -> None:
        """Serve the use in all shadows: without it, blocks that are only ever relocated would look idle."""
        if path:
            self._serve(path, *self._residents.sizes(path), now)
            self._kept = frozenset()

    def declines(self, key: K) -> bool:
        """Return True if a leader with admission did not take in a block of a recent prompt.

        Any other leader takes in all that comes; what its shadow has evicted since comes late, not unwanted.
        """
        leader = self.leader
        return leader.has_admission and key not in leader and any(key in prompt for prompt in self._recent)

    def fill(self, facts: Sequence[Facts[K]], uses: Sequence[Sequence[K]], now: float) -> None:
        for one in facts:
            self._residents.insert(one, followed=True)
        for i, expert in enumerate(self.experts):
            evicted = expert.fill(facts, uses, now)
            if i == self._leader:
                self._residents.on_evict(evicted)

    def fill_stored(self, stored: StoreContents, now: float) -> None:
        native = [expert for expert in self.experts if isinstance(expert, NativeShadow)]
        if not stored.unique or len(native) < len(self.experts):
            super().fill_stored(stored, now)
            return
        self._residents.fill_stored(stored)
        for i, expert in enumerate(native):
            evicted = expert.fill_stored(stored, now)
            if i == self._leader:
                self._residents.on_evict(evicted)

    def set_recompute_cost(self, per_token: float, per_pair: float) -> None:
        for expert in self.experts:
            expert.set_recompute_cost(per_token, per_pair)

    def _feed(
        self, i: int, path: Sequence[K], sizes: Sequence[int], tokens: Sequence[int], now: float
    ) -> tuple[int, int]:
        served = self.experts[i].request(path, sizes, tokens, now)
        if i == self._leader:
            self._residents.on_insert(served.inserted)
            self._residents.on_evict(served.evicted)
        return served.blocks, served.tokens

    def _serve(self, path: Sequence[K], sizes: Sequence[int], tokens: Sequence[int], now: float) -> None:
        sizes, tokens = counts_of(sizes, len(path)), counts_of(tokens, len(path))
        total, blocks = sum(tokens), self._residents.match(path)
        cached = sum(tokens[:blocks])
        hits = [self._feed(i, path, sizes, tokens, now) for i in range(len(self.experts))]
        self._lookups, self._cached = self._lookups + total, self._cached + cached
        self._hits = [before + more for before, (_, more) in zip(self._hits, hits)]
        served = [LeadingHits(found, self._value(0, more)) for found, more in hits]
        # The last block of a context is worth the most.
        self._block = self._value(total - tokens[-1], tokens[-1])
        self._per_byte = max(self._per_byte, self._block / max(sizes[-1], 1))
        self._greedy.note(path, served, LeadingHits(blocks, self._value(0, cached)))
        followed, charge = self._greedy.followed, self._reconsider()
        self._guard.note([one.worth for one in served], followed, charge, self._per_byte * self.capacity)
        self._lead(self._guard.followed)
        self._kept = self._prompt if self._has_lookups and path[-1] in self.leader else frozenset()

    def _value(self, start: int, tokens: int) -> float:
        return float(tokens) if self._worth is None else self._worth(start, tokens)

    def _reconsider(self) -> float:
        """Apply the greedy rule; returns the charge for a change: the worth of what only the new leader has."""
        old = self._greedy.followed
        best = self._greedy.choose(self._block, self._per_byte * self.capacity, len(self._residents))
        if best == old:
            return 0.0
        self._greedy.follow(best)
        return self._per_byte * self.experts[best].beyond(self.experts[old])

    def _lead(self, followed: int) -> None:
        leader = self._greedy.followed if followed == RegretGuard.GREEDY else followed
        if leader != self._leader:
            self._residents.follow(self.leader, self.experts[leader])
            self._leader = leader
            self._switches += 1

    def on_pause(self, tip: K, label: int, now: float) -> None:
        for expert in self.experts:
            expert.on_pause(tip, label, now)

    def remove(self, key: K, now: float) -> None:
        self._residents.remove(key)
        self._greedy.on_evict(key)

    def order(self) -> Iterator[K]:
        return self._residents.order(self.leader)

    @property
    def stats(self) -> PolicyStats:
        names = [expert.name for expert in self.experts]
        weights = dict(zip([*names, "greedy"], self._guard.weights))
        hits = dict(zip(names, self._hits))
        return PolicyStats(self.leader.name, self._switches, self._lookups, self._cached, hits, weights)

    def dump(self) -> bytes:
        names = [expert.name for expert in self.experts]
        inner = [expert.dump() for expert in self.experts]
        counts = self._switches, self._lookups, self._cached, self._hits
        guard = self._guard
        learnt = _Learnt(
            names, names[self._greedy.followed], guard.followed, *counts, self._greedy.scores, guard.dump(), inner
        )
        return msgspec.msgpack.encode(learnt)

    def load(self, raw: bytes) -> bool:
        names = [expert.name for expert in self.experts]
        try:
            learnt = msgspec.msgpack.decode(raw, type=_Learnt)
        except msgspec.MsgspecError:
            return False
        before, counts = learnt.names, [learnt.switches, learnt.lookups, learnt.cached, *learnt.hits]
        sound = len(set(before)) == len(before) and set(before) <= set(names)
        sound = sound and learnt.greedy in before and min(counts) >= 0
        sound = sound and len(learnt.hits) == len(learnt.scores) == len(learnt.inner) == len(before)
        if not sound or not all(math.isfinite(score) and score >= 0 for score in learnt.scores):
            return False
        places = [names.index(name) for name in before]
        if not self._guard.restore(learnt.logs, learnt.followed, places):
            return False
        # An expert that has come in since goes on from the score of the one that was followed, and shows what it is.
        scores = [learnt.scores[before.index(learnt.greedy)]] * len(names)
        for i, hits, score, inner in zip(places, learnt.hits, learnt.scores, learnt.inner):
            self._hits[i], scores[i] = hits, score
            self.experts[i].load(inner)
        self._lookups, self._cached = learnt.lookups, learnt.cached
        self._greedy.scores = scores
        self._greedy.follow(names.index(learnt.greedy))
        self._lead(self._guard.followed)
        self._switches = learnt.switches
        return True

    def check(self) -> None:
        for expert in self.experts:
            expert.check()
        self._residents.check(self.leader)

"""Several policies, each in a cache without contents, and the real cache that follows whichever serves better."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from random import Random
from typing import Any, Generic

import msgspec

from ctxreuse.store.policy.base import Facts, K
from ctxreuse.store.policy.guard import Guard
from ctxreuse.store.policy.native import NativeRoster, counts_of
from ctxreuse.store.policy.roster import Contender, Roster

__all__ = ["Duel", "Standing"]

#: Scores forget 1/800 of themselves a request: half after 554 of them.
_DECAY = 1 - 1 / 800
#: The swift rule changes its leader for one who is ahead by this share, so many blocks and this share of a full cache,
#: for a change costs something of that. Both numbers are from the first half of a chat service's trace.
_AHEAD, _BLOCKS, _ROOM = 1.02, 5.0, 0.01
#: Prompts that are remembered until their blocks have come.
_RECENT = 16


class Standing(msgspec.Struct, frozen=True):
    """How a duel stands. Counts since the store was made: ``asked`` tokens of all prompts, ``hits`` tokens by
    contender, ``real`` tokens that the cache itself held; ``weights`` of the guard, in which ``swift`` is the free
    choice."""

    leader: str
    switches: int
    asked: int
    real: int
    hits: Mapping[str, int]
    weights: Mapping[str, float]


class _Learnt(msgspec.Struct, frozen=True):
    names: list[str]
    swift: str
    followed: int
    switches: int
    asked: int
    real: int
    hits: list[int]
    scores: list[float]
    logs: list[float]
    inner: list[bytes]


class Duel(Generic[K]):
    """The policy of the contender that leads; what it does not hold goes first. Not thread-safe.

    Each prompt is served in each contender's shadow (`asked`), which makes it as good as its contenders are, whatever
    the traffic. The swift rule follows who hit the most worth of late (counts decay by 1/800 a request) and changes its
    mind when another is ahead by 2%, five blocks and 1% of a full cache. The `Guard` follows that rule as long as it
    serves well, and else a contender; it proves what the cache can lose by that.

    Where nobody calls `asked`, each access counts as a request.
    """

    name = "duel"
    #: What the leader does not hold goes first, also if it has just come in: so the leader may decline it.
    choosy = True

    def __init__(
        self,
        contenders: Sequence[Contender[K]],
        capacity: int,
        rng: Random,
        roster: Roster[K] | NativeRoster[K] | None = None,
        worth: Callable[[int, int], float] | None = None,
    ) -> None:
        """``contenders`` are fresh shadows of ``capacity``. ``worth(start, tokens)`` is that of tokens of a context
        after its first ``start`` (default: their number). ``roster``: that of the contenders' kind."""
        self.contenders, self.capacity = tuple(contenders), capacity
        self._roster: Any = roster if roster is not None else Roster()
        self._worth = worth
        self._guard = Guard(len(self.contenders), rng)
        self._scores = [0.0] * len(self.contenders)
        self._hits = [0] * len(self.contenders)
        self._asked = self._real = self._switches = 0
        self._swift = self._leader = 0
        self._per_byte = self._block = 0.0
        self._told = False
        #: The last prompt: what of it a shadow does not hold had no room there.
        self._prompt: frozenset[K] = frozenset()
        #: The same of the last prompts, whose blocks may still be on their way in.
        self._recent: deque[frozenset[K]] = deque(maxlen=_RECENT)
        #: The same if the leader holds all of it, else nothing: it need not be asked block by block.
        self._kept: frozenset[K] = frozenset()

    @property
    def leader(self) -> Contender[K]:
        """Whom the cache follows."""
        return self.contenders[self._leader]

    def __len__(self) -> int:
        return len(self._roster)

    def insert(self, facts: Facts[K], now: float) -> None:
        self._roster.hold(facts, facts.key in self._kept or facts.key in self.leader)

    def access(self, path: Sequence[K], now: float) -> None:
        """A use of held blocks. A prompt that was asked is counted; only what came after it is new to the shadows."""
        if not path or path[-1] in self._prompt:
            return
        lacking = [i for i, contender in enumerate(self.contenders) if path[-1] not in contender]
        if self._told and not lacking:
            return
        sizes, tokens = self._roster.sizes(path)
        if not self._told:
            self._serve(path, sizes, tokens, now)
            return
        self._kept = frozenset()
        for i in lacking:
            self._feed(i, path, sizes, tokens, now)

    def asked(self, path: Sequence[K], sizes: Sequence[int], tokens: Sequence[int], now: float) -> None:
        """Somebody needs the context ``path``, held or not; called once a prompt, before anything of it is used."""
        self._told = True
        self._prompt = frozenset(path)
        self._recent.append(self._prompt)
        if path:
            self._serve(path, sizes, tokens, now)

    def needed(self, path: Sequence[K], now: float) -> None:
        """A use of held blocks that belongs to no prompt: without it, what is only ever moved would look idle."""
        if path:
            sizes, tokens = self._roster.sizes(path)
            self._serve(path, sizes, tokens, now)
            self._kept = frozenset()

    def declines(self, key: K) -> bool:
        """True if the leader is choosy and did not take in a block that a late prompt needed: nor should a full cache.

        Any other leader takes in all that comes, and what its shadow has let go of since comes late, not unwanted.
        """
        choosy = getattr(self.leader, "choosy", False)
        return choosy and key not in self.leader and any(key in prompt for prompt in self._recent)

    def fill(self, facts: Sequence[Facts[K]], uses: Sequence[Sequence[K]], now: float) -> None:
        """The cache holds this already, parents first, used in the order of ``uses``: so do all shadows from now on."""
        for one in facts:
            self._roster.hold(one, followed=True)
        for i, contender in enumerate(self.contenders):
            gone = contender.fill(facts, uses, now)
            if i == self._leader:
                self._roster.left(gone)

    def price(self, per_token: float, per_pair: float) -> None:
        """See `Shadow.price`."""
        for contender in self.contenders:
            contender.price(per_token, per_pair)

    def _feed(self, i: int, path: Sequence[K], sizes: Sequence[int], tokens: Sequence[int], now: float) -> int:
        served = self.contenders[i].request(path, sizes, tokens, now)
        if i == self._leader:
            self._roster.came(served.inserted)
            self._roster.left(served.evicted)
        return served.tokens

    def _serve(self, path: Sequence[K], sizes: Sequence[int], tokens: Sequence[int], now: float) -> None:
        sizes, tokens = counts_of(sizes, len(path)), counts_of(tokens, len(path))
        total = sum(tokens)
        real = sum(tokens[: self._roster.match(path)])
        hits = [self._feed(i, path, sizes, tokens, now) for i in range(len(self.contenders))]
        self._asked, self._real = self._asked + total, self._real + real
        self._hits = [before + more for before, more in zip(self._hits, hits)]
        worth = [self._value(0, found) for found in hits]
        self._measure(total, sizes, tokens)
        self._scores = [_DECAY * score + more for score, more in zip(self._scores, worth)]
        followed, charge = self._swift, self._reconsider()
        self._guard.note(worth, followed, charge, self._per_byte * self.capacity)
        chosen = self._guard.followed
        self._lead(self._swift if chosen == Guard.SWIFT else chosen)
        self._kept = self._prompt if self._told and path[-1] in self.leader else frozenset()

    def _value(self, start: int, tokens: int) -> float:
        return float(tokens) if self._worth is None else self._worth(start, tokens)

    def _measure(self, total: int, sizes: Sequence[int], tokens: Sequence[int]) -> None:
        """The dearest block of a context is its last."""
        last = self._value(total - tokens[-1], tokens[-1])
        self._per_byte = max(self._per_byte, last / max(sizes[-1], 1))
        self._block = last

    def _reconsider(self) -> float:
        """The swift rule; returns the charge for a change of its leader: what the new one has and the old one lacks."""
        best = max(range(len(self._scores)), key=self._scores.__getitem__)
        margin = _BLOCKS * self._block + _ROOM * self._per_byte * self.capacity
        if self._scores[best] <= _AHEAD * self._scores[self._swift] + margin:
            return 0.0
        old, self._swift = self.contenders[self._swift], best
        new = self.contenders[best]
        return self._per_byte * new.beyond(old)

    def _lead(self, leader: int) -> None:
        if leader == self._leader:
            return
        self._roster.follow(self.leader, self.contenders[leader])
        self._leader = leader
        self._switches += 1

    def mark(self, tip: K, label: int, now: float) -> None:
        for contender in self.contenders:
            contender.mark(tip, label, now)

    def remove(self, key: K, now: float) -> None:
        self._roster.drop(key)

    def order(self) -> Iterator[K]:
        order: Iterator[K] = self._roster.order(self.leader)
        return order

    @property
    def standing(self) -> Standing:
        """Who leads, and by how much."""
        names = [contender.name for contender in self.contenders]
        weights = dict(zip([*names, "swift"], self._guard.weights))
        hits = dict(zip(names, self._hits))
        return Standing(self.leader.name, self._switches, self._asked, self._real, hits, weights)

    def dump(self) -> bytes:
        names = [contender.name for contender in self.contenders]
        inner = [contender.dump() for contender in self.contenders]
        counts = self._switches, self._asked, self._real, self._hits
        learnt = _Learnt(
            names, names[self._swift], self._guard.followed, *counts, self._scores, self._guard.dump(), inner
        )
        return msgspec.msgpack.encode(learnt)

    def load(self, raw: bytes) -> bool:
        names = [contender.name for contender in self.contenders]
        try:
            learnt = msgspec.msgpack.decode(raw, type=_Learnt)
        except msgspec.MsgspecError:
            return False
        n = len(names)
        counts = [learnt.switches, learnt.asked, learnt.real, *learnt.hits]
        sound = learnt.names == names and learnt.swift in names and min(counts) >= 0
        sound = sound and len(learnt.hits) == len(learnt.scores) == len(learnt.inner) == n
        if not sound or not all(math.isfinite(score) and score >= 0 for score in learnt.scores):
            return False
        if not self._guard.restore(learnt.logs, learnt.followed):
            return False
        for contender, inner in zip(self.contenders, learnt.inner):
            contender.load(inner)
        self._switches, self._asked, self._real = learnt.switches, learnt.asked, learnt.real
        self._hits, self._scores = list(learnt.hits), list(learnt.scores)
        self._swift = names.index(learnt.swift)
        self._lead(self._swift if learnt.followed == Guard.SWIFT else learnt.followed)
        self._switches = learnt.switches
        return True

    def check(self) -> None:
        """Raises AssertionError where the shadows or the strays are wrong. O(blocks)."""
        for contender in self.contenders:
            contender.check()
        self._roster.check(self.leader)

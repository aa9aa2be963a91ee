"""Whom the adaptive policy follows: the greedy rule, which changes its choice where that would have paid."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from ctxreuse.kernels.dispatch import native as _native
from ctxreuse.store.policy.shadow import ids_of

__all__ = ["GreedyRule", "LeadingHits"]

#: Scores decay by 1/1600 a request: half after 1,109 of them.
_DECAY = 1 - 1 / 1600
#: A change is due when it would have gained this share of the followed expert's score, the worth of so many blocks and
#: this share of a full cache. A loss counts up to that share of a full cache: further back is forgotten.
_AHEAD, _BLOCKS, _ROOM, _LOSS = 0.02, 5.0, 0.03, 0.5
#: Blocks whose last request or eviction is remembered, and how many full caches they span: of larger caches a sample.
_REMEMBERED, _SPAN = 1 << 14, 4
#: Evictions that are noted at once.
_EVICTED = 256


class LeadingHits(NamedTuple):
    """What one request found somewhere: leading blocks, and their worth."""

    blocks: int
    worth: float


class GreedyRule:
    """Follows an expert until a change to another would have paid for itself. Not thread-safe.

    A change loses what only the new leader caches: all of that is missing once. Hits alone do not show it: on a loop
    that is longer than the cache, two experts that serve as much as each other take turns, and who follows the one that
    was ahead just now is always where nothing is left to hit. So for each expert this counts what following it since
    some moment would have gained: its hits less the followed expert's, and less those of blocks that the real cache
    has not cached or been asked for since that moment, as these would have been misses. That moment is the last
    change, or when the expert had lost as much as counts.
    """

    def __init__(self, experts: int, followed: int) -> None:
        self.followed = followed
        #: The worth of recent hits.
        self.scores = [0.0] * experts
        self._gains, self._since = [0.0] * experts, [0] * experts
        self._now = 0
        #: When blocks of the sample were requested or evicted last, the longest ago first.
        self._last: OrderedDict[Any, int] = OrderedDict()
        self._bits = 0
        #: Evicted since the last request, not noted yet.
        self._evicted: list[Any] = []

    def follow(self, expert: int) -> None:
        """Follow an expert from now on."""
        self.followed = expert
        self._gains = [0.0] * len(self._gains)
        self._since = [self._now] * len(self._gains)

    def note(self, path: Sequence[Any], served: Sequence[LeadingHits], real: LeadingHits) -> None:
        """Count a request for ``path``: what each expert and the real cache served of it."""
        lead = served[self.followed].worth
        self.scores = [_DECAY * score + one.worth for score, one in zip(self.scores, served)]
        self._note_evicted()
        last = self._requested(path, real.blocks, max(one.blocks for one in served))
        for i, one in enumerate(served):
            self._gains[i] += one.worth - lead
            if one.blocks > real.blocks and i != self.followed:
                first = sum(place < one.blocks and when < self._since[i] for place, when in last)
                each = (one.worth - real.worth) / (one.blocks - real.blocks)
                self._gains[i] -= each * (first << self._bits)
        self._now += 1

    def on_evict(self, key: Any) -> None:
        """Note that the real cache had a block until now."""
        self._evicted.append(key)
        if len(self._evicted) >= _EVICTED:
            self._note_evicted()

    def choose(self, block: float, room: float, blocks: int) -> int:
        """Return the expert to follow: the followed one, where no change is due.

        ``block``, ``room``: the worth of a block and of a full cache; ``blocks``: how many it has now.
        """
        while blocks * _SPAN >> self._bits > _REMEMBERED:
            self._bits += 1
            self._last = OrderedDict((key, self._last[key]) for _, key in self._sampled(list(self._last)))
        for i, gain in enumerate(self._gains):
            if gain <= -_LOSS * room:
                self._gains[i], self._since[i] = -_LOSS * room, self._now
        best = max(range(len(self._gains)), key=self._gains.__getitem__)
        margin = _AHEAD * self.scores[self.followed] + _BLOCKS * block + _ROOM * room
        return best if self._gains[best] > margin else self.followed

    def _sampled(self, keys: Sequence[Any]) -> Iterable[tuple[int, Any]]:
        if not self._bits:
            return enumerate(keys)
        return ((place, keys[place]) for place in _native.ids_sampled(*ids_of(keys), self._bits))

    def _requested(self, path: Sequence[Any], start: int, stop: int) -> list[tuple[int, int]]:
        """Note a request; returns the sampled blocks from ``start`` to ``stop``, and when they were requested."""
        found = []
        for place, key in self._sampled(path):
            if start <= place < stop:
                found.append((place, self._last.get(key, -1)))
            self._note(key)
        return found

    def _note_evicted(self) -> None:
        if self._evicted:
            for _, key in self._sampled(self._evicted):
                self._note(key)
            self._evicted = []

    def _note(self, key: Any) -> None:
        self._last[key] = self._now
        self._last.move_to_end(key)
        if len(self._last) > _REMEMBERED:
            self._last.popitem(last=False)

"""The order of a prompt's parts: by stability, and within a kind by what is cached and by what others will share."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Sequence
from itertools import groupby

import msgspec

from ctxreuse.planner.cached import CachedPrefixes, PlannedPrefix
from ctxreuse.planner.companions import Companions
from ctxreuse.planner.parts import KINDS, MOVABLE, Part
from ctxreuse.planner.permutation import Permutation

__all__ = ["Plan", "Planner"]

#: Prefixes that are followed at a time, and extended in all: this bounds the time of one plan.
_BEAM, _MOST_EXTENDED = 2, 400

_RANK = {kind: rank for rank, kind in enumerate(KINDS)}


class Plan(msgspec.Struct, frozen=True):
    """``permutation``: of the parts. ``cached`` tokens of KV are there for a prompt in this order, ``cached_as_given``
    for one in the order given."""

    permutation: Permutation
    cached: int = 0
    cached_as_given: int = 0

    @property
    def moves(self) -> bool:
        """True if the order is not the one given."""
        return self.permutation.moves


class Planner:
    """Orders the parts of one tenant's prompts, and learns which are requested together. Any thread may call.

    Bounded: some 2,000 parts are remembered, by a digest.
    """

    def __init__(self) -> None:
        self._companions, self._lock = Companions(), threading.Lock()

    def plan(self, parts: Sequence[Part], cached: CachedPrefixes) -> Plan:
        """Order parts: the most stable kinds first, and documents and memories so that most KV is reused.

        Those of other kinds keep their order. In a kind whose parts may move, a beam search over the context tree finds
        the beginning that has most cached tokens; what is not cached follows by how surely it comes with the others,
        so that later requests find more. Equal beginnings: the one given is kept.
        """
        given, raws = PlannedPrefix(), [part.ids.tobytes() for part in parts]
        for raw in raws:
            given = cached.extend(given, raw)
        order: list[int] = []
        prefix = PlannedPrefix()
        ranked = sorted(range(len(parts)), key=lambda i: _RANK[parts[i].kind])
        for kind, members in groupby(ranked, lambda i: parts[i].kind):
            group = list(members)
            if kind in MOVABLE and len(group) > 1:
                group = self._arranged(raws, group, prefix, cached)
            for index in group:
                prefix = cached.extend(prefix, raws[index])
            order += group
        return Plan(Permutation(tuple(order)), prefix.reach, given.reach)

    def _arranged(
        self, raws: Sequence[bytes], group: list[int], start: PlannedPrefix, cached: CachedPrefixes
    ) -> list[int]:
        names = [hashlib.sha256(raws[index]).digest()[:16] for index in group]
        with self._lock:
            scores = dict(zip(group, self._companions.scores(names)))
            self._companions.note(list(dict.fromkeys(names)))
        first = _follow(raws, group, start, cached, scores)
        placed = set(first)
        return first + sorted((index for index in group if index not in placed), key=lambda index: -scores[index])


def _follow(
    raws: Sequence[bytes], group: list[int], start: PlannedPrefix, cached: CachedPrefixes, scores: dict[int, float]
) -> list[int]:
    """Return the parts that begin the order with most cached tokens; none if no order has any."""
    best: tuple[int, list[int]] = (start.reach, [])
    beam = [(start, list[int]())]
    extended = 0
    # As given: it is kept if nothing is better.
    prefix, path = start, list[int]()
    for index in group:
        prefix = cached.extend(prefix, raws[index])
        path.append(index)
        if prefix.reach > best[0]:
            best = prefix.reach, path.copy()
        if not prefix.alive:
            break
    while beam and extended < _MOST_EXTENDED:
        longer: list[tuple[PlannedPrefix, list[int]]] = []
        for prefix, path in beam:
            for index in group:
                if index not in path:
                    extended += 1
                    more = cached.extend(prefix, raws[index])
                    if more.reach > best[0]:
                        best = more.reach, [*path, index]
                    if more.alive:
                        longer.append((more, [*path, index]))
        longer.sort(key=lambda one: (-one[0].reach, -scores[one[1][-1]]))
        beam = longer[:_BEAM]
    return best[1]

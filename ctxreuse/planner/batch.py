"""The order of many requests and of the documents in each, so that neighbours share as long a beginning as can be.

Each request is a leaf of a tree whose nodes hold what all leaves below them have in common. What a request does not
compute is the path that it shares with others, so joining two nodes saves as many tokens as their contents share: the
two that share most are joined, again and again, until none share anything. Contents only shrink, so the best partner of
a node has to be looked for again only when that partner has changed.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from ctxreuse.planner.permutation import Permutation

__all__ = ["MOST_TOGETHER", "BatchPlan", "plan_batch"]

#: Requests that are compared with each other, in a table of 64 MiB; of more, as many at a time.
MOST_TOGETHER = 4096

_Name = TypeVar("_Name", bound=Hashable)
_Items: TypeAlias = npt.NDArray[np.intp]
#: Of a joined node, and of one that no request may be joined with.
_NEVER = np.float32(-np.inf)


class BatchPlan(msgspec.Struct, frozen=True):
    """``schedule``: of the requests; ``documents``: for each request, as given, the order of its documents.

    ``shared``: tokens that requests find at their beginnings as others before them have left them, where nothing is
    evicted meanwhile; repeats in a request may add some.
    """

    schedule: Permutation
    documents: tuple[Permutation, ...]
    shared: float


def plan_batch(requests: Sequence[Sequence[_Name]], tokens: Mapping[_Name, float]) -> BatchPlan:
    """Return an order for requests and for the documents of each, never one that shares less than the order given.

    2,000 requests of 20 documents take about .3 s (``python -m benchmarks planner``).

    Args:
        requests: names of the documents of each; equal names are equal documents. One that comes twice in a request
            counts once, its repeats stand at the end.
        tokens: of each document.
    """
    as_given = _shared(requests, tokens)
    schedule, orders, shared = list[int](), dict[int, Permutation](), 0.0
    for start in range(0, len(requests), MOST_TOGETHER):
        part = requests[start : start + MOST_TOGETHER]
        forest = _Forest(part, tokens)
        forest.join()
        for number, names in forest.leaves():
            schedule.append(start + number)
            orders[start + number] = _permutation(part[number], names)
        shared += forest.shared
    if shared <= as_given:
        kept = tuple(Permutation.identity(len(request)) for request in requests)
        return BatchPlan(Permutation.identity(len(requests)), kept, as_given)
    return BatchPlan(Permutation(tuple(schedule)), tuple(orders[n] for n in range(len(requests))), shared)


def _shared(requests: Sequence[Sequence[_Name]], tokens: Mapping[_Name, float]) -> float:
    """Tokens that requests find at their beginnings, in the order given."""
    root: dict[_Name, Any] = {}
    found = 0.0
    for request in requests:
        node = root
        for name in request:
            below = node.get(name)
            if below is None:
                below = node[name] = {}
            else:
                found += tokens[name]
            node = below
    return found


def _permutation(given: Sequence[_Name], names: Sequence[_Name]) -> Permutation:
    """The order of ``given`` in which ``names`` come first, repeats last."""
    first = {name: index for index, name in reversed(list(enumerate(given)))}
    order = [first[name] for name in names]
    placed = set(order)
    return Permutation((*order, *(index for index in range(len(given)) if index not in placed)))


class _Node:
    """Items that all requests below it have; ``request``: its number, for a leaf, else -1."""

    __slots__ = ("children", "items", "request")

    def __init__(self, items: _Items, request: int = -1, children: tuple[_Node, ...] = ()) -> None:
        self.items, self.request, self.children = items, request, children


class _Forest:
    """Trees of requests, one for each column of a table of items by trees."""

    def __init__(self, requests: Sequence[Sequence[Any]], tokens: Mapping[Any, float]) -> None:
        # As they come first: items of a node stand in that order, so the order given stays where nothing is shared.
        self._names = list(dict.fromkeys(name for request in requests for name in request))
        index = {name: number for number, name in enumerate(self._names)}
        self._weights = np.array([tokens[name] for name in self._names], np.float32)
        own = [np.array(list(dict.fromkeys(index[name] for name in request)), np.intp) for request in requests]
        self._has = np.zeros((len(self._names), len(requests)), np.bool_)
        for column, items in enumerate(own):
            self._has[items, column] = True
        self._trees: list[_Node | None] = [_Node(items, column) for column, items in enumerate(own)]
        self._open = np.zeros(len(requests), np.float32)
        self.shared = 0.0

    def _alike(self) -> npt.NDArray[np.float32]:
        """Tokens that each two requests share."""
        found = np.zeros((len(self._trees),) * 2, np.float32)
        for weight, row in zip(self._weights, self._has):
            columns = row.nonzero()[0]
            if len(columns) > 1:
                found[np.ix_(columns, columns)] += weight
        np.fill_diagonal(found, _NEVER)
        return found

    def join(self) -> None:
        """Join the two trees that share most until none share anything."""
        alike = self._alike()
        partners = alike.argmax(1).tolist() if len(alike) else []
        gains = alike[np.arange(len(alike)), partners].tolist() if partners else []
        changes, seen = [0] * len(gains), [0] * len(gains)
        # A gain that is no longer right is too large: it is corrected when its turn comes.
        queue = [(-gain, column) for column, gain in enumerate(gains) if gain > 0]
        heapq.heapify(queue)
        while queue:
            gain, column = heapq.heappop(queue)
            if self._trees[column] is None:
                continue
            partner = partners[column]
            if self._trees[partner] is not None and changes[partner] == seen[column]:
                self.shared -= gain
                self._join(column, partner)
                changes[column] += 1
            partner, found = self._partner(column)
            if found > 0:
                partners[column], seen[column] = partner, changes[partner]
                heapq.heappush(queue, (-found, column))

    def _partner(self, column: int) -> tuple[int, float]:
        tree = self._trees[column]
        assert tree is not None
        found = self._weights[tree.items] @ self._has[tree.items] + self._open
        found[column] = _NEVER
        best = int(found.argmax())
        return best, float(found[best])

    def _join(self, column: int, other: int) -> None:
        one, two = self._trees[column], self._trees[other]
        assert one is not None
        assert two is not None
        both = one.items[self._has[one.items, other]]
        self._has[one.items, column] = self._has[two.items, other] = False
        self._has[both, column] = True
        self._trees[column], self._trees[other] = _Node(both, children=(one, two)), None
        self._open[other] = _NEVER

    def leaves(self) -> list[tuple[int, list[Any]]]:
        """Return the requests, relatives beside each other, with their items in order."""
        found = []
        pending = [(tree, list[int]()) for tree in reversed(self._trees) if tree is not None]
        while pending:
            node, path = pending.pop()
            placed = set(path)
            path = path + [item for item in node.items.tolist() if item not in placed]
            if node.request >= 0:
                found.append((node.request, [self._names[item] for item in path]))
            pending += [(child, path) for child in reversed(node.children)]
        return found

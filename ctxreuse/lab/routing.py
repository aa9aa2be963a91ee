"""A trace sent to several nodes by a rule: the time to the first token, and what was reused (simulation).

Each node computes one prompt after another and keeps an LRU of KV; answers cost nothing, and KV stays where it was
computed. Prompts take what a line of prefill says.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Final

import msgspec
import numpy as np

from ctxreuse.cost.lines import PrefillLine
from ctxreuse.errors import ConfigError
from ctxreuse.lab.trace import Request
from ctxreuse.routing import KnownPrefixes, PrefixRun, Router
from ctxreuse.routing.node import NodeLoad

__all__ = ["BOUND", "RULES", "Routed", "Rule", "prompt_path", "route_trace"]

#: Seconds of ``tokens`` behind ``cached`` ones.
Prefill = Callable[[int, int], float]


class Routed(msgspec.Struct, frozen=True):
    """Seconds to the first token under one rule: mean and percentiles, and the share of tokens that was reused."""

    rule: str
    nodes: int
    requests: int
    mean: float
    median: float
    ninety_fifth: float
    reused: float


class _Node:
    """One node as it really is."""

    def __init__(self, tokens: float) -> None:
        self.cache, self.free = KnownPrefixes(tokens, 1 << 40), 0.0


class Rule:
    """Chooses a node for a prompt; sees the nodes as they are. This one: any, by chance."""

    def __init__(self, nodes: Sequence[_Node], prefill: Prefill, tokens: float) -> None:
        self.nodes, self.prefill, self.tokens = nodes, prefill, tokens
        self.chance = random.Random(1)

    def choose(self, path: Sequence[PrefixRun], now: float) -> int:
        """Return the number of the node."""
        return self.chance.randrange(len(self.nodes))

    def started(self, node: int, now: float) -> None:
        """A request of ``node`` has its first token."""

    def queue(self, node: int, now: float) -> float:
        """Seconds until a request that is sent now begins."""
        return max(self.nodes[node].free - now, 0.0)

    def rest(self, node: int, path: Sequence[PrefixRun]) -> float:
        """Seconds of the prompt there, once it begins."""
        cached = self.nodes[node].cache.match(path)
        return self.prefill(sum(run.tokens for run in path) - cached, cached)


class _LeastLoad(Rule):
    def choose(self, path: Sequence[PrefixRun], now: float) -> int:
        return min(range(len(self.nodes)), key=lambda node: self.queue(node, now))


class _LongestPrefix(Rule):
    def choose(self, path: Sequence[PrefixRun], now: float) -> int:
        return max(
            range(len(self.nodes)), key=lambda node: (self.nodes[node].cache.match(path), -self.queue(node, now))
        )


class _FirstToken(Rule):
    """The node where the first token comes soonest."""

    def choose(self, path: Sequence[PrefixRun], now: float) -> int:
        return min(range(len(self.nodes)), key=lambda node: self.queue(node, now) + self.rest(node, path))


class _E2(Rule):
    """Preble's: where most of a prompt is cached, the least loaded that has it; else where it costs least."""

    def choose(self, path: Sequence[PrefixRun], now: float) -> int:
        cached = [node.cache.match(path) for node in self.nodes]
        most, total = max(cached), sum(run.tokens for run in path)
        if most > total - most:
            return min((n for n, found in enumerate(cached) if found == most), key=lambda node: self.queue(node, now))
        return min(range(len(self.nodes)), key=lambda node: self.queue(node, now) + self.rest(node, path))


class _Blocks(Rule):
    """As Dynamo's router: tokens that would be computed, and those that wait already, added up."""

    def choose(self, path: Sequence[PrefixRun], now: float) -> int:
        total, token = sum(run.tokens for run in path), self.prefill(1000, 0) / 1000

        def cost(node: int) -> float:
            return total - self.nodes[node].cache.match(path) + self.queue(node, now) / token

        return min(range(len(self.nodes)), key=cost)


class _Known(NodeLoad):
    """A node whose speed is known."""

    def __init__(self, prefill: Prefill) -> None:
        super().__init__(PrefillLine())
        self._known = prefill

    @property
    def knows_speed(self) -> bool:
        """See `NodeLoad.knows_speed`."""
        return True

    def measure(self, tokens: int, cached: int, seconds: float, now: float) -> None:
        """Learn nothing: see `NodeLoad.measure`."""

    def seconds(self, tokens: int, cached: int, now: float) -> float:
        return self._known(tokens, cached)


class _Price(Rule):
    """Ours: see `ctxreuse.routing.router`. It sees what it sent, not the nodes."""

    def __init__(self, nodes: Sequence[_Node], prefill: Prefill, tokens: float) -> None:
        super().__init__(nodes, prefill, tokens)
        self._router = Router(tokens, lambda _: _Known(prefill))
        self._names = [f"node {number}" for number in range(len(nodes))]
        self._sent: list[list[int]] = [[] for _ in nodes]

    def choose(self, path: Sequence[PrefixRun], now: float) -> int:
        route = self._router.choose(path, self._names, now)
        node = self._names.index(route.chosen.node)
        self._sent[node].append(self._router.begin(route, path, now))
        return node

    def started(self, node: int, now: float) -> None:
        self._router.started(self._sent[node].pop(0), now, measured=True)


RULES: Final[dict[str, type[Rule]]] = {
    "price": _Price,
    "first-token": _FirstToken,
    "blocks": _Blocks,
    "e2": _E2,
    "longest-prefix": _LongestPrefix,
    "least-load": _LeastLoad,
    "random": Rule,
}


#: No rule: nothing waits, and one cache that keeps all serves all nodes.
BOUND: Final = "bound"


def prompt_path(request: Request, block_tokens: int) -> list[PrefixRun]:
    """Return a request's prompt as runs; tokens behind its last block are a run of their own."""
    whole = min(len(request.path) * block_tokens, request.tokens)
    path = [PrefixRun(int(key), block_tokens) for key in request.path]
    if path:
        path[-1] = PrefixRun(path[-1].key, block_tokens - (len(path) * block_tokens - whole))
    if request.tokens > whole:
        path.append(PrefixRun(("rest", request.t, request.tokens), request.tokens - whole))
    return path


def route_trace(
    requests: Iterable[Request], block_tokens: int, rule: str, nodes: int, tokens: float, prefill: Prefill
) -> Routed:
    """Send a trace to ``nodes`` nodes that keep ``tokens`` tokens of KV each; by `BOUND`, to one of which that does not
    wait and keeps all. Raises ConfigError for unknown rules."""
    if rule not in RULES and rule != BOUND:
        raise ConfigError(f"there is no rule {rule!r}", fix=f"Use {', '.join(RULES)}")
    places = [_Node(tokens) for _ in range(nodes)] if rule != BOUND else [_Node(math.inf)]
    chooser = RULES.get(rule, _LeastLoad)(places, prefill, tokens)
    running: list[tuple[float, int]] = []
    waits, reused, total = list[float](), 0, 0
    for request in requests:
        while running and running[0][0] <= request.t:
            at, node = heapq.heappop(running)
            chooser.started(node, at)
        path = prompt_path(request, block_tokens)
        node = chooser.choose(path, request.t)
        place = places[node]
        cached = place.cache.match(path)
        place.cache.note(path)
        began = request.t if rule == BOUND else max(place.free, request.t)
        place.free = began + prefill(request.tokens - cached, cached)
        heapq.heappush(running, (place.free, node))
        waits.append(place.free - request.t)
        reused += cached
        total += request.tokens
    if not waits:
        raise ConfigError("the trace has no requests")
    mean, median, most = float(np.mean(waits)), float(np.median(waits)), float(np.percentile(waits, 95))
    return Routed(rule, nodes, len(waits), mean, median, most, reused / max(total, 1))

"""The price of each node for a request, in seconds, and the choice of the cheapest.

    price = what waits there + what computing the rest of the prompt takes there
            + p * what that takes more than where most of it is cached

The first two are the time to the first token. The third is what the choice costs others: work that is done again keeps
a node from theirs. Its price p rises as the nodes fill, 0.3 / (1 - busy)^2: an idle node may as well compute a prefix
again, which also copies what is popular; nodes near their limit cannot.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import NamedTuple

import msgspec
import xxhash

from ctxreuse.cost.lines import PrefillLine
from ctxreuse.routing.feed import Reported
from ctxreuse.routing.known import KnownPrefixes, PrefixRun
from ctxreuse.routing.node import NodeLoad

__all__ = ["Route", "RouteOption", "Router", "wasted_price"]

#: Tokens of KV that a node is taken to keep where its size is not known.
_NODE_TOKENS = 1_000_000
#: The share of the last minutes beyond which the price of work done twice stops rising.
_FULL = 0.9
#: Prices this much apart (as a share, and in seconds) count as equal.
_EQUAL, _EQUAL_SECONDS = 0.02, 0.02


class RouteOption(msgspec.Struct, frozen=True):
    """One node for a request: ``cached`` tokens of its prompt are probably there, ``queue`` seconds wait before it,
    ``prefill`` seconds would compute the rest; ``price``: see `ctxreuse.routing.router`. ``reported``: the node says
    itself what it has, and that is all."""

    node: str
    cached: int
    queue: float
    prefill: float
    price: float
    reported: bool = False

    @property
    def seconds(self) -> float:
        """Expected time to the first token."""
        return self.queue + self.prefill


class Route(msgspec.Struct, frozen=True):
    """The chosen node of a prompt of so many ``tokens``, and the others, cheapest first."""

    tokens: int
    chosen: RouteOption
    others: tuple[RouteOption, ...] = ()


def wasted_price(busy: float) -> float:
    """Return what a second of work that is done again costs, in seconds, where nodes are ``busy`` for such a share."""
    return float(0.3 / (1 - min(max(busy, 0.0), _FULL)) ** 2)


class _Sent(NamedTuple):
    """A request at a node since ``at``.

    ``alone``: tokens that it computes behind ``cached`` ones, 0 if it waits. ``new``: keys of runs that the node had
    not. ``path``: all its runs.
    """

    node: str
    at: float
    alone: int
    cached: int
    new: list[Hashable]
    path: Sequence[PrefixRun]


class Router:
    """Chooses nodes, and learns from what it sent them. Not thread-safe.

    Args:
        tokens: of KV that each node keeps.
        load: makes the state of a node, given the line that is fitted to all.
    """

    def __init__(self, tokens: float = _NODE_TOKENS, load: Callable[[PrefillLine], NodeLoad] = NodeLoad) -> None:
        self._tokens, self._load = tokens, load
        #: Seconds of a prompt, from first tokens of all nodes.
        self.prefill = PrefillLine()
        self._known: dict[str, KnownPrefixes] = {}
        self._loads: dict[str, NodeLoad] = {}
        #: By node, how many requests without a first token have each run: it will have these before it says so.
        self._coming: dict[str, dict[Hashable, int]] = {}
        #: Requests without a first token.
        self._sent: dict[int, _Sent] = {}
        self._number = 0

    def known(self, node: str) -> KnownPrefixes:
        """Return what a node has cached."""
        if node not in self._known:
            self._known[node] = KnownPrefixes(self._tokens)
        return self._known[node]

    def load(self, node: str) -> NodeLoad:
        """Return what waits at a node."""
        if node not in self._loads:
            self._loads[node] = self._load(self.prefill)
        return self._loads[node]

    def choose(
        self,
        path: Sequence[PrefixRun],
        nodes: Sequence[str],
        now: float,
        home: bytes = b"",
        *,
        tokens: int = 0,
        reported: Mapping[str, Reported] | None = None,
    ) -> Route:
        """Choose one of ``nodes`` (at least one) for a prompt. Pure but for nodes that are new.

        Args:
            path: the runs of the prompt.
            nodes: that may get it.
            now: seconds.
            home: of equally cheap nodes, requests with the same one get the same.
            tokens: of the prompt, where they were counted; 0: the runs say it.
            reported: what nodes say that they have of it, in the same tokens.
        """
        sent = sum(tokens for _, tokens in path)
        options = self._options(path, nodes, now, (tokens or sent, sent), reported or {})
        least = min(option.price for option in options)
        near = [o for o in options if o.price <= least + max(_EQUAL * least, _EQUAL_SECONDS)]
        seed = xxhash.xxh3_64_intdigest(home)
        chosen = max(near, key=lambda option: xxhash.xxh3_64_intdigest(option.node.encode(), seed))
        others = sorted((option for option in options if option is not chosen), key=lambda option: option.price)
        return Route(tokens or sent, chosen, tuple(others))

    def begin(self, route: Route, path: Sequence[PrefixRun], now: float, *, silent: bool = False) -> int:
        """Note that a prompt is sent as chosen, ``silent``: for an answer that comes whole; returns its number for
        `started` and `failed`."""
        self._number += 1
        chosen, load = route.chosen, self.load(route.chosen.node)
        alone = route.tokens - chosen.cached if not load.waiting else 0
        load.begin(self._number, chosen.prefill, now, silent=silent)
        known = self.known(chosen.node)
        self._sent[self._number] = _Sent(chosen.node, now, alone, chosen.cached, known.missing(path), path)
        known.note(path)
        coming = self._coming.setdefault(chosen.node, {})
        for key, _ in path:
            coming[key] = coming.get(key, 0) + 1
        return self._number

    def _options(
        self,
        path: Sequence[PrefixRun],
        nodes: Sequence[str],
        now: float,
        counted: tuple[int, int],
        reported: Mapping[str, Reported],
    ) -> list[RouteOption]:
        """``counted``: tokens of the prompt, and of its runs."""
        price = wasted_price(sum(self.load(node).busy(now) for node in nodes) / len(nodes))
        found = []
        for node in nodes:
            cached, load = self._cached(path, node, counted, reported.get(node)), self.load(node)
            found.append((node, cached, load.queue(now), load.seconds(counted[0] - cached, cached, now)))
        least = min(prefill for *_, prefill in found)
        whole = {node for node, each in reported.items() if each.whole}
        return [
            RouteOption(node, cached, queue, prefill, queue + prefill + price * (prefill - least), node in whole)
            for node, cached, queue, prefill in found
        ]

    def _cached(self, path: Sequence[PrefixRun], node: str, counted: tuple[int, int], reported: Reported | None) -> int:
        """Return the leading tokens that a node has, or will have when it has computed what it was sent."""
        total, sent = counted
        scale = total / sent if sent else 0.0
        if reported is None or not reported.whole:
            known = self.known(node).match(path)
        else:
            coming = self._coming.get(node, {})
            known = 0
            for run in path:
                if run.key not in coming:
                    break
                known += run.tokens
        return max(int(known * scale), reported.tokens if reported is not None else 0)

    def started(self, number: int, now: float, *, measured: bool = False) -> None:
        """Note the first token of a request; ``measured``: it came as soon as there was one, so its time says how fast
        the node is (an answer that comes as a whole says nothing)."""
        sent = self._sent.pop(number, None)
        if sent is None:
            return
        self._came(sent)
        if measured and sent.alone:
            self.load(sent.node).measure(sent.alone, sent.cached, now - sent.at, now)
        elif measured:
            self.load(sent.node).measure_wait(number, now)
        self.load(sent.node).end(number, now)

    def failed(self, number: int, now: float) -> None:
        """Note that a request got no answer: its node may have nothing of what it brought."""
        sent = self._sent.pop(number, None)
        if sent is not None:
            self._came(sent)
            self.load(sent.node).end(number, now)
            for key in sent.new:
                self.known(sent.node).forget(key)

    def _came(self, sent: _Sent) -> None:
        coming = self._coming[sent.node]
        for key, _ in sent.path:
            if (left := coming.pop(key) - 1) > 0:
                coming[key] = left

    def check(self) -> None:
        """Raise AssertionError if a bound or a count is wrong."""
        coming = sum(len(sent.path) for sent in self._sent.values())
        assert sum(sum(counts.values()) for counts in self._coming.values()) == coming, "runs under way counted wrong"
        for known in self._known.values():
            known.check()
        assert sum(load.waiting for load in self._loads.values()) == len(self._sent), "a request waits nowhere"

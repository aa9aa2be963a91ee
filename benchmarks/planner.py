"""Order of documents: how much of the prompts a prefix cache serves, and what planning costs, by planner.

A made-up retrieval load with fixed seeds: 40 topics of 30 documents whose popularity follows Zipf's law, 20 documents
that belong to all topics; each request asks for 10 or 20 documents of a topic, in an order of its own. Documents are
256 tokens, the cache keeps all and is asked by block. ``online``: a request is planned when it comes, from what the
cache holds (`Planner`); ``batch``: all requests are known (`plan_batch`). Baseline: the order as given. Peer:
ContextPilot 0.5, where ``CTXREUSE_BENCH_CONTEXTPILOT`` names the Python of an environment that has it (``pip install
contextpilot==0.5.0``). Bound: all documents that were there before, at any position. Time is processor time, that of
the peer's processes together.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt

from ctxreuse.bench.measure import Options
from ctxreuse.bench.report import Figure
from ctxreuse.identity.keys import ROOT, Tokens, prefix_keys
from ctxreuse.planner import CachedPrefixes, Part, Planner, plan_batch
from ctxreuse.tree import ContextTree

__all__ = ["run"]

_TOPICS, _EACH, _COMMON, _COMMON_SHARE = 40, 30, 20, 0.15
_BLOCK, _TOKENS = 64, 256
_SPACE, _SALT = bytes(32), bytes(16)
_ONLINE, _SECONDS, _MILLISECONDS = 1.5, 0.3, 1.0

#: Prints the peer's order of requests and documents, and the seconds of each call.
_PEER = """
import contextlib, io, json, os, sys
import contextpilot
mode, requests = json.load(sys.stdin)
planner, found, times = contextpilot.ContextPilot(use_gpu=False), [], []
with contextlib.redirect_stdout(io.StringIO()):
    for part in [requests] if mode == "batch" else [[one] for one in requests]:
        began = sum(os.times()[:4])
        ordered, _ = planner.reorder(part)
        times.append(sum(os.times()[:4]) - began)
        found += ordered
json.dump([found, times], sys.stdout)
"""

Requests = Sequence[Sequence[int]]


def _load(count: int, documents: int) -> list[list[int]]:
    chance = np.random.default_rng(7)

    def popularity(size: int, power: float) -> npt.NDArray[np.float64]:
        weights = np.arange(1, size + 1, dtype=np.float64) ** -power
        return np.asarray(weights / weights.sum())

    topics, each, common = popularity(_TOPICS, 1.1), popularity(_EACH, 0.8), popularity(_COMMON, 0.8)
    found = []
    for _ in range(count):
        topic, shared = chance.choice(_TOPICS, p=topics), chance.binomial(documents, _COMMON_SHARE)
        own = chance.choice(_EACH, size=min(documents - shared, _EACH), replace=False, p=each)
        request = [*(_COMMON + topic * _EACH + own), *chance.choice(_COMMON, size=shared, replace=False, p=common)]
        chance.shuffle(request)
        found.append([int(one) for one in request])
    return found


class _Cache:
    """A prefix cache that keeps all, and the planner that asks it."""

    def __init__(self) -> None:
        chance = np.random.default_rng(1)
        numbers = _COMMON + _TOPICS * _EACH
        self._ids: list[Tokens] = [chance.integers(0, 30_000, _TOKENS).astype("<i4") for _ in range(numbers)]
        self._tree = ContextTree()
        self._prefixes = CachedPrefixes(self._tree.match, _SPACE, _SALT, _BLOCK)
        self._planner = Planner()
        self.hits = self.tokens = 0
        self.seconds: list[float] = []

    def plan(self, request: Sequence[int]) -> list[int]:
        parts = [Part("document", self._ids[one]) for one in request]
        began = time.process_time()
        plan = self._planner.plan(parts, self._prefixes)
        self.seconds.append(time.process_time() - began)
        return plan.permutation.apply(request)

    def compute(self, request: Sequence[int]) -> None:
        keys = prefix_keys(_SPACE, _SALT, np.concatenate([self._ids[one] for one in request]), _BLOCK)
        self.hits += self._tree.match(keys).tokens
        self.tokens += len(keys) * _BLOCK
        for parent, key in zip([ROOT, *keys], keys):
            self._tree.insert(key, parent, _BLOCK, 1)


def _served(requests: Requests, order: Callable[[_Cache, Sequence[int]], Sequence[int]]) -> tuple[float, _Cache]:
    cache = _Cache()
    for request in requests:
        cache.compute(order(cache, request))
    return 100 * cache.hits / cache.tokens, cache


def _as_given(_: _Cache, request: Sequence[int]) -> Sequence[int]:
    return request


def _popular(requests: Requests) -> float:
    """Sorted by how often each document was requested so far, the simplest rule."""
    seen: dict[int, int] = {}

    def order(_: _Cache, request: Sequence[int]) -> Sequence[int]:
        found = sorted(request, key=lambda one: (-seen.get(one, 0), one))
        for one in request:
            seen[one] = seen.get(one, 0) + 1
        return found

    return _served(requests, order)[0]


def _anywhere(requests: Requests) -> float:
    known: set[int] = set()
    hits = 0
    for request in requests:
        hits += sum(one in known for one in request)
        known.update(request)
    return 100 * hits / sum(map(len, requests))


def _peer(mode: str, requests: Requests) -> tuple[float, list[float]] | None:
    python = os.environ.get("CTXREUSE_BENCH_CONTEXTPILOT")
    if not python:
        return None
    done = subprocess.run(
        [python, "-c", _PEER], input=json.dumps([mode, requests]), capture_output=True, text=True, check=True
    )
    found, seconds = json.loads(done.stdout.splitlines()[-1])
    return _served(found, _as_given)[0], seconds


def run(options: Options) -> list[Figure]:
    """Hits and time, online and in a batch, by requests and documents in each."""
    figures: list[Figure] = []
    for count, documents in options.pick([(200, 10)], [(600, 10), (2000, 10), (2000, 20)]):
        options.step(f"{count} requests of {documents}")
        figures += _compared(_load(count, documents), f"{count:,} x {documents}")
    return figures


def _compared(requests: Requests, name: str) -> list[Figure]:
    given, bound = _served(requests, _as_given)[0], _anywhere(requests)
    online, cache = _served(requests, _Cache.plan)
    their = _peer("online", requests)
    peer, times = their if their is not None else (None, [])
    note = f"sorted by popularity {_popular(requests):.1f}"
    hits = partial(Figure, unit="% of tokens", better="higher", baseline=given, bound=bound)
    figures = [
        hits(
            metric=f"online, {name}: hits",
            value=online,
            peer=peer,
            bar=None if peer is None else _ONLINE * peer,
            note=note,
        ),
        Figure(
            metric=f"online, {name}: a plan",
            value=1e3 * statistics.mean(cache.seconds),
            unit="ms",
            better="lower",
            peer=1e3 * statistics.mean(times) if times else None,
            bar=_MILLISECONDS,
            note=f"95th percentile {1e3 * float(np.percentile(cache.seconds, 95)):.2f}",
        ),
    ]
    numbers = dict.fromkeys(range(_COMMON + _TOPICS * _EACH), _TOKENS)
    began = time.process_time()
    plan = plan_batch(requests, numbers)
    spent = time.process_time() - began
    ordered = [plan.documents[index].apply(requests[index]) for index in plan.schedule.order]
    their = _peer("batch", requests)
    peer, times = their if their is not None else (None, [])
    return [
        *figures,
        hits(metric=f"batch, {name}: hits", value=_served(ordered, _as_given)[0], peer=peer, bar=peer),
        Figure(
            metric=f"batch, {name}: the plan",
            value=spent,
            unit="s",
            better="lower",
            peer=sum(times) if times else None,
            bar=_SECONDS,
        ),
    ]

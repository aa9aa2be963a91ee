"""Time to the first token by which node gets a request, for traces sent to several nodes (simulation).

A simulation: nodes compute one prompt after another at the speed of a model of 70 billion parameters (28.93 ms, 0.182
ms a token, 0.004 ms a cached one, 2.55 ns a pair of them), each keeps an LRU of 3 million tokens of KV, answers cost
nothing and KV is not sent between nodes. The trace is 45 minutes of a chat service (Mooncake's conversation trace,
9,000 rows): set CTXREUSE_TRACES to the folder that has ``prefix/mooncake_conversation_rows0-8999.jsonl.xz``; without it
made-up chats are used, and every note says so. Ours (``price``) sees only what it sent; the other rules see the nodes
as they are. Baseline: least load. Peer: the best of the other rules in that cell. Bound: no queue, and one cache for
all.
"""

from __future__ import annotations

import math
import os
import time
from pathlib import Path

from ctxreuse.bench.measure import Options
from ctxreuse.bench.report import Figure
from ctxreuse.lab.generate import generate
from ctxreuse.lab.mooncake import mooncake
from ctxreuse.lab.routing import BOUND, RULES, prompt_path, route_trace
from ctxreuse.lab.trace import Trace
from ctxreuse.routing import Router

__all__ = ["run"]

_FILE = Path("prefix", "mooncake_conversation_rows0-8999.jsonl.xz")
_TOKENS = 3_000_000
#: Of the bound with ten nodes, of the best other rule in every cell, and microseconds of a choice.
_OF_BOUND, _OF_BEST, _MICROSECONDS = 1.4, 1.1, 500.0


def _prefill(tokens: int, cached: int) -> float:
    return (28.93 + 0.182 * tokens + 0.004 * cached + 2.55e-6 * tokens * (cached + tokens / 2)) / 1e3


def _trace(quick: bool) -> tuple[Trace, str]:
    folder = os.environ.get("CTXREUSE_TRACES", "")
    path = Path(folder) / _FILE
    if folder and path.is_file() and not quick:
        return mooncake(path), ""
    return generate("chat", requests=400 if quick else 9_000), "; made-up chats"


def run(options: Options) -> list[Figure]:
    """First tokens by number of nodes, and what a choice costs."""
    trace, made_up = _trace(options.quick)
    requests, block = list(trace), trace.block_tokens
    figures = []
    for nodes in options.pick((3,), (12, 10, 9, 8)):
        found = {}
        for rule in (BOUND, *RULES):
            options.step(f"{nodes} nodes, {rule}")
            found[rule] = route_trace(requests, block, rule, nodes, _TOKENS, _prefill)
        bound, ours = found.pop(BOUND), found.pop("price")
        best = min(found.values(), key=lambda one: one.mean)
        bar = min(_OF_BEST * best.mean, _OF_BOUND * bound.mean if nodes == 10 else math.inf)
        for name, value in (("mean", "mean"), ("95th percentile", "ninety_fifth")):
            figures.append(
                Figure(
                    metric=f"{nodes} nodes: first token, {name}",
                    value=getattr(ours, value),
                    unit="s",
                    better="lower",
                    baseline=getattr(found["least-load"], value),
                    peer=getattr(best, value),
                    bound=getattr(bound, value),
                    bar=bar if value == "mean" else None,
                    note=f"peer: {best.rule}; reused {ours.reused:.1%}, peer {best.reused:.1%}{made_up}",
                )
            )
    router, names = Router(_TOKENS), [f"node {n}" for n in range(8)]
    paths = [prompt_path(request, block) for request in requests[:2000]]
    began = time.process_time()
    for at, path in enumerate(paths):
        router.started(router.begin(router.choose(path, names, at), path, at), at + 0.5)
    spent = (time.process_time() - began) / len(paths)
    figures.append(
        Figure(metric="a choice of 8 nodes", value=1e6 * spent, unit="µs", better="lower", bar=_MICROSECONDS)
    )
    return figures

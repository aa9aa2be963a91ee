"""Blocks served from a cache that is too small, by who is evicted: the store's policies and the bounds (simulation).

A simulation on a virtual clock: the requests of a chat service (Mooncake's conversation trace, 9,000 rows, blocks of
512 tokens) through the policy objects that the store runs, in caches of 0.5 to 10.2 million tokens. Set CTXREUSE_TRACES
to the folder that has ``prefix/mooncake_conversation_rows0-8999.jsonl.xz``; without it made-up traffic is used, and
every note says so.

No policy was tuned on this trace by the bench. ``half`` figures count the second half of the rows, the first having
filled the cache; the others count all. The baseline is LRU, the peer the best single policy at that size, the bound
Belady's choice, which is exact for blocks of one size. The adaptive policy is random: its figure is the mean over
seeds.
"""

from __future__ import annotations

import os
import statistics
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ctxreuse.bench.measure import Options
from ctxreuse.bench.report import Figure
from ctxreuse.lab.bounds import Future, belady
from ctxreuse.lab.generate import generate
from ctxreuse.lab.mooncake import mooncake
from ctxreuse.lab.packed import Packed, pack
from ctxreuse.lab.replay import serve
from ctxreuse.store.policy import NAMES, make_policy
from ctxreuse.store.policy.native import NATIVE, NativeShadow

__all__ = ["run"]

_FILE = Path("prefix", "mooncake_conversation_rows0-8999.jsonl.xz")
_SIZES = {"0.5M": 500_000, "1M": 1_000_000, "2.6M": 2_600_000, "5.1M": 5_100_000, "10.2M": 10_200_000}
_ADAPTIVE, _SEEDS = "adaptive", (0, 1, 2)
#: Points of block hits: how far the adaptive policy may be behind the best, and must be ahead of LRU at 1M.
_BEHIND, _AHEAD = 0.5, 5.0


class _Trace(NamedTuple):
    packed: Packed
    real: bool


def _trace(quick: bool) -> _Trace:
    folder = os.environ.get("CTXREUSE_TRACES", "")
    path = Path(folder) / _FILE
    if folder and path.is_file() and not quick:
        return _Trace(pack(mooncake(path)), True)
    return _Trace(pack(generate("chat", requests=400 if quick else 9_000)), False)


def _shares(trace: Packed, hits: npt.NDArray[np.int32]) -> tuple[float, float]:
    """Percent of blocks served: of all requests, and of the second half of them."""
    half = len(trace) // 2
    return tuple(  # type: ignore[return-value]
        100 * float(hits[first:].sum() / max(int(trace.length[first:].sum()), 1)) for first in (0, half)
    )


def _served(trace: Packed, name: str, blocks: int, seed: int = 0) -> tuple[float, float]:
    size = trace.block_tokens
    policy: Any = NativeShadow(name, blocks * size) if name in NATIVE else None
    if policy is None:
        policy = make_policy(name, blocks * size, rng=Random(seed))
    return _shares(trace, serve(trace, policy, blocks, block_bytes=size).hits)


def run(options: Options) -> list[Figure]:
    """Block hits in percent, by size and policy, over the whole trace and its second half."""
    trace, real = _trace(options.quick)
    what = "the real trace" if real else f"made-up traffic, {len(trace):,} requests: no bar holds"
    future = Future(trace)
    sizes = {"0.1M": 100_000} if options.quick else _SIZES
    singles = [name for name in NAMES if name != _ADAPTIVE]
    steps, done = len(sizes) * (len(singles) + len(_SEEDS)), 0
    endless = _shares(trace, trace.known)
    figures: list[Figure] = []
    for label, tokens in sizes.items():
        blocks = max(1, tokens // trace.block_tokens)
        bound = _shares(trace, belady(trace, future, blocks))
        found: dict[str, tuple[float, float]] = {}
        for name in singles:
            options.step(f"{name} at {label}", done, steps)
            found[name] = _served(trace, name, blocks)
            done += 1
        runs = []
        for seed in _SEEDS[: 1 if options.quick else None]:
            options.step(f"{_ADAPTIVE} at {label}", done, steps)
            runs.append(_served(trace, _ADAPTIVE, blocks, seed))
            done += 1
        for part, where in enumerate(("", " half")):
            best = max(singles, key=lambda name, part=part: found[name][part])  # type: ignore[misc]
            value = statistics.fmean(run[part] for run in runs)
            floor = found[best][part] - _BEHIND
            bar = max(floor, found["lru"][part] + _AHEAD) if label == "1M" else floor
            least = min(run[part] for run in runs)
            note = f"{what}; peer: {best}; least of {len(runs)} seeds {least:.2f}; endless cache {endless[part]:.1f}"
            figures.append(
                _figure(
                    f"{label}{where} {_ADAPTIVE}", value, found, part, bound, note, peer=best, bar=bar if real else None
                )
            )
            for name in singles:
                figures.append(_figure(f"{label}{where} {name}", found[name][part], found, part, bound, ""))
    return figures


def _figure(
    metric: str,
    value: float,
    found: dict[str, tuple[float, float]],
    part: int,
    bound: tuple[float, float],
    note: str,
    *,
    peer: str = "",
    bar: float | None = None,
) -> Figure:
    return Figure(
        metric=metric,
        value=value,
        unit="% of blocks",
        baseline=found["lru"][part],
        peer=found[peer][part] if peer else None,
        bound=bound[part],
        bar=bar,
        note=note,
    )

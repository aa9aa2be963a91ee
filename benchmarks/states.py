"""Blocks that a hybrid model need not compute, by where its states are kept (simulation).

A simulation on a virtual clock: 130 interleaved sessions of a coding agent through a cache of blocks and states of a 7B
hybrid (4 attention and 24 recurrent layers: 65,536 bytes of K and V a token, 26.8 MB a state). Set CTXREUSE_TRACES to
the folder that has ``prefix/claude_code_sessions.jsonl.xz``; without it made-up traffic is used, and notes say so.

The baseline keeps a state each 32 tokens, the peer one each 528 (what vLLM's block of such a model comes to), the bound
needs none: attention layers alone, under the same LRU. ``half`` figures are of the second 65 sessions in half the
cache: constants were chosen on the first. ``gemma`` figures are of Gemma 3 270M's windows: 3,072 bytes a token, 7.86 MB
a state.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from benchmarks.hybrid import HybridCache
from ctxreuse.bench.measure import Options
from ctxreuse.bench.report import Figure
from ctxreuse.lab.generate import generate
from ctxreuse.lab.sessions import SESSIONS, agent_sessions
from ctxreuse.store.policy.states import StatePolicy

__all__ = ["run"]

_FILE = Path("prefix", "claude_code_sessions.jsonl.xz")
_BLOCK = 64
_GB = 10**9
#: Points of blocks: how far from the bound the policy may stay.
_NEAR = 3.0

Traffic = list[tuple[float, list[int]]]


class _Model(NamedTuple):
    token: int
    state: int
    sizes: tuple[int, ...]

    @property
    def worth(self) -> int:
        return self.state // self.token


_HYBRID = _Model(65_536, 26_787_840, (80, 160, 320, 640))
_GEMMA = _Model(3_072, 7_864_320, (4, 8, 16, 32))


def _traffic(quick: bool, part: tuple[int, int] | None = None) -> tuple[Traffic, str]:
    folder = os.environ.get("CTXREUSE_TRACES", "")
    path = Path(folder) / _FILE
    if folder and path.is_file() and not quick:
        trace, what = agent_sessions(path, sessions=SESSIONS, part=part), "real sessions"
    else:
        trace, what = generate("agents", requests=300 if quick else 5_000), "made-up traffic: no bar holds"
    return [(request.t, request.path.tolist()) for request in trace], what


def _hit(traffic: Traffic, cache: HybridCache) -> float:
    reused = sum(cache.request(path, t) for t, path in traffic)
    return 100 * reused / max(1, sum(len(path) for _, path in traffic))


def _ways(model: _Model) -> dict[str, Callable[[int], HybridCache]]:
    kv = _BLOCK * model.token

    def every(tokens: int) -> Callable[[int], HybridCache]:
        return lambda capacity: HybridCache(capacity, _BLOCK, kv, model.state, every=tokens / _BLOCK)

    def admitted(policy: StatePolicy) -> Callable[[int], HybridCache]:
        return lambda capacity: HybridCache(capacity, _BLOCK, kv, model.state, policy=policy)

    return {
        "per 32": every(32),
        "per 528": every(528),
        "branch and last": admitted(StatePolicy()),
        "with rungs": admitted(StatePolicy(worth=model.worth)),
        "attention": lambda capacity: HybridCache(capacity, _BLOCK, kv),
    }


def run(options: Options) -> list[Figure]:
    """Percent of blocks that were not computed, by size of the cache."""
    whole, what = _traffic(options.quick)
    barred = what == "real sessions"
    figures: list[Figure] = []
    for name, model in (("", _HYBRID), ("gemma_", _GEMMA)):
        for size in model.sizes[: options.pick(1, None)]:
            found: dict[str, float] = {}
            for way, make in _ways(model).items():
                options.step(f"{name}{size} GB, {way}")
                found[way] = _hit(whole, make(size * _GB))
            for metric, way, near in (("last", "branch and last", None), ("replay", "with rungs", _NEAR)):
                figures.append(
                    Figure(
                        metric=f"{name}{metric}_{size}GB",
                        value=found[way],
                        unit="% of blocks",
                        baseline=found["per 32"],
                        peer=found["per 528"],
                        bound=found["attention"],
                        bar=found["attention"] - near if near and barred and not name else None,
                        note=f"states at {_NOTES[metric]}; {what}",
                    )
                )
    half, what = _traffic(options.quick, (SESSIONS // 2, SESSIONS))
    ways = _ways(_HYBRID)
    for size in _HYBRID.sizes[: options.pick(1, None)]:
        options.step(f"second half, {size // 2} GB")
        bound = _hit(half, ways["attention"](size * _GB // 2))
        figures.append(
            Figure(
                metric=f"half_replay_{size // 2}GB",
                value=_hit(half, ways["with rungs"](size * _GB // 2)),
                unit="% of blocks",
                baseline=_hit(half, ways["per 32"](size * _GB // 2)),
                peer=_hit(half, ways["per 528"](size * _GB // 2)),
                bound=bound,
                bar=bound - _NEAR if barred else None,
                note=f"second half of the sessions; {what}",
            )
        )
    return figures


_NOTES = {
    "last": "branches proven to recur and the last block; peer: one each 528 tokens",
    "replay": "branches, the last block and rungs from which the tail is replayed; peer: one each 528 tokens",
}

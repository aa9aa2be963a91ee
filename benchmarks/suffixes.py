"""The index that answers are drafted from: microseconds a draft, bytes a token, tokens a second that it learns.

Ten million tokens of texts that repeat each other as an agent's do: each takes runs of some tokens from earlier ones.
Drafts continue texts that were said. Times are CPU time. Peer: the suffix cache of ArcticInference, where
``arctic_inference`` is installed, on the same texts, of which it has the first million tokens at most.
"""

from __future__ import annotations

import time
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np

from ctxreuse.bench.measure import Options
from ctxreuse.bench.report import Figure
from ctxreuse.speculate import SuffixIndex

__all__ = ["run", "texts"]

_TOKENS, _PEER, _TEXT, _DRAFTS, _LENGTH = 10_000_000, 1_000_000, 2_000, 2_000, 16
_MOST_SECONDS, _MOST_BYTES = 10.0, 40.0


def texts(count: int, rng: np.random.Generator) -> np.ndarray:
    """``count`` tokens: half of them runs of 20 to 200 that stood before."""
    ids = rng.zipf(1.2, count).astype(np.int64) % 50_000
    at = 5_000
    while at < count - 400:
        length = int(rng.integers(20, 200))
        start = int(rng.integers(0, at - length))
        ids[at : at + length] = ids[start : start + length]
        at += length + int(rng.integers(20, 200))
    return ids.astype("<i4")


def _peer(ids: np.ndarray, tails: list[np.ndarray]) -> tuple[float, float]:
    """Microseconds a draft, and tokens learnt a second, of the other cache."""
    cache: Any = import_module("arctic_inference.suffix_decoding").SuffixDecodingCache(
        max_tree_depth=64, max_cached_requests=-1
    )
    began = time.thread_time()
    for number, start in enumerate(range(0, len(ids), _TEXT)):
        name = str(number)
        cache.start_request(name, ids[start : start + 1])
        cache.add_active_response(name, ids[start + 1 : start + _TEXT].tolist())
        cache.stop_request(name)
    learnt = len(ids) / (time.thread_time() - began)
    cache.start_request("asks", ids[:1])
    began = time.thread_time()
    for tail in tails:
        cache.speculate("asks", tail, max_spec_tokens=_LENGTH)
    return 1e6 * (time.thread_time() - began) / len(tails), learnt


def run(options: Options) -> list[Figure]:
    """Figures of the index at its full size."""
    rng = np.random.default_rng(0)
    count = options.pick(100_000, _TOKENS)
    options.step("making texts")
    ids = texts(count, rng)
    options.step("learning")
    index, began = SuffixIndex(1 << 24), time.thread_time()
    for start in range(0, count, _TEXT):
        index.add(ids[start : start + _TEXT])
    learnt = count / (time.thread_time() - began)
    options.step("drafting")
    ends = rng.integers(count // 2, count - _TEXT, options.pick(200, _DRAFTS))
    tails = [ids[end - 64 : end] for end in ends]
    for tail in tails[:50]:
        index.draft(tail, _LENGTH)
    began, drafted = time.thread_time(), 0
    for tail in tails:
        drafted += len(index.draft(tail, _LENGTH).ids)
    took = 1e6 * (time.thread_time() - began) / len(tails)
    peer: tuple[float, float] | None = None
    if find_spec("arctic_inference") is not None:
        size = min(count, _PEER)
        peer = _peer(ids[:size], [ids[end - 64 : end] for end in ends % (size - 100) + 64])
    return [
        Figure(
            metric="draft",
            value=took,
            unit="µs",
            peer=peer[0] if peer is not None else None,
            better="lower",
            bar=None if options.quick else _MOST_SECONDS,
            note=f"of {_LENGTH} tokens at most at {count:,}; {drafted / len(tails):.1f} came",
        ),
        Figure(
            metric="bytes",
            value=index.nbytes / len(index),
            unit="bytes/token",
            better="lower",
            bar=None if options.quick else _MOST_BYTES,
            note="memory of the index",
        ),
        Figure(
            metric="learn",
            value=learnt / 1e6,
            unit="Mtoken/s",
            peer=peer[1] / 1e6 if peer is not None else None,
            note="texts of 2,000",
        ),
    ]

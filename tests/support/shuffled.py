"""Documents in any order behind one head, a card that permits moving them, and what must hold of every request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ctxreuse.codec import model_digest
from ctxreuse.engines.torch_hf import TorchEngine
from ctxreuse.identity.keys import Tokens
from ctxreuse.reuse import ChunkKind, ChunkProfile, PolicyMeasurement, QualityGate
from ctxreuse.runtime import PrefillResult, Runtime
from ctxreuse.store import TieredStore

BLOCK, VOCAB = 16, 256
MAX_KL = 0.05
KINDS: tuple[ChunkKind, ...] = ("head", "behind")


def tokens(n: int, seed: int) -> Tokens:
    return np.random.default_rng(seed).integers(3, VOCAB, n).astype("<i4")


def card(
    engine: TorchEngine,
    *repairs: tuple[str, float],
    limit: float = 1e9,
    kinds: Sequence[ChunkKind] = KINDS,
    recomputed: float = 0.0,
) -> ChunkProfile:
    """As if these repairs had been measured to cost so much (default: turning alone, .02)."""
    rows = [
        PolicyMeasurement(name, kind, 4, 64, kl, kl, 0.9, 0.01, recomputed, 8)
        for name, kl in repairs or [("rotate", 0.02)]
        for kind in kinds
    ]
    return ChunkProfile(model_digest(engine.space), 1, dict.fromkeys(kinds, limit), tuple(rows))


def gate(engine: TorchEngine, *repairs: tuple[str, float], **more: Any) -> QualityGate:
    return QualityGate(engine.space, card(engine, *repairs, **more))


class Pool:
    """``count`` documents behind a head of ``head`` tokens; ``ask`` puts some of them and a question together."""

    def __init__(self, count: int = 4, *, head: int = 24, sizes: Sequence[int] = (70, 96, 61, 130), seed: int = 0):
        self.head = tokens(head, 1000 + seed)
        self.documents = [tokens(sizes[i % len(sizes)], seed + i) for i in range(count)]

    def ask(self, order: Sequence[int], question: int = 12, *, seed: int = 50) -> tuple[Tokens, tuple[int, ...]]:
        pieces = [self.head, *(self.documents[i] for i in order), tokens(question, seed)]
        ends = np.cumsum([len(piece) for piece in pieces])[:-1]
        return np.concatenate(pieces).astype("<i4"), tuple(int(end) for end in ends)


def prefill(runtime: Runtime, asked: tuple[Tokens, tuple[int, ...]], max_kl: float | None = MAX_KL) -> PrefillResult:
    """Computed, checked, given back, and stored."""
    ids, parts = asked
    done = runtime.prefill(runtime.request(ids, parts=parts, max_kl=max_kl))
    holds(done, ids)
    runtime.release(done)
    if runtime.store is not None:
        runtime.store.flush(30)
    return done


def holds(done: PrefillResult, ids: Tokens) -> None:
    """Tokens add up, whatever was reused how."""
    usage = done.usage
    assert done.context.tokens.tolist() == ids.tolist()
    assert usage.prompt_tokens == len(ids)
    assert sum(usage.tokens.by_source.values()) == sum(usage.tokens.by_level.values()) == usage.cached_tokens < len(ids)
    assert all(n > 0 for n in (*usage.tokens.by_source.values(), *usage.tokens.by_level.values()))
    assert usage.cached_tokens + sum(one.end - one.start for one in done.computed) == len(ids)
    ends = [edge for one in done.computed for edge in (one.start, one.end)]
    assert ends == sorted(ends)
    assert 0 <= usage.tokens.relocated <= usage.cached_tokens
    assert usage.tokens.recomputed == 0 or usage.gate_decision
    assert not usage.tokens.relocated or (
        usage.approximate and usage.tokens.by_level["approx"] >= usage.tokens.relocated
    )
    assert done.context.gaps == ()  # type: ignore[attr-defined]
    assert sum(run.end - run.start for run in done.context.levels) == len(ids)


def forget_memory(runtime: Runtime, store: TieredStore) -> None:
    """Nothing is left but what the store holds."""
    store.flush(30)
    runtime.context_cache.clear()

"""Documents in any order behind one head, a card that permits moving them, and what must hold of every request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ctxreuse.engines.torch_hf import TorchEngine
from ctxreuse.keys import Tokens
from ctxreuse.reuse import ChunkCard, Gate, Kind, Measured
from ctxreuse.reuse.card import card_model
from ctxreuse.runtime import Prefilled, Runtime
from ctxreuse.store import TieredStore

BLOCK, VOCAB = 16, 256
LOSSY = "kl-0.05"
KINDS: tuple[Kind, ...] = ("head", "behind")


def tokens(n: int, seed: int) -> Tokens:
    return np.random.default_rng(seed).integers(3, VOCAB, n).astype("<i4")


def card(
    engine: TorchEngine,
    *repairs: tuple[str, float],
    limit: float = 1e9,
    kinds: Sequence[Kind] = KINDS,
    recomputed: float = 0.0,
) -> ChunkCard:
    """As if these repairs had been measured to cost so much (default: turning alone, .02)."""
    rows = [
        Measured(name, kind, 4, 64, kl, kl, 0.9, 0.01, recomputed, 8)
        for name, kl in repairs or [("rotate", 0.02)]
        for kind in kinds
    ]
    return ChunkCard(card_model(engine.space), 1, dict.fromkeys(kinds, limit), tuple(rows))


def gate(engine: TorchEngine, *repairs: tuple[str, float], **more: Any) -> Gate:
    return Gate(engine.space, card(engine, *repairs, **more))


class Pool:
    """``count`` documents behind a head of ``head`` tokens; ``ask`` puts some of them and a question together."""

    def __init__(self, count: int = 4, *, head: int = 24, sizes: Sequence[int] = (70, 96, 61, 130), seed: int = 0):
        self.head = tokens(head, 1000 + seed)
        self.documents = [tokens(sizes[i % len(sizes)], seed + i) for i in range(count)]

    def ask(self, order: Sequence[int], question: int = 12, *, seed: int = 50) -> tuple[Tokens, tuple[int, ...]]:
        pieces = [self.head, *(self.documents[i] for i in order), tokens(question, seed)]
        ends = np.cumsum([len(piece) for piece in pieces])[:-1]
        return np.concatenate(pieces).astype("<i4"), tuple(int(end) for end in ends)


def prefill(runtime: Runtime, asked: tuple[Tokens, tuple[int, ...]], lossy: str | None = LOSSY) -> Prefilled:
    """Computed, checked, given back, and stored."""
    ids, parts = asked
    done = runtime.prefill(ids, parts=parts, lossy=lossy)
    holds(done, ids)
    runtime.release(done.live, lossy=lossy)
    if runtime.store is not None:
        runtime.store.flush(30)
    return done


def holds(done: Prefilled, ids: Tokens) -> None:
    """Tokens add up, whatever was reused how."""
    usage = done.usage
    assert done.live.tokens.tolist() == ids.tolist()
    assert usage.prompt_tokens == len(ids)
    assert sum(usage.by_source.values()) == sum(usage.by_level.values()) == usage.cached_tokens < len(ids)
    assert all(n > 0 for n in (*usage.by_source.values(), *usage.by_level.values()))
    assert usage.cached_tokens + sum(one.end - one.start for one in done.computed) == len(ids)
    ends = [edge for one in done.computed for edge in (one.start, one.end)]
    assert ends == sorted(ends)
    assert 0 <= usage.moved <= usage.cached_tokens
    assert usage.mended == 0 or usage.gate
    assert not usage.moved or (usage.approx and usage.by_level["approx"] >= usage.moved)
    assert done.live.gaps == ()  # type: ignore[attr-defined]
    assert sum(run.end - run.start for run in done.live.levels) == len(ids)


def forget_memory(runtime: Runtime, store: TieredStore) -> None:
    """Nothing is left but what the store holds."""
    store.flush(30)
    runtime.pool.clear()

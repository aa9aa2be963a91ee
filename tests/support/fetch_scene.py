"""A prompt, an engine whose tokens take a told time, and a peer that holds a part; tests load it by path."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
import pytest

from benchmarks.nearby import Held, NearbyRemote, Pace, constant
from ctxreuse.cost import CostModel, Decision
from ctxreuse.cost import FetchPath as Link
from ctxreuse.engines.torch_hf import TorchEngine
from ctxreuse.identity.keys import Tokens
from ctxreuse.runtime import PrefillResult, Runtime, RuntimeOptions
from ctxreuse.store import BlockStore
from ctxreuse.testing.clock import FakeClock

BLOCK, VOCAB, EACH = 16, 256, 0.001
both = pytest.mark.parametrize("engine", ["llama", "gemma"], indirect=True)
ways = pytest.mark.parametrize("way", ["layers", "tail"])


def tokens(n: int, seed: int = 0) -> Tokens:
    return np.random.default_rng(seed).integers(3, VOCAB, n).astype("<i4")


class Timed:
    """The real engine, on a machine where each token takes a millisecond of the test's time."""

    def __init__(self, engine: TorchEngine, clock: FakeClock) -> None:
        self._engine, self._clock = engine, clock

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def prefill(self, context: Any, ids: Tokens) -> Any:
        logits = self._engine.prefill(context, ids)
        self._clock.advance(EACH * len(ids))
        return logits

    def step(self, batch: Any, *, limit: int | None = None, rows: Any = ()) -> Any:
        before = sum(context.n for context, _ in batch)
        found = self._engine.step(batch, limit=limit, rows=rows)
        self._clock.advance(EACH * (sum(context.n for context, _ in batch) - before))
        return found


class Chosen(CostModel):
    """A model that knows what computing takes and always decides for one way."""

    def __init__(self, way: str | None = None) -> None:
        super().__init__()
        self._way = way
        for n in (1, 16, 64, 200) * 3:
            self.prefill.observe(n, 0, EACH * n)
            self.prefill.observe(n, 100, EACH * n)

    def choose(self, held: int, reach: int, total: int, path: Link, layers: int) -> Decision:
        found = super().choose(held, reach, total, path, layers)
        way, self._way = self._way, None  # what is decided after a switch is its own business
        return Decision(way, found.predicted, found.ways, found.deadline) if way else found  # type: ignore[arg-type]


class Scene:
    """A runtime and a peer that holds ``held`` tokens of the same context, on the test's own time."""

    def __init__(
        self,
        engine: TorchEngine,
        held: Tokens,
        pace: Pace | None = None,
        *,
        way: str | None = None,
        offered: float = 1e9,
    ) -> None:
        self.clock, self.engine = FakeClock(), engine
        self.remote = NearbyRemote(
            Held(engine, held),
            pace or constant(1e9, 0.001),
            offered=offered,
            rtt=0.001,
            clock=self.clock.monotonic,
            sleep=lambda seconds: self.clock.advance(max(seconds, 0.002)),
        )
        self.cost = Chosen(way)

    def runtime(self, store: BlockStore | None = None, engine: Any = None) -> Runtime:
        timed: Any = engine or Timed(self.engine, self.clock)
        return Runtime(
            timed, store, RuntimeOptions(remote=self.remote, cost=self.cost, clock=self.clock.monotonic, rng=Random(5))
        )

    def prefill(self, ids: Tokens, runtime: Runtime | None = None) -> tuple[PrefillResult, float]:
        at = self.clock.monotonic()
        done = (runtime or self.runtime()).prefill(ids)
        return done, self.clock.monotonic() - at


def right(engine: TorchEngine, done: PrefillResult, ids: Tokens) -> None:
    np.testing.assert_allclose(done.logits, engine.prefill(engine.new_context(), ids), atol=2e-5)
    usage = done.usage
    assert done.context.tokens.tolist() == ids.tolist()
    assert usage.cached_tokens == sum(usage.tokens.by_source.values()) < usage.prompt_tokens == len(ids)
    # It goes on as a context that was never fetched.
    more = engine.prefill(done.context, ids[:3])
    np.testing.assert_allclose(more, engine.prefill(engine.new_context(), np.concatenate([ids, ids[:3]])), atol=2e-5)

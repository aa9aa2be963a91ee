"""What goes wrong between the plan and the answer: a gap is computed, a source is forgotten, the request goes on."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from ctxreuse.block.format import parse
from ctxreuse.engines.chunks import RelocationError
from ctxreuse.engines.torch_hf import TorchEngine
from ctxreuse.engines.torch_hf.chunks.ops import TorchChunkOps
from ctxreuse.errors import EngineError, StoreError
from ctxreuse.reuse import ChunkLocation, plan
from ctxreuse.runtime import Runtime, RuntimeOptions
from ctxreuse.store import TieredStore, open_store
from support.shuffled import MAX_KL, Pool, forget_memory, gate, holds, prefill

FORWARD, BACKWARD = (0, 1, 2, 3), (3, 2, 1, 0)


@pytest.fixture
def store() -> Iterator[TieredStore]:
    with open_store(None, host_bytes=1 << 27) as opened:
        yield opened
        opened.check()


@pytest.fixture
def pool() -> Any:
    return Pool()


@pytest.fixture
def runtime(llama: TorchEngine, store: TieredStore, pool: Any) -> Runtime:
    """One that has read the documents, and has nothing of them in memory."""
    made = Runtime(llama, store, RuntimeOptions(gate=gate(llama)))
    prefill(made, pool.ask(FORWARD))
    forget_memory(made, store)
    return made


def planned(runtime: Runtime, store: TieredStore, asked: Any) -> list[Any]:
    ids, parts = asked
    return plan(store, runtime.chunk_reuse.salt, runtime.engine.space, ids, 16, parts, MAX_KL)


def right(runtime: Runtime, done: Any, atol: float = 2e-4) -> None:
    full = runtime.engine.prefill(runtime.engine.new_context(), done.context.tokens)
    np.testing.assert_allclose(done.logits, full, atol=atol)


@pytest.mark.parametrize("what", ["plane", "ids", "header"])
def test_a_damaged_source_is_dropped_and_its_tokens_computed(
    runtime: Runtime, store: TieredStore, pool: Any, what: str
) -> None:
    asked = pool.ask(BACKWARD)
    runs = planned(runtime, store, asked)
    key = runs[1].sources[0].keys[0]
    data = bytearray(store._host.get(("block", key)).data)  # type: ignore[union-attr]
    view = parse(data)
    if what == "plane":
        data[bytes(data).index(view.plane(2, "v")) + 1000] ^= 1
    elif what == "ids":
        data[bytes(data).index(view.header.tokens)] ^= 1
    else:
        data[9] ^= 255
    store._host._values[("block", key)] = store._host._values[("block", key)]._replace(data=memoryview(data))
    done = prefill(runtime, asked)
    assert done.usage.gate_decision == "kl-0.020 by rotate"
    whole = sum(run.end - run.start for run in runs)
    assert 0 < done.usage.tokens.relocated < whole
    assert done.usage.tokens.recomputed == 0
    assert any(reason == "corrupt" for reason in store.stats().dropped) == (what == "plane")
    # Whatever led to it leads there no more, and the tokens were stored where they stand now.
    again = prefill(runtime, pool.ask((2, 0, 3, 1)))
    assert again.usage.tokens.relocated > 0
    assert np.isfinite(again.logits).all()


def test_a_source_that_went_between_plan_and_read(
    runtime: Runtime, store: TieredStore, pool: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = pool.ask(BACKWARD)
    gone = planned(runtime, store, asked)[0].sources[0].keys[0]
    reading = store.read

    @contextlib.contextmanager
    def read(max_kl: float | None = None) -> Iterator[Any]:
        store.drop(gone, "forgotten")
        with reading(max_kl) as reader:
            yield reader

    monkeypatch.setattr(store, "read", read)
    done = prefill(runtime, asked)
    monkeypatch.undo()
    assert done.usage.cached_tokens + sum(c.end - c.start for c in done.computed) == len(asked[0])
    assert all(gone not in run.sources[0].keys for run in planned(runtime, store, pool.ask((2, 0, 3, 1))))


def test_all_sources_gone_is_a_full_prefill(runtime: Runtime, store: TieredStore, pool: Any) -> None:
    asked = pool.ask(BACKWARD)
    for entry in list(store.walk()):
        store.drop(entry.key, "forgotten")
    done = prefill(runtime, asked)
    assert (done.usage.tokens.relocated, done.usage.gate_decision, done.usage.cached_tokens) == (0, "", 0)
    right(runtime, done, 2e-5)


def test_homes_that_lie_are_not_believed(runtime: Runtime, store: TieredStore, pool: Any, llama: TorchEngine) -> None:
    """An index of another's making: rows of other tokens, at other places, of blocks of other prompts."""
    from ctxreuse.identity.keys import chunk_keys
    from ctxreuse.reuse import chunks

    ids, parts = asked = pool.ask(BACKWARD)
    cut = chunks(ids, parts)
    names = chunk_keys(llama.space.digest, runtime.chunk_reuse.salt, ids, cut)
    keys = [entry.key for entry in store.walk()]
    for number, name in enumerate(names):
        home = ChunkLocation((keys[number % len(keys)],), 0, 16, (number % len(keys)) * llama.space.block_tokens)
        store.chunks.add_many([(name, home._replace(row=row)) for row in range(4)])
    done = prefill(runtime, asked)
    right(runtime, done, 2e-5)
    assert done.usage.tokens.relocated == 0
    # What is known of them now is where they stand since.
    assert {run.shift for run in planned(runtime, store, asked)} == {0}


class Failing:
    """An engine one of whose methods, or of its chunk operations, raises (once)."""

    def __init__(self, engine: TorchEngine, name: str, error: Exception, times: int = 1) -> None:
        self._engine, self._name, self._error, self.times = engine, name, error, times
        self.chunks = self

    def __getattr__(self, name: str) -> Any:
        of = self._engine.chunks if hasattr(TorchChunkOps, name) else self._engine
        if name != self._name:
            return getattr(of, name)

        def fail(*given: Any, **more: Any) -> Any:
            if not self.times:
                return getattr(of, name)(*given, **more)
            self.times -= 1
            raise self._error

        return fail


def failing(
    llama: TorchEngine, store: TieredStore, name: str, error: Exception, times: int = 1, *, repair: str = "rotate"
) -> Runtime:
    engine: Any = Failing(llama, name, error, times)
    return Runtime(engine, store, RuntimeOptions(gate=gate(llama, (repair, 0.02))))


@pytest.mark.parametrize("name", ["insert_rows", "deviations", "attention"])
def test_an_engine_that_cannot_says_so_and_computes(
    llama: TorchEngine, store: TieredStore, runtime: Runtime, pool: Any, name: str
) -> None:
    other = failing(llama, store, name, EngineError("this attention cannot"), repair="ask-5%")
    done = prefill(other, pool.ask(BACKWARD))
    assert done.usage.gate_decision == "refused: this attention cannot"
    assert (done.usage.tokens.relocated, done.usage.tokens.recomputed, done.usage.miss_reason) == (0, 0, "gate")
    right(runtime, done, 2e-5)


def test_every_move_that_fails_loses_one_source(
    llama: TorchEngine, store: TieredStore, runtime: Runtime, pool: Any
) -> None:
    runs = len(planned(runtime, store, pool.ask(BACKWARD)))
    other = failing(llama, store, "insert_rows", RelocationError("a plane is damaged", index=0, key=b"x" * 32), runs)
    done = prefill(other, pool.ask(BACKWARD))
    assert other.engine.times == 0  # type: ignore[attr-defined]
    assert (done.usage.tokens.relocated, done.usage.gate_decision) == (0, "")
    right(runtime, done, 2e-5)


def test_an_error_of_the_last_step_is_the_callers(
    llama: TorchEngine, store: TieredStore, runtime: Runtime, pool: Any
) -> None:
    other = failing(llama, store, "recompute_rows", EngineError("out of memory"))
    with pytest.raises(EngineError, match="out of memory"):
        prefill(other, pool.ask(BACKWARD))
    assert prefill(other, pool.ask(BACKWARD)).usage.tokens.relocated


@pytest.mark.parametrize("method", ["read", "entries"])
def test_a_store_that_fails_meanwhile(
    runtime: Runtime, store: TieredStore, pool: Any, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    before, ready = getattr(store, method), [False]

    def fail(*given: Any, **more: Any) -> Any:
        if ready[0]:
            raise StoreError("the disk is gone")
        return before(*given, **more)

    monkeypatch.setattr(store, method, fail)
    begin = runtime.chunk_reuse.begin

    def begun(*given: Any) -> Any:
        ready[0] = True
        return begin(*given)

    monkeypatch.setattr(runtime.chunk_reuse, "begin", begun)
    ids, parts = pool.ask(BACKWARD)
    done = runtime.prefill(runtime.request(ids, parts=parts, max_kl=MAX_KL))
    holds(done, ids)
    assert done.usage.tokens.relocated == 0
    assert done.usage.miss_reason == "unreadable"
    right(runtime, done, 2e-5)


def test_not_a_number_in_a_source_is_found_by_the_probe(
    llama: TorchEngine, store: TieredStore, runtime: Runtime, pool: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    far = TorchChunkOps.deviations

    def deviations(self: TorchChunkOps, *given: Any) -> Any:
        distance, length = far(self, *given)
        return np.full_like(distance, np.nan), length

    monkeypatch.setattr(TorchChunkOps, "deviations", deviations)
    done = prefill(runtime, pool.ask(BACKWARD))
    assert done.usage.tokens.relocated == 0
    assert "probes deviate" in done.usage.gate_decision
    right(runtime, done)

"""What goes wrong between the plan and the answer: a gap is computed, a source is forgotten, the request goes on."""

from __future__ import annotations

import contextlib
import runpy
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ctxreuse.block import parse
from ctxreuse.engines.moving import MoveError
from ctxreuse.engines.torch_hf import TorchEngine
from ctxreuse.errors import EngineError, StoreError
from ctxreuse.reuse import Home, plan
from ctxreuse.runtime import Runtime
from ctxreuse.store import TieredStore, open_store

S: Any = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("shuffled.py"))))
FORWARD, BACKWARD = (0, 1, 2, 3), (3, 2, 1, 0)


@pytest.fixture
def store() -> Iterator[TieredStore]:
    with open_store(None, host_bytes=1 << 27) as opened:
        yield opened
        opened.check()


@pytest.fixture
def pool() -> Any:
    return S.Pool()


@pytest.fixture
def runtime(llama: TorchEngine, store: TieredStore, pool: Any) -> Runtime:
    """One that has read the documents, and has nothing of them in memory."""
    made = Runtime(llama, store, gate=S.gate(llama))
    S.prefill(made, pool.ask(FORWARD))
    S.forget_memory(made, store)
    return made


def planned(runtime: Runtime, store: TieredStore, asked: Any) -> list[Any]:
    ids, parts = asked
    return plan(store, runtime.anywhere.salt, runtime.engine.space, ids, 16, parts, S.LOSSY)


def right(runtime: Runtime, done: Any, atol: float = 2e-4) -> None:
    full = runtime.engine.prefill(runtime.engine.start(), done.live.tokens)
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
    done = S.prefill(runtime, asked)
    assert done.usage.gate == "kl-0.020 by rotate"
    whole = sum(run.end - run.start for run in runs)
    assert 0 < done.usage.moved < whole
    assert done.usage.mended == 0
    assert any(reason == "corrupt" for reason in store.stats().dropped) == (what == "plane")
    # Whatever led to it leads there no more, and the tokens were stored where they stand now.
    again = S.prefill(runtime, pool.ask((2, 0, 3, 1)))
    assert again.usage.moved > 0
    assert np.isfinite(again.logits).all()


def test_a_source_that_went_between_plan_and_read(
    runtime: Runtime, store: TieredStore, pool: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = pool.ask(BACKWARD)
    gone = planned(runtime, store, asked)[0].sources[0].keys[0]
    reading = store.read

    @contextlib.contextmanager
    def read(lossy: str | None = None) -> Iterator[Any]:
        store.drop(gone, "forgotten")
        with reading(lossy) as reader:
            yield reader

    monkeypatch.setattr(store, "read", read)
    done = S.prefill(runtime, asked)
    monkeypatch.undo()
    assert done.usage.cached_tokens + sum(c.end - c.start for c in done.computed) == len(asked[0])
    assert all(gone not in run.sources[0].keys for run in planned(runtime, store, pool.ask((2, 0, 3, 1))))


def test_all_sources_gone_is_a_full_prefill(runtime: Runtime, store: TieredStore, pool: Any) -> None:
    asked = pool.ask(BACKWARD)
    for entry in list(store.walk()):
        store.drop(entry.key, "forgotten")
    done = S.prefill(runtime, asked)
    assert (done.usage.moved, done.usage.gate, done.usage.cached_tokens) == (0, "", 0)
    right(runtime, done, 2e-5)


def test_homes_that_lie_are_not_believed(runtime: Runtime, store: TieredStore, pool: Any, llama: TorchEngine) -> None:
    """An index of another's making: rows of other tokens, at other places, of blocks of other prompts."""
    from ctxreuse.keys import chunk_keys
    from ctxreuse.reuse import chunks

    ids, parts = asked = pool.ask(BACKWARD)
    cut = chunks(ids, parts)
    names = chunk_keys(llama.space.digest, runtime.anywhere.salt, ids, cut)
    keys = [entry.key for entry in store.walk()]
    for number, name in enumerate(names):
        home = Home((keys[number % len(keys)],), 0, 16, (number % len(keys)) * llama.space.block_tokens)
        store.chunks.add_many([(name, home._replace(row=row)) for row in range(4)])
    done = S.prefill(runtime, asked)
    right(runtime, done, 2e-5)
    assert done.usage.moved == 0
    # What is known of them now is where they stand since.
    assert {run.shift for run in planned(runtime, store, asked)} == {0}


class Failing:
    """The engine, but one of its methods raises (once)."""

    def __init__(self, engine: TorchEngine, name: str, error: Exception, times: int = 1) -> None:
        self._engine, self._name, self._error, self.times = engine, name, error, times

    def __getattr__(self, name: str) -> Any:
        if name != self._name:
            return getattr(self._engine, name)

        def fail(*given: Any, **more: Any) -> Any:
            if not self.times:
                return getattr(self._engine, name)(*given, **more)
            self.times -= 1
            raise self._error

        return fail

    def place(self, *given: Any, **more: Any) -> Any:
        return self.__getattr__("place")(*given, **more)

    deviations: Callable[..., Any] = lambda self, *given: self.__getattr__("deviations")(*given)
    attention: Callable[..., Any] = lambda self, *given, **options: self.__getattr__("attention")(*given, **options)
    mend: Callable[..., Any] = lambda self, *given, **more: self.__getattr__("mend")(*given, **more)


def failing(
    llama: TorchEngine, store: TieredStore, name: str, error: Exception, times: int = 1, *, repair: str = "rotate"
) -> Runtime:
    engine: Any = Failing(llama, name, error, times)
    return Runtime(engine, store, gate=S.gate(llama, (repair, 0.02)))


@pytest.mark.parametrize("name", ["place", "deviations", "attention"])
def test_an_engine_that_cannot_says_so_and_computes(
    llama: TorchEngine, store: TieredStore, runtime: Runtime, pool: Any, name: str
) -> None:
    other = failing(llama, store, name, EngineError("this attention cannot"), repair="ask-5%")
    done = S.prefill(other, pool.ask(BACKWARD))
    assert done.usage.gate == "refused: this attention cannot"
    assert (done.usage.moved, done.usage.mended, done.usage.missed) == (0, 0, "gate")
    right(runtime, done, 2e-5)


def test_every_move_that_fails_loses_one_source(
    llama: TorchEngine, store: TieredStore, runtime: Runtime, pool: Any
) -> None:
    runs = len(planned(runtime, store, pool.ask(BACKWARD)))
    other = failing(llama, store, "place", MoveError("a plane is damaged", index=0, key=b"x" * 32), runs)
    done = S.prefill(other, pool.ask(BACKWARD))
    assert other.engine.times == 0  # type: ignore[attr-defined]
    assert (done.usage.moved, done.usage.gate) == (0, "")
    right(runtime, done, 2e-5)


def test_an_error_of_the_last_step_is_the_callers(
    llama: TorchEngine, store: TieredStore, runtime: Runtime, pool: Any
) -> None:
    other = failing(llama, store, "mend", EngineError("out of memory"))
    with pytest.raises(EngineError, match="out of memory"):
        S.prefill(other, pool.ask(BACKWARD))
    assert S.prefill(other, pool.ask(BACKWARD)).usage.moved


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
    begin = runtime.anywhere.begin

    def begun(*given: Any) -> Any:
        ready[0] = True
        return begin(*given)

    monkeypatch.setattr(runtime.anywhere, "begin", begun)
    ids, parts = pool.ask(BACKWARD)
    done = runtime.prefill(ids, parts=parts, lossy=S.LOSSY)
    S.holds(done, ids)
    assert done.usage.moved == 0
    assert done.usage.missed == "unreadable"
    right(runtime, done, 2e-5)


def test_not_a_number_in_a_source_is_found_by_the_probe(
    llama: TorchEngine, store: TieredStore, runtime: Runtime, pool: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    far = TorchEngine.deviations

    def deviations(self: TorchEngine, *given: Any) -> Any:
        distance, length = far(self, *given)
        return np.full_like(distance, np.nan), length

    monkeypatch.setattr(TorchEngine, "deviations", deviations)
    done = S.prefill(runtime, pool.ask(BACKWARD))
    assert done.usage.moved == 0
    assert "probes deviate" in done.usage.gate
    right(runtime, done)

"""Contexts that wait are kept quantised, where their sessions allow it, before any is evicted."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import numpy as np
import pytest

from ctxreuse.engines.sampling import SamplingParams
from ctxreuse.engines.torch_hf import TorchEngine
from ctxreuse.identity.keys import Tokens
from ctxreuse.metrics import Metrics
from ctxreuse.reuse import InPlaceMeasurement, QualityGate
from ctxreuse.runtime import Runtime, RuntimeOptions
from support.shuffled import card
from support.tiny_models import engine_of
from support.tiny_text import tiny_engine

TOKENS = 600


def measured(engine: TorchEngine, *formats: tuple[str, float]) -> QualityGate:
    """As if rows in these formats had been measured to cost so much."""
    rows = tuple(InPlaceMeasurement(name, None, 896, kl, kl, 0.9, 0.01, 8) for name, kl in formats)  # type: ignore[arg-type]
    return QualityGate(engine.space, msgspec.structs.replace(card(engine), in_place=rows))


@pytest.fixture(scope="module")
def engine() -> TorchEngine:
    return tiny_engine(positions=2048)


@pytest.fixture
def metrics() -> Metrics:
    return Metrics()


@pytest.fixture
def runtime(engine: TorchEngine, metrics: Metrics) -> Iterator[Runtime]:
    """With room for two contexts as they are computed."""
    one = Runtime(engine, None, RuntimeOptions(gate=measured(engine, ("int8", 0.01))))
    one.warm(prompt(9))
    room = 2 * one.context_cache.nbytes
    one.close()
    options = RuntimeOptions(gate=measured(engine, ("int8", 0.01)), context_cache_bytes=room, metrics=metrics)
    found = Runtime(engine, None, options)
    yield found
    found.context_cache.check()
    found.close()


def prompt(number: int, count: int = TOKENS) -> Tokens:
    return np.random.default_rng(number).integers(3, 250, count).astype("<i4")


def resident(runtime: Runtime, max_kl: float | None, count: int = 6) -> list[int]:
    """Which of so many contexts go on in memory after all of them were computed."""
    for number in range(count):
        runtime.warm(runtime.request(prompt(number), max_kl=max_kl))
        runtime.context_cache.check()
    found = []
    for number in reversed(range(count)):
        longer = np.concatenate([prompt(number), prompt(99, 5)])
        if runtime.warm(runtime.request(longer, max_kl=max_kl)).cached_tokens == TOKENS:
            found.append(number)
    return found


def test_where_sessions_allow_it_more_contexts_stay(runtime: Runtime) -> None:
    assert resident(runtime, None) == [5, 4]
    runtime.context_cache.clear()
    assert resident(runtime, 0.005) == [5, 4]  # less than what was measured
    runtime.context_cache.clear()
    assert len(resident(runtime, 0.05)) > 4
    assert set(runtime.context_cache.levels()) <= {"exact", "approx~kl-0.010"}


def test_an_exact_request_takes_no_compressed_context(runtime: Runtime) -> None:
    resident(runtime, 0.05)
    assert "approx~kl-0.010" in runtime.context_cache.levels()
    usage = runtime.warm(runtime.request(np.concatenate([prompt(0), prompt(99, 5)])))
    assert not usage.approximate
    assert usage.cached_tokens == 0


def test_metrics_say_how_many_are_kept_at_which_level(runtime: Runtime, engine: TorchEngine, metrics: Metrics) -> None:
    def figures() -> dict[str, tuple[float, float]]:
        metrics.render()
        names = ("ctxreuse_resident_contexts", "ctxreuse_resident_tokens")
        return {level: tuple(metrics.read(name, level) for name in names) for level in ("exact", "approx")}

    resident(runtime, 0.05)
    levels = runtime.context_cache.levels()
    assert figures() == {"exact": levels.get("exact", (0, 0)), "approx": levels["approx~kl-0.010"]}
    # Another runtime of the same process adds its own.
    other = Runtime(engine, None, RuntimeOptions(metrics=metrics))
    other.warm(prompt(1))
    count, tokens = levels.get("exact", (0, 0))
    assert figures()["exact"] == (count + 1, tokens + TOKENS)
    other.close()
    runtime.context_cache.clear()
    assert figures()["approx"] == (0, 0)


def test_an_answer_goes_on_from_a_compressed_context_and_says_so(runtime: Runtime) -> None:
    resident(runtime, 0.05)
    first = next(one for one in runtime.context_cache._contexts if one.levels[0].level != "exact")
    held = first.n
    longer = np.concatenate([first.tokens, prompt(99, 5)])
    answer = runtime.complete(
        runtime.request(longer, max_kl=0.05), SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    )
    answer.drain()
    assert len(answer.tokens) == 4
    usage = answer.usage
    assert usage.approximate
    assert usage.tokens.by_level == {"approx": held}


def test_several_answers_fork_from_a_compressed_context(runtime: Runtime) -> None:
    resident(runtime, 0.05)
    first = next(one for one in runtime.context_cache._contexts if one.levels[0].level != "exact")
    longer = np.concatenate([first.tokens, prompt(99, 5)])
    greedy = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)
    two = runtime.complete_many(runtime.request(longer, max_kl=0.05), [greedy, greedy])
    for one in two:
        one.drain()
    assert two[0].tokens == two[1].tokens


def test_a_model_that_cannot_be_compressed_evicts_as_before() -> None:
    engine = engine_of("gemma3")  # with sliding windows
    gate = measured(engine, ("int8", 0.01))
    runtime = Runtime(engine, None, RuntimeOptions(gate=gate, context_cache_bytes=1 << 19))
    ids = [np.random.default_rng(n).integers(3, engine.space.vocab_size, 64).astype("<i4") for n in range(30)]
    for one in ids:
        runtime.warm(runtime.request(one, max_kl=0.05))
        runtime.context_cache.check()
    assert set(runtime.context_cache.levels()) <= {"exact"}
    runtime.close()

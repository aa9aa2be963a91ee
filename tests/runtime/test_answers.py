"""Several answers to one prompt: each is what a request alone gives, the prompt is computed once."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from ctxreuse.engines.sampling import SamplingParams
from ctxreuse.engines.torch_hf import TorchEngine
from ctxreuse.errors import EngineError, TokenRangeError
from ctxreuse.runtime import Runtime, RuntimeOptions
from ctxreuse.runtime.answers import pieces_in_turn
from ctxreuse.store import BlockStore
from support.examples import examples
from support.letters import Letters

BLOCK, VOCAB = 16, 512
both = pytest.mark.parametrize("engine", ["llama", "gemma"], indirect=True)


def tokens(n: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).integers(3, VOCAB, n).astype("<i4")


def runtime_of(engine: Any, store: BlockStore | None = None, **options: Any) -> Runtime:
    return Runtime(engine, store, RuntimeOptions(text=Letters(), **options))


def alone(engine: Any, ids: Any, sampling: SamplingParams) -> list[int]:
    completion = runtime_of(engine, context_cache_bytes=0).complete(ids, sampling)
    completion.drain()
    return completion.tokens


@both
@examples("heavy", suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    n=st.integers(1, 5),
    prompt=st.integers(1, 3 * BLOCK + 2),
    how=st.fixed_dictionaries(
        {
            "max_tokens": st.integers(0, 9),
            "temperature": st.sampled_from([0.0, 0.7, 1.5]),
            "top_p": st.sampled_from([1.0, 0.9]),
            "presence_penalty": st.sampled_from([0.0, 1.0]),
            "repetition_penalty": st.sampled_from([1.0, 1.3]),
            "seed": st.integers(0, 99),
            "ignore_eos": st.booleans(),
        }
    ),
)
def test_answer_i_is_that_of_a_request_alone_with_seed_plus_i(
    engine: TorchEngine, n: int, prompt: int, how: dict[str, Any]
) -> None:
    ids, sampling = tokens(prompt), SamplingParams(**how)
    runtime = runtime_of(engine)
    found = runtime.complete_many(ids, sampling.answers(n))
    for one in reversed(found):  # in any order
        one.drain()
    for i, one in enumerate(found):
        assert one.tokens == alone(engine, ids, SamplingParams(**how | {"seed": how["seed"] + i}))
    assert sum(one.usage.prompt_tokens for one in found) == prompt
    assert sum(one.usage.completion_tokens for one in found) == sum(len(one.tokens) for one in found)
    runtime.context_cache.check()
    assert not runtime.inflight.table.prompts()


@both
def test_what_every_answer_said_is_kept(engine: TorchEngine, store: BlockStore) -> None:
    ids, sampling = (
        tokens(3 * BLOCK + 5),
        SamplingParams(max_tokens=2 * BLOCK, temperature=1.0, seed=3, ignore_eos=True),
    )
    runtime = runtime_of(engine, store)
    found = runtime.complete_many(ids, sampling.answers(3))
    assert {number for number, _ in pieces_in_turn(found)} == {0, 1, 2}
    store.flush()
    for one in found:
        said = np.concatenate([ids, np.asarray(one.tokens[:-1], "<i4")])
        again = Runtime(engine, store, RuntimeOptions(context_cache_bytes=0)).prefill(said)
        assert again.usage.cached_tokens >= len(said) // BLOCK * BLOCK - (BLOCK if engine.space.needs_state else 0)
        expected = engine.prefill(engine.new_context(), said)
        np.testing.assert_allclose(again.logits, expected, atol=1e-5)


def test_one_prefill_and_common_passes_serve_all(llama: TorchEngine) -> None:
    runtime = runtime_of(llama)
    found = runtime.complete_many(tokens(40), SamplingParams(max_tokens=6, ignore_eos=True).answers(8))
    for one in found:
        assert next(one) is not None
    assert runtime.steps.stats().passes == 1, "all first tokens come of the prompt's logits"
    for _ in pieces_in_turn(found):
        pass
    assert all(len(one.tokens) == 6 for one in found)
    assert runtime.steps.stats().contexts == 1 + 8 * 5


def test_answers_end_one_by_one_and_a_cancelled_one_harms_no_other(llama: TorchEngine) -> None:
    ids, sampling = tokens(30), SamplingParams(max_tokens=9, temperature=1.0, seed=5, ignore_eos=True)
    runtime = runtime_of(llama)
    first, second, third = runtime.complete_many(ids, sampling.answers(3))
    next(first)
    first.close()
    next(second)
    next(second)
    second.cancel()
    second.drain()
    third.drain()
    assert [one.finish for one in (first, second, third)] == ["cancelled", "cancelled", "length"]
    assert (len(first.tokens), len(second.tokens)) == (1, 2)
    assert third.tokens == alone(llama, ids, SamplingParams(max_tokens=9, temperature=1.0, seed=7, ignore_eos=True))
    never = runtime.complete_many(ids, sampling.answers(2))
    for one in never:
        one.cancel()
    assert [one.drain() for one in never] == ["", ""]
    assert not runtime.inflight.table.prompts()


def test_threads_may_read_an_answer_each(llama: TorchEngine) -> None:
    ids, sampling = tokens(30), SamplingParams(max_tokens=12, temperature=1.0, seed=1, ignore_eos=True)
    found = runtime_of(llama).complete_many(ids, sampling.answers(4))
    threads = [threading.Thread(target=one.drain) for one in found]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, one in enumerate(found):
        assert one.tokens == alone(
            llama, ids, SamplingParams(max_tokens=12, temperature=1.0, seed=1 + i, ignore_eos=True)
        )


def test_an_error_of_the_prompt_is_that_of_every_answer(llama: TorchEngine) -> None:
    runtime = runtime_of(llama)
    found = runtime.complete_many(tokens(20), [SamplingParams(logit_bias={VOCAB: 1})] * 2)
    for one in found:
        with pytest.raises(TokenRangeError):
            next(one)
    assert [one.finish for one in found] == ["error", "error"]
    with pytest.raises(EngineError, match="no tokenizer"):
        Runtime(llama).complete_many(tokens(20), [SamplingParams()])

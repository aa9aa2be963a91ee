"""Reuse against recomputing: whatever the store does, the logits and the tokens are those of a full prefill."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from ctxreuse.engines.sampling import SamplingParams
from ctxreuse.engines.torch_hf import TorchEngine
from ctxreuse.errors import ContextTooLongError, EngineError, TokenRangeError
from ctxreuse.identity.keys import as_tokens
from ctxreuse.runtime import Runtime, RuntimeOptions
from ctxreuse.store import BlockStore
from support.examples import examples
from support.letters import Letters
from support.waiting import patient

BLOCK, VOCAB = 16, 512
both = pytest.mark.parametrize("engine", ["llama", "gemma"], indirect=True)


def tokens(n: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).integers(3, VOCAB, n).astype("<i4")


def plain(engine: TorchEngine, ids: Any) -> Any:
    return engine.prefill(engine.new_context(), ids)


def reused(engine: TorchEngine, store: BlockStore, ids: Any, **options: Any) -> Any:
    """Prefill in a runtime of its own, so that nothing comes from memory."""
    runtime = Runtime(engine, store, RuntimeOptions(context_cache_bytes=0, **options))
    done = runtime.prefill(ids)
    runtime.release(done)
    store.flush()
    return done


@both
def test_second_request_reuses_and_equals_full_prefill(engine: TorchEngine, store: BlockStore) -> None:
    context = tokens(100)
    first = reused(engine, store, context)
    assert first.usage.cached_tokens == 0
    assert first.usage.miss_reason == "absent"
    asked = np.concatenate([context, tokens(11, 1)])
    again = reused(engine, store, asked)
    assert again.usage.cached_tokens == 96
    assert again.usage.tokens.by_source == {"disk": 96}
    assert again.usage.miss_reason == ""
    np.testing.assert_allclose(again.logits, plain(engine, asked), atol=1e-5)


@both
def test_the_same_prompt_again_computes_at_least_one_token(engine: TorchEngine, store: BlockStore) -> None:
    ids = tokens(4 * BLOCK)
    reused(engine, store, ids)
    again = reused(engine, store, ids)
    # A state model can go back only to where a state was kept: the end, which leaves nothing to compute, or nowhere.
    assert again.usage.cached_tokens == (0 if engine.space.needs_state else 3 * BLOCK)
    np.testing.assert_allclose(again.logits, plain(engine, ids), atol=1e-5)


def test_memory_serves_the_next_turn_without_a_load(llama: TorchEngine, store: BlockStore) -> None:
    runtime = Runtime(llama, store)
    ids = tokens(70)
    runtime.release(runtime.prefill(ids))
    longer = np.concatenate([ids, tokens(9, 1)])
    done = runtime.prefill(longer)
    assert done.usage.tokens.by_source == {"device": 70}
    np.testing.assert_allclose(done.logits, plain(llama, longer), atol=1e-5)
    runtime.release(done)
    other = np.concatenate([ids[:60], tokens(9, 2)])
    done = runtime.prefill(other)
    assert done.usage.tokens.by_source == {"device": 60}
    np.testing.assert_allclose(done.logits, plain(llama, other), atol=1e-5)
    runtime.release(done)
    runtime.context_cache.check()
    assert len(runtime.context_cache) == 1


def test_pool_keeps_its_size_and_does_not_crop_a_long_context_for_a_short_one(llama: TorchEngine) -> None:
    runtime = Runtime(llama, None)
    long = tokens(200)
    runtime.release(runtime.prefill(long))
    assert runtime.prefill(long[:40]).usage.cached_tokens == 0
    assert runtime.prefill(long).usage.tokens.by_source == {"device": 199}
    small = Runtime(llama, None, RuntimeOptions(context_cache_bytes=1))
    small.release(small.prefill(long))
    assert len(small.context_cache) == 0
    assert small.prefill(long).usage.miss_reason == "no store"


@both
@examples("heavy", suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lengths=st.lists(st.tuples(st.integers(0, 90), st.integers(1, 60), st.integers(0, 3)), min_size=2, max_size=6))
def test_any_sequence_of_overlapping_prompts(
    engine: TorchEngine, tmp_path_factory: pytest.TempPathFactory, lengths: list[tuple[int, int, int]]
) -> None:
    """Prompts that share prefixes of any length, with and without memory: always the logits of a full prefill."""
    base = tokens(90)
    with BlockStore.open(tmp_path_factory.mktemp("store"), capacity=64 << 20) as store:
        runtime = Runtime(engine, store, RuntimeOptions(context_cache_bytes=1 << 20))
        for shared, fresh, seed in lengths:
            ids = np.concatenate([base[:shared], tokens(fresh, 10 + seed)])
            done = runtime.prefill(ids)
            usage = done.usage
            assert usage.cached_tokens == sum(usage.tokens.by_source.values()) < usage.prompt_tokens == len(ids)
            assert done.context.tokens.tolist() == ids.tolist()
            np.testing.assert_allclose(done.logits, plain(engine, ids), atol=1e-5)
            runtime.release(done)
            runtime.context_cache.check()
            store.flush()
            store.check()


def test_tenants_and_models_never_share(llama: TorchEngine, other_llama: TorchEngine, store: BlockStore) -> None:
    ids = tokens(100)
    reused(llama, store, ids, tenant="a")
    assert reused(llama, store, ids, tenant="b").usage.cached_tokens == 0
    theirs = reused(other_llama, store, ids, tenant="a")
    assert theirs.usage.cached_tokens == 0
    np.testing.assert_allclose(theirs.logits, plain(other_llama, ids), atol=1e-5)
    assert reused(llama, store, ids, tenant="a").usage.cached_tokens == 96


@both
def test_eviction_costs_time_only(engine: TorchEngine, tmp_path: Path) -> None:
    ids = tokens(120)
    with BlockStore.open(tmp_path, capacity=1 << 20) as store:
        before = reused(engine, store, ids)
        for seed in range(30):
            reused(engine, store, tokens(120, 100 + seed))
        after = reused(engine, store, ids)
        assert store.stats().nbytes <= 1 << 20
    np.testing.assert_allclose(before.logits, after.logits, atol=1e-5)


def test_forget_drops_what_no_other_context_shares(llama: TorchEngine, store: BlockStore) -> None:
    shared = tokens(64)
    one, two = (np.concatenate([shared, tokens(48, seed)]) for seed in (1, 2))
    runtime = Runtime(llama, store)
    for ids in (one, two):
        runtime.release(runtime.prefill(ids))
    store.flush()
    assert runtime.forget(one) == 3
    assert len(runtime.context_cache) == 0
    assert store.match(runtime.keys(one)).tokens == 64
    assert store.match(runtime.keys(two)).tokens == 112
    assert runtime.forget(two) == 7
    assert store.match(runtime.keys(two)).tokens == 0


def test_bad_prompts(llama: TorchEngine, store: BlockStore) -> None:
    runtime = Runtime(llama, store)
    with pytest.raises(EngineError, match="empty"):
        runtime.prefill([])
    with pytest.raises(TokenRangeError, match="outside the vocabulary"):
        runtime.prefill([1, 2, VOCAB])
    with pytest.raises(TokenRangeError, match="outside the vocabulary"):
        Runtime(llama, store, RuntimeOptions(text=Letters())).complete(
            [1, 2, VOCAB], SamplingParams()
        )  # before the first token is asked for
    with pytest.raises(TokenRangeError):
        runtime.prefill([1, -2])
    with pytest.raises(ContextTooLongError, match="2,049 tokens and the model takes 2,048"):
        runtime.prefill(tokens(2049))
    one = runtime.prefill([5])
    np.testing.assert_allclose(one.logits, plain(llama, as_tokens([5])), atol=1e-6)
    whole = runtime.prefill(tokens(2048))
    assert whole.usage.prompt_tokens == 2048


def test_a_store_that_refuses_or_is_closed_costs_time_only(llama: TorchEngine, tmp_path: Path) -> None:
    ids = tokens(100)
    store = BlockStore.open(tmp_path, capacity=64 << 20)
    reused(llama, store, ids)
    runtime = Runtime(llama, store, RuntimeOptions(context_cache_bytes=0))
    store.close()
    done = runtime.prefill(ids)
    assert done.usage.cached_tokens == 0
    np.testing.assert_allclose(done.logits, plain(llama, ids), atol=1e-5)
    runtime.release(done)


def test_a_prefix_that_a_second_context_shares_has_its_state_from_then_on(
    gemma: TorchEngine, store: BlockStore
) -> None:
    """Three long questions over one document: the second pays for the state where they part, all later ones gain."""
    runtime = Runtime(gemma, store, RuntimeOptions(context_cache_bytes=0))
    document, end = tokens(100), 100 // BLOCK * BLOCK
    for seed, cached in ((1, 0), (2, 0), (3, end), (4, end)):
        asked = np.concatenate([document, tokens(40, seed)])
        done = runtime.prefill(runtime.request(asked, branches=(100,)))
        assert done.usage.cached_tokens == cached
        np.testing.assert_allclose(done.logits, plain(gemma, asked), atol=1e-5)
        runtime.release(done)
        store.flush()
    # The end of each, and where they part: nothing else, whatever turns end there.
    assert store.stats().states == 5
    store.check()


def test_a_state_in_memory_is_stored_once_its_place_is_proven(gemma: TorchEngine, store: BlockStore) -> None:
    """The first question left one at the end of the turn; the second is resumed there and has the store keep it."""
    runtime = Runtime(gemma, store)
    document, end = tokens(100), 100 // BLOCK * BLOCK
    first, second, third = (np.concatenate([document, tokens(40, seed)]) for seed in (1, 2, 3))
    runtime.release(runtime.prefill(runtime.request(first, branches=(100, 100, 3, 999))))
    store.flush()
    assert store.stats().states == 1
    again = runtime.prefill(second)
    assert again.usage.tokens.by_source == {"device": end}
    np.testing.assert_allclose(again.logits, plain(gemma, second), atol=1e-5)
    runtime.release(again)
    store.flush()
    runtime.context_cache.clear()
    last = runtime.prefill(third)
    assert last.usage.tokens.by_source == {"disk": end}
    np.testing.assert_allclose(last.logits, plain(gemma, third), atol=1e-5)


def test_closing_from_another_thread_while_a_token_is_made(llama: TorchEngine) -> None:
    """The context goes to the pool only when the token is there, and the iteration ends instead of failing."""
    runtime = Runtime(llama, None, RuntimeOptions(text=Letters()))
    entered, errors = threading.Event(), []
    advance = runtime.steps.advance_all

    def watched(*args: Any, **options: Any) -> Any:
        entered.set()
        return advance(*args, **options)

    def drain() -> None:
        try:
            completion.drain()
        except BaseException as error:
            errors.append(error)

    prompt, greedy = tokens(40), SamplingParams(max_tokens=200, ignore_eos=True)
    whole = runtime.complete(prompt, greedy)
    whole.drain()
    runtime.close()
    completion = runtime.complete(prompt, greedy)
    next(completion)
    runtime.steps.advance_all = watched  # type: ignore[method-assign]
    reader, closer = threading.Thread(target=drain), threading.Thread(target=completion.close)
    with runtime.steps.exclusive():
        reader.start()
        assert entered.wait(patient(30))
        closer.start()
    closer.join(patient(30))
    reader.join(patient(30))
    assert errors == []
    assert completion.finish == "cancelled"
    assert completion.tokens == whole.tokens[: len(completion.tokens)]
    runtime.context_cache.check()
    again = runtime.complete(prompt, greedy)
    assert again.drain() == whole.text

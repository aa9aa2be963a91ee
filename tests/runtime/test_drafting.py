"""Answers that are drafted are those of plain decoding, token for token."""

from __future__ import annotations

from itertools import count
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from ctxreuse.constrain import Grammar
from ctxreuse.engines.sampling import SamplingParams
from ctxreuse.engines.torch_hf import TorchEngine
from ctxreuse.runtime import Runtime, RuntimeOptions
from ctxreuse.runtime.answers import pieces_in_turn
from support.examples import examples
from support.letters import Letters

BLOCK, VOCAB = 16, 512


def tokens(n: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).integers(3, VOCAB, n).astype("<i4")


def drafting(engine: Any, **options: Any) -> Runtime:
    """A runtime whose passes all take the same time, whatever is in them: it drafts as much as it can."""
    ticks = count()
    return Runtime(
        engine, None, RuntimeOptions(text=Letters(), speculate="auto", clock=lambda: float(next(ticks)), **options)
    )


def plain(engine: Any, ids: Any, sampling: SamplingParams) -> list[int]:
    completion = Runtime(engine, None, RuntimeOptions(text=Letters())).complete(ids, sampling)
    completion.drain()
    return completion.tokens


@pytest.fixture(scope="module")
def warm(llama: TorchEngine) -> Runtime:
    """It has said much, so that there is much to draft from."""
    runtime = drafting(llama)
    for seed in range(4):
        runtime.complete(tokens(9, seed), SamplingParams(max_tokens=40, ignore_eos=True)).drain()
    return runtime


@examples("heavy", suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    n=st.integers(1, 4),
    seed=st.integers(0, 5),
    how=st.fixed_dictionaries(
        {
            "max_tokens": st.integers(0, 40),
            "temperature": st.sampled_from([0.0, 0.3, 1.0]),
            "top_k": st.sampled_from([0, 4]),
            "repetition_penalty": st.sampled_from([1.0, 1.1]),
            "seed": st.integers(0, 9),
            "logprobs": st.sampled_from([0, 2]),
            "ignore_eos": st.booleans(),
        }
    ),
)
def test_drafted_answers_are_those_of_plain_decoding(
    llama: TorchEngine, warm: Runtime, n: int, seed: int, how: dict[str, Any]
) -> None:
    ids, sampling = tokens(9, seed), SamplingParams(**how)
    found = warm.complete_many(ids, sampling.answers(n))
    list(pieces_in_turn(found))
    for one, own in zip(found, sampling.answers(n)):
        assert one.tokens == plain(llama, ids, own)
        assert 0 <= one.usage.tokens.accepted <= one.usage.tokens.drafted
    warm.context_cache.check()


def test_what_was_said_before_takes_fewer_passes(llama: TorchEngine, warm: Runtime) -> None:
    sampling, before = SamplingParams(max_tokens=40, ignore_eos=True), warm.steps.stats().passes
    completion = warm.complete(tokens(9, 1), sampling)
    completion.drain()
    used = completion.usage.tokens
    assert used.accepted >= 25
    assert warm.steps.stats().passes - before == 40 - used.accepted
    off = warm.complete(tokens(9, 1), SamplingParams(max_tokens=40, ignore_eos=True, speculate="off"))
    off.drain()
    assert off.tokens == completion.tokens
    assert off.usage.tokens.drafted == 0


def test_another_callers_text_is_never_drafted(llama: TorchEngine, warm: Runtime) -> None:
    sampling = SamplingParams(max_tokens=10, ignore_eos=True)
    for caller, right in (("stranger", 0), ("", 1)):
        request = warm.request(tokens(9, 1), caller=caller)
        completion = warm.complete(request, sampling)
        completion.drain()
        # What it repeats is what the others said, nothing within ten tokens.
        assert (completion.usage.tokens.accepted > 0) == right


def test_an_answer_that_is_closed_inside_a_draft_keeps_what_was_taken(llama: TorchEngine, warm: Runtime) -> None:
    ids, sampling = tokens(9, 2), SamplingParams(max_tokens=40, ignore_eos=True)
    expected = plain(llama, ids, sampling)
    for taken in (1, 7, 20):
        completion = warm.complete(ids, sampling)
        assert [next(completion).token for _ in range(taken)] == expected[:taken]
        completion.close()
        context = warm.context_cache._contexts[-1]
        assert context.tokens.tolist() == [*ids.tolist(), *expected[: taken - 1]]


def test_a_context_limit_ends_a_drafted_answer_where_it_ends_another(llama: TorchEngine, warm: Runtime) -> None:
    most = llama.space.max_tokens
    ids = np.tile(tokens(8, 3), most // 8)[: most - 20]
    sampling = SamplingParams(max_tokens=100, ignore_eos=True)
    completion = warm.complete(ids, sampling)
    completion.drain()
    assert completion.finish == "length"
    assert completion.tokens == plain(llama, ids, sampling)
    assert len(ids) + len(completion.tokens) == most + 1


def test_a_model_that_cannot_forget_is_not_drafted(gemma: TorchEngine) -> None:
    runtime, sampling = drafting(gemma), SamplingParams(max_tokens=20, ignore_eos=True)
    for _ in range(2):
        completion = runtime.complete(tokens(9), sampling)
        completion.drain()
        assert completion.usage.tokens.drafted == 0
    assert runtime.drafting is not None
    assert runtime.drafting.refused == "state"


def test_a_grammar_drafts_what_it_forces_and_cuts_what_it_forbids() -> None:
    from support.tiny_text import tiny_engine

    engine, grammar = tiny_engine(), Grammar.regex("(yes, |no, |maybe, ){6}the end of the list")
    text = engine.text
    assert text is not None
    ids = text.encode("yes, no, maybe, perhaps, yes, no, maybe, perhaps, " * 4)
    sampling = SamplingParams(max_tokens=90, grammar=grammar)
    unlike = Runtime(engine, None, RuntimeOptions()).complete(ids, sampling)
    unlike.drain()
    options = RuntimeOptions(speculate="auto", clock=iter(map(float, count())).__next__)
    drafted = Runtime(engine, None, options).complete(ids, sampling)
    drafted.drain()
    assert drafted.text == unlike.text
    assert drafted.usage.tokens.accepted > 15

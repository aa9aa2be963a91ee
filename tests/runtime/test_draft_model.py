"""A draft model's answers are those of plain decoding, and it is silent where it does not pay."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ctxreuse.config import EngineConfig
from ctxreuse.engines import open_draft_engine
from ctxreuse.engines.sampling import Sampler, SamplingParams
from ctxreuse.errors import ConfigError, EngineError
from ctxreuse.runtime import Runtime, RuntimeOptions
from ctxreuse.runtime.answers import pieces_in_turn
from support.tiny_models import engine_of
from support.tiny_text import tiny_engine

VOCAB = 256
SAMPLING = SamplingParams(max_tokens=60, ignore_eos=True)


def tokens(n: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).integers(0, VOCAB, n).astype("<i4")


class Work:
    """A clock of the work that engines do: a pass of the target takes 1 s, one of the draft model a tenth."""

    def __init__(self, target: Any, draft: Any) -> None:
        self.now, self.passes, self.drafts = 0.0, 0, 0
        step, prefill = target.step, draft.prefill

        def pass_of_target(*args: Any, **more: Any) -> Any:
            self.now, self.passes = self.now + 1, self.passes + 1
            return step(*args, **more)

        def pass_of_draft(*args: Any) -> Any:
            self.now, self.drafts = self.now + 0.1, self.drafts + 1
            return prefill(*args)

        target.step, draft.prefill = pass_of_target, pass_of_draft


def opened(draft_seed: int = 7) -> tuple[Runtime, Work, Any]:
    target, draft = tiny_engine(), tiny_engine(seed=draft_seed)
    work = Work(target, draft)
    options = RuntimeOptions(speculate="auto", draft=draft, clock=lambda: work.now)
    return Runtime(target, None, options), work, draft


def plain(ids: Any, sampling: SamplingParams = SAMPLING) -> list[int]:
    completion = Runtime(tiny_engine(), None, RuntimeOptions()).complete(ids, sampling)
    completion.drain()
    return completion.tokens


def is_drawn_plainly(ids: Any, answer: list[int], sampling: SamplingParams) -> bool:
    """Whether each token is the one that plain decoding draws there.

    A pass over several tokens rounds otherwise than one over each, so a draw next to a border between two tokens may
    fall on either side.
    """
    engine = tiny_engine()
    context, names = engine.new_context(), np.arange(258)
    exact, up, down = (Sampler(sampling, len(ids)) for _ in range(3))
    logits = engine.prefill(context, ids)
    for i, token in enumerate(answer):
        history = np.concatenate([ids, np.array(answer[:i], "<i4")])
        drawn = exact.next(logits, history)
        nudge = np.float32(1e-4)  # rounding is 2e-5 here
        near = (
            up.next(logits + nudge * (names <= token), history),
            down.next(logits + nudge * (names >= token), history),
        )
        if token not in (drawn, *near):
            return False
        logits = engine.prefill(context, np.array([token], "<i4"))
    return len(answer) == sampling.max_tokens


@pytest.mark.parametrize("draft_seed", [7, 1])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_answers_are_those_of_plain_decoding(draft_seed: int, temperature: float) -> None:
    runtime, _, _ = opened(draft_seed)
    sampling = SamplingParams(max_tokens=60, ignore_eos=True, temperature=temperature, seed=3)
    for seed in range(3):
        found = runtime.complete_many(tokens(20, seed), sampling.answers(2))
        list(pieces_in_turn(found))
        for one, own in zip(found, sampling.answers(2)):
            assert is_drawn_plainly(tokens(20, seed), one.tokens, own)
    runtime.context_cache.check()


def test_the_same_weights_are_nearly_always_right_and_counted_apart() -> None:
    runtime, work, _ = opened()
    for seed in range(3):
        before = work.passes
        completion = runtime.complete(tokens(20, seed), SAMPLING)
        completion.drain()
    used = completion.usage.tokens
    assert used.drafted_by_model > 30
    assert used.accepted_by_model >= 0.95 * used.drafted_by_model
    assert work.passes - before < 60 / 2
    assert completion.usage.seconds.saved > 20
    assert "a draft model drafted" in completion.why().text


def test_the_next_turn_continues_the_context_of_the_last() -> None:
    runtime, _, draft = opened()
    ids = tokens(400)
    first = runtime.complete(ids, SAMPLING)
    first.drain()
    seen = list[int]()
    prefill = draft.prefill
    draft.prefill = lambda context, new: (seen.append(len(new)), prefill(context, new))[1]
    again = runtime.complete(np.concatenate([ids, np.array(first.tokens, "<i4"), tokens(9, 5)]), SAMPLING)
    again.drain()
    assert again.usage.tokens.accepted_by_model > 10
    assert max(seen) < 100


def test_weights_that_are_never_right_fall_silent() -> None:
    runtime, work, _ = opened(1)
    for seed in range(4):
        completion = runtime.complete(tokens(20, seed), SAMPLING)
        completion.drain()
    drafts = work.drafts
    runtime.complete(tokens(20, 9), SAMPLING).drain()
    assert work.drafts - drafts <= 12


def test_a_draft_model_that_fails_leaves_the_answer_alone(caplog: pytest.LogCaptureFixture) -> None:
    runtime, _, draft = opened()

    def failing(*_: Any) -> Any:
        raise EngineError("it is broken")

    draft.prefill = failing
    completion = runtime.complete(tokens(20), SAMPLING)
    completion.drain()
    assert completion.tokens == plain(tokens(20))
    assert "it is broken" in caplog.text


def test_what_is_forgotten_goes_from_the_draft_models_memory_too() -> None:
    runtime, _, _ = opened()
    runtime.complete(tokens(20), SAMPLING).drain()
    assert runtime.drafting is not None
    cache = runtime.drafting.model.cache
    assert len(cache) == 1
    runtime.forget_texts()
    assert len(cache) == 0


def test_other_tokenizers_and_models_that_cannot_forget_are_refused() -> None:
    with pytest.raises(ConfigError, match="recurrent or windowed"):
        Runtime(tiny_engine(), None, RuntimeOptions(speculate="auto", draft=engine_of("gemma3")))
    with pytest.raises(ConfigError, match="another tokenizer"):
        Runtime(tiny_engine(), None, RuntimeOptions(speculate="auto", draft=engine_of("llama")))
    with pytest.raises(ConfigError, match="while speculate is off"):
        open_draft_engine("smollm2", EngineConfig())


@pytest.mark.model
def test_smollm2_drafts_for_itself(tmp_path: Path) -> None:
    from ctxreuse import LLM, models
    from ctxreuse.runtime.draft_model import DraftModel

    question = [{"role": "user", "content": "Name three things that float on water, and say why."}]
    with LLM("smollm2", engine="llama_cpp", threads=1) as llm:
        expected = llm.chat(question, max_tokens=48)
    file = str(models.get_gguf("smollm2"))
    with LLM("smollm2", engine="llama_cpp", threads=1, speculate="auto", draft_model=file) as llm:
        drafting = llm.runtime.drafting
        assert drafting is not None
        assert isinstance(drafting.model, DraftModel)
        # The same weights never pay: a token of the draft is said to cost nothing.
        drafting.model.clock = lambda: 0.0
        drafting.model._token.clear()
        drafting.model._token.append(1e-6)
        for _ in range(2):
            answer = llm.chat(question, max_tokens=48)
            assert answer.tokens == expected.tokens
            assert answer.usage.tokens.drafted_by_model == 0 or answer.usage.tokens.accepted_by_model > 0

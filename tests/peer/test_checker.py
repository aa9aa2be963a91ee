"""Answers that peers draft are those of plain decoding, whatever is drafted, in whatever passes."""

from __future__ import annotations

from itertools import count
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxreuse.bus.protocol.messages import DrawRule, JudgeRule, Verify
from ctxreuse.engines.digit import DigitQuestion
from ctxreuse.engines.sampling import Sampler, SamplingParams
from ctxreuse.identity.keys import prefix_keys
from ctxreuse.judge import likelihood
from ctxreuse.peer.serve.checker import AnswerChecker, sampling_of
from ctxreuse.peer.serve.engine import compute_blocks
from ctxreuse.store import TieredStore
from ctxreuse.testing.engine import random_tokens
from support.examples import examples
from support.tiny_models import engine_of
from support.tiny_text import tiny_engine

GREEDY = DrawRule()
SALT, OTHER = b"s" * 16, b"o" * 16


@pytest.fixture(scope="module")
def engine() -> Any:
    return engine_of("llama")


def request_of(engine: Any, ids: Any, count: int, **options: Any) -> Verify:
    return Verify(1, engine.space.digest, np.asarray(ids, "<i4").tobytes(), count, **options)


def plain(engine: Any, ids: Any, count: int, rule: DrawRule = GREEDY) -> list[int]:
    """The answer of the engine alone."""
    sampler, context, known = Sampler(sampling_of(rule), len(ids)), engine.new_context(), list(ids)
    logits = engine.prefill(context, np.asarray(ids, "<i4"))
    while True:
        known.append(sampler.next(logits, np.asarray(known, "<i4")))
        if len(known) == len(ids) + count:
            return known[len(ids) :]
        logits = engine.prefill(context, np.asarray(known[-1:], "<i4"))


def finish(checker: AnswerChecker, said: dict[int, list[int]]) -> list[Any]:
    """Step to the end of all answers; adds the tokens to ``said`` and returns the verdicts."""
    found = []
    while checker.busy:
        for number, verdict, _, failed in checker.step():
            assert not failed
            assert verdict is not None
            assert verdict.start == len(said.setdefault(number, []))
            said[number] += np.frombuffer(verdict.tokens, "<i4").tolist()
            found.append(verdict)
    return found


@examples("heavy")
@given(data=st.data(), seed=st.integers(0, 3), temperature=st.sampled_from([0.0, 0.8]))
def test_answers_are_those_of_plain_decoding(engine: Any, data: st.DataObject, seed: int, temperature: float) -> None:
    checker = AnswerChecker(engine)
    said: dict[int, list[int]] = {}
    truth: dict[int, list[int]] = {}
    for number in range(1, data.draw(st.integers(1, 3)) + 1):
        ids = random_tokens(engine, 20 + 3 * number, seed)
        length, rule = data.draw(st.integers(1, 24)), DrawRule(temperature=temperature, seed=number)
        truth[number] = plain(engine, ids, length, rule)
        width = data.draw(st.integers(0, 8))
        checker.open(number, [SALT, OTHER][number % 2], request_of(engine, ids, length, width=width, rule=rule), 0)
    while checker.busy:
        for number, tokens in truth.items():
            start = data.draw(st.integers(0, len(tokens)))
            draft = np.array(tokens[start : start + data.draw(st.integers(0, 9))], "<i4")
            if len(draft) and data.draw(st.booleans()):
                draft[data.draw(st.integers(0, len(draft) - 1))] = 5
            if len(draft):
                checker.draft(number, start, draft)
        for number, verdict, _, failed in checker.step():
            assert not failed
            assert verdict is not None
            assert verdict.start == len(said.setdefault(number, []))
            assert verdict.accepted <= min(verdict.drafted, len(verdict.tokens) // 4)
            said[number] += np.frombuffer(verdict.tokens, "<i4").tolist()
    assert said == truth


def test_a_right_draft_takes_fewer_passes_and_a_late_one_counts_from_where_it_is_new(engine: Any) -> None:
    ids = random_tokens(engine, 30, 1)
    tokens, said = plain(engine, ids, 17), dict[int, list[int]]()
    checker = AnswerChecker(engine)
    checker.open(1, SALT, request_of(engine, ids, 17, width=16, draft=np.array(tokens[:8], "<i4").tobytes()), 0)
    first = checker.step()[0].verdict
    assert first is not None
    assert (first.drafted, first.accepted, len(first.tokens) // 4, first.rows) == (8, 8, 9, 0)
    said[1] = np.frombuffer(first.tokens, "<i4").tolist()
    checker.draft(1, 4, np.array(tokens[4:], "<i4"))  # five of them are known by now
    (second,) = finish(checker, said)
    assert (second.drafted, second.accepted, second.rows, second.contexts) == (7, 7, 8, 1)
    assert said[1] == tokens


def test_a_context_stays_for_its_own_tenant_and_what_is_evicted_is_found_in_the_store(engine: Any) -> None:
    ids, size, now = random_tokens(engine, 50, 2), engine.space.block_tokens, count()
    store, blocks = TieredStore(16 << 20), 50 // engine.space.block_tokens
    keys = prefix_keys(engine.space.digest, SALT, ids, size)
    for made in compute_blocks(engine, SALT, ids[: blocks * size], 0):
        store.put(keys[made.number], made.data)
    store.flush()
    tokens, cached = plain(engine, ids, 8), []
    checker = AnswerChecker(engine, store, clock=lambda: float(next(now)))
    for salt, audited in ((OTHER, 0), (SALT, blocks), (SALT, blocks), (OTHER, 0)):
        said: dict[int, list[int]] = {}
        checker.open(1, salt, request_of(engine, ids, 8), audited)
        cached.append(finish(checker, said)[-1].cached)
        assert said[1] == tokens
    # A stranger computes all; then the store, the context in memory, and the stranger's own one are found.
    assert cached == [0, blocks * size, 49, 49]
    for _ in range(400):
        next(now)
    checker.open(1, SALT, request_of(engine, ids, 8), blocks)
    assert finish(checker, {})[-1].cached == blocks * size  # it had expired
    store.close()


def test_drafts_without_a_meaning_count_for_nothing(engine: Any) -> None:
    ids = random_tokens(engine, 20, 3)
    checker, said = AnswerChecker(engine), dict[int, list[int]]()
    checker.open(1, SALT, request_of(engine, ids, 6, width=8, draft=np.array([-1], "<i4").tobytes()), 0)
    for start, draft in ((7, [1]), (1 << 61, [1]), (0, [engine.space.vocab_size]), (0, [-5, 1])):
        checker.draft(1, start, np.array(draft, "<i4"))
    checker.draft(9, 0, np.array([1], "<i4"))  # no such answer
    assert sum(verdict.drafted for verdict in finish(checker, said)) == 0
    assert said[1] == plain(engine, ids, 6)


def test_an_answer_ends_at_a_stop_and_where_the_model_does(engine: Any) -> None:
    ids = random_tokens(engine, 20, 4)
    tokens = plain(engine, ids, 12)
    checker, said = AnswerChecker(engine), dict[int, list[int]]()
    draft = np.array(tokens, "<i4").tobytes()
    checker.open(1, SALT, request_of(engine, ids, 12, width=16, stops=(tokens[5],), draft=draft), 0)
    finish(checker, said)
    assert said[1] == tokens[: tokens.index(tokens[5]) + 1]
    room = random_tokens(engine, engine.space.max_tokens - 2, 5)
    checker.open(2, SALT, request_of(engine, room, 50, width=4), 0)
    finish(checker, said)
    assert len(said[2]) == 3  # the last token needs no position


def test_a_rule_is_that_of_the_engines(engine: Any) -> None:
    assert sampling_of(DrawRule()) == SamplingParams(seed=0)
    assert set(DrawRule.__struct_fields__) <= set(SamplingParams.__struct_fields__)


@pytest.mark.parametrize("prompt", [30, 300])
@pytest.mark.parametrize("kind", ["likelihood", "digit"])
def test_a_step_is_taken_or_written_anew_as_its_score_says(kind: Any, prompt: int) -> None:
    engine = tiny_engine(positions=1024)
    ids, step = random_tokens(engine, prompt, 4), random_tokens(engine, 12, 5)
    context = engine.new_context()
    rows = engine.step([(context, np.concatenate([ids, step[:-1]]))], limit=None, rows=[len(step)])[0]
    assert isinstance(rows, np.ndarray)
    if kind == "likelihood":
        score = likelihood(rows, step)
    else:
        question = DigitQuestion(engine.text)
        score = question.score(engine.prefill(context, np.concatenate([step[-1:], question.ids])))
    own, checker = plain(engine, ids, 15), AnswerChecker(engine)
    for threshold, expected in ((score - 0.01, step.tolist()), (score + 0.01, own), (None, own)):
        said = dict[int, list[int]]()
        judge = JudgeRule(kind, threshold)
        checker.open(1, SALT, request_of(engine, ids, 15, draft=step.tobytes(), judge=judge), 0)
        found = finish(checker, said)
        assert said[1] == expected
        (judged,) = (one for one in found if one.score is not None)
        assert judged.score == pytest.approx(score, abs=1e-3)
        assert (judged.drafted, judged.accepted) == (12, 12 if expected is not own else 0)
    without = AnswerChecker(engine_of("llama"))
    without.open(1, SALT, request_of(engine, ids, 15, draft=step.tobytes(), judge=JudgeRule("digit", 1.0)), 0)
    assert "no tokenizer" in without.step()[0].failed
    # Its context goes on behind it: only what is new is computed.
    checker.open(1, SALT, request_of(engine, np.concatenate([ids, own]), 3), 0)
    assert finish(checker, {})[-1].cached == (prompt + 14 if prompt > engine.space.block_tokens else 0)

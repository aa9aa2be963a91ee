"""The decode loop: what ends an answer, what is fed back, what is reported of each token."""

import subprocess
import sys

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from ctxreuse.engines.generate import generate
from ctxreuse.engines.sampling import SamplingParams, log_softmax
from ctxreuse.engines.text import HFText
from ctxreuse.errors import TokenRangeError
from ctxreuse.testing.engine import random_tokens


@pytest.fixture(scope="module")
def engine(engine_of):
    return engine_of("llama")


def words(stops=frozenset()):
    """512 tokens that are words "w0 ", "w1 ", …"""
    tokenizer = Tokenizer(models.WordLevel({f"w{i} ": i for i in range(512)}, unk_token="w0 "))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.Fuse()
    return HFText(tokenizer, stop_ids=stops)


def answer(engine, sampling, stops=frozenset()):
    context = engine.new_context()
    logits = engine.prefill(context, random_tokens(engine, 20))
    return context, list(generate(engine, words(stops), context, logits, sampling))


def test_greedy_tokens_are_the_argmax_of_each_step(engine):
    context = engine.new_context()
    logits = engine.prefill(context, random_tokens(engine, 20))
    expected = []
    for _ in range(8):
        expected.append(int(logits.argmax()))
        logits = engine.prefill(context, expected[-1:])
    context, pieces = answer(engine, SamplingParams(max_tokens=8))
    assert [p.token for p in pieces] == expected
    assert "".join(p.text for p in pieces) == "".join(f"w{t} " for t in expected)
    assert [p.finish for p in pieces] == [None] * 7 + ["length"]
    assert context.n == 20 + 7, "the last token is not fed to the engine"


def test_banned_tokens_never_come_and_unknown_ones_are_refused(engine):
    _, free = answer(engine, SamplingParams(max_tokens=8))
    _, banned = answer(engine, SamplingParams(max_tokens=8, logit_bias=dict.fromkeys((p.token for p in free), -100)))
    assert not {p.token for p in banned} & {p.token for p in free}
    with pytest.raises(TokenRangeError, match="logit_bias names token 512, and the model has 512 tokens"):
        answer(engine, SamplingParams(logit_bias={512: 1}))


def test_an_end_marker_ends_and_is_not_fed_or_shown(engine):
    _, free = answer(engine, SamplingParams(max_tokens=8, temperature=1.0, seed=4))
    tokens = [p.token for p in free]
    end = next(t for i, t in enumerate(tokens) if i >= 3 and t not in tokens[:i])
    count = tokens.index(end)
    context, pieces = answer(engine, SamplingParams(max_tokens=8, temperature=1.0, seed=4), frozenset({end}))
    assert [p.token for p in pieces] == tokens[: count + 1]
    assert pieces[-1].finish == "stop"
    assert "".join(p.text for p in pieces) == "".join(f"w{t} " for t in tokens[:count])
    assert context.n == 20 + count
    _, on = answer(engine, SamplingParams(max_tokens=8, temperature=1.0, seed=4, ignore_eos=True), frozenset({end}))
    assert [p.token for p in on] == tokens


def test_a_stop_string_across_tokens_cuts_the_text_before_it(engine):
    _, free = answer(engine, SamplingParams(max_tokens=10, temperature=1.0, seed=4))
    tokens = [p.token for p in free]
    text = "".join(f"w{t} " for t in tokens)
    stop = f"{str(tokens[4])[-1]} w{tokens[5]} w"
    _, pieces = answer(engine, SamplingParams(max_tokens=10, temperature=1.0, seed=4, stop=("never", stop)))
    shown = "".join(p.text for p in pieces)
    assert shown == text[: text.index(stop)]
    assert pieces[-1].finish == "stop_string"
    assert all(p.finish is None for p in pieces[:-1])


def test_text_held_back_comes_out_at_the_end(engine):
    _, free = answer(engine, SamplingParams(max_tokens=5))
    text = "".join(p.text for p in free)
    _, pieces = answer(engine, SamplingParams(max_tokens=5, stop=(text[-4:] + "!",)))
    assert "".join(p.text for p in pieces) == text


def test_logprobs_are_of_the_models_own_distribution(engine):
    context = engine.new_context()
    logits = engine.prefill(context, random_tokens(engine, 20))
    how = SamplingParams(max_tokens=1, temperature=0.5, seed=1, repetition_penalty=1.3, logprobs=3)
    (piece,) = generate(engine, words(), context, logits, how)
    scores = log_softmax(logits)
    assert piece.logprob == pytest.approx(scores[piece.token])
    assert [i for i, _ in piece.top] == np.argsort(-scores)[:3].tolist()
    assert [p for _, p in piece.top] == pytest.approx(np.sort(scores)[::-1][:3].tolist())
    (piece,) = generate(engine, words(), context, logits, SamplingParams(max_tokens=1))
    assert (piece.logprob, piece.top) == (None, ())


def test_a_full_context_ends_with_length(engine_of):
    engine = engine_of("gpt2")
    context = engine.new_context()
    logits = engine.prefill(context, random_tokens(engine, engine.space.max_tokens - 3))
    pieces = list(generate(engine, words(), context, logits, SamplingParams(max_tokens=100)))
    assert len(pieces) == 4
    assert pieces[-1].finish == "length"
    assert context.n == engine.space.max_tokens


def test_any_number_of_tokens_may_be_wanted(engine_of):
    """Memory is taken for what the model has positions for, not for what is requested."""
    engine = engine_of("gpt2")
    context = engine.new_context()
    logits = engine.prefill(context, np.arange(5, 1020, dtype=np.int32) % 500)
    pieces = list(generate(engine, words(), context, logits, SamplingParams(max_tokens=10**15, ignore_eos=True)))
    assert len(pieces) == 1024 - 1015 + 1
    assert pieces[-1].finish == "length"


def test_no_tokens_wanted_gives_none(engine):
    context, pieces = answer(engine, SamplingParams(max_tokens=0))
    assert pieces == []
    assert context.n == 20


def test_a_generation_that_is_left_can_be_taken_up(engine):
    _, whole = answer(engine, SamplingParams(max_tokens=6))
    context = engine.new_context()
    logits = engine.prefill(context, random_tokens(engine, 20))
    run = generate(engine, words(), context, logits, SamplingParams(max_tokens=6))
    first = [next(run) for _ in range(3)]
    run.close()
    assert context.n == 22
    logits = engine.prefill(context, [first[-1].token])
    rest = list(generate(engine, words(), context, logits, SamplingParams(max_tokens=3)))
    assert [p.token for p in first + rest] == [p.token for p in whole]


def test_the_loop_needs_no_torch():
    code = (
        "import sys, ctxreuse.engines, ctxreuse.engines.generate, ctxreuse.engines.text, ctxreuse.testing.engine;"
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'tokenizers', 'jinja2')))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)

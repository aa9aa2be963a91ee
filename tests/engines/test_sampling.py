"""The sampler against the definitions of its parts, and its determinism."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxreuse.engines.sampling import Sampler, SamplingParams, SamplingSettings, log_softmax
from ctxreuse.errors import ConfigError, EngineError

NONE = np.zeros(0, np.int32)


def logits(seed=0, vocab=50):
    return np.random.default_rng(seed).normal(size=vocab).astype(np.float32) * 3


def draws(sampling, scores, count=400):
    return [Sampler(SamplingParams(**{**sampling, "seed": seed})).next(scores, NONE) for seed in range(count)]


def test_greedy_takes_the_largest_and_the_first_of_equals():
    assert Sampler(SamplingParams()).next(np.array([1, 5, 5, 2], np.float32), NONE) == 1


def test_a_seed_fixes_all_draws_and_none_depends_on_another_sampler():
    how = SamplingParams(temperature=1.0, seed=11)
    alone = Sampler(how)
    expected = [alone.next(logits(i), NONE) for i in range(20)]
    first, second = Sampler(how), Sampler(SamplingParams(temperature=1.0, seed=12))
    got = []
    for i in range(20):
        got.append(first.next(logits(i), NONE))
        second.next(logits(i), NONE)
    assert got == expected
    assert len(set(expected)) > 5
    late = Sampler(how)
    late.next(logits(99), NONE)  # another first draw does not move the second
    assert late.next(logits(1), NONE) == expected[1]


def test_without_a_seed_one_is_made_up_that_repeats_the_draws():
    free = Sampler(SamplingParams(temperature=1.0))
    expected = [free.next(logits(i), NONE) for i in range(10)]
    again = Sampler(SamplingParams(temperature=1.0, seed=free.seed))
    assert [again.next(logits(i), NONE) for i in range(10)] == expected


def test_logit_bias_comes_before_penalties_and_temperature():
    scores = np.array([3.0, 2.0, 1.0, 0.0], np.float32)
    assert Sampler(SamplingParams(logit_bias={0: -100})).next(scores, NONE) == 1
    assert Sampler(SamplingParams(logit_bias={3: 100})).next(scores, NONE) == 3
    assert Sampler(SamplingParams(logit_bias={2: 1.5, 0: -1})).next(scores, NONE) == 2
    np.testing.assert_array_equal(scores, [3, 2, 1, 0])
    banned = draws({"temperature": 2.0, "logit_bias": {1: -100}}, scores)
    assert set(banned) == {0, 2, 3}
    # 6 / 4 < 2: had the penalty come first, it would be 3 / 4 + 3 > 2.
    biased = SamplingParams(logit_bias={0: 3}, repetition_penalty=4)
    assert Sampler(biased).next(scores, np.array([0], np.int32)) == 1
    with pytest.raises(ConfigError, match="from -100 to 100"):
        SamplingParams(logit_bias={1: -100.5})
    with pytest.raises(ConfigError, match="logit_bias"):
        SamplingParams(logit_bias={-1: 3})


def test_frequencies_follow_the_softmax_at_the_temperature():
    scores = np.array([0.0, 1.0, 2.0, -1.0], np.float32)
    for temperature in (0.7, 1.5):
        wanted = np.exp(scores / temperature) / np.exp(scores / temperature).sum()
        counts = np.bincount(draws({"temperature": temperature}, scores, 3000), minlength=4) / 3000
        assert np.abs(counts - wanted).max() < 0.04  # over 4 standard deviations


def test_top_k_top_p_and_min_p_keep_what_they_should():
    scores = np.log(np.array([0.5, 0.25, 0.15, 0.07, 0.03])).astype(np.float32)
    assert set(draws({"temperature": 1.0}, scores)) == {0, 1, 2, 3, 4}
    assert set(draws({"temperature": 1.0, "top_k": 2}, scores)) == {0, 1}
    assert set(draws({"temperature": 1.0, "top_k": 1}, scores)) == {0}
    assert set(draws({"temperature": 1.0, "top_p": 0.7}, scores)) == {0, 1}
    assert set(draws({"temperature": 1.0, "top_p": 0.8}, scores)) == {0, 1, 2}
    assert set(draws({"temperature": 1.0, "top_p": 1e-9}, scores)) == {0}
    assert set(draws({"temperature": 1.0, "min_p": 0.2}, scores)) == {0, 1, 2}
    assert set(draws({"temperature": 1.0, "min_p": 1.0}, scores)) == {0}


def test_penalties_by_their_definitions():
    scores = np.array([2.0, 1.9, -1.0, -1.05], np.float32)
    prompt = np.array([0], np.int32)
    # Repetition divides positive and multiplies negative scores, prompt included.
    assert Sampler(SamplingParams(repetition_penalty=1.2), prompt=1).next(scores, prompt) == 1
    negative = np.array([-1.0, -1.05], np.float32)
    assert Sampler(SamplingParams(repetition_penalty=1.2), prompt=1).next(negative, prompt) == 1
    # Presence and frequency look at the answer only.
    assert Sampler(SamplingParams(presence_penalty=1.0), prompt=1).next(scores, prompt) == 0
    assert Sampler(SamplingParams(presence_penalty=1.0), prompt=0).next(scores, prompt) == 1
    twice = np.array([0, 0], np.int32)
    assert Sampler(SamplingParams(frequency_penalty=0.06)).next(scores, twice) == 1
    assert Sampler(SamplingParams(frequency_penalty=0.04)).next(scores, twice) == 0
    assert scores[0] == 2.0


@given(st.integers(0, 2**128 - 1), st.floats(0.01, 5), st.floats(0.01, 1), st.integers(0, 60), st.floats(0, 1))
def test_every_draw_is_a_token(seed, temperature, top_p, top_k, min_p):
    how = SamplingParams(seed=seed, temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p)
    assert 0 <= Sampler(how).next(logits(), NONE) < 50


def test_log_softmax_sums_to_one():
    assert np.exp(log_softmax(logits() + 1000)).sum() == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("bad", [[np.nan, 1.0], [-np.inf, -np.inf], [np.inf, 0.0]])
def test_logits_that_are_no_numbers_are_an_error(bad):
    with pytest.raises(EngineError, match="not finite"):
        Sampler(SamplingParams()).next(np.array(bad, np.float32), NONE)


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": -1},
        {"temperature": float("nan")},
        {"top_p": 0},
        {"top_p": 1.1},
        {"top_k": -1},
        {"min_p": 2},
        {"repetition_penalty": 0},
        {"presence_penalty": float("inf")},
        {"seed": -1},
        {"stop": ("",)},
        {"max_tokens": -1},
        {"logprobs": -1},
    ],
)
def test_values_without_a_meaning_are_refused(bad):
    with pytest.raises(ConfigError, match=next(iter(bad))):
        SamplingParams(**bad)


@pytest.mark.parametrize(
    "wrong",
    [{"stop": "END"}, {"stop": ("",)}, {"max_tokens": 1.5}, {"top_k": 1.5}, {"logprobs": -1}, {"temperature": -1}]
    + [{name: float("nan")} for name in ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty")],
)
def test_values_without_a_meaning_are_refused_before_anything_is_computed(wrong):
    """A bare string would have stopped at each of its letters."""
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        SamplingParams(**wrong)


@pytest.mark.parametrize("temperature", [5e-324, 1e-310, 1e-30, 1e300])
@pytest.mark.parametrize("penalty", [{}, {"repetition_penalty": 5e-324}, {"presence_penalty": -1e308}])
def test_the_smallest_and_largest_numbers_draw_a_token(temperature, penalty):
    said = np.array([3, 3, 4], np.int32)
    for scores in (logits(1), np.where(np.arange(50) % 2, logits(1), -np.inf).astype(np.float32)):
        how = SamplingParams(temperature=temperature, seed=1, frequency_penalty=-1e308, **penalty)
        assert np.isfinite(scores[Sampler(how).next(scores, said)])
        cold = SamplingParams(temperature=min(temperature, 1e-30), seed=1)
        assert Sampler(cold).next(scores, said) == scores.argmax()


def test_settings_are_the_fields_of_the_parameters() -> None:
    assert SamplingSettings.__annotations__.keys() == set(SamplingParams.__struct_fields__)

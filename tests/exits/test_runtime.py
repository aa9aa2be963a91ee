"""Answers with early exits through a runtime: off by default, counted, explained, kept over restarts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ctxreuse.engines.sampling import SamplingParams
from ctxreuse.metrics import Metrics
from ctxreuse.runtime import Runtime, RuntimeOptions
from ctxreuse.runtime.answers import pieces_in_turn
from support.early import early_engine

GREEDY = SamplingParams(max_tokens=150, ignore_eos=True)


@pytest.fixture(scope="module")
def engine() -> Any:
    return early_engine()


def ids_of(seed: int) -> Any:
    return np.random.default_rng(seed).integers(3, 250, 20).astype("<i4")


def answer(runtime: Runtime, seed: int, sampling: SamplingParams = GREEDY) -> Any:
    found = runtime.complete(ids_of(seed), sampling)
    found.drain()
    return found


def disagreements(engine: Any, prompt: Any, tokens: list[int]) -> int:
    """Tokens of an answer that are not the likeliest in their places, found by a full run."""
    context, wrong = engine.new_context(), 0
    logits = engine.prefill(context, prompt)
    for token in tokens:
        wrong += int(logits.argmax()) != token
        logits = engine.prefill(context, np.array([token], "<i4"))
    return wrong


def test_answers_within_a_budget_are_counted_and_explained(engine: Any) -> None:
    metrics = Metrics()
    runtime = Runtime(engine, None, RuntimeOptions(exits=0.05, metrics=metrics))
    exited = wrong = said = 0
    for seed in range(3):
        found = answer(runtime, seed)
        usage = found.usage.tokens
        assert usage.completion == 150
        assert usage.disagreed == disagreements(engine, ids_of(seed), found.tokens), "each wrong one is found out"
        exited, wrong, said = exited + usage.exited, wrong + usage.disagreed, said + 150
        assert wrong <= 0.05 * said
    assert exited > 50
    text = found.why().text
    assert "left the model early" in text
    assert "budget: 5.0%" in text
    page = metrics.render().decode()
    assert f'ctxreuse_exit_tokens_total{{verdict="disagreed"}} {float(wrong)}' in page
    assert f'ctxreuse_exit_tokens_total{{verdict="agreed"}} {float(exited - wrong)}' in page
    assert 'ctxreuse_exit_refused_tokens_total{reason="unknown"}' in page
    runtime.close()


@pytest.mark.parametrize("answers", [1, 2])
def test_seconds_saved_are_what_whole_passes_would_have_taken_more(answers: int) -> None:
    """By a clock that layers, ramps and parts of passes advance: what they are charged with is known to the digit."""
    engine, now = early_engine(), [0.0]
    assert engine.batches  # found out by trying, which takes passes
    for layer in engine.model.model.layers:  # a row more costs a fifth of a layer
        layer.register_forward_hook(lambda _, given, __: now.__setitem__(0, now[0] + 0.8 + 0.2 * given[0].shape[1]))
    exits = engine._exits
    exits._clock, exits._parted = lambda: now[0], 0.1
    tops, advance = exits._tops, exits._advance

    def costly_tops(*given: Any) -> Any:
        now[0] += 0.3
        return tops(*given)

    def costly_advance(lanes: Any, at: int, stop: int) -> None:
        began = now[0]
        advance(lanes, at, stop)
        now[0] += 0.1 * (now[0] - began)

    exits._tops, exits._advance = costly_tops, costly_advance
    runtime = Runtime(engine, None, RuntimeOptions(exits=0.2, clock=lambda: now[0]))
    for seed in range(3):
        found = runtime.complete_many(ids_of(seed), GREEDY.answers(answers))
        for one in found:
            next(one)
        began, passes = now[0], runtime.steps.stats().passes
        list(pieces_in_turn(found))
        whole = (runtime.steps.stats().passes - passes) * 6 * (0.8 + 0.2 * answers)
        saved = sum(one.usage.seconds.saved for one in found)
        assert saved == pytest.approx(whole - (now[0] - began), abs=1e-6)
    assert found[0].usage.tokens.exited > 20
    runtime.close()


def test_answers_that_share_passes_leave_early_in_them(engine: Any) -> None:
    runtime = Runtime(engine, None, RuntimeOptions(exits=0.2))
    answer(runtime, 0)  # what is learnt first
    before = runtime.steps.stats()
    found = runtime.complete_many(ids_of(3), GREEDY.answers(2))
    list(pieces_in_turn(found))
    stats = runtime.steps.stats()
    assert stats.contexts - before.contexts > 1.5 * (stats.passes - before.passes)
    assert sum(one.usage.tokens.exited for one in found) > 10
    for one in found:
        assert one.usage.tokens.disagreed == disagreements(engine, ids_of(3), one.tokens)
    runtime.close()


def test_they_are_off_unless_wanted(engine: Any) -> None:
    plain = Runtime(engine, None, RuntimeOptions())
    found = answer(plain, 0)
    assert found.usage.tokens.exited == 0
    assert "early" not in found.why().text
    assert disagreements(engine, ids_of(0), found.tokens) == 0
    wanted = Runtime(engine, None, RuntimeOptions(exits=0.2))
    off = SamplingParams(max_tokens=150, ignore_eos=True, exits=0.0)
    assert all(answer(wanted, seed, off).usage.tokens.exited == 0 for seed in range(3))


@pytest.mark.parametrize(
    ("sampling", "reason"),
    [
        ({"temperature": 0.7, "seed": 1}, "drawn"),
        ({"repetition_penalty": 1.2}, "penalised"),
        ({"logit_bias": {5: 1.0}}, "biased"),
        ({"logprobs": 2}, "log-probabilities"),
    ],
)
def test_what_a_ramp_cannot_say_is_refused(engine: Any, sampling: dict[str, Any], reason: str) -> None:
    runtime = Runtime(engine, None, RuntimeOptions(exits=0.2))
    found = answer(runtime, 0, SamplingParams(max_tokens=20, ignore_eos=True, **sampling))
    assert found.usage.tokens.exited == 0
    assert reason in found.why().text


def test_an_engine_without_ramps_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CTXREUSE_CARDS", str(tmp_path))
    runtime = Runtime(early_engine(exits=False), None, RuntimeOptions(exits=0.2))
    assert "ctxreuse calibrate NAME --exits" in answer(runtime, 0).why().text


def test_what_was_learnt_and_spent_survives_a_restart(engine: Any, tmp_path: Path) -> None:
    options = RuntimeOptions(exits=0.2, drafts=tmp_path)
    runtime = Runtime(engine, None, options)
    assert sum(answer(runtime, seed).usage.tokens.exited for seed in range(3)) > 0
    runtime.close()
    (path,) = tmp_path.glob("exits-*.bin")
    assert path.stat().st_mode & 0o77 == 0
    again = Runtime(engine, None, options)
    assert answer(again, 5).usage.tokens.exited > 0
    # Not closed, as after a crash: what was spent since is unknown.
    crashed = Runtime(engine, None, options)
    found = answer(crashed, 6)
    assert found.usage.tokens.exited == 0
    assert "as many as the budget allows" in found.why().text
    path.write_bytes(b"no such thing")
    damaged = Runtime(engine, None, options)
    assert answer(damaged, 7).usage.tokens.exited == 0
    again.exiting = crashed.exiting = damaged.exiting  # nothing is written after the folder is removed


def test_the_engine_in_a_process_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ctxreuse.engines import open_engine
    from ctxreuse.exits.profile import ExitProfileStore
    from support.early import early_model, ramps_of
    from support.tiny_text import tiny_text

    monkeypatch.setenv("CTXREUSE_CARDS", str(tmp_path / "cards"))
    model = early_model()
    model.save_pretrained(tmp_path / "model")
    tiny_text()._tokenizer.save(str(tmp_path / "model" / "tokenizer.json"))
    engine = open_engine(str(tmp_path / "model"), isolate=True, engine="torch", threads=1)
    try:
        ExitProfileStore().add(ramps_of(model, engine.space))
        runtime = Runtime(engine, None, RuntimeOptions(exits=0.2))
        found = [answer(runtime, seed).usage.tokens for seed in range(2)]
        assert found[1].exited > 0
        runtime.close()
    finally:
        engine.close()  # type: ignore[attr-defined]

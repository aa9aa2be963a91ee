"""LLM: a model and its store in one object."""

from __future__ import annotations

from pathlib import Path

import pytest

from ctxreuse import LLM, SamplingParams
from ctxreuse.errors import ConfigError
from support.tiny_text import tiny_engine

LIGHTHOUSE = "The lighthouse keeper opened the door. " * 8


def test_a_second_life_reuses_what_the_first_one_stored(tmp_path: Path) -> None:
    with LLM(tiny_engine(), store=tmp_path / "store") as llm:
        first = llm.generate(LIGHTHOUSE, max_tokens=6)
        assert first.usage.tokens.by_source == {}
        assert len(first.tokens) == first.usage.tokens.completion <= 6
    with LLM(tiny_engine(), store=tmp_path / "store") as llm:
        again = llm.generate(LIGHTHOUSE, SamplingParams(max_tokens=6))
        assert again.usage.tokens.by_source["disk"] > 0
        assert (again.text, again.tokens, again.finish) == (first.text, first.tokens, first.finish)


def test_prompts_of_one_call_share_their_beginning() -> None:
    with LLM(tiny_engine()) as llm:
        one, two = llm.generate([LIGHTHOUSE + "Then", LIGHTHOUSE + "Now"], max_tokens=2)
        assert one.usage.tokens.cached == 0
        assert two.usage.tokens.cached > 0


def test_a_conversation_that_goes_on_is_reused_and_streams_like_it_generates() -> None:
    with LLM(tiny_engine()) as llm:
        messages = [{"role": "system", "content": LIGHTHOUSE}, {"role": "user", "content": "Why?"}]
        answer = llm.chat(messages, max_tokens=4)
        more = [*messages, {"role": "assistant", "content": answer.text}, {"role": "user", "content": "And then?"}]
        assert llm.chat(more, max_tokens=2).usage.tokens.cached > len(LIGHTHOUSE) // 2
        pieces = llm.stream(LIGHTHOUSE, max_tokens=3)
        assert "".join(piece.text for piece in pieces) == llm.generate(LIGHTHOUSE, max_tokens=3).text


def test_n_answers_are_those_of_their_seeds_and_pay_for_one_prompt() -> None:
    how = SamplingParams(max_tokens=6, temperature=1.0)
    with LLM(tiny_engine()) as llm:
        many = llm.generate(LIGHTHOUSE, how, n=3, seed=4)
        alone = [llm.generate(LIGHTHOUSE, how, seed=4 + i) for i in range(3)]
        assert [one.tokens for one in many] == [one.tokens for one in alone]
        assert [one.usage.tokens.prompt for one in many] == [alone[0].usage.tokens.prompt, 0, 0]
        with pytest.raises(ConfigError, match="n is 0"):
            llm.generate(LIGHTHOUSE, n=0)


def test_a_priority_is_that_of_the_request() -> None:
    with LLM(tiny_engine()) as llm:
        llm.generate("one", max_tokens=1, priority=-1)
        llm.generate(["two", "three"], max_tokens=1, priority=5)
        llm.chat([{"role": "user", "content": "four"}], max_tokens=1)
        assert llm.runtime.steps.stats().started == {-1: 1, 1: 2, 0: 1}


def test_an_open_engine_and_store_stay_open(tmp_path: Path) -> None:
    from ctxreuse.store import open_store

    engine = tiny_engine()
    with open_store(tmp_path) as store:
        with LLM(engine, store=store) as llm:
            llm.generate(LIGHTHOUSE, max_tokens=1)
        store.flush()
        assert store.stats().blocks > 0


def test_mistakes_are_named(tmp_path: Path) -> None:
    with LLM(tiny_engine()) as llm:
        with pytest.raises(ConfigError, match="max_token"):
            llm.generate("x", max_token=2)
        with pytest.raises(ConfigError, match="content"):
            llm.chat([{"role": "user"}])
    with pytest.raises(ConfigError, match="dtype"):
        LLM(tiny_engine(), dtype="float32")
    with pytest.raises(ConfigError, match="max_kl"):
        LLM(tiny_engine(), max_kl=0.01)

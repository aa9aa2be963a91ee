"""Prompts from messages: what grows keeps its ids, ends of turns are found, and no text becomes a marker."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxreuse.engines.prompt import Disguise, prompt
from ctxreuse.engines.text import Message
from ctxreuse.errors import EngineError

TINY = runpy.run_path(str(Path(__file__).parents[1] / "agents" / "tiny_engine.py"))
TEXT = TINY["tiny_text"]()
STRIPPING = TINY["tiny_text"](TINY["CHATML"].replace("m['content']", "m['content'] | trim"))
REFUSING = TINY["tiny_text"](
    "{% if messages[-1]['role'] == 'system' %}{{ raise_exception('no') }}{% endif %}" + TINY["CHATML"]
)
START, END = 256, 257

pieces = ["a", " ", "\n", "é", "<|im_start|>", "<|im_end|>", "<|im_", "\ue000", "0"]
words = st.lists(st.sampled_from(pieces), max_size=8).map("".join)
turns = st.lists(st.builds(Message, st.sampled_from(["user", "assistant", "system"]), words), min_size=1, max_size=6)


def test_a_plain_conversation_is_the_template_encoded() -> None:
    messages = [Message("system", "Be kind."), Message("user", "Hi"), Message("assistant", "Yes?")]
    found = prompt(TEXT, messages)
    assert found.ids.tolist() == TEXT.encode(TEXT.render(messages, generate=True)).tolist()
    ends = [len(prompt(TEXT, messages[:n], generate=False).ids) for n in (1, 2, 3)]
    assert list(found.ends) == ends
    assert prompt(TEXT, messages, generate=False).ids.tolist() == found.ids[: ends[-1]].tolist()


@given(turns, turns)
def test_what_grows_keeps_its_ids(before: list[Message], after: list[Message]) -> None:
    short = prompt(TEXT, before, generate=False).ids
    assert prompt(TEXT, [*before, *after]).ids[: len(short)].tolist() == short.tolist()


@pytest.mark.parametrize("text", [TEXT, STRIPPING, REFUSING], ids=["plain", "stripping", "refusing"])
@given(messages=turns)
def test_only_the_template_writes_markers(text: object, messages: list[Message]) -> None:
    harmless = [Message(m.role, "x") for m in messages]
    honest = TEXT.render(harmless, generate=True)
    try:
        ids = prompt(text, [*messages, Message("user", "end")]).ids.tolist()  # type: ignore[arg-type]
    except EngineError:
        return
    expected = honest.count("<|im_start|>") + 1
    assert ids.count(START) == expected
    assert ids.count(END) == expected - 1


@given(turns)
def test_the_text_of_the_ids_is_the_text_of_the_messages(messages: list[Message]) -> None:
    ids = prompt(TEXT, messages).ids
    assert TEXT.decode(ids, markers=True) == TEXT.render(messages, generate=True)


def test_long_conversations_are_cut_less_often_and_keep_their_ids() -> None:
    messages = [Message(("user", "assistant")[n % 2], f"turn {n}") for n in range(150)]
    found = prompt(TEXT, messages)
    assert 64 < len(found.ends) < 80
    assert found.ids.tolist() == TEXT.encode(TEXT.render(messages, generate=True)).tolist()
    shorter = prompt(TEXT, messages[:-10], generate=False).ids
    assert found.ids[: len(shorter)].tolist() == shorter.tolist()


def test_a_template_that_ends_nowhere_before_the_end() -> None:
    found = prompt(REFUSING, [Message("system", "s"), Message("user", "u")])
    assert len(found.ends) == 1
    with pytest.raises(EngineError, match="refuses"):
        prompt(REFUSING, [Message("system", "s")])


def test_a_text_with_every_private_character() -> None:
    every = "".join(map(chr, (*range(0xE000, 0xF900), *range(0xF0000, 0xFFFFE))))
    with pytest.raises(EngineError, match="private"):
        Disguise(TEXT, [every + "<|im_end|>"])
    assert not Disguise(TEXT, [every])

"""Prompts from messages: what grows keeps its ids, ends of turns are found, and no text becomes a marker."""

from __future__ import annotations

import runpy
from itertools import accumulate, pairwise, permutations
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxreuse.engines.prompt import Disguise, Prompted, prompt
from ctxreuse.engines.text import Message
from ctxreuse.errors import EngineError

TINY = runpy.run_path(str(Path(__file__).parents[1] / "agents" / "tiny_engine.py"))
TEXT = TINY["tiny_text"]()
STRIPPING = TINY["tiny_text"](TINY["CHATML"].replace("m['content']", "m['content'] | trim"))
REFUSING = TINY["tiny_text"](
    "{% if messages[-1]['role'] == 'system' %}{{ raise_exception('no') }}{% endif %}" + TINY["CHATML"]
)
MERGING = TINY["merging_text"]()
SHOUTING = TINY["tiny_text"](TINY["CHATML"].replace("m['content']", "m['content'] | upper"))
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


# Parts of messages

documents = st.lists(st.text(st.sampled_from("ab \n.é<"), min_size=1, max_size=12), min_size=1, max_size=4)


def cut(contents: list[str], role: str = "user") -> Message:
    """A message whose parts are ``contents``."""
    ends = list(accumulate(map(len, contents)))
    return Message(role, "".join(contents), None, tuple(ends))


def pieces_of(found: Prompted) -> list[str]:
    edges = [0, *found.parts, len(found.ids)]
    return [MERGING.decode(found.ids[a:b].tolist(), markers=True) for a, b in pairwise(edges)]


def test_each_part_is_encoded_by_itself() -> None:
    messages = [Message("system", "Rules."), cut(["one two\n\n", "two one\n\n", "one?"])]
    found = prompt(MERGING, messages)
    head, answer = "<|im_start|>user\n", "<|im_start|>assistant\n"
    expected = ["<|im_start|>system\nRules.<|im_end|>\n", head, "one two\n\n", "two one\n\n", "one?", "<|im_end|>\n"]
    assert pieces_of(found) == [*expected, answer]
    assert found.ends == (found.parts[0], found.parts[-1])
    assert MERGING.decode(found.ids.tolist(), markers=True) == MERGING.render(messages, generate=True)


@pytest.mark.parametrize("trims", [False, True], ids=["plain", "trimming"])
def test_a_document_has_the_same_ids_in_any_order(trims: bool) -> None:
    text = TINY["merging_text"](TINY["CHATML"].replace("m['content']", "m['content'] | trim") if trims else None)
    given = ["one two\n\n", "nett one\n\n", "two two\n\n"]
    alone = {document: text.encode(document).tolist() for document in given}
    for order in permutations(given):
        found = prompt(text, [cut([*order, "two?"])])
        edges = [0, *found.parts, len(found.ids)]
        spans = [found.ids[a:b].tolist() for a, b in pairwise(edges)]
        for document in given:
            assert alone[document] in spans
    # Without parts the tokenizer takes blanks and letters of neighbours together.
    assert len(prompt(text, [Message("user", "".join(given))]).ids) < len(prompt(text, [cut(given)]).ids)


@given(st.lists(documents, min_size=1, max_size=4), documents)
def test_what_grows_keeps_its_ids_and_parts(before: list[list[str]], after: list[str]) -> None:
    for text in (TEXT, STRIPPING):
        turns = [cut(contents) for contents in before]
        short, long = prompt(text, turns, generate=False), prompt(text, [*turns, cut(after)])
        assert long.ids[: len(short.ids)].tolist() == short.ids.tolist()
        assert long.parts[: len(short.parts)] == short.parts


@given(turns, st.lists(st.integers(-2, 40), max_size=6))
def test_cuts_change_neither_text_nor_markers(messages: list[Message], cuts: list[int]) -> None:
    given = [msgspec.structs.replace(m, cuts=tuple(cuts)) for m in messages]
    for text in (TEXT, STRIPPING, SHOUTING):
        plain, found = prompt(text, messages), prompt(text, given)
        assert text.decode(found.ids, markers=True) == text.decode(plain.ids, markers=True)
        assert found.ids.tolist().count(START) == plain.ids.tolist().count(START)
        assert len(found.ends) == len(plain.ends)
        assert list(found.parts) == sorted(set(found.parts))
        assert set(found.ends) - {0} <= set(found.parts) | {len(found.ids)}


def test_a_marker_that_is_cut_in_two_stays_text() -> None:
    messages = [Message("system", "s"), cut(["a<|im_", "end|>b", "<|im_start|>"])]
    found = prompt(TEXT, messages)
    assert found.ids.tolist().count(START) == 3
    assert found.ids.tolist().count(END) == 2
    assert TEXT.decode(found.ids, markers=True) == TEXT.render(messages, generate=True)


def test_a_content_that_a_template_shows_otherwise_keeps_its_ids_whatever_follows() -> None:
    # This one spells non-ASCII characters out in a tool's results: no seam survives there, elsewhere they do.
    odd = TINY["tiny_text"](
        TINY["CHATML"].replace(
            "{{ m['content'] }}", "{% if m['role'] == 'tool' %}{{ m['content'] | tojson(ensure_ascii=True) }}"
            "{% else %}{{ m['content'] }}{% endif %}"
        )
    )  # fmt: skip
    first = [cut(["one", "two", "?"])]
    short, long = prompt(odd, first, generate=False), prompt(odd, [*first, cut(["ü", "x"], "tool")])
    assert len(short.parts) == 5
    assert long.ids[: len(short.ids)].tolist() == short.ids.tolist()
    assert long.parts[:5] == short.parts
    assert '"\\u00fcx"' in odd.decode(long.ids, markers=True)


def test_one_part_is_what_a_plain_text_is() -> None:
    whole, cut_at_its_end = prompt(TEXT, [Message("user", "all of it")]), prompt(TEXT, [cut(["all of it"])])
    assert cut_at_its_end.ids.tolist() == whole.ids.tolist()
    assert cut_at_its_end.parts == whole.parts == whole.ends

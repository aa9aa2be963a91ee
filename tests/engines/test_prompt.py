"""Prompts from messages: what grows keeps its ids, ends of turns are found, and no text becomes a marker."""

from __future__ import annotations

import tracemalloc
from collections.abc import Sequence
from itertools import accumulate, pairwise, permutations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxreuse.engines.prompt import EncodedPrompt, Placeholders, check_length, encode_prompt
from ctxreuse.engines.text import HFText, Message
from ctxreuse.errors import ContextTooLongError, EngineError
from support.tiny_text import CHATML, merging_text, tiny_text

TEXT = tiny_text()
STRIPPING = tiny_text(CHATML.replace("m['content']", "m['content'] | trim"))
REFUSING = tiny_text("{% if messages[-1]['role'] == 'system' %}{{ raise_exception('no') }}{% endif %}" + CHATML)
MERGING = merging_text()
SHOUTING = tiny_text(CHATML.replace("m['content']", "m['content'] | upper"))
START, END = 256, 257

pieces = ["a", " ", "\n", "é", "<|im_start|>", "<|im_end|>", "<|im_", "\ue000", "0"]
words = st.lists(st.sampled_from(pieces), max_size=8).map("".join)
turns = st.lists(st.builds(Message, st.sampled_from(["user", "assistant", "system"]), words), min_size=1, max_size=6)


def test_a_plain_conversation_is_the_template_encoded() -> None:
    messages = [Message("system", "Be kind."), Message("user", "Hi"), Message("assistant", "Yes?")]
    found = encode_prompt(TEXT, messages)
    assert found.ids.tolist() == TEXT.encode(TEXT.render(messages, generate=True)).tolist()
    ends = [len(encode_prompt(TEXT, messages[:n], generate=False).ids) for n in (1, 2, 3)]
    assert list(found.ends) == ends
    assert encode_prompt(TEXT, messages, generate=False).ids.tolist() == found.ids[: ends[-1]].tolist()


@given(turns, turns)
def test_what_grows_keeps_its_ids(before: list[Message], after: list[Message]) -> None:
    short = encode_prompt(TEXT, before, generate=False).ids
    assert encode_prompt(TEXT, [*before, *after]).ids[: len(short)].tolist() == short.tolist()


@pytest.mark.parametrize("text", [TEXT, STRIPPING, REFUSING], ids=["plain", "stripping", "refusing"])
@given(messages=turns)
def test_only_the_template_writes_markers(text: object, messages: list[Message]) -> None:
    harmless = [Message(m.role, "x") for m in messages]
    honest = TEXT.render(harmless, generate=True)
    try:
        ids = encode_prompt(text, [*messages, Message("user", "end")]).ids.tolist()  # type: ignore[arg-type]
    except EngineError:
        return
    expected = honest.count("<|im_start|>") + 1
    assert ids.count(START) == expected
    assert ids.count(END) == expected - 1


@given(turns)
def test_the_text_of_the_ids_is_the_text_of_the_messages(messages: list[Message]) -> None:
    ids = encode_prompt(TEXT, messages).ids
    assert TEXT.decode(ids, markers=True) == TEXT.render(messages, generate=True)


def test_long_conversations_are_cut_less_often_and_keep_their_ids() -> None:
    messages = [Message(("user", "assistant")[n % 2], f"turn {n}") for n in range(150)]
    found = encode_prompt(TEXT, messages)
    assert 64 < len(found.ends) < 80
    assert found.ids.tolist() == TEXT.encode(TEXT.render(messages, generate=True)).tolist()
    shorter = encode_prompt(TEXT, messages[:-10], generate=False).ids
    assert found.ids[: len(shorter)].tolist() == shorter.tolist()


class Counting:
    """Counts the messages that a text model renders."""

    def __init__(self, text: HFText) -> None:
        self._text, self.rendered = text, 0

    def __getattr__(self, name: str) -> object:
        return getattr(self._text, name)

    def render(self, messages: Sequence[Message], *, generate: bool) -> str:
        self.rendered += len(messages)
        return self._text.render(messages, generate=generate)


PADDED = tiny_text(CHATML.replace("m['content']", "' ' + m['content'] | trim + '\n'"))


@pytest.mark.parametrize("text", [TEXT, STRIPPING, REFUSING, SHOUTING, PADDED])
def test_thousands_of_messages_go_through_the_template_a_few_times(text: HFText) -> None:
    roles, contents = ("user", "assistant", "user", "assistant", "tool"), ("x", " y\n", "", "zé", "  ")
    messages = [Message(roles[n % 5], contents[n % 3]) for n in range(3000)]
    counting = Counting(text)
    found = encode_prompt(counting, messages)  # type: ignore[arg-type]
    assert counting.rendered < 40_000, "it was 270,000"
    assert found.ids.tolist() == text.encode(text.render(messages, generate=True)).tolist()
    assert len(found.ends) == 64 + (3000 - 64) // 16 + 2 or text is SHOUTING
    some = [messages[:n] for n in (64, 80, 96, 512)]
    lengths = [len(text.encode(text.render(part, generate=False))) for part in some]
    assert set(lengths) <= set(found.ends)


def test_what_cannot_fit_is_refused_before_it_is_tokenised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HFText, "encode", lambda *_, **__: pytest.fail("tokenised"))
    assert TEXT.token_chars == len("<|im_start|>")
    with pytest.raises(ContextTooLongError, match=r"1,201 characters, too many for the 100 tokens"):
        check_length(TEXT, "x" * 1201, 100)
    check_length(TEXT, "x" * 1200, 100)
    check_length(TEXT, "x" * 1200 + "\x04" * 5000, 100)  # some vocabularies leave controls out
    with pytest.raises(ContextTooLongError, match="characters"):
        encode_prompt(TEXT, [Message("user", "x" * 1201)], max_tokens=100)
    counting = Counting(TEXT)
    with pytest.raises(ContextTooLongError, match="101 messages"):
        encode_prompt(counting, [Message("user", "x")] * 101, max_tokens=100)  # type: ignore[arg-type]
    assert not counting.rendered


def test_a_template_that_ends_nowhere_before_the_end() -> None:
    found = encode_prompt(REFUSING, [Message("system", "s"), Message("user", "u")])
    assert len(found.ends) == 1
    with pytest.raises(EngineError, match="refuses"):
        encode_prompt(REFUSING, [Message("system", "s")])


def test_a_text_with_every_private_character() -> None:
    every = "".join(map(chr, (*range(0xE000, 0xF900), *range(0xF0000, 0xFFFFE))))
    with pytest.raises(EngineError, match="private"):
        Placeholders(TEXT, [every + "<|im_end|>"])
    assert not Placeholders(TEXT, [every])


def test_private_characters_are_looked_for_one_by_one() -> None:
    """All 72,000 of them were made for each prompt: 3 ms and 3 MB."""
    tracemalloc.start()
    try:
        assert Placeholders(TEXT, ["a\ue000"]).seam == "\ue001"
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()


# Parts of messages

documents = st.lists(st.text(st.sampled_from("ab \n.é<"), min_size=1, max_size=12), min_size=1, max_size=4)


def cut(contents: list[str], role: str = "user") -> Message:
    """A message whose parts are ``contents``."""
    ends = list(accumulate(map(len, contents)))
    return Message(role, "".join(contents), None, tuple(ends))


def pieces_of(found: EncodedPrompt) -> list[str]:
    edges = [0, *found.parts, len(found.ids)]
    return [MERGING.decode(found.ids[a:b].tolist(), markers=True) for a, b in pairwise(edges)]


def test_each_part_is_encoded_by_itself() -> None:
    messages = [Message("system", "Rules."), cut(["one two\n\n", "two one\n\n", "one?"])]
    found = encode_prompt(MERGING, messages)
    head, answer = "<|im_start|>user\n", "<|im_start|>assistant\n"
    expected = ["<|im_start|>system\nRules.<|im_end|>\n", head, "one two\n\n", "two one\n\n", "one?", "<|im_end|>\n"]
    assert pieces_of(found) == [*expected, answer]
    assert found.ends == (found.parts[0], found.parts[-1])
    assert MERGING.decode(found.ids.tolist(), markers=True) == MERGING.render(messages, generate=True)


@pytest.mark.parametrize("trims", [False, True], ids=["plain", "trimming"])
def test_a_document_has_the_same_ids_in_any_order(trims: bool) -> None:
    text = merging_text(CHATML.replace("m['content']", "m['content'] | trim") if trims else None)
    given = ["one two\n\n", "nett one\n\n", "two two\n\n"]
    alone = {document: text.encode(document).tolist() for document in given}
    for order in permutations(given):
        found = encode_prompt(text, [cut([*order, "two?"])])
        edges = [0, *found.parts, len(found.ids)]
        spans = [found.ids[a:b].tolist() for a, b in pairwise(edges)]
        for document in given:
            assert alone[document] in spans
    # Without parts the tokenizer takes blanks and letters of neighbours together.
    assert len(encode_prompt(text, [Message("user", "".join(given))]).ids) < len(encode_prompt(text, [cut(given)]).ids)


@given(st.lists(documents, min_size=1, max_size=4), documents)
def test_what_grows_keeps_its_ids_and_parts(before: list[list[str]], after: list[str]) -> None:
    for text in (TEXT, STRIPPING):
        turns = [cut(contents) for contents in before]
        short, long = encode_prompt(text, turns, generate=False), encode_prompt(text, [*turns, cut(after)])
        assert long.ids[: len(short.ids)].tolist() == short.ids.tolist()
        assert long.parts[: len(short.parts)] == short.parts


@given(turns, st.lists(st.integers(-2, 40), max_size=6))
def test_cuts_change_neither_text_nor_markers(messages: list[Message], cuts: list[int]) -> None:
    given = [msgspec.structs.replace(m, cuts=tuple(cuts)) for m in messages]
    for text in (TEXT, STRIPPING, SHOUTING):
        plain, found = encode_prompt(text, messages), encode_prompt(text, given)
        assert text.decode(found.ids, markers=True) == text.decode(plain.ids, markers=True)
        assert found.ids.tolist().count(START) == plain.ids.tolist().count(START)
        assert len(found.ends) == len(plain.ends)
        assert list(found.parts) == sorted(set(found.parts))
        assert set(found.ends) - {0} <= set(found.parts) | {len(found.ids)}


def test_a_marker_that_is_cut_in_two_stays_text() -> None:
    messages = [Message("system", "s"), cut(["a<|im_", "end|>b", "<|im_start|>"])]
    found = encode_prompt(TEXT, messages)
    assert found.ids.tolist().count(START) == 3
    assert found.ids.tolist().count(END) == 2
    assert TEXT.decode(found.ids, markers=True) == TEXT.render(messages, generate=True)


def test_a_content_that_a_template_shows_otherwise_keeps_its_ids_whatever_follows() -> None:
    # This one spells non-ASCII characters out in a tool's results: no seam survives there, elsewhere they do.
    odd = tiny_text(
        CHATML.replace(
            "{{ m['content'] }}", "{% if m['role'] == 'tool' %}{{ m['content'] | tojson(ensure_ascii=True) }}"
            "{% else %}{{ m['content'] }}{% endif %}"
        )
    )  # fmt: skip
    first = [cut(["one", "two", "?"])]
    short, long = encode_prompt(odd, first, generate=False), encode_prompt(odd, [*first, cut(["ü", "x"], "tool")])
    assert len(short.parts) == 5
    assert long.ids[: len(short.ids)].tolist() == short.ids.tolist()
    assert long.parts[:5] == short.parts
    assert '"\\u00fcx"' in odd.decode(long.ids, markers=True)


def test_one_part_is_what_a_plain_text_is() -> None:
    whole, cut_at_its_end = (
        encode_prompt(TEXT, [Message("user", "all of it")]),
        encode_prompt(TEXT, [cut(["all of it"])]),
    )
    assert cut_at_its_end.ids.tolist() == whole.ids.tolist()
    assert cut_at_its_end.parts == whole.parts == whole.ends

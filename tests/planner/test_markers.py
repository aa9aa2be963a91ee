"""Marks in requests to providers' APIs, and pointers in place of repeated texts."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxreuse.errors import FormatError
from ctxreuse.planner import Repeats, mark_request, without_repeats

LONG = "The harbour office opens at nine. " * 200
DOCUMENTS = [f"Document {n}. {LONG}" for n in range(3)]


def user(*texts: str) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "text", "text": text} for text in texts]}


def marked(body: Any) -> list[tuple[Any, ...]]:
    """Paths to the blocks that have a mark."""
    found = list[tuple[Any, ...]]()

    def walk(value: Any, path: tuple[Any, ...]) -> None:
        if isinstance(value, dict):
            if "cache_control" in value:
                assert value["cache_control"] == {"type": "ephemeral"}
                found.append(path)
            for name, one in value.items():
                walk(one, (*path, name))
        elif isinstance(value, list):
            for number, one in enumerate(value):
                walk(one, (*path, number))

    walk({name: body[name] for name in ("tools", "system", "messages") if name in body}, ())
    return found


def test_marks_stand_where_requests_begin_to_differ() -> None:
    body = {
        "tools": [{"name": "search", "description": LONG, "input_schema": {}}],
        "system": LONG,
        "messages": [
            user("Hello. " + LONG),
            {"role": "assistant", "content": "Yes?"},
            user(*DOCUMENTS, "When does it open?"),
        ],
    }
    given = copy.deepcopy(body)
    found = mark_request(body)
    assert body == given, "the body given was changed"
    ends = [("system", 0), ("messages", 0, "content", 0), ("messages", 2, "content", 2), ("messages", 2, "content", 3)]
    assert marked(found.body) == list(found.marks) == ends
    assert marked(mark_request(body, continues=False).body) == ends[:3]
    del body["system"]
    assert marked(mark_request(body).body)[0] == ("tools", 0)


def test_what_changes_is_no_part_of_the_beginning() -> None:
    blocks = [{"type": "text", "text": text} for text in (LONG, "Today is Monday.", LONG)]
    body = {"system": blocks, "messages": [user("Hello.")]}
    assert mark_request(body, continues=False).marks == (("system", 2),)
    other = copy.deepcopy(body) | {"messages": [user("Something else")]}
    assert mark_request(body, continues=False, before=other).marks == (("system", 2),)
    other["system"][1]["text"] = "Today is Tuesday."
    assert mark_request(body, continues=False, before=other).marks == (("system", 0),)


def test_short_prompts_and_those_with_marks_get_none() -> None:
    short = {"system": "You are a clerk.", "messages": [user("Hello."), user("Hello?")]}
    assert mark_request(short).marks == ()
    own = {"system": LONG, "messages": [user("Hello.")], "cache_control": {"type": "ephemeral"}}
    found = mark_request(own)
    assert (found.marks, found.body) == ((), own)


def test_one_key_for_what_begins_alike() -> None:
    def key(system: str, question: str, **more: Any) -> str:
        messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
        return str(mark_request({"messages": messages, **more}, "openai").body["prompt_cache_key"])

    assert key("A", "one") == key("A", "two") != key("B", "one")
    assert key("A", "one", tools=[{"type": "function"}]) != key("A", "one")
    assert key("A", "one", prompt_cache_key="mine") == "mine"


def test_repeats_of_messages_become_pointers() -> None:
    result = {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": DOCUMENTS[0]}]}
    body = {
        "system": DOCUMENTS[1],
        "messages": [
            user(DOCUMENTS[0], "What is this?"),
            {"role": "assistant", "content": DOCUMENTS[0]},
            {"role": "user", "content": [result, {"type": "text", "text": DOCUMENTS[1]}]},
            user("What is this?", DOCUMENTS[1]),
        ],
    }
    found = mark_request(body, repeats=True)
    pairs = {found.places[at]: found.places[source] for at, source in found.repeats.sources.items()}
    assert pairs == {
        ("messages", 2, "content", 0, "content", 0, "text"): ("messages", 0, "content", 0, "text"),
        ("messages", 3, "content", 1, "text"): ("messages", 2, "content", 1, "text"),
    }
    last = found.body["messages"][3]["content"]
    assert last[0]["text"] == "What is this?", "a pointer would be longer"
    assert 'begins: "Document 1. The harbour office' in last[1]["text"]
    assert found.body["messages"][1]["content"] == DOCUMENTS[0], "what the model said stays"
    restored = found.restored()
    for path in found.marks:
        block = restored
        for step in path:
            block = block[step]
        del block["cache_control"]
    assert restored["messages"] == body["messages"]


@given(st.lists(st.sampled_from([*DOCUMENTS, DOCUMENTS[0][:500], "short", "", LONG]), max_size=12))
def test_texts_can_be_had_back(texts: list[str]) -> None:
    found = without_repeats(texts)
    assert found.restored == texts
    for at, source in found.sources.items():
        quoted = found.texts[at].partition('begins: "')[2].removesuffix('")')
        begins = [text for text in set(texts[:at]) if text.startswith(quoted)]
        assert begins == [texts[source]] or any(other.startswith(texts[source]) for other in begins)


@pytest.mark.parametrize("sources", [{0: 0}, {1: 2}, {2: 1, 1: 0}, {3: 0}, {1: -1}])
def test_pointers_point_back_to_texts(sources: dict[int, int]) -> None:
    with pytest.raises(ValueError, match="cannot point"):
        Repeats(("a", "b", "c"), sources)


@pytest.mark.parametrize("body", [{}, {"messages": []}, {"messages": "x"}, {"messages": ["x"]}])
def test_what_is_no_request(body: Any) -> None:
    with pytest.raises(FormatError, match="messages"):
        mark_request(body)


@pytest.mark.parametrize(
    "more",
    [
        {"system": 3},
        {"tools": "x"},
        {"system": ["x"]},
        {"messages": [{}]},
        {"messages": [{"role": "user", "content": [3]}]},
    ],
)
def test_parts_of_other_forms_are_passed_over(more: Any) -> None:
    found = mark_request({"system": LONG, "messages": [user(LONG)]} | more, repeats=True)
    assert all(isinstance(path, tuple) for path in found.marks)


def test_a_text_that_names_the_mark_is_none() -> None:
    said = {"role": "user", "content": "cache_control " * 1000}
    found = mark_request({"messages": [said, {"role": "assistant", "content": "cache_control"}, said]})
    assert found.marks


def test_a_body_that_is_nested_deeply_is_refused() -> None:
    deep: list[object] = []
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(FormatError, match="nested too deeply"):
        mark_request({"messages": [{"role": "user", "content": "Hello."}], "metadata": deep})


def test_texts_that_only_differ_late_stay() -> None:
    one, other = "a" * 2000 + "b", "a" * 2000 + "c"
    assert without_repeats([one, other, one]).texts == (one, other, one)
    assert without_repeats([one, one]).sources == {1: 0}


def test_many_texts_that_begin_alike_take_little_time() -> None:
    texts = [f"{'a' * 300}{number:05}" + "b" * 200 for number in range(5000)]
    found = without_repeats([*texts, *texts])
    assert len(found.sources) == len(texts)

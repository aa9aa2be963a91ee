"""An answer of texts and calls as the events and items of `/v1/responses`."""

from __future__ import annotations

from itertools import count
from typing import Any

from ctxreuse.daemon.openai import CallDelta, Delta, FunctionDelta
from ctxreuse.daemon.responses import Item, OutputWriter, messages_of
from ctxreuse.engines.text import Message, ToolCall


def called(index: int, id: str) -> Delta:
    return Delta(tool_calls=[CallDelta(index, FunctionDelta("", "look"), id, "function")])


def arguments(index: int, text: str) -> Delta:
    return Delta(tool_calls=[CallDelta(index, FunctionDelta(text))])


def test_text_then_two_calls_the_last_one_cut() -> None:
    numbers = count()
    writer = OutputWriter(lambda prefix: f"{prefix}_{next(numbers)}")
    deltas = [Delta(content="So"), Delta(content=":"), called(0, "a"), arguments(0, "{"), arguments(0, "}")]
    events: list[Any] = [e for delta in (*deltas, called(1, "b"), arguments(1, '{"')) for e in writer.feed(delta)]
    events += writer.finish(cut=True)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [(event["type"].removeprefix("response."), event["output_index"]) for event in events] == [
        ("output_item.added", 0),
        ("content_part.added", 0),
        ("output_text.delta", 0),
        ("output_text.delta", 0),
        ("output_text.done", 0),
        ("content_part.done", 0),
        ("output_item.done", 0),
        ("output_item.added", 1),
        ("function_call_arguments.delta", 1),
        ("function_call_arguments.delta", 1),
        ("function_call_arguments.done", 1),
        ("output_item.done", 1),
        ("output_item.added", 2),
        ("function_call_arguments.delta", 2),
        ("function_call_arguments.done", 2),
        ("output_item.done", 2),
    ]
    assert {event["item_id"] for event in events if "item_id" in event} == {"msg_0", "fc_1", "fc_2"}
    assert [item.status for item in writer.output] == ["completed", "completed", "incomplete"]
    assert messages_of(map(Item.made, writer.output)) == [
        Message("assistant", "So:", tool_calls=(ToolCall("look", "{}", "a"), ToolCall("look", '{"', "b")))
    ]


def test_an_answer_of_nothing_is_an_empty_message() -> None:
    writer = OutputWriter()
    kinds = [event["type"].rpartition(".")[2] for event in writer.finish(cut=False)]
    assert kinds == ["added", "added", "done", "done", "done"]
    (item,) = writer.output
    assert Item.made(item).plain["content"][0]["text"] == ""

"""The API's words: what is accepted, what is refused and how it is named, what usage adds up to."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxreuse import errors
from ctxreuse.daemon.openai import ApiError, ChatMessage, ChatRequest, CompletionRequest, api_error, parse, usage_of
from ctxreuse.metrics import SOURCES
from ctxreuse.usage import TokenUsage, Usage

MESSAGES = [{"role": "user", "content": "x"}]


def encoded(**body: Any) -> bytes:
    return msgspec.json.encode({"messages": MESSAGES, **body})


def test_stops_and_contents_in_all_their_forms() -> None:
    assert parse(encoded(stop="a"), ChatRequest).stops == ("a",)
    assert parse(encoded(stop=["a", "b"]), ChatRequest).stops == ("a", "b")
    assert parse(encoded(stop=None), ChatRequest).stops == ()
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b", "cache_control": {}}]
    message = msgspec.convert({"role": "user", "content": parts}, ChatMessage)
    assert message.text() == "ab"
    assert ChatMessage("assistant").text() == ""
    with pytest.raises(ApiError, match="image_url") as refused:
        msgspec.convert({"role": "user", "content": [{"type": "image_url"}]}, ChatMessage).text("messages[3]")
    assert refused.value.param == "messages[3]"


def test_null_is_as_good_as_absent() -> None:
    names = ("max_tokens", "temperature", "top_p", "seed", "stop", "n", "stream", "stream_options", "logprobs")
    assert parse(encoded(**dict.fromkeys(names)), ChatRequest) == parse(encoded(), ChatRequest)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"temperature": 2.5}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"presence_penalty": -3}, "presence_penalty"),
        ({"top_p": 1.5}, "top_p"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"stop": [1]}, "stop[0]"),
        ({"messages": "hello"}, "messages"),
        ({"messages": [{"role": "user", "content": "a"}, {"content": "b"}]}, "messages[1]"),
    ],
)
def test_a_refusal_names_the_field(body: dict[str, Any], param: str) -> None:
    if body.get("temperature") != body.get("temperature"):
        raw = b'{"messages": [{"role": "user", "content": "x"}], "temperature": "NaN"}'
    else:
        raw = encoded(**body)
    with pytest.raises(ApiError) as refused:
        parse(raw, ChatRequest)
    assert (refused.value.status, refused.value.param) == (400, param)
    error = msgspec.json.decode(refused.value.body())["error"]
    assert error["param"] == param
    assert param in error["message"]


def test_what_is_missing_is_named() -> None:
    with pytest.raises(ApiError) as refused:
        parse(b"{}", CompletionRequest)
    assert refused.value.param == "prompt"


@given(st.binary(max_size=60))
def test_any_bytes_are_a_request_or_a_refusal(raw: bytes) -> None:
    for kind in (ChatRequest, CompletionRequest):
        with suppress(ApiError):
            assert parse(raw, kind).stops is not None


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from([*ChatRequest.__struct_fields__, "x"]), json_values, max_size=4))
def test_any_json_is_a_request_or_a_refusal(body: dict[str, Any]) -> None:
    with suppress(ApiError):
        asked = parse(msgspec.json.encode({"messages": MESSAGES} | body), ChatRequest)
        assert all(isinstance(stop, str) for stop in asked.stops)
        assert all(isinstance(m.text(), str) for m in asked.messages)


def test_usage_adds_up() -> None:
    found = usage_of(Usage(TokenUsage(100, 70, 7, {"disk": 60, "cloud": 10})))
    assert (found.prompt_tokens, found.completion_tokens, found.total_tokens) == (100, 7, 107)
    sources = found.prompt_tokens_details.sources
    assert sources == {"device": 0, "host": 0, "disk": 60, "edge": 0, "cloud": 10, "compute": 30}
    assert set(sources) == set(SOURCES)
    assert found.prompt_tokens_details.cached_tokens == 70


def test_every_error_has_a_status() -> None:
    kinds = [getattr(errors, name) for name in errors.__all__]
    status = {kind.__name__: api_error(kind("why", fix="do")).status for kind in kinds}
    assert status["ContextTooLongError"] == status["ConfigError"] == status["EngineError"] == 400
    assert status["SessionError"] == 404
    assert status["StoreFullError"] == 503
    assert status["LinkDownError"] == 502
    assert api_error(errors.ContextTooLongError("why")).code == "context_length_exceeded"
    assert all(400 <= value < 600 for value in status.values())

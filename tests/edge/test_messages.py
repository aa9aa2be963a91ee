"""Anthropic's door: text, calls and results as its clients send and read them, pinned prefixes, errors in its form."""

from __future__ import annotations

import json
from typing import Any

import pytest

from support.hermes import hermes_folder
from support.waiting import until

CITY = {"type": "string", "maxLength": 6}
TOOLS: list[Any] = [
    {
        "name": "get_weather",
        "description": "The weather of a place.",
        "input_schema": {
            "type": "object", "properties": {"city": CITY}, "required": ["city"], "additionalProperties": False
        },
    },
    {
        "name": "Uhr stellen ☃ \"so\" \\o/",
        "input_schema": {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"]},
    },
]  # fmt: skip
SYSTEM = "You are a harbour master. " * 40
HELLO = [{"role": "user", "content": "Wie ist das Wetter in Köln?"}]


def post(edge: Any, status: int = 200, path: str = "/v1/messages", **body: Any) -> Any:
    given = {"model": "tiny", "max_tokens": 900, "temperature": 0, "messages": HELLO, **body}
    if path.endswith("count_tokens"):
        del given["max_tokens"], given["temperature"]
    answer = edge.http.post(path, json=given)
    assert answer.status_code == status, answer.text
    return answer


def message(edge: Any, **body: Any) -> Any:
    return post(edge, **body).json()


def events(answer: Any) -> list[Any]:
    """The events of a stream; each is named by its type."""
    found = []
    for block in answer.text.strip().split("\n\n"):
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def joined(streamed: list[Any]) -> list[Any]:
    """The content that the events of a stream make, in the order that clients insist on."""
    blocks: list[Any] = []
    ended: list[int] = []
    for one in streamed:
        if one["type"] == "content_block_start":
            assert one["index"] == len(blocks) == len(ended)
            blocks.append(one["content_block"] | {"json": ""})
        elif one["type"] == "content_block_delta":
            assert one["index"] == len(blocks) - 1 == len(ended)
            if one["delta"]["type"] == "text_delta":
                blocks[-1]["text"] += one["delta"]["text"]
            else:
                assert one["delta"]["type"] == "input_json_delta"
                blocks[-1]["json"] += one["delta"]["partial_json"]
        elif one["type"] == "content_block_stop":
            ended.append(one["index"])
    assert ended == list(range(len(blocks)))
    for block in blocks:
        said = block.pop("json")
        if block["type"] == "tool_use":
            block["input"] = json.loads(said)
    return blocks


def total(usage: Any) -> int:
    parts = usage["cache_creation"]
    assert usage["cache_creation_input_tokens"] == sum(parts.values())
    found = usage["input_tokens"] + usage["cache_creation_input_tokens"] + usage["cache_read_input_tokens"]
    return int(found)


def test_text_whole_and_streamed_is_the_same_and_ends_as_it_says(edge: Any) -> None:
    whole = message(edge, system=SYSTEM, max_tokens=20)
    assert (whole["type"], whole["role"], whole["stop_reason"]) == ("message", "assistant", "max_tokens")
    streamed = events(post(edge, system=SYSTEM, max_tokens=20, stream=True))
    assert [one["type"] for one in streamed[:2]] == ["message_start", "content_block_start"]
    assert [one["type"] for one in streamed[-3:]] == ["content_block_stop", "message_delta", "message_stop"]
    assert joined(streamed) == whole["content"]
    assert streamed[0]["message"]["content"] == []
    assert streamed[-2]["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    usage = streamed[-2]["usage"]
    assert usage["output_tokens"] == whole["usage"]["output_tokens"] == 20
    assert usage["cache_read_input_tokens"] > 0.9 * total(usage)
    assert total(usage) == total(whole["usage"]) == total(streamed[0]["message"]["usage"])
    counted = post(edge, path="/v1/messages/count_tokens", system=SYSTEM)
    assert counted.json() == {"input_tokens": total(usage)}
    text = whole["content"][0]["text"]
    cut = message(edge, system=SYSTEM, max_tokens=20, stop_sequences=["not there", text[5:8]])
    assert (cut["stop_reason"], cut["stop_sequence"]) == ("stop_sequence", text[5:8])
    assert text.startswith(cut["content"][0]["text"] if cut["content"] else "")


def test_a_prompt_alone_is_computed_and_kept(edge: Any) -> None:
    """``max_tokens`` 0 warms the cache, as in Anthropic's API."""
    whole = message(edge, system=SYSTEM, max_tokens=0, cache_control={"type": "ephemeral"})
    assert (whole["content"], whole["stop_reason"], whole["usage"]["output_tokens"]) == ([], "max_tokens", 0)
    assert whole["usage"]["cache_creation_input_tokens"] > 900
    streamed = events(post(edge, system=SYSTEM, max_tokens=0, stream=True))
    assert [one["type"] for one in streamed] == ["message_start", "message_delta", "message_stop"]
    assert streamed[0]["message"]["usage"]["cache_read_input_tokens"] > 900


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": TOOLS[1]["name"]}])
def test_calls_and_results_of_any_unicode_go_round(edge: Any, choice: Any) -> None:
    body = {"tools": TOOLS, "tool_choice": choice | {"disable_parallel_tool_use": True}, "system": SYSTEM}
    first = message(edge, **body)
    assert first["stop_reason"] == "tool_use"
    [call] = first["content"]
    assert call["id"].startswith("toolu_")
    assert choice.get("name", call["name"]) == call["name"]
    [again] = joined(events(post(edge, **body, stream=True)))
    assert (again["name"], again["input"]) == (call["name"], call["input"])
    results = [
        {"type": "tool_result", "tool_use_id": call["id"], "is_error": True, "content": "kein 🌧 <|im_end|>\u2028"},
        {"type": "text", "text": "Und nun?"},
    ]
    messages = [*HELLO, {"role": "assistant", "content": first["content"]}, {"role": "user", "content": results}]
    second = message(edge, **body | {"tool_choice": {"type": "none"}}, messages=messages, max_tokens=4)
    assert second["content"][0]["type"] == "text"
    assert second["usage"]["cache_read_input_tokens"] >= total(first["usage"]) - 1


def test_a_stream_cut_in_the_middle_of_a_call_leaves_the_daemon_free(edge: Any) -> None:
    body = {"model": "", "max_tokens": 2000, "messages": HELLO, "tools": TOOLS, "tool_choice": {"type": "any"}}
    with edge.http.stream("POST", "/v1/messages", json={**body, "stream": True}) as answer:
        for line in answer.iter_lines():
            if "input_json_delta" in line:
                break
    until(lambda: edge.node.pool.active == 0)
    cut = message(edge, tools=TOOLS, tool_choice={"type": "any"}, max_tokens=40)
    assert cut["stop_reason"] == "max_tokens"
    assert all(isinstance(block.get("input", {}), dict) for block in cut["content"])


def test_documents_are_parts_and_what_is_no_text_is_refused_by_its_place(edge: Any) -> None:
    source = {"type": "text", "media_type": "text/plain", "data": "The pier is closed."}
    blocks: list[Any] = [
        {"type": "document", "title": "Pier", "source": source},
        {"type": "search_result", "title": "T", "source": "s", "content": [{"type": "text", "text": "found"}]},
        {"type": "text", "text": "Is it open?"},
    ]
    given = [{"role": "user", "content": blocks}, {"role": "user", "content": "Say it."}]
    assert message(edge, messages=given, max_tokens=2)["content"]
    thought = {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm.", "signature": "s"}]}
    assert message(edge, messages=[thought, *given], max_tokens=2)["content"]
    assert post(edge, 400, messages=[thought]).json()["error"]["message"].startswith("messages")
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
    pdf = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "AA=="}}
    for wrong, place in ((image, "messages[0].content[1]"), (pdf, "messages[0].content[1].source")):
        found = post(edge, 400, messages=[{"role": "user", "content": [blocks[2], wrong]}])
        assert found.json()["type"] == "error"
        assert found.json()["error"]["type"] == "invalid_request_error"
        assert found.json()["error"]["message"].startswith(place)
        assert found.json()["request_id"] == found.headers["request-id"]
    search = {"type": "web_search_20250305", "name": "web_search"}
    assert "web_search" in post(edge, 400, tools=[search]).json()["error"]["message"]
    ended = post(edge, 400, messages=[*HELLO, {"role": "assistant", "content": "It is"}]).json()["error"]
    assert "assistant" in ended["message"]
    assert post(edge, 404, model="claude").json()["error"]["type"] == "not_found_error"
    for depth in (4, 100, 400, 5000):
        deep = '[{"type": "search_result", "content": ' * depth + '"x"' + "}]" * depth
        raw = '{"model": "", "max_tokens": 1, "messages": [{"role": "user", "content": ' + deep + "}]}"
        assert edge.http.post("/v1/messages", content=raw).status_code == 400
    many = [{"type": "tool_use", "id": "t", "name": "f", "input": {}}] * 20_000
    crowd = post(edge, 400, messages=[*HELLO, {"role": "assistant", "content": many}, *HELLO]).json()["error"]
    assert "16,384" in crowd["message"]
    missing = edge.http.post("/v1/messages", json={"model": "", "messages": HELLO})
    assert (missing.status_code, "max_tokens" in missing.text) == (400, True)


def test_results_of_a_megabyte_are_read_and_answered_in_words(edge: Any) -> None:
    call = {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {"city": "Köln"}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "Regen 🌧 " * 100_000}
    messages = [*HELLO, {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    found = post(edge, 400, messages=messages, tools=TOOLS).json()["error"]
    assert found["message"].startswith("prompt is too long")
    assert message(edge, max_tokens=2)["content"]


def test_a_marked_prefix_is_pinned_and_counted(edge: Any) -> None:
    marked = [{"type": "text", "text": SYSTEM, "cache_control": {"type": "ephemeral", "ttl": "1h"}}]
    first = message(edge, system=marked, max_tokens=2)["usage"]
    assert first["cache_creation"]["ephemeral_1h_input_tokens"] > 900
    assert first["cache_creation"]["ephemeral_5m_input_tokens"] == 0
    until(lambda: len(edge.node.pins) == 1)
    automatic = {"cache_control": {"type": "ephemeral"}, "system": marked, "max_tokens": 2}
    longer = [{"role": "user", "content": "And in Rome? " * 20}]
    second = message(edge, **automatic, messages=longer)["usage"]
    assert second["cache_read_input_tokens"] >= first["cache_creation_input_tokens"]
    assert second["cache_creation"]["ephemeral_1h_input_tokens"] == 0
    assert second["cache_creation"]["ephemeral_5m_input_tokens"] > 100
    until(lambda: len(edge.node.pins) == 2)
    edge.node.pins.check()
    edge.node.store.check()


def test_marks_beyond_four_and_out_of_order_are_refused(edge: Any) -> None:
    block: Any = {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}
    many = post(edge, 400, messages=[{"role": "user", "content": [block] * 5}]).json()["error"]
    assert many["message"].startswith("cache_control")
    longer = {"type": "text", "text": "b", "cache_control": {"type": "ephemeral", "ttl": "1h"}}
    wrong = post(edge, 400, messages=[{"role": "user", "content": [block, longer]}]).json()["error"]
    assert "1h" in wrong["message"]
    assert message(edge, messages=[{"role": "user", "content": [longer, block, block, block]}], max_tokens=1)


def test_the_key_may_come_as_anthropics_clients_send_it(serve: Any, tmp_path: Any) -> None:
    keys = tmp_path / "keys"
    keys.write_text("sesame\n")
    keys.chmod(0o600)
    edge = serve(**{"edge.api_key_file": str(keys)})
    refused = post(edge, 401).json()["error"]
    assert refused["type"] == "authentication_error"
    edge.http.headers.update({"x-api-key": "sesame", "anthropic-version": "2023-06-01"})
    assert message(edge, max_tokens=1)["usage"]["output_tokens"] == 1


@pytest.fixture(params=["generic", "hermes", "llama3"])
def served(request: pytest.FixtureRequest, serve: Any, engine: Any, tmp_path: Any) -> Any:
    """Daemons whose models show tools in different places."""
    if request.param == "llama3":
        return serve(**{"edge.tools": "llama3"})
    if request.param == "generic":
        return serve(engine)
    from ctxreuse.engines import open_engine

    return serve(open_engine(str(hermes_folder(tmp_path / "hermes"))))


PLACES = ("tools", "first of system", "system", "first of message", "message", "result")


def marked(place: str, rest: str) -> Any:
    """A request with a mark at a place, after which the words are different with ``rest``."""
    kept = {"cache_control": {"type": "ephemeral"}}
    # These templates show tools behind the system's text, so that is part of their prefix.
    last = PLACES.index("system" if place == "tools" else place)

    def text(name: str) -> Any:
        words = f"{rest if PLACES.index(name) > last else place} {name}. " * 12
        return {"type": "text", "text": words} | (kept if name == place else {})

    call = {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {"city": "Köln"}}
    said = text("result")
    result = {**said, "type": "tool_result", "tool_use_id": "toolu_1", "content": said["text"]}
    return {
        "tools": [TOOLS[0], TOOLS[1] | (kept if place == "tools" else {})],
        "system": [text("first of system"), text("system")],
        "messages": [
            {"role": "user", "content": [text("first of message"), text("message")]},
            {"role": "assistant", "content": [call]},
            {"role": "user", "content": [result]},
        ],
        "max_tokens": 1,
    }


def test_what_was_kept_up_to_a_mark_is_read_whatever_follows_it(served: Any) -> None:
    for number, place in enumerate(PLACES, 1):
        first = message(served, **marked(place, "Now"))["usage"]
        again = message(served, **marked(place, "But then"))["usage"]
        assert first["cache_read_input_tokens"] < 64
        assert first["cache_creation_input_tokens"] >= 128, place
        assert again["cache_read_input_tokens"] >= first["cache_creation_input_tokens"], place
        assert again["cache_creation_input_tokens"] == 0, place
        until(lambda count=number: len(served.node.pins) == count)

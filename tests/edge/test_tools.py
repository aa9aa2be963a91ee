"""Tools at the OpenAI door: calls whole and streamed, results in the next turn, and the prefix that turns share."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ctxreuse.engines import open_engine
from support.hermes import hermes_folder

CITY = {"type": "string", "maxLength": 6}
WEATHER = {"type": "object", "properties": {"city": CITY}, "required": ["city"], "additionalProperties": False}
CLOCK = {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"], "additionalProperties": False}


def tools(description: str = "The weather of a place.") -> list[Any]:
    functions: list[Any] = [
        {"name": "get_weather", "description": description, "parameters": WEATHER},
        {"name": "set_clock", "description": "Sets the clock. " + "It is patient. " * 20, "parameters": CLOCK},
    ]
    return [{"type": "function", "function": function} for function in functions]


SYSTEM = {"role": "system", "content": "You are a harbour master. " * 40}
HELLO = [SYSTEM, {"role": "user", "content": "Wie ist das Wetter in Köln?"}]


@pytest.fixture(scope="session")
def hermes_engine(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return open_engine(str(hermes_folder(tmp_path_factory.mktemp("models") / "hermes")))


@pytest.fixture(params=["generic", "hermes", "llama3"])
def served(request: pytest.FixtureRequest, serve: Any, hermes_engine: Any, engine: Any) -> Any:
    """A daemon whose model's template knows no tools, one whose does, and one whose form the settings name."""
    if request.param == "llama3":
        return serve(**{"edge.tools": "llama3"})
    return serve(hermes_engine if request.param == "hermes" else engine)


def chat(edge: Any, messages: list[Any] = HELLO, **body: Any) -> Any:
    answer = edge.http.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 900, "seed": 1, **body})
    assert answer.status_code == 200, answer.text
    return answer


def checked(calls: list[Any]) -> list[str]:
    assert len({call["id"] for call in calls}) == len(calls)
    for call in calls:
        arguments = json.loads(call["function"]["arguments"])
        if call["function"]["name"] == "get_weather":
            assert list(arguments) == ["city"]
            assert len(arguments["city"]) <= 6
        else:
            assert arguments in ({"on": True}, {"on": False})
        assert call["type"] == "function"
        assert call["id"].startswith("call_")
    return [call["function"]["name"] for call in calls]


def test_calls_whole_and_streamed_are_the_same_and_valid(served: Any) -> None:
    for choice in ("required", {"type": "function", "function": {"name": "set_clock"}}):
        body = {"tools": tools(), "tool_choice": choice, "parallel_tool_calls": choice != "required"}
        found = chat(served, **body).json()["choices"][0]
        message = found["message"]
        names = checked(message["tool_calls"])
        assert message["content"] is None
        assert found["finish_reason"] == "tool_calls"
        assert choice == "required" or set(names) == {"set_clock"}
        assert choice != "required" or len(names) == 1
        raw = chat(served, **body, stream=True).text
        chunks = [json.loads(line[6:]) for line in raw.splitlines() if line.startswith("data: {")]
        calls: dict[int, Any] = {}
        for delta in (chunk["choices"][0]["delta"] for chunk in chunks):
            assert not delta.get("content")
            for piece in delta.get("tool_calls", ()):
                if "id" in piece:
                    calls[piece["index"]] = piece
                else:
                    calls[piece["index"]]["function"]["arguments"] += piece["function"]["arguments"]
        assert [call["function"] for call in calls.values()] == [call["function"] for call in message["tool_calls"]]
        checked(list(calls.values()))
        assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
        assert len(chunks) > 10, "arguments come in pieces"


def test_text_stays_text_and_a_cut_call_says_length(served: Any) -> None:
    for choice in ("auto", "none", None):
        found = chat(served, tools=tools(), tool_choice=choice, max_tokens=20).json()["choices"][0]
        assert found["message"]["content"]
        assert "tool_calls" not in found["message"]
    cut = chat(served, tools=tools(), tool_choice="required", max_tokens=75).json()["choices"][0]
    assert cut["finish_reason"] == "length" or cut["message"]["tool_calls"]
    raw = chat(served, tools=tools(), tool_choice="required", max_tokens=30, stream=True).text
    assert raw.endswith("data: [DONE]\n\n")
    assert '"finish_reason":"length"' in raw


def test_the_next_turn_reuses_the_prompt_and_renders_calls_and_results(served: Any) -> None:
    first = chat(served, tools=tools(), tool_choice="required", parallel_tool_calls=False).json()
    message = first["choices"][0]["message"]
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "12 °C <|im_end|>"}
    second = chat(served, [*HELLO, message, result], tools=tools(), tool_choice="none", max_tokens=4).json()["usage"]
    cached = second["prompt_tokens_details"]["cached_tokens"]
    assert cached >= first["usage"]["prompt_tokens"] - 1
    assert cached >= 0.95 * second["prompt_tokens"] - 64
    assert cached / second["prompt_tokens"] >= 0.9


def test_tokenize_counts_the_prompt_with_its_tools_and_calls(served: Any) -> None:
    message = chat(served, tools=tools(), tool_choice="required").json()["choices"][0]["message"]
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "12 °C"}
    for messages in (HELLO, [*HELLO, message, result]):
        usage = chat(served, messages, tools=tools(), tool_choice="none", max_tokens=1).json()["usage"]
        counted = served.http.post("/tokenize", json={"messages": messages, "tools": tools()}).json()
        assert counted["count"] == usage["prompt_tokens"]


def test_why_names_the_tool_whose_description_changed(served: Any) -> None:
    before = chat(served, tools=tools(), tool_choice="none", max_tokens=2)
    after = chat(served, tools=tools("The wind."), tool_choice="none", max_tokens=2)
    assert before.json()["id"] != after.json()["id"]
    why = served.http.get(f"/api/why/{after.json()['id']}").json()
    assert "tool get_weather" in json.dumps(why)
    grown = [*HELLO, {"role": "assistant", "content": "Regen."}, {"role": "user", "content": "Und morgen?"}]
    usage = chat(served, grown, tools=tools("The wind."), tool_choice="none", max_tokens=2).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] >= after.json()["usage"]["prompt_tokens"] - 32

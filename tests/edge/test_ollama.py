"""Ollama's door: lines of JSON, calls and results, formats, loading, and what its clients read of models."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

import pytest

HELLO = [{"role": "user", "content": "Wie ist das Wetter in Köln?"}]
CITY = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 6}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": "wetter ☃", "description": "The weather.", "parameters": CITY}}]
GREEDY = {"temperature": 0, "num_predict": 24}


def post(edge: Any, path: str = "/api/chat", status: int = 200, **body: Any) -> Any:
    given = {"model": "tiny", "messages": HELLO, "options": GREEDY, "stream": False, **body}
    if path != "/api/chat":
        del given["messages"]
    answer = edge.http.post(path, json=given)
    assert answer.status_code == status, answer.text
    return answer


def lines(answer: Any) -> list[Any]:
    assert answer.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in answer.text.splitlines()]


def test_chats_whole_and_streamed_are_the_same_and_count_in_nanoseconds(edge: Any) -> None:
    whole = post(edge, model="tiny:latest").json()
    assert (whole["done"], whole["done_reason"], whole["message"]["role"]) == (True, "length", "assistant")
    assert whole["eval_count"] == 24
    assert whole["total_duration"] >= whole["load_duration"] + whole["prompt_eval_duration"] + whole["eval_duration"]
    assert whole["prompt_eval_duration"] > 0
    datetime.fromisoformat(whole["created_at"])
    given = {"model": "tiny", "messages": HELLO, "options": GREEDY}
    streamed = lines(edge.http.post("/api/chat", json=given))
    assert "".join(line["message"]["content"] for line in streamed) == whole["message"]["content"]
    assert [line["done"] for line in streamed] == [False] * (len(streamed) - 1) + [True]
    assert streamed[-1]["prompt_eval_count"] == whole["prompt_eval_count"]
    body = {"messages": HELLO, "temperature": 0, "max_tokens": 24, "top_k": 40, "top_p": 0.9}
    same = edge.http.post("/v1/chat/completions", json=body).json()
    assert same["choices"][0]["message"]["content"] == whole["message"]["content"]
    text = whole["message"]["content"]
    stopped = post(edge, options=GREEDY | {"stop": [text[6:9]]}).json()
    assert stopped["done_reason"] == "stop"
    assert text.startswith(stopped["message"]["content"])


def test_texts_with_the_template_and_raw(edge: Any) -> None:
    chat = post(edge, messages=[{"role": "system", "content": "Be kind."}, *HELLO]).json()["message"]["content"]
    said = post(edge, "/api/generate", prompt=HELLO[0]["content"], system="Be kind.").json()
    assert said["response"] == chat
    assert "message" not in said
    plain = {"prompt": "a b c", "raw": True}
    raw = "".join(line["response"] for line in lines(post(edge, "/api/generate", **plain, stream=True)))
    body = {"prompt": "a b c", "temperature": 0, "max_tokens": 24, "top_k": 40, "top_p": 0.9}
    assert edge.http.post("/v1/completions", json=body).json()["choices"][0]["text"] == raw


def test_calls_come_whole_and_results_go_to_their_calls(edge: Any) -> None:
    forced = {"tools": TOOLS, "tool_choice": "required", "options": {"temperature": 0, "num_predict": 300}}
    whole = post(edge, **forced).json()
    calls = whole["message"]["tool_calls"]
    assert {call["function"]["name"] for call in calls} == {"wetter ☃"}
    assert all(len(call["function"]["arguments"]["city"]) <= 6 for call in calls)
    streamed = lines(post(edge, **forced, stream=True))
    assert [call for line in streamed for call in line["message"].get("tool_calls", [])] == calls
    cut = post(edge, **forced | {"options": {"num_predict": 30}}).json()
    assert (cut["done_reason"], cut["message"].get("tool_calls")) == ("length", None)
    call = {"function": {"name": "wetter ☃", "arguments": {"city": "Köln"}}}
    result = {"role": "tool", "tool_name": "wetter ☃", "content": "Regen 🌧 <|im_end|>"}
    messages = [*HELLO, {"role": "assistant", "content": "", "tool_calls": [call]}, result]
    after = post(edge, messages=messages, tools=TOOLS).json()
    openai = [
        *HELLO,
        {"role": "assistant", "content": "", "tool_calls": [
            {"id": "call00000", "type": "function", "function": {"name": "wetter ☃", "arguments": '{"city": "Köln"}'}}
        ]},
        {"role": "tool", "name": "wetter ☃", "tool_call_id": "call00000", "content": result["content"]},
    ]  # fmt: skip
    body = {"messages": openai, "tools": TOOLS, "temperature": 0, "max_tokens": 24, "top_k": 40, "top_p": 0.9}
    same = edge.http.post("/v1/chat/completions", json=body).json()
    assert same["usage"]["prompt_tokens"] == after["prompt_eval_count"]
    assert same["choices"][0]["message"]["content"] == after["message"]["content"]


def test_formats_are_kept_and_wrong_ones_refused(edge: Any) -> None:
    options = {"temperature": 0, "num_predict": 200}
    found = json.loads(post(edge, format=CITY, options=options).json()["message"]["content"])
    assert len(found["city"]) <= 6
    refused = post(edge, status=400, format="xml").json()
    assert list(refused) == ["error"]
    assert "xml" in refused["error"]


def test_loading_and_what_is_served(edge: Any) -> None:
    loaded = post(edge, messages=[]).json()
    assert (loaded["done"], loaded["done_reason"], loaded["message"]["content"]) == (True, "load", "")
    assert post(edge, "/api/generate", keep_alive=0).json()["done_reason"] == "unload"
    [model] = edge.http.get("/api/tags").json()["models"]
    assert model["name"] == model["model"] == "tiny"
    assert model["size"] > 0
    assert len(model["digest"]) == 64
    assert edge.http.get("/api/ps").json()["models"][0]["context_length"] == 4096
    shown = edge.http.post("/api/show", json={"model": "tiny"}).json()
    family = shown["model_info"]["general.architecture"]
    assert shown["model_info"][f"{family}.context_length"] == 4096
    assert "tools" in shown["capabilities"]
    assert "im_start" in shown["template"]
    assert edge.http.get("/api/version").json()["version"]
    assert edge.http.get("/api/status").status_code == 200


@pytest.mark.parametrize(
    ("path", "body", "status", "word"),
    [
        ("/api/chat", {"model": "nobody"}, 404, "nobody"),
        ("/api/chat", {"messages": [{"role": "user", "content": "x", "images": ["AA=="]}]}, 400, "messages[0].images"),
        ("/api/chat", {"messages": [{"role": "alien", "content": "x"}]}, 400, "alien"),
        ("/api/chat", {"keep_alive": "soon"}, 400, "keep_alive"),
        ("/api/chat", {"options": {"top_p": 3}}, 400, "top_p"),
        ("/api/generate", {"prompt": "x", "suffix": "y"}, 400, "suffix"),
        ("/api/show", {"model": "nobody"}, 404, "nobody"),
    ],
)
def test_errors_are_a_text(edge: Any, path: str, body: Any, status: int, word: str) -> None:
    error = post(edge, path, status, **body).json()["error"]
    assert word in error

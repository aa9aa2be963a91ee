"""``response_format`` and ``structured_outputs``: what comes back has the wanted form, whatever the model says."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}, "sure": {"type": "boolean"}},
    "required": ["city", "sure"],
    "additionalProperties": False,
}
JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "place", "strict": True, "schema": SCHEMA}}


def chat(edge: Any, **body: Any) -> Any:
    messages = [{"role": "user", "content": "Where?"}]
    return edge.http.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 300, **body})


@pytest.mark.parametrize("seed", range(4))
def test_an_answer_has_the_schema_whole_and_streamed(edge: Any, seed: int) -> None:
    answer = chat(edge, response_format=JSON_SCHEMA, seed=seed).json()["choices"][0]
    found = json.loads(answer["message"]["content"])
    assert set(found) == {"city", "sure"}
    assert len(found["city"]) <= 8
    assert answer["finish_reason"] == "stop"
    raw = chat(edge, response_format=JSON_SCHEMA, seed=seed, stream=True).text
    chunks = [json.loads(line[6:]) for line in raw.splitlines() if line.startswith("data: {")]
    assert "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks) == answer["message"]["content"]
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


def test_other_forms_at_both_doors_and_by_token_ids(edge: Any) -> None:
    plain = chat(edge, response_format={"type": "text"}, seed=1)
    assert plain.json()["choices"][0]["message"]["content"] != ""
    found = chat(edge, response_format={"type": "json_object"}, seed=3, stop=["}"]).json()["choices"][0]["message"]
    assert found["content"].startswith("{")
    of_text = {"prompt": "once", "max_tokens": 99, "structured_outputs": {"regex": "[a-f]{3}-[0-9]{3}"}}
    text = edge.http.post("/v1/completions", json=of_text).json()["choices"][0]["text"]
    assert re.fullmatch("[a-f]{3}-[0-9]{3}", text)
    chosen = chat(edge, structured_outputs={"choice": ["ja", "nein", "vielleicht ☔"]}, temperature=2).json()
    assert chosen["choices"][0]["message"]["content"] in ("ja", "nein", "vielleicht ☔")
    grammar = {"kind": "lark", "text": 'start: "a" b*\nb: "b" | "c"'}
    body = {"tokens": [5, 6, 7], "sampling": {"max_tokens": 5, "grammar": grammar, "ignore_eos": True}}
    raw = edge.http.post("/api/tokens/complete", json=body).text
    pieces = [json.loads(line[6:]) for line in raw.splitlines() if line.startswith("data: {")]
    assert re.fullmatch("a[bc]*", "".join(piece.get("text", "") for piece in pieces))


def test_a_schema_that_cannot_be_followed_is_named_with_the_place(edge: Any) -> None:
    bad = {"type": "object", "properties": {"a": {"type": "string", "pattern": "(?=x)"}}}
    answer = chat(edge, response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": bad}})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "response_format.json_schema.schema")
    assert "#/properties/a" in error["message"]
    wide = {"properties": {f"p{n}": {} for n in range(5_000)}}
    answer = chat(edge, response_format={"type": "json_schema", "json_schema": {"schema": wide}})
    assert answer.status_code == 400
    assert "#/properties" in answer.json()["error"]["message"]
    by_ids = {"tokens": [5], "sampling": {"grammar": {"kind": "regex", "text": "("}}}
    assert edge.http.post("/api/tokens/complete", json=by_ids).status_code == 400
    edge.node.pool.check()

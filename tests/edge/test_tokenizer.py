"""/tokenize and /detokenize: the ids that the other routes compute, and back."""

from __future__ import annotations

from typing import Any

import pytest

from .test_api import HELLO, ask


def test_ids_are_those_that_are_computed(edge: Any) -> None:
    found = edge.http.post("/tokenize", json={"prompt": "once upon é"}).json()
    text = edge.node.runtime.text
    assert found["tokens"] == text.encode("once upon é").tolist()
    assert (found["count"], found["max_model_len"], found["token_strs"]) == (len(found["tokens"]), 4096, None)
    assert ask(edge, "/v1/completions", prompt="once upon é").json()["usage"]["prompt_tokens"] == found["count"]
    assert edge.http.post("/detokenize", json={"tokens": found["tokens"]}).json() == {"prompt": "once upon é"}

    chat = edge.http.post("/tokenize", json={"messages": HELLO, "return_token_strs": True}).json()
    assert ask(edge).json()["usage"]["prompt_tokens"] == chat["count"]
    assert (
        "".join(chat["token_strs"]) == edge.http.post("/detokenize", json={"tokens": chat["tokens"]}).json()["prompt"]
    )
    assert chat["token_strs"][0] == "<|im_start|>"
    history = edge.http.post("/tokenize", json={"messages": HELLO, "add_generation_prompt": False}).json()
    assert chat["tokens"][: history["count"]] == history["tokens"] != chat["tokens"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": HELLO}, "prompt"),
        ("/tokenize", {"messages": [{"role": "wizard"}]}, "messages[0].role"),
        ("/tokenize", {"prompt": "a", "model": "gpt"}, "model"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
        ("/detokenize", {"tokens": [100_000]}, "tokens"),
    ],
)
def test_what_is_wrong_is_named(edge: Any, path: str, body: dict[str, Any], param: str) -> None:
    answer = edge.http.post(path, json=body)
    assert answer.status_code in (400, 404)
    assert answer.json()["error"]["param"] == param

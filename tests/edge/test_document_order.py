"""Documents of a chat request in the order that is cached, and plans for requests that are sent elsewhere."""

from __future__ import annotations

import json
from typing import Any

import pytest

from support.pages import blocks

from .test_documents import DOCUMENTS, RULES, ask, body

ORDER = {"ctxreuse": {"order": "cached"}}


def why_of(edge: Any, documents: list[str], **more: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    answer = edge.http.post("/v1/chat/completions", json=body(documents, **more))
    assert answer.status_code == 200, answer.text
    return answer.json(), edge.http.get(f"/api/why/{answer.headers['x-request-id']}").json()


def test_documents_in_another_order_are_put_into_the_cached_one(serve: Any) -> None:
    edge = serve()
    ask(edge.http, DOCUMENTS)
    shuffled = [DOCUMENTS[2], DOCUMENTS[0], DOCUMENTS[1]]
    as_given = ask(edge.http, shuffled)
    assert as_given["cached_tokens"] < 0.4 * as_given["prompt"]
    first = [DOCUMENTS[1], DOCUMENTS[2], DOCUMENTS[0]]
    answer, why = why_of(edge, first, **ORDER)
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 0.8 * answer["usage"]["prompt_tokens"]
    order, cached, given = why["reordered"]
    found = [first[index] for index in order]
    assert found in (DOCUMENTS, shuffled)
    assert cached > given
    assert "documents were put into the order" in why["text"]
    same, _ = why_of(edge, found)
    assert answer["choices"][0]["message"] == same["choices"][0]["message"], "an answer to the prompt as it says"


def test_ranked_tells_the_model_the_order_given(serve: Any) -> None:
    edge = serve(**{"edge.document_order": "ranked"})
    ask(edge.http, DOCUMENTS)
    shuffled = [DOCUMENTS[1], DOCUMENTS[2], DOCUMENTS[0]]
    answer, why = why_of(edge, shuffled)
    order = why["reordered"][0]
    assert [shuffled[index] for index in order] == DOCUMENTS
    plain, unplanned = why_of(edge, shuffled, ctxreuse={"order": "given"})
    assert unplanned["reordered"] is None
    line = "(Documents by relevance, best first: 2, 3, 1.)\n\n"
    said, _ = why_of(edge, DOCUMENTS, question=line + "How often?", ctxreuse={"order": "given"})
    assert answer["usage"]["prompt_tokens"] == said["usage"]["prompt_tokens"] > plain["usage"]["prompt_tokens"]
    assert answer["choices"][0]["message"] == said["choices"][0]["message"]


@pytest.mark.parametrize(
    "messages",
    [
        [RULES, {"role": "user", "content": "How often?"}],
        [RULES, {"role": "user", "content": [{"type": "text", "text": text} for text in (DOCUMENTS[0], "How often?")]}],
        [RULES, {"role": "user", "content": [{"type": "text", "text": f" {text}"} for text in DOCUMENTS]}],
        [{"role": "user", "content": []}],
    ],
    ids=["a text", "one document", "they begin with blanks", "nothing"],
)
def test_what_cannot_change_places_stays(serve: Any, messages: list[dict[str, Any]]) -> None:
    edge = serve()
    sent = {"messages": messages, "temperature": 0, "max_tokens": 2}
    answer = edge.http.post("/v1/chat/completions", json={**sent, **ORDER})
    assert answer.status_code == 200, answer.text
    assert edge.http.get(f"/api/why/{answer.headers['x-request-id']}").json()["reordered"] is None
    assert answer.json()["choices"] == edge.http.post("/v1/chat/completions", json=sent).json()["choices"]


def test_a_plan_of_requests_for_another_engine(serve: Any) -> None:
    http = serve().http
    requests = [{"documents": ["a", "b", "c"]}, {"documents": ["x"]}, {"documents": ["c", "a", "d"]}]
    tokens = {"a": 100, "b": 50, "c": 200, "d": 10, "x": 5}
    found = http.post("/api/plan", json={"requests": requests, "tokens": tokens}).json()
    orders = [[given["documents"][i] for i in one["order"]] for given, one in zip(requests, found["requests"])]
    assert orders[0][:2] == orders[2][:2]
    assert abs(found["schedule"].index(0) - found["schedule"].index(2)) == 1
    assert (found["shared"], found["tokens"]) == (300, 665)


def test_the_plan_that_the_guide_shows(serve: Any) -> None:
    shown, marks = (json.loads(text) for page, text in blocks("json") if page == "docs/guide/documents.md")
    http = serve().http
    assert http.post("/api/plan", json=marks).json() == {"body": marks["body"], "marks": [], "repeats": []}
    found = http.post("/api/plan", json=shown).json()
    assert (found["shared"], found["tokens"]) == (600, 1800)
    assert abs(found["schedule"].index(0) - found["schedule"].index(2)) == 1


def test_a_body_gets_marks_and_pointers(serve: Any) -> None:
    text = "What stands in the harbour's rules. " * 200
    asked = [{"type": "text", "text": text}, {"type": "text", "text": "Why?"}]
    messages = [{"role": "user", "content": asked}, {"role": "user", "content": asked}]
    found = serve().http.post("/api/plan", json={"body": {"messages": messages}, "repeats": True}).json()
    assert found["marks"] == [
        ["messages", 0, "content", 1],
        ["messages", 1, "content", 0],
        ["messages", 1, "content", 1],
    ]
    assert found["repeats"] == [
        {"at": ["messages", 1, "content", 0, "text"], "of": ["messages", 0, "content", 0, "text"]}
    ]
    assert found["body"]["messages"][0]["content"][0]["text"] == text
    assert len(found["body"]["messages"][1]["content"][0]["text"]) < 300


def test_a_plan_says_what_is_wrong(serve: Any) -> None:
    http = serve().http
    refused = http.post("/api/plan", json={"requests": [{"documents": ["a"] * 4096}] * 17})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "requests")
    assert "send fewer at a time" in refused.json()["error"]["message"]
    for wrong in (
        {},
        {"requests": [], "body": {}},
        {"body": {}},
        {"body": {}, "api": "x"},
        {"requests": [{"documents": [1]}]},
        {"requests": [], "tokens": {"a": -1}},
    ):
        assert http.post("/api/plan", json=wrong).status_code == 400
    unknown = http.post("/v1/chat/completions", json=body(DOCUMENTS, ctxreuse={"order": "best"}))
    assert unknown.status_code == 400
    assert "order" in unknown.json()["error"]["message"]

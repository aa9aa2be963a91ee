"""`/v1/responses`: stored responses are sessions and forks, durable; events in OpenAI's order; what is refused."""

from __future__ import annotations

import json
import signal
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import httpx
import numpy as np
from ctxreuse_edge.responses import StoredResponses, new_response_id

from ctxreuse.daemon.middleware import CALLER
from ctxreuse.daemon.responses import Item, ResponseObject
from ctxreuse.engines.text import Message
from ctxreuse.identity.keys import as_tokens
from support.waiting import until

CITY = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 6}}, "required": ["city"]}
TOOLS = [
    {"type": "function", "name": "get_weather", "description": "The weather.", "parameters": CITY, "strict": None},
    {"type": "function", "name": "rufe_Köln_an_☎", "parameters": None},
]
SYSTEM = "You are a harbour master. " * 40


class Client(NamedTuple):
    """What stands for a daemon in this process where it is one of its own."""

    http: httpx.Client


def respond(edge: Any, input: Any, **body: Any) -> Any:
    body = {"max_output_tokens": 12, "temperature": 0, "instructions": SYSTEM, **body}
    answer = edge.http.post("/v1/responses", json={"input": input, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def refused(edge: Any, status: int = 400, **body: Any) -> Any:
    answer = edge.http.post("/v1/responses", json={"input": "hi", **body})
    assert answer.status_code == status, answer.text
    return answer.json()["error"]


def events(edge: Any, input: Any, **body: Any) -> list[Any]:
    body = {"max_output_tokens": 12, "temperature": 0, "instructions": SYSTEM, "stream": True, **body}
    raw = edge.http.post("/v1/responses", json={"input": input, **body}).text
    found = []
    for block in raw.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


def texts(response: Any) -> list[str]:
    return [part["text"] for item in response["output"] if item["type"] == "message" for part in item["content"]]


def cached(response: Any) -> int:
    return int(response["usage"]["input_tokens_details"]["cached_tokens"])


def test_a_response_is_kept_and_given_again(edge: Any) -> None:
    made = respond(edge, "Moin", metadata={"ship": "Aurora"}, prompt_cache_key="quay", max_tool_calls=3)
    assert made["object"] == "response"
    assert (made["status"], made["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert (made["metadata"], made["prompt_cache_key"], made["store"]) == ({"ship": "Aurora"}, "quay", True)
    assert made["usage"]["output_tokens"] == 12
    assert made["usage"]["total_tokens"] == made["usage"]["input_tokens"] + 12
    assert texts(made)[0]
    again = edge.http.get(f"/v1/responses/{made['id']}").json()
    assert again == made
    (given,) = edge.http.get(f"/v1/responses/{made['id']}/input_items").json()["data"]
    assert (given["role"], given["content"]) == ("user", [{"type": "input_text", "text": "Moin"}])
    edge.node.ledger.check()


def test_the_next_response_shares_the_turns_of_the_first(edge: Any) -> None:
    first = respond(edge, "Moin")
    second = respond(edge, "Wie tief ist das Wasser?", previous_response_id=first["id"])
    assert second["previous_response_id"] == first["id"]
    assert cached(second) >= first["usage"]["input_tokens"] - 1
    whole = [
        {"role": "user", "content": "Moin"},
        *first["output"],
        {"role": "user", "content": "Wie tief ist das Wasser?"},
    ]
    assert texts(respond(edge, whole, store=False)) == texts(second)
    ledger = edge.node.ledger
    one, two = (ledger.session(made["id"]) for made in (first, second))
    assert (two.origin, two.forked_at) == (one.id, ledger.before(one.head, 1))
    assert ledger.ancestor(two.forked_at, two.head)
    assert ledger.stats().turns == 6, "the turns of the first are not copied"
    ids, space = edge.node.contexts.tokens(two), edge.node.runtime.space.digest
    assert len(ids) == second["usage"]["total_tokens"]
    alone = respond(edge, whole)
    copied = edge.node.contexts.tokens(ledger.session(alone["id"]))
    assert np.array_equal(ids, copied)
    assert len(ledger.tokens(two.head, space)) < len(copied) * 4 / 8, "ids of the first are not copied"
    third = respond(edge, "Und?", previous_response_id=second["id"])
    longer = edge.node.contexts.tokens(ledger.session(third["id"]))
    assert len(longer) == third["usage"]["total_tokens"]
    assert np.array_equal(longer[: len(ids) - 12], ids[:-12])
    listed = edge.http.get(f"/v1/responses/{second['id']}/input_items?order=asc").json()["data"]
    assert [item["role"] for item in listed] == ["user", "assistant", "user"]
    assert listed[1]["id"] == first["output"][0]["id"]
    page = edge.http.get(f"/v1/responses/{second['id']}/input_items?limit=2").json()
    assert page["has_more"]
    assert [item["id"] for item in page["data"]] == [listed[2]["id"], listed[1]["id"]]
    rest = edge.http.get(f"/v1/responses/{second['id']}/input_items?after={page['last_id']}").json()
    assert ([item["id"] for item in rest["data"]], rest["has_more"]) == ([listed[0]["id"]], False)


def test_instructions_are_those_of_the_request_alone(edge: Any) -> None:
    first = respond(edge, "Moin")
    body = {"input": "Und?", "previous_response_id": first["id"]}
    second = respond(edge, **body, instructions=None)
    counted = edge.http.post("/v1/responses/input_tokens", json=body).json()
    assert counted == {"object": "response.input_tokens", "input_tokens": second["usage"]["input_tokens"]}
    third = respond(edge, "Und?", previous_response_id=first["id"], instructions="x")
    assert second["instructions"] is None
    assert second["usage"]["input_tokens"] < first["usage"]["input_tokens"]
    assert third["usage"]["input_tokens"] > 0


def said(edge: Any, text: str) -> set[int]:
    """Return the turns of sessions that have a text."""
    ledger = edge.node.ledger
    turns = [turn for session in ledger.sessions() for turn in ledger.turns(session.head)]
    return {turn.id for turn in turns if text in turn.content}


def test_two_go_on_from_one_and_deleting_it_leaves_both(edge: Any) -> None:
    first = respond(edge, "Moin", instructions="Be the secret harbour master. " * 20)
    left, right = (respond(edge, text, previous_response_id=first["id"]) for text in ("Backbord?", "Steuerbord?"))
    assert left["id"] != right["id"]
    assert said(edge, "secret harbour")
    gone = edge.http.delete(f"/v1/responses/{first['id']}").json()
    assert gone == {"id": first["id"], "object": "response", "deleted": True}
    edge.node.ledger.gc()
    edge.node.ledger.check()
    assert not said(edge, "secret harbour"), "what only the first had"
    assert len(said(edge, "Moin")) == 1, "what the others have, too"
    assert edge.http.get(f"/v1/responses/{first['id']}").status_code == 404
    assert refused(edge, previous_response_id=first["id"])["code"] == "previous_response_not_found"
    for made in (left, right):
        assert edge.http.get(f"/v1/responses/{made['id']}").json()["status"] == "incomplete"
        respond(edge, "Weiter", previous_response_id=made["id"])


def test_what_is_not_stored_is_not_found(edge: Any) -> None:
    made = respond(edge, "Moin", store=False)
    assert made["store"] is False
    assert edge.node.ledger.stats().sessions == 0
    for path in ("", "/input_items"):
        answer = edge.http.get(f"/v1/responses/{made['id']}{path}")
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "response_not_found")
    assert edge.http.delete(f"/v1/responses/{made['id']}").status_code == 404
    assert refused(edge, previous_response_id=made["id"])["param"] == "previous_response_id"


def test_responses_are_no_contexts_unless_asked_for(edge: Any) -> None:
    made = respond(edge, "Moin")
    edge.http.post("/api/contexts", json={"name": "manual", "text": "red button"})
    listed = edge.http.get("/api/contexts").json()
    assert ([one["name"] for one in listed["contexts"]], listed["total"]) == (["manual"], 1)
    (one,) = edge.http.get("/api/contexts?prefix=resp_").json()["contexts"]
    assert one["name"] == made["id"]
    assert one["tokens"] == made["usage"]["total_tokens"]
    chat = {"context": made["id"], "messages": [{"role": "user", "content": "Und?"}], "max_tokens": 1}
    assert edge.http.post("/v1/chat/completions", json=chat).status_code == 200
    taken = edge.http.post("/api/contexts", json={"name": "resp_mine", "text": "x"})
    assert taken.json()["error"]["code"] == "context_name"
    assert edge.http.get("/v1/responses/manual").status_code == 404


def test_events_of_a_text_come_in_order(edge: Any) -> None:
    found = events(edge, "Moin")
    kinds = [event["type"].removeprefix("response.") for event in found]
    deltas = kinds.count("output_text.delta")
    ends = ["output_text.done", "content_part.done", "output_item.done", "incomplete"]
    head = ["created", "in_progress", "output_item.added", "content_part.added"]
    assert kinds == [*head, *["output_text.delta"] * deltas, *ends]
    assert deltas > 1
    whole = respond(edge, "Moin")
    text = "".join(event["delta"] for event in found if event["type"].endswith("text.delta"))
    assert [text] == texts(whole) == texts(found[-1]["response"])
    assert found[0]["response"]["status"] == "in_progress"
    assert found[0]["response"]["id"] == found[-1]["response"]["id"]
    assert edge.http.get(f"/v1/responses/{found[0]['response']['id']}").status_code == 200


def test_a_call_and_its_result_of_any_text(edge: Any) -> None:
    body = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False, "max_output_tokens": 900}
    found = events(edge, "Wie ist das Wetter in Köln?", **body)
    final = found[-1]["response"]
    (call,) = final["output"]
    assert (call["type"], call["status"]) == ("function_call", "completed")
    assert call["name"] in [tool["name"] for tool in TOOLS]
    json.loads(call["arguments"])
    kinds = [event["type"].removeprefix("response.") for event in found]
    pieces = [event["delta"] for event in found if event["type"].endswith("arguments.delta")]
    assert "".join(pieces) == call["arguments"]
    assert len(pieces) > 1
    assert kinds[2] == "output_item.added"
    assert kinds[-3:] == ["function_call_arguments.done", "output_item.done", "completed"]
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": "12 °C <|im_end|> \U0001f6a2\x00"}
    second = respond(edge, [output], previous_response_id=final["id"], tools=TOOLS, tool_choice="none")
    assert cached(second) >= final["usage"]["input_tokens"] - 1
    shown = edge.http.get(f"/v1/responses/{second['id']}/input_items?order=asc").json()["data"]
    assert [item["type"] for item in shown] == ["message", "function_call", "function_call_output"]
    assert shown[2]["output"] == output["output"]
    assert shown[1] == {**call, "id": shown[1]["id"]}
    whole = [{"role": "user", "content": "Wie ist das Wetter in Köln?"}, call, output]
    assert texts(respond(edge, whole, tools=TOOLS, tool_choice="none", store=False)) == texts(second)


def test_a_named_function_and_a_schema(edge: Any) -> None:
    name = TOOLS[1]["name"]
    made = respond(edge, "x", tools=TOOLS, tool_choice={"type": "function", "name": name}, max_output_tokens=900)
    assert {item["name"] for item in made["output"]} == {name}
    schema = {"type": "object", "properties": {"deep": {"type": "boolean"}}, "required": ["deep"]}
    schema["additionalProperties"] = False
    form = {"type": "json_schema", "name": "depth", "schema": schema, "strict": True}
    made = respond(edge, "x", text={"format": form}, max_output_tokens=200)
    assert json.loads(texts(made)[0])["deep"] in (True, False)
    assert made["text"]["format"] == form


def test_log_probabilities(edge: Any) -> None:
    body = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    made = respond(edge, "Moin", **body)
    reports = made["output"][0]["content"][0]["logprobs"]
    assert len(reports) == 12
    assert all(len(one["top_logprobs"]) == 2 for one in reports)
    streamed = [event.get("logprobs", []) for event in events(edge, "Moin", **body) if "delta" in event]
    assert [one["token"] for piece in streamed for one in piece] == [one["token"] for one in reports]


SLIPS: list[tuple[Any, str]] = [
    ({"input": []}, "input"),
    ({"input": [{"role": "pirate", "content": "x"}]}, "input[0].role"),
    ({"input": [{"role": "user"}]}, "input[0].content"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
    ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0]"),
    ({"input": [{"type": "computer_call"}]}, "input[0].type"),
    ({"input": [{"type": "function_call", "call_id": "c"}]}, "input[0].name"),
    ({"input": [{"type": "function_call_output", "call_id": "c"}]}, "input[0].output"),
    ({"input": [{"type": "function_call_output", "call_id": "c", "output": "x"}]}, "input"),
    ({"input": 5}, "input"),
    ({"input": "x" * 5000}, "input"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"type": "function"}]}, "tools[0]"),
    ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
    ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"background": True}, "background"),
    ({"prompt": {"id": "pmpt_1"}}, "prompt"),
    ({"include": ["everything"]}, "include"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"previous_response_id": "resp_0"}, "previous_response_id"),
    ({"previous_response_id": "manual"}, "previous_response_id"),
    ({"metadata": {"x": 5}}, "metadata[...]"),
    ({"model": "gpt-5"}, "model"),
    ({"prompt_cache_retention": "1y"}, "prompt_cache_retention"),
]


def test_slips(edge: Any) -> None:
    for body, param in SLIPS:
        error = refused(edge, 404 if "model" in body else 400, **body)
        assert error["param"] == param
        assert error["message"]
    assert edge.node.ledger.stats().sessions == 0


def test_cancelling_is_refused_and_unknown_fields_are_named(edge: Any) -> None:
    answer = edge.http.post("/v1/responses/resp_1/cancel")
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "not_in_background")
    body = {"input": "hi", "max_output_tokens": 1, "reasoning": {"effort": "low"}, "wit": 3}
    answer = edge.http.post("/v1/responses", json=body)
    assert answer.headers["x-ctxreuse-ignored-fields"] == "reasoning, wit"
    assert edge.http.get(f"/v1/responses/{answer.json()['id']}/input_items?limit=0").status_code == 400


def test_a_stream_cut_in_a_call_leaves_nothing_and_what_was_before_goes_on(edge: Any) -> None:
    first = respond(edge, "Moin")
    flags = {"type": "array", "items": {"type": "boolean"}, "minItems": 400}
    tool = {"type": "function", "name": "set_flags", "parameters": {"type": "object", "properties": {"flags": flags}}}
    tool["parameters"]["required"] = ["flags"]
    body = {"input": "x", "tools": [tool], "tool_choice": "required", "previous_response_id": first["id"]}
    with edge.http.stream("POST", "/v1/responses", json={**body, "instructions": SYSTEM, "stream": True}) as answer:
        lines = (json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: "))
        id = next(lines)["response"]["id"]
        assert next(event for event in lines if event["type"] == "response.function_call_arguments.delta")
    until(lambda: edge.node.pool.active == 0)
    assert edge.http.get(f"/v1/responses/{id}").status_code == 404
    assert edge.node.ledger.stats().turns == 3
    second = respond(edge, "Weiter", previous_response_id=first["id"])
    assert cached(second) >= first["usage"]["input_tokens"] - 64
    edge.node.ledger.check()


def test_a_response_whose_beginning_is_deleted_meanwhile_fails(edge: Any) -> None:
    first = respond(edge, "Moin")
    body = {"input": "x", "previous_response_id": first["id"], "stream": True, "max_output_tokens": 2000}
    form = {"type": "json_schema", "name": "x", "schema": {"type": "array", "items": {"type": "null"}, "minItems": 200}}
    with edge.http.stream("POST", "/v1/responses", json={**body, "text": {"format": form}}) as answer:
        lines = (json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: "))
        assert next(event for event in lines if event["type"] == "response.output_text.delta")
        assert edge.http.delete(f"/v1/responses/{first['id']}").status_code == 200
        *_, last = lines
    assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
    assert "deleted meanwhile" in last["response"]["error"]["message"]
    assert edge.node.ledger.stats().sessions == 0


def test_two_clients_go_on_from_one_response_at_once(edge: Any) -> None:
    first = respond(edge, "Moin")
    with ThreadPoolExecutor(2) as threads:
        texts = ("Backbord?", "Steuerbord?")
        made = list(threads.map(lambda text: respond(edge, text, previous_response_id=first["id"]), texts))
    for text, one in zip(texts, made):
        listed = edge.http.get(f"/v1/responses/{one['id']}/input_items").json()["data"]
        assert listed[0]["content"][0]["text"] == text
        assert listed[1]["id"] == first["output"][0]["id"]
    assert edge.node.ledger.stats().turns == 3 + 3 + 3
    edge.node.ledger.check()


def test_any_unicode_in_names_arguments_and_results(edge: Any) -> None:
    names = ['say "hi"\\', "привет", "رحلة", "🚢" * 60, "<|im_end|>", "</tool_call>"]
    tools = [{"type": "function", "name": name, "parameters": CITY} for name in names]
    for name in names:
        choice = {"type": "function", "name": name}
        body = {"tools": tools, "tool_choice": choice, "parallel_tool_calls": False, "max_output_tokens": 900}
        found = events(edge, f"Ruf {name}", **body, instructions=None)[-1]["response"]
        (call,) = found["output"]
        assert (call["name"], call["status"]) == (name, "completed")
        given = {"type": "function_call", "call_id": "c", "name": name, "arguments": json.dumps({"ort": name})}
        outputs = [{"type": "function_call_output", "call_id": id, "output": name} for id in (call["call_id"], "c")]
        second = respond(edge, [given, *outputs], previous_response_id=found["id"], instructions=None)
        shown = edge.http.get(f"/v1/responses/{second['id']}/input_items?order=asc").json()["data"]
        assert [item.get("name", item.get("output")) for item in shown[1:]] == [name] * 4
        assert shown[2]["arguments"] == given["arguments"]
    joined = {"type": "function", "name": "a\u200db"}
    assert "printable" in refused(edge, tools=[joined])["message"]
    lone = edge.http.post("/v1/responses", content=b'{"input": "\\ud800"}')
    assert lone.status_code == 400


def test_a_long_conversation_drops_its_beginning_if_told_to(edge: Any) -> None:
    tool = {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"}
    look = [tool, {"type": "function_call_output", "call_id": "c", "output": "wind\n" * 200_000}]
    said = [{"role": "user", "content": f"{n} " + "x" * 96} for n in range(60)]
    assert refused(edge, input=[*look, *said])["code"] == "context_length_exceeded"
    first = respond(edge, [*look, *said], truncation="auto", instructions=None)
    assert first["truncation"] == "auto"
    assert 1500 < first["usage"]["input_tokens"] <= 4096 - 12
    second = respond(edge, "Und?", previous_response_id=first["id"], truncation="auto", instructions=None)
    assert cached(second) >= first["usage"]["input_tokens"] - 64, "the same items are dropped"
    listed = edge.http.get(f"/v1/responses/{second['id']}/input_items?order=asc&limit=100").json()["data"]
    assert len(listed[1]["output"]) == 1_000_000, "what was dropped from the prompt is kept"
    error = refused(edge, input="x" * 5000, truncation="auto")
    assert error["code"] == "context_length_exceeded"


def test_a_result_of_a_megabyte_is_refused_and_costs_nothing(edge: Any) -> None:
    body = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False, "max_output_tokens": 900}
    first = respond(edge, "Wetter?", **body)
    id = first["output"][0]["call_id"]
    output = {"type": "function_call_output", "call_id": id, "output": "wind\n" * 200_000}
    error = refused(edge, input=[output], previous_response_id=first["id"])
    assert (error["code"], error["param"]) == ("context_length_exceeded", "input")
    second = respond(edge, [{**output, "output": "wind"}], previous_response_id=first["id"], tools=TOOLS)
    assert cached(second) >= first["usage"]["input_tokens"] - 1


def test_old_responses_are_deleted_unless_they_are_pinned(edge: Any) -> None:
    made = [respond(edge, f"Moin {n}") for n in range(3)]
    edge.http.post("/api/contexts", json={"name": "manual", "text": "red button"})
    edge.http.post(f"/api/contexts/{made[1]['id']}/pin")
    last = respond(edge, "Und?", previous_response_id=made[2]["id"])
    ledger = edge.node.ledger
    clock = [ledger.session(last["id"]).created]
    kept = StoredResponses(ledger, edge.node.contexts, ledger.delete, seconds=0, clock=lambda: clock[0])
    kept.expire()
    found = [edge.http.get(f"/v1/responses/{one['id']}").status_code for one in (*made, last)]
    assert found == [404, 200, 404, 200]
    assert edge.http.get("/api/contexts/manual").status_code == 200
    respond(edge, "Weiter", previous_response_id=last["id"])
    clock[0] += 3599
    kept.expire()
    assert edge.http.get(f"/v1/responses/{last['id']}").status_code == 200
    clock[0] += 2
    kept.expire()
    assert edge.http.get(f"/v1/responses/{last['id']}").status_code == 404
    ledger.check()
    turns = ledger.turns(ledger.session(made[1]["id"]).head)
    assert ledger.stats().turns == len(turns) + 1


def test_a_response_is_that_of_one_key(serve: Any, tmp_path: Any) -> None:
    (tmp_path / "keys").write_text("secret-1\nsecret-2\n")
    edge = serve(**{"edge.api_key_file": str(tmp_path / "keys")})
    mine, other = ({"authorization": f"Bearer secret-{n}"} for n in (1, 2))
    body = {"input": "Moin", "max_output_tokens": 2}
    made = edge.http.post("/v1/responses", json=body, headers=mine).json()
    more = {**body, "previous_response_id": made["id"]}
    session = made["id"].removeprefix("resp_")
    for headers, status in ((other, (404, 400, 404, 404)), (mine, (200, 200, 200, 200))):
        gets = [f"/v1/responses/{made['id']}", f"/api/contexts/{session}", f"/api/contexts/{session}/export"]
        found = [edge.http.get(path, headers=headers).status_code for path in gets]
        found.insert(1, edge.http.post("/v1/responses", json=more, headers=headers).status_code)
        assert tuple(found) == status
        listed = edge.http.get("/api/contexts?prefix=resp_", headers=headers).json()["contexts"]
        assert (made["id"] in [one["name"] for one in listed]) == (headers is mine)
    for path in (f"/v1/responses/{made['id']}", f"/api/contexts/{session}"):
        assert edge.http.delete(path, headers=other).status_code == 404
    # One of another key and of a model that is not the first, whose ids are made again, does not stand in the way.
    alien = ResponseObject(id=new_response_id(), created_at=1, model="m")
    items = [Item(Message("user", "Moin")), Item(Message("assistant", "Tach"), "msg_1")]
    token = CALLER.set("another")
    edge.node.responses.store(alien, items[:1], items[1:], None, as_tokens([1, 2]), bytes(32))
    CALLER.reset(token)
    assert edge.http.get(f"/v1/responses/{alien.id}", headers=mine).status_code == 404
    assert edge.http.delete(f"/v1/responses/{made['id']}", headers=mine).status_code == 200


def test_hints_on_the_cache(edge: Any) -> None:
    made = respond(edge, "Moin", prompt_cache_key="quay 5", prompt_cache_retention="24h")
    respond(edge, "Moin")
    why = edge.http.get("/api/why?session=quay 5").json()
    assert why == edge.http.get(f"/api/why/{made['id']}").json()
    until(lambda: len(edge.node.pins) == 1)
    assert edge.node.pins.nbytes > 0
    respond(edge, "Moin, moin", instructions="Other. " * 40, prompt_cache_options={"ttl": "30m"})
    until(lambda: len(edge.node.pins) == 2)
    respond(edge, "Tach", instructions="Third. " * 40, prompt_cache_retention="in_memory")
    edge.node.pins.work()
    assert len(edge.node.pins) == 2


def test_responses_and_their_kv_are_found_after_a_kill(process: Any) -> None:
    daemon = process()
    with daemon.ready() as http:
        first = respond(Client(http), "Moin")
        second = events(Client(http), "Und?", previous_response_id=first["id"])[-1]["response"]
        until(lambda: http.get("/api/status").json()["store"]["stats"]["queued"] == 0)
        daemon.end(signal.SIGKILL)
    daemon = process()
    with daemon.ready() as http:
        for made in (first, second):
            assert http.get(f"/v1/responses/{made['id']}").json() == made
        third = respond(Client(http), "Weiter", previous_response_id=second["id"])
        assert cached(third) >= second["usage"]["input_tokens"] - 64
        assert third["usage"]["input_tokens_details"]["sources"]["disk"] >= 256
        listed = http.get(f"/v1/responses/{third['id']}/input_items").json()["data"]
        answers = [item["id"] for made in (second, first) for item in made["output"]]
        assert [item["id"] for item in listed if item["role"] == "assistant"] == answers

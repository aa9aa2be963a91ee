"""Routes of other APIs through the proxy: what is read of them, what is passed on untouched, and where what was stored
is found again."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from ctxreuse_cloud.proxy.pauses import stop_of
from ctxreuse_cloud.proxy.proxy import is_proxied
from ctxreuse_cloud.proxy.reported import usage_of
from ctxreuse_cloud.proxy.request import parse_request
from ctxreuse_cloud.proxy.stored import StoredObjects, id_of_answer, stored_id
from ctxreuse_cloud.proxy.tenants import Tenants
from hypothesis import given, settings
from hypothesis import strategies as st

from ctxreuse.daemon.key_file import KeyFile
from support.scripted import RunningProxy, Scripted, event, fronted
from support.waiting import async_until, patient

EVENTS = "text/event-stream"
FIELDS = st.sampled_from(("messages", "input", "role", "type", "content", "id", "previous_response_id", "conversation"))
COUNTS = st.sampled_from(
    ("usage", "response", "message", "input_tokens", "prompt_tokens", "cached_tokens", "eval_count")
)
RESPONSE_USAGE = {"input_tokens": 30, "output_tokens": 3, "input_tokens_details": {"cached_tokens": 16}}


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), patient(20)))


def named(kind: str, **more: Any) -> bytes:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **more})}\n\n".encode()


def response_stream(identity: str, text: str = "x") -> list[bytes | None]:
    made = {"id": identity, "object": "response", "status": "in_progress", "output": []}
    item = {"type": "message", "content": [{"type": "output_text", "text": text}]}
    done = made | {"status": "completed", "output": [item], "usage": RESPONSE_USAGE}
    first = named("response.created", response=made)
    return [
        first[:20],
        first[20:],
        named("response.output_text.delta", delta=text),
        named("response.completed", response=done),
    ]


MESSAGE_STREAM: list[bytes | None] = [
    named("message_start", message={"id": "msg_1", "usage": {"input_tokens": 14, "cache_read_input_tokens": 16}}),
    named("content_block_delta", index=0, delta={"type": "text_delta", "text": "a"}),
    named("message_delta", delta={"stop_reason": "end_turn"}, usage={"output_tokens": 3}),
    named("message_stop"),
]
OLLAMA_STREAM: list[bytes | None] = [
    b'{"message": {"content": "a"}, "done": false}\n{"message": {"con',
    b'tent": "b"}, "done": false}\n',
    b'{"done": true, "done_reason": "stop", "prompt_eval_count": 30, "eval_count": 3}\n',
]


@pytest.mark.parametrize(
    ("path", "media", "pieces", "cached"),
    [
        ("/v1/responses", EVENTS, response_stream("resp_1"), 16),
        ("/v1/responses", EVENTS, response_stream("resp_1", "long " * 20_000), 16),
        ("/v1/messages", EVENTS, MESSAGE_STREAM, 16),
        ("/api/chat", "application/x-ndjson", OLLAMA_STREAM, 0),
        ("/v1/responses", "application/json", [json.dumps({"id": "r", "usage": RESPONSE_USAGE}).encode()], 16),
    ],
)
def test_other_apis_pass_as_they_came_and_are_counted(path: str, media: str, pieces: list[bytes], cached: int) -> None:
    async def test() -> None:
        async with Scripted("a") as a, fronted(a) as front:
            a.plan = [(media, pieces)]
            raw = b'{ "model":"m",  "unknown": [1,2], "messages":[{"role":"user","content":"x"}],"stream" : true}'
            async with front.client.post(front.url + path, data=raw) as response:
                assert (response.status, response.content_type) == (200, media)
                assert await response.read() == b"".join(pieces)
            assert a.seen[0][2] == raw, "byte for byte"
            counted = [front.count("ctxreuse_proxy_tokens_total", kind=k) for k in ("prompt", "cached", "completion")]
            assert counted == [30, cached, 3]

    run(test)


@pytest.mark.parametrize(
    ("path", "media", "pieces", "last"),
    [
        ("/v1/messages", EVENTS, MESSAGE_STREAM, "api_error"),
        ("/v1/responses", EVENTS, response_stream("resp_1"), "upstream_error"),
        ("/api/chat", "application/x-ndjson", OLLAMA_STREAM, None),
    ],
)
def test_a_stream_that_breaks_ends_as_its_api_does(
    path: str, media: str, pieces: list[bytes], last: str | None
) -> None:
    async def test() -> None:
        async with Scripted("a") as a, fronted(a) as front:
            a.plan = [(media, [*pieces[:2], pieces[2][:9], None])]
            status, body, _ = await front.ask(path)
            assert status == 200
            whole = b"".join(pieces[:2])
            assert body.startswith(whole)
            end = body[len(whole) :].strip().splitlines()
            if last is None:
                assert json.loads(end[0]) == {"error": "the backend broke off during the answer"}
            else:
                assert end[0] == b"event: error"
                found = json.loads(end[1].removeprefix(b"data: "))
                assert (found["type"], found["error"]["type"]) == ("error", last)

    run(test)


def test_refusals_are_in_the_words_of_each_api() -> None:
    async def test() -> None:
        async with Scripted("a") as a, fronted(a, tenants=None, max_body=1 << 10) as front:
            refused = [
                json.loads((await front.ask(path, user="x" * 2000))[1]) for path in ("/v1/messages", "/api/chat")
            ]
            assert refused[0]["type"] == "error"
            assert "larger than 1024 bytes" in refused[0]["error"]["message"]
            assert "larger than 1024 bytes" in refused[1]["error"]

    run(test)


async def get(front: RunningProxy, path: str, method: str = "GET", key: str = "") -> tuple[int, Any]:
    headers = {"x-api-key": key} if key else {}
    async with front.client.request(method, front.url + path, headers=headers) as response:
        return response.status, json.loads(await response.read())


def test_what_is_passed_on() -> None:
    own = ["/healthz", "/metrics", "/api/status", "/api/why/1", "/", "/reset_prefix_cache", "/slots", "/api/contexts"]
    assert not any(map(is_proxied, own))
    paths = ["/tokenize", "/detokenize", "/api/tags", "/api/chat", "/api/generate", "/api/embed", "/v1/a/b"]
    assert all(map(is_proxied, paths))

    async def test() -> None:
        async with Scripted("a") as a, fronted(a) as front:
            a.plan = [("application/json", [b"{}"])] * 9
            assert await get(front, "/api/tags") == (200, {"from": "a"})
            for path in ("/tokenize", "/api/embed", "/v1/some/new/route"):
                assert (await front.ask(path))[0] == 200
            odd = b"\x00no JSON\xff"
            async with front.client.post(front.url + "/v1/audio/new", data=odd) as response:
                assert response.status == 200
            assert a.seen[-1][2] == odd
            async with front.client.post(front.url + "/v1/chat/completions", data=odd) as response:
                assert response.status == 400
            asked = len(a.asked)
            assert (await get(front, "/v1/x", "PATCH"))[0] == 405
            assert (await get(front, "/v1/a%2Fb%3F/c"))[0] == 404
            assert len(a.asked) == asked

    run(test)


def test_a_stored_response_is_continued_read_and_deleted_where_it_is(tmp_path: Path) -> None:
    async def test() -> None:
        file = tmp_path / "stored.journal"
        async with Scripted("a") as a, Scripted("b") as b, Scripted("c") as c:
            servers = {"a": a, "b": b, "c": c}
            async with fronted(a, b, c, stored=StoredObjects(file)) as front:
                for n in range(9):  # of different contexts, so that they are spread
                    body = json.dumps({"id": f"resp_{n}", "usage": RESPONSE_USAGE}).encode()
                    answer = (EVENTS, response_stream(f"resp_{n}")) if n % 2 else ("application/json", [body])
                    for server in servers.values():
                        server.plan = [answer]
                    assert (await front.ask("/v1/responses", messages=None, input=f"{n}"))[0] == 200
                    place = next(server for server in servers.values() if not server.plan)
                    place.stored.add(f"resp_{n}")
            assert sum(bool(server.stored) for server in servers.values()) > 1
            for server in servers.values():
                server.plan.clear()
            # Started again: what was stored is known, no backend is asked for it.
            async with fronted(a, b, c, stored=StoredObjects(file)) as front:
                for name, server in servers.items():
                    for identity in sorted(server.stored):
                        others = [len(one.asked) for one in servers.values() if one is not server]
                        more = {"messages": None, "input": "and then?", "previous_response_id": identity}
                        assert (await front.ask("/v1/responses", **more))[0] == 200
                        assert server.asked[-1] == "POST /v1/responses"
                        assert await get(front, f"/v1/responses/{identity}?stream=false") == (200, {"stored": name})
                        assert (await front.ask(f"/v1/responses/{identity}/cancel"))[0] == 200
                        assert (await get(front, f"/v1/responses/{identity}", "DELETE"))[0] == 200
                        assert server.asked[-1] == f"DELETE /v1/responses/{identity}"
                        assert others == [len(one.asked) for one in servers.values() if one is not server]
            # Without the file the backends are asked.
            async with fronted(a, b, c) as front:
                for name, server in servers.items():
                    for identity in sorted(server.stored):
                        assert await get(front, f"/v1/responses/{identity}") == (200, {"stored": name})
                assert (await get(front, "/v1/responses/resp_none"))[0] == 404

    run(test)


def test_the_only_backend_that_has_it_is_not_replaced_by_another() -> None:
    async def test() -> None:
        async with Scripted("a") as a, Scripted("b") as b, fronted(a, b) as front:
            a.stored.add("resp_1")
            a.plan = [503, 503, 503]
            more = {"messages": None, "input": "x", "previous_response_id": "resp_1"}
            assert (await front.ask("/v1/responses", **more))[0] == 503
            assert not b.seen
            assert len(a.seen) == 1, "what may have been stored is sent once"
            assert (await front.ask("/v1/responses", **more, store=False))[0] == 200
            assert len(a.seen) == 4, "what stores nothing may be sent again"
            assert not b.seen

    run(test)


def test_no_tenant_reaches_what_another_stored(tmp_path: Path) -> None:
    async def test() -> None:
        file = KeyFile(tmp_path / "keys.json")
        ada, bob = file.add("ada"), file.add("bob")
        again = file.add("ada")  # another key of hers
        async with Scripted("a") as a, fronted(a, tenants=Tenants(file)) as front:
            a.plan = [("application/json", [b'{"id": "resp_1"}'])]
            a.stored.add("resp_1")
            headers = {"authorization": f"Bearer {ada}"}
            assert (await front.ask("/v1/responses", headers=headers, input="x"))[0] == 200
            for key in (ada, again):
                assert (await get(front, "/v1/responses/resp_1", key=key))[0] == 200
            asked = len(a.asked)
            for method in ("GET", "DELETE"):
                status, said = await get(front, "/v1/responses/resp_1", method, bob)
                assert (status, said["error"]["message"]) == (404, "'resp_1' is not known here")
                for path in ("/v1/files", "/v1/conversations", "/v1/chat/completions"):
                    assert (await get(front, path, method, bob))[0] == 404
            mine = {"headers": {"authorization": f"Bearer {bob}"}}
            assert (await front.ask("/v1/responses", **mine, previous_response_id="resp_1"))[0] == 404
            assert (await front.ask("/v1/responses", **mine, conversation={"id": "conv_1"}))[0] == 404
            assert (await front.ask("/v1/responses/resp_1/cancel", **mine))[0] == 404
            assert len(a.asked) == asked
            assert (await get(front, "/api/tags", key=bob))[0] == 200

    run(test)


def test_a_revoked_key_ends_its_stream_at_the_backend_too(tmp_path: Path) -> None:
    async def test() -> None:
        file = KeyFile(tmp_path / "keys.json")
        gone, stays = file.add("gone"), file.add("stays")
        tenants = Tenants(file)
        assert tenants.keys is not None
        async with Scripted("a") as a, fronted(a, tenants=tenants) as front:
            a.plan, a.pause = ["flood", "flood"], 0.01
            asking = [
                asyncio.create_task(front.ask(headers={"authorization": f"Bearer {key}"})) for key in (gone, stays)
            ]
            await async_until(lambda: a.open == 2 and front.proxy.running == 2)
            await async_until(lambda: front.count("ctxreuse_proxy_attempts_total", backend="a") == 2)
            sent = a.sent
            await async_until(lambda: a.sent > sent + 40_000)
            file.revoke("gone")
            assert tenants.keys.refresh()
            status, body, _ = await asking[0]
            assert status == 200
            last = json.loads(body.strip().split(b"\n\n")[-1].removeprefix(b"data: "))
            assert last["error"]["message"] == "the API key was revoked or has expired"
            await async_until(lambda: a.open == 1)
            assert not asking[1].done()
            assert (await front.ask(headers={"authorization": f"Bearer {gone}"}))[0] == 401
            assert (await front.ask(headers={"authorization": f"Bearer {stays}"}))[0] == 200
            assert front.count("ctxreuse_proxy_requests_total", outcome="revoked") == 1
            asking[1].cancel()
            await asyncio.gather(asking[1], return_exceptions=True)

    run(test)


def test_requests_and_tokens_a_minute_of_a_key(tmp_path: Path) -> None:
    async def test() -> None:
        file = KeyFile(tmp_path / "keys.json")
        few, little = file.add("few", requests=1), file.add("little", tokens=40)
        async with Scripted("a") as a, fronted(a, tenants=Tenants(file)) as front:
            one = {"headers": {"authorization": f"Bearer {few}"}}
            status, _, headers = await front.ask(**one)
            assert (status, headers["x-ratelimit-remaining-requests"]) == (200, "0")
            status, body, headers = await front.ask(**one)
            assert (status, json.loads(body)["error"]["type"]) == (429, "requests")
            assert 1 <= int(headers["retry-after"]) <= 60
            two = {"headers": {"authorization": f"Bearer {little}"}}
            await front.ask(**two)  # 30 tokens of a prompt, 16 of them cached, and 3
            status, _, headers = await front.ask(**two)
            assert (status, headers["x-ratelimit-remaining-tokens"]) == (200, "23")
            a.plan = [("application/json", [b'{"tokens": []}'])]
            assert (await front.ask("/tokenize", **two, prompt="x" * 1000))[0] == 200, "it computes nothing"
            assert (await get(front, "/api/tags", key=little))[0] == 200
            a.plan = [(EVENTS, [event("x" * 400)])]  # without a usage: by its bytes
            await front.ask(**two)
            assert (await front.ask(**two))[0] == 429

    run(test)


def test_what_is_read_of_requests_and_answers() -> None:
    tools, system = [{"name": "t"}], "Be brief."
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1"}]}
    body = json.dumps({"tools": tools, "system": system, "messages": [{"role": "user", "content": "x"}, result]})
    assert [name for name, _ in parse_request(body.encode(), "t").messages()] == ["tools", "system", "user", "tool"]
    items = [{"role": "user", "content": "x"}, {"type": "function_call", "name": "t"}, {"type": "function_call_output"}]
    body = json.dumps({"instructions": system, "input": items, "store": False, "conversation": "c"})
    found = parse_request(body.encode(), "t")
    assert [name for name, _ in found.messages()] == ["instructions", "user", "function_call", "tool"]
    assert (found.stores, found.continues()) == (False, [("conversations", "c")])
    same = parse_request(json.dumps({"instructions": system, "input": "other"}).encode(), "t")
    assert same.context == found.context, "requests with the same instructions go to one backend"
    for odd in ("[1, 2]", '["a", "b"]', '"text"', "null", "{}"):
        parse_request(f'{{"input": {odd}}}'.encode(), "t").messages()
    assert stored_id("/v1/responses/r/cancel") == ("responses", "r")
    assert stored_id("/v1/messages/batches/b/results") == ("messages/batches", "b")
    for route in ("/v1/responses", "/v1/responses/input_tokens", "/v1/responses/compact"):
        assert stored_id(route) == ("responses", "")
    assert stored_id("/v1/responses/compacted") == ("responses", "compacted")
    assert stored_id("/v1/chat/completions") == stored_id("/v1/responsesx/r") == ("", "")
    assert id_of_answer(b"".join(piece for piece in response_stream("resp_7") if piece)) == "resp_7"
    assert [id_of_answer(odd) for odd in (b"", b"[]", b'{"id": 3}', b"data: {", b"event: x\n\n")] == [""] * 5
    # A text of the answer that looks like a usage is none.
    fake = json.dumps({"output": [{"text": '"usage": {"input_tokens": 9}'}], "usage": RESPONSE_USAGE})[5:]
    usage = usage_of(fake.encode(), events=True)
    assert usage is not None
    assert (usage.prompt_tokens, usage.cached, usage.completion_tokens) == (30, 16, 3)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=9),
    lambda one: st.lists(one, max_size=3) | st.dictionaries(FIELDS | COUNTS | st.text(max_size=9), one, max_size=4),
    max_leaves=20,
)


@settings(max_examples=50)
@given(JSON, st.binary(max_size=40), st.integers(0, 60))
def test_any_request_and_any_answer_is_read_or_refused(value: Any, odd: bytes, cut: int) -> None:
    body = json.dumps(value).encode()
    for raw in (body, body[cut:], body[:cut], odd + body, b"data: " + body + b"\n\ndata: " + odd + b"\n"):
        request = parse_request(raw, "t", lenient=True)
        assert request.body("") == raw or "cache_salt" in value
        assert all(isinstance(name, str) for name, _ in request.messages())
        assert all(identity for _, identity in request.continues())
        for events in (False, True):
            usage = usage_of(raw, events=events)
            assert usage is None or usage.valid()
        assert isinstance(id_of_answer(raw), str)
        stop_of(raw)


def test_places_are_bounded_and_a_damaged_file_costs_nothing_else(tmp_path: Path) -> None:
    file = tmp_path / "stored.journal"
    kept = StoredObjects(file)
    kept.note("one", "t", "a")
    kept.note("one", "t", "b")
    kept.close()
    file.write_bytes(file.read_bytes()[:-3])
    found = StoredObjects(file)
    assert found.find("one", "t") == "a", "the end of the file was cut off"
    assert found.find("one", "u") is None
    found.close()
    file.write_bytes(b"garbage " * 10)
    again = StoredObjects(file)
    assert again.find("one", "t") is None
    again.note("two", "t", "a")
    again.close()
    assert StoredObjects(file).find("two", "t") == "a"

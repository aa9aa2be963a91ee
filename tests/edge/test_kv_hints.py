"""KV hints at the edge's HTTP API: riding on a request and alone, each does what the runtime can; the rest is named."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from ctxreuse_cloud.proxy.tenants import Tenants

from ctxreuse.config import BackendConfig
from ctxreuse.daemon.key_file import KeyFile
from support.scripted import fronted
from support.waiting import async_until, patient, until

SAID = [{"role": "system", "content": "Read the file with care. " * 20}, {"role": "user", "content": "Go on."}]


def action(name: str, version: str = "1.0", **payload: Any) -> dict[str, Any]:
    return {"action_id": name, "action_type": name, "action_version": version, "payload": payload}


def envelope(*actions: dict[str, Any]) -> dict[str, Any]:
    return {"protocol_version": "0.1", "message_id": "m1", "actions": list(actions)}


def ask(edge: Any, *actions: dict[str, Any], path: str = "/v1/chat/completions", **body: Any) -> Any:
    said = {"messages": SAID} if "chat" in path else {"prompt": SAID[0]["content"]}
    hints = {"kv_hints": envelope(*actions)} if actions else {}
    answer = edge.http.post(path, json={**said, **hints, "max_tokens": 4, "temperature": 0, **body})
    assert answer.status_code == 200, answer.text
    return answer


def tell(edge: Any, *actions: dict[str, Any], status: int = 200, **where: Any) -> Any:
    answer = edge.http.post("/api/kv_hints", json={"kv_hints": envelope(*actions), **where})
    assert answer.status_code == status, answer.text
    return answer.json()


def figure(edge: Any, name: str) -> float:
    lines = edge.http.get("/metrics").text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))


def outcome(edge: Any, name: str) -> float:
    return figure(edge, f'ctxreuse_kv_hints_total{{outcome="{name}"}}')


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_context_is_retained_with_its_answer_until_it_is_demoted(edge: Any, path: str, stream: bool) -> None:
    answer = ask(edge, action("kv.retain", ttl_seconds=600), action("kv.fetch"), path=path, stream=stream)
    assert answer.headers["x-ctxreuse-kv-hints"] == "accepted=1, type=1"
    assert "x-ctxreuse-ignored-fields" not in answer.headers
    until(lambda: len(edge.node.pins) == 1)
    assert edge.node.pins.nbytes > 0
    ask(edge, action("kv.demote"), path=path, stream=stream)
    until(lambda: len(edge.node.pins) == 0)
    edge.node.pins.check()
    assert (outcome(edge, "accepted"), outcome(edge, "type")) == (2, 1)
    assert "x-ctxreuse-kv-hints" not in ask(edge, path=path).headers


def test_a_beginning_is_retained_and_what_is_cached_for_the_caller_stays_when_its_end_is_demoted(edge: Any) -> None:
    unit = edge.node.runtime.space.block_tokens
    begin = [{"end": 2 * unit, "priority": 80, "duration": 60.0}]
    name = ask(edge, action("kv.retain", directives=begin)).headers["x-request-id"]
    until(lambda: len(edge.node.pins) == 1)
    keys = edge.node.runtime.keys(edge.node.runtime.requests.get(name).numbers)
    assert len(keys) > 2
    assert list(edge.node.pins._pins) == [keys[1]]
    edge.node.pins.keep(keys[:1], 300.0)  # as cache_control does
    until(lambda: len(edge.node.pins) == 2)
    tell(edge, action("kv.demote"), request=name)
    until(lambda: len(edge.node.pins) == 1)
    assert list(edge.node.pins._pins) == [keys[0]]


def test_a_pause_of_known_length_and_what_was_demoted(edge: Any) -> None:
    name = ask(edge, action("kv.pause", seconds=2.0, kind="tool:bash")).headers["x-request-id"]
    paused = edge.node.runtime.paused
    keys = edge.node.runtime.keys(edge.node.runtime.requests.get(name).numbers)
    state = paused.state(keys)
    assert (state.pause.stop, state.pause.tool) == ("tool", "shell/")
    worth = state.worth
    edge.node.store.flush()
    held = edge.node.runtime.context_cache.nbytes
    assert held
    assert tell(edge, action("kv.demote"), request=name)["accepted"] == 1
    assert paused.state(keys).worth < worth / 8
    # Ended, it leaves memory; prefetched, it is there again before its request comes.
    tell(edge, action("kv.pause", kind="closed"), request=name)
    until(lambda: edge.node.runtime.context_cache.nbytes < held)
    assert tell(edge, action("kv.prefetch"), request=name)["accepted"] == 1
    again = ask(edge).json()["usage"]["prompt_tokens_details"]
    assert again["sources"]["device"] == again["cached_tokens"] > 64


def test_a_named_context_and_what_is_refused(edge: Any) -> None:
    made = edge.http.post("/api/contexts", json={"name": "files", "messages": SAID[:1]})
    assert made.status_code == 201
    report = tell(edge, action("kv.pin", ttl_seconds=60), action("kv.pin", "3.0"), context="files")
    assert (report["accepted"], report["ignored"]) == (1, 1)
    assert report["actions"][1] == {"action_id": "kv.pin", "outcome": "version"}
    until(lambda: len(edge.node.pins) == 1)
    for status, where in (
        (404, {"request": "nobody"}),
        (404, {"context": "nobody"}),
        (400, {}),
        (400, {"request": "a", "context": "files"}),
    ):
        assert "error" in tell(edge, action("kv.pin"), status=status, **where)
    chat = {"messages": SAID, "max_tokens": 2}
    for wrong in ({}, [], "x", envelope(*[action("kv.pin")] * 65), {**envelope(), "message_id": "m" * 600}):
        refused = edge.http.post("/v1/chat/completions", json={**chat, "kv_hints": wrong})
        assert refused.status_code == 400
        assert refused.json()["error"]["param"].startswith("kv_hints")
    deep = b'{"messages": [], "kv_hints": ' + b"[" * 100_000
    assert edge.http.post("/v1/chat/completions", content=deep).status_code == 400
    assert ask(edge, action("kv.demote", session_id="of another")).headers["x-ctxreuse-kv-hints"] == "target=1"


def test_pins_are_in_the_share_of_their_key(serve: Callable[..., Any], tmp_path: Any) -> None:
    file = KeyFile(tmp_path / "keys.json")
    first, second = (file.add(name) for name in ("one", "two"))
    edge = serve(**{"edge.api_key_file": str(file.path)})
    edge.http.headers["authorization"] = f"Bearer {first}"
    ask(edge, action("kv.retain", ttl_seconds=60))
    until(lambda: len(edge.node.pins) == 1)
    edge.http.headers["authorization"] = f"Bearer {second}"
    ask(edge, action("kv.demote"))  # of the same context: the pin is not theirs to end
    edge.node.pins.work()
    assert len(edge.node.pins) == 1


def test_behind_the_sidecar_hints_reach_the_edge_that_answered_and_no_other_tenant(edge: Any, tmp_path: Any) -> None:
    file = KeyFile(tmp_path / "keys.json")
    mine, other = ({"authorization": f"Bearer {file.add(name)}"} for name in ("mine", "other"))
    rows, pins = [BackendConfig(url=edge.url, name="edge", kv_hints="pass")], edge.node.pins

    async def test() -> None:
        async with fronted(rows=rows, tenants=Tenants(file)) as front:
            body = {"model": "", "messages": SAID, "max_tokens": 4, "stream": False, "headers": mine}
            hints = envelope(action("kv.retain", ttl_seconds=60), action("kv.fetch"))
            status, _, headers = await front.ask(**body, kv_hints=hints)
            assert (status, headers["x-ctxreuse-kv-hints"]) == (200, "accepted=1, type=1")
            await async_until(lambda: len(pins) == 1)
            where = {"request": headers["x-request-id"]}

            async def alone(status: int, key: Any, *actions: Any, **wrong: Any) -> Any:
                sent = {"kv_hints": envelope(*actions), "context": "another's", **where, **wrong}
                async with front.client.post(front.url + "/api/kv_hints", json=sent, headers=key) as answer:
                    assert answer.status == status, await answer.text()
                    return await answer.json(), answer.headers

            asked = action("kv.demote"), action("kv.pause", kind="closed"), action("kv.fetch")
            await alone(404, other, *asked)
            await alone(401, {}, *asked)
            assert len(pins) == 1
            report, headers = await alone(200, mine, *asked)
            assert (report["accepted"], headers["x-ctxreuse-kv-hints"]) == (2, "accepted=2, type=1")
            await async_until(lambda: len(pins) == 0)
            assert (await alone(200, mine, action("kv.fetch")))[0]["accepted"] == 0
            for wrong in ({"request": 1}, {"request": ""}, {"kv_hints": None}, {"kv_hints": []}):
                await alone(400, mine, **wrong)

    asyncio.run(asyncio.wait_for(test(), patient(60)))

"""KV hints through the sidecar: what backends are sent of callers' hints, what it makes itself, and whose they are."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from ctxreuse.config import BackendConfig
from ctxreuse.pauses.hazard import AGES, ends_within, prior, survival
from support.scripted import RunningProxy, Scripted, fronted
from support.waiting import patient

TOOL = {"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), patient(60)))


def action(name: str, version: str = "1.0", **payload: Any) -> dict[str, Any]:
    return {"action_id": name, "action_type": name, "action_version": version, "payload": payload}


def envelope(*actions: dict[str, Any]) -> dict[str, Any]:
    return {"protocol_version": "0.1", "message_id": "m1", "actions": list(actions)}


def row(server: Any, takes: Any) -> BackendConfig:
    return BackendConfig(url=server.url, name="a", kv_hints=takes)


def sent(server: Scripted) -> Any:
    """The hints in the last body that a backend has read."""
    return json.loads(server.seen[-1][2]).get("kv_hints")


async def alone(front: RunningProxy, *actions: Any, headers: Any = None, **body: Any) -> tuple[int, Any, Any]:
    whole = {"kv_hints": envelope(*actions), **body}
    async with front.client.post(front.url + "/api/kv_hints", json=whole, headers=headers or {}) as answer:
        return answer.status, await answer.json(content_type=None), answer.headers


def test_a_backend_is_sent_what_is_on_the_callers_own_context() -> None:
    async def test() -> None:
        mine = action("kv.retain", ttl_seconds=60, note={"kept": "as it came"})
        others = [
            action("kv.fetch", source_control_endpoint="tcp://10.0.0.1:1", block_hashes=[1]),
            action("kv.evict", block_hashes=[1, 2]),
            action("kv.demote", session_id="another's"),
            action("kv.pin", "9"),
        ]
        async with Scripted("a") as a, fronted(a, rows=[row(a, "pass")]) as front:
            _, _, headers = await front.ask(kv_hints=envelope(mine, *others))
            assert sent(a) == envelope(mine)
            assert headers["x-ctxreuse-kv-hints"] == "accepted=1, version=1, type=1, target=2"
            assert front.count("ctxreuse_proxy_kv_hints_total", outcome="accepted") == 1
            assert front.count("ctxreuse_proxy_kv_hints_total", outcome="target") == 2
            status, body, _ = await front.ask(kv_hints={"actions": "none"})
            assert status == 400
            assert "kv_hints" in json.loads(body)["error"]["message"]
            _, _, headers = await front.ask(tools=[TOOL])
            assert sent(a) is None
            assert "x-ctxreuse-kv-hints" not in headers
        async with Scripted("a") as a, fronted(a) as front:  # it was not said that this one takes any
            _, _, headers = await front.ask(kv_hints=envelope(mine, *others), temperature=0.5)
            assert sent(a) is None
            assert json.loads(a.seen[-1][2])["temperature"] == 0.5
            assert headers["x-ctxreuse-kv-hints"] == "version=1, type=1, target=2, backend=1"

    run(test)


def test_a_context_that_may_wait_for_a_tool_is_retained_for_as_long_as_tools_take() -> None:
    async def test() -> None:
        async with Scripted("a") as a, fronted(a, rows=[row(a, "make")]) as front:

            async def seconds(**more: Any) -> Any:
                await front.ask(**more)
                hints = sent(a)
                directives = [one["payload"]["directives"] for one in hints["actions"] if one["action_id"] != "mine"]
                return [row["duration"] for rows in directives for row in rows]

            (before,) = await seconds(tools=[TOOL])
            assert sent(a)["actions"][0]["action_type"] == "kv.retain"
            said: list[dict[str, Any]] = [{"role": "user", "content": "Look."}]
            for _ in range(30):  # tools that are back at once
                said += [{"role": "assistant", "content": "I do."}, {"role": "tool", "content": "A line."}]
                await front.ask(messages=said)
                assert sent(a) is None  # without tools nothing is made
            (after,) = await seconds(tools=[TOOL])
            assert after < before / 4
            assert front.count("ctxreuse_proxy_kv_hints_total", outcome="made") == 2
            # What the caller says of its pause counts for more, and what it says of its context for all.
            told = {**action("kv.pause", seconds=40.0), "action_id": "mine"}
            assert await seconds(tools=[TOOL], kv_hints=envelope(told)) == [80.0]
            for name in ("kv.retain", "kv.demote"):
                await front.ask(tools=[TOOL], kv_hints=envelope(action(name)))
                assert sent(a) == envelope(action(name))

    run(test)


def test_most_pauses_have_ended() -> None:
    rates = prior()
    for share in (0.1, 0.5, 0.9):
        age = ends_within(rates, share)
        assert survival(rates, 0.0, age) <= 1 - share
        before = AGES[list(AGES).index(age) - 1]
        assert survival(rates, 0.0, float(before)) > 1 - share
    assert ends_within(rates * 0, 0.9) == AGES[-1]


@pytest.mark.parametrize("takes", ["none", "pass"])
def test_a_backend_without_the_route_says_so(takes: str) -> None:
    async def test() -> None:
        async with Scripted("a") as a, fronted(a, rows=[row(a, takes)]) as front:
            _, _, headers = await front.ask()
            a.plan = [404]
            status, body, _ = await alone(front, action("kv.pin"), request=headers["x-request-id"])
            assert status == 404
            assert ("takes no KV hints" in str(body)) is (takes == "none")
            assert len(a.seen) == (1 if takes == "none" else 2)

    run(test)

"""The sidecar infers pauses from what passes: stop reasons, called tools, roles; of texts it keeps nothing."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from ctxreuse_cloud.proxy.pauses import PauseTracker, stop_of
from prometheus_client import CollectorRegistry

from ctxreuse.pauses import Pause
from ctxreuse.pauses.kinds import END_OF_TURN, LENGTH, TOOL_CALL, UNKNOWN
from support.scripted import Scripted, fronted
from support.waiting import patient

CALL = {"function": {"name": "run_shell", "arguments": "{}"}, "id": "x", "type": "function"}


def whole(finish: str, **message: Any) -> bytes:
    return json.dumps({"choices": [{"message": {"role": "assistant", **message}, "finish_reason": finish}]}).encode()


@pytest.mark.parametrize(
    ("tail", "stop", "tool"),
    [
        (whole("stop", content="Yes."), "end_of_turn", "/t"),
        (whole("length", content="Yes"), "length", "/t"),
        (whole("tool_calls", content=None, tool_calls=[CALL]), "tool", "shell/c"),
        (whole("stop", content="I look.", reasoning_content="Hm", tool_calls=[CALL]), "tool", "shell/tkc"),
        (b'data: {"choices":[{"delta":{},"finish_reason":"tool_calls"}]}\n\ndata: [DONE]\n\n', "tool", "/c"),
        (b'data: {"choices":[{"delta":{},"finish_reason":null}]}\n\n', "unknown", "/"),
        (b'{"stop_reason": "tool_use"', "tool", "/c"),
        (b'{"type": "message_delta", "delta": {"stop_reason": "end_turn"}}', "end_of_turn", "/"),
        (b'{"content": [{"type": "tool_use", "name": "bash"}], "stop_reason": "tool_use"}', "tool", "shell/c"),
        (b'{"object": "response", "output": [{"text": "Yes"}], "status": "completed"}', "end_of_turn", "/t"),
        (b'{"type": "response.completed", "o": [{"type": "function_call", "name": "bash"}]}', "tool", "shell/c"),
        (b'{"object": "response", "incomplete_details": {"reason": "max_output_tokens"}}', "length", "/"),
        (b'{"done": true, "done_reason": "length", "eval_count": 3}\n', "length", "/"),
        (b"", "unknown", "/"),
        (b"\xff" * 100, "unknown", "/"),
        (b'"finish_reason":"' * 20_000, "unknown", "/"),
        (b'"finish_reason": "stop"' + b" " * 40_000, "unknown", "/"),  # too far from the end
    ],
)
def test_stops(tail: bytes, stop: str, tool: str) -> None:
    kind = stop_of(tail)
    assert (kind.stop, kind.tool) == (stop, tool)
    assert kind.reason in (UNKNOWN, TOOL_CALL, END_OF_TURN, LENGTH, 8)


def test_a_conversation_goes_on_where_it_ended_and_the_role_tells_what_it_waited_for() -> None:
    registry = CollectorRegistry()
    book = PauseTracker(registry)
    said = [("system", b"be kind"), ("user", b"hi")]
    for n in range(20):
        read, now = [*said, ("user", b"%d" % n)], 1000.0 * n
        key = book.on_request("t", "m", read, now)
        book.on_pause(key, stop_of(whole("stop")), now + 1)
        key = book.on_request("t", "m", [*read, ("assistant", b"I call"), ("tool", b"a result")], now + 3)
        book.on_pause(key, stop_of(whole("stop")), now + 4)
        book.check()
    assert registry.get_sample_value("ctxreuse_proxy_pause_seconds_count", {"kind": "tool"}) == 20
    assert registry.get_sample_value("ctxreuse_proxy_pause_seconds_sum", {"kind": "tool"}) == 40
    assert registry.get_sample_value("ctxreuse_proxy_pause_seconds_count", {"kind": "end_of_turn"}) == 0
    estimator = book.sessions.estimator
    assert estimator.survival(Pause("tool"), 0.0, 10.0) < 0.3
    # The same words of another tenant, or to another model, are another conversation.
    book.on_request(
        "other", "m", [*said, ("user", b"1"), ("assistant", b"I call"), ("tool", b"r"), ("user", b"x")], 1e6
    )
    book.on_request(
        "t", "other", [*said, ("user", b"1"), ("assistant", b"I call"), ("tool", b"r"), ("user", b"x")], 1e6
    )
    assert registry.get_sample_value("ctxreuse_proxy_pause_seconds_count", {"kind": "end_of_turn"}) == 0


@pytest.mark.slow
def test_memory_is_bounded() -> None:
    book = PauseTracker(CollectorRegistry())
    for n in range(5000):
        book.on_pause(book.on_request("t", "m", [("user", b"%d" % n)], float(n)), stop_of(whole("stop")), n + 0.5)
    book.check()
    assert book.on_request("t", "m", [], 0.0) == b""
    book.on_pause(b"", stop_of(b""), 0.0)


def test_through_the_proxy() -> None:
    async def test() -> None:
        async with Scripted("a") as a, fronted(a) as front:
            a.plan = ["json", "stream"]
            said: list[dict[str, str]] = [{"role": "user", "content": "What is in the file?"}]
            for _ in range(3):
                status, _, _ = await front.ask("/v1/chat/completions", messages=said)
                assert status == 200
                said += [{"role": "assistant", "content": "I read it."}, {"role": "tool", "content": "A line."}]
            assert front.count("ctxreuse_proxy_pause_seconds_count", kind="tool") == 2

    asyncio.run(asyncio.wait_for(test(), patient(20)))

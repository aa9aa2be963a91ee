"""The sidecar records what passes through its proxy, if it is told to: hashes, and nothing that anybody wrote."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from ctxreuse_cloud.proxy.request import parse_request

from ctxreuse.lab import open_trace
from support.scripted import Scripted

SECRET = "nobody else may read this " * 40


def test_a_sidecar_that_records(sidecar: Any, tmp_path: Path) -> None:
    file = tmp_path / "traffic.jsonl"
    system = {"role": "system", "content": SECRET}
    turns = [system, {"role": "user", "content": SECRET + "1"}]

    async def ask(url: str, body: Any) -> int:
        async with aiohttp.ClientSession() as client, client.post(f"{url}/v1/chat/completions", data=body) as response:
            await response.read()
            return response.status

    async def test() -> None:
        async with Scripted("a") as a:
            running = await asyncio.to_thread(sidecar, "--workers", "0", "--backend", a.url, "--record", str(file))
            first = {"model": "m", "messages": turns}
            more = {"model": "m", "messages": [*turns, {"role": "assistant", "content": SECRET + "2"}]}
            for body in (first, more, more | {"model": "n"}, more | {"tools": [{"type": "function"}]}):
                assert await ask(running.url, json.dumps(body)) == 200
            assert await ask(running.url, "{") == 400
            assert await asyncio.to_thread(running.stop) == 0

    asyncio.run(test())
    assert b"nobody" not in file.read_bytes()
    trace = open_trace(file)
    first, second, other, tools = trace
    assert trace.block_tokens == 64
    assert len(first.path) == (len(json.dumps(turns[0])) + len(json.dumps(turns[1]))) // 256
    # A conversation goes on where it ended; another model, and tools before the messages, share nothing.
    assert second.path[: len(first.path)].tolist() == first.path.tolist()
    assert (first.session, second.session) == (0, 0)
    assert len({*second.path.tolist(), *other.path.tolist(), *tools.path.tolist()}) == 2 * len(second.path) + len(
        tools.path
    )
    assert all(request.busy > 0 for request in trace)


@pytest.mark.parametrize(
    ("body", "parts"),
    [
        ({"messages": [{"a": 1}, {"b": 2}]}, ['{"a":1}', '{"b":2}']),
        ({"prompt": "text", "tools": [1]}, ["1", '"text"']),
        ({"instructions": "be", "input": [{"c": 3}]}, ['"be"', '{"c":3}']),
        ({"model": "m"}, []),
        ({"messages": None}, []),
    ],
)
def test_what_the_model_reads(body: dict[str, Any], parts: list[str]) -> None:
    asked = parse_request(json.dumps(body, separators=(",", ":")).encode(), "t")
    assert [bytes(part).decode() for part in asked.parts()] == parts


def test_a_form_is_not_read() -> None:
    assert parse_request(b"--x--", "t", opaque=True).parts() == []

"""Messages of several parts through the proxy: they pass as they came, and what a daemon says of moving is counted."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from ctxreuse_cloud.proxy.reported import usage_of

from support.scripted import Scripted, event, fronted
from support.waiting import patient

PARTS = [
    {"type": "text", "text": "Zwei Türme.\n\n"},
    {"type": "text", "text": "One horn."},
    {"type": "text", "text": "?"},
]
MESSAGES = [{"role": "system", "content": "Rules."}, {"role": "user", "content": PARTS}]


def usage(**details: Any) -> dict[str, Any]:
    return {"prompt_tokens": 90, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 80, **details}}


def test_parts_pass_as_they_came_and_moved_tokens_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = [event("a"), event("", usage=usage(moved=64, mended=4, gate="kl-0.020 by rotate")), b"data: [DONE]\n\n"]
    monkeypatch.setattr("support.scripted.STREAM", stream)

    async def test() -> None:
        async with Scripted("a") as a, fronted(a) as front:
            for salt in ({}, {"cache_salt": "theirs"}):
                status, body, _ = await front.ask(
                    "/v1/chat/completions", messages=MESSAGES, ctxreuse={"lossy": "kl-0.05"}, **salt
                )
                assert (status, body) == (200, b"".join(stream))
                sent = json.loads(a.seen[-1][2])
                assert sent["messages"] == MESSAGES
                assert sent["ctxreuse"] == {"lossy": "kl-0.05"}
            found = [
                front.count("ctxreuse_proxy_tokens_total", kind=kind)
                for kind in ("cached", "relocated", "moved", "mended")
            ]
            assert found == [160, 128, 128, 8]

    asyncio.run(asyncio.wait_for(test(), patient(20)))


@pytest.mark.parametrize("said", [{"moved": -1}, {"mended": -5}, {"moved": "many"}, {"moved": 1.5}])
def test_counts_that_are_none_are_not_believed(said: dict[str, Any]) -> None:
    assert usage_of(event("", usage=usage(**said)), events=True) is None


def test_other_servers_say_nothing_of_moving() -> None:
    found = usage_of(event("", usage=usage(moved=None)), events=True)
    assert found is not None
    assert (found.cached, found.counts()["relocated"], found.counts()["recomputed"]) == (80, 0, 0)

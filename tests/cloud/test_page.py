"""The page of a sidecar, read from a real one: backends, devices, what was reused, and who may read it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from ctxreuse.daemon.key_file import KeyFile
from ctxreuse.daemon.page.follow import FeedState
from support.scripted import Scripted
from support.waiting import patient


@contextmanager
def feed(url: str, **headers: str) -> Iterator[Callable[[Callable[[FeedState], Any]], FeedState]]:
    """Yields ``wait``, which follows the feed until a function of its state is true."""
    state = FeedState()
    with httpx.stream("GET", f"{url}/api/events", headers=headers, timeout=patient(20)) as answer:
        assert answer.status_code == 200, answer.read()
        lines = answer.iter_lines()

        def wait(done: Callable[[FeedState], Any]) -> FeedState:
            while not state.values or not done(state):
                state.take(json.loads(next(line for line in lines if line.startswith("data: "))[6:]))
            return state

        yield wait


def test_it_shows_backends_reuse_and_devices(sidecar: Callable[..., Any]) -> None:
    def look(one: Any) -> FeedState:
        assert "<title>ctxreuse</title>" in httpx.get(one.url + "/").text
        body = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "stream": True}
        with feed(one.url) as wait:
            assert wait(lambda _: True).values["daemon"]["kind"] == "cloud"
            assert httpx.post(f"{one.url}/v1/chat/completions", json=body).status_code == 200
            return wait(lambda state: state.rows["requests"] and state.values["tokens"]["requests"]["ok"])

    async def run() -> FeedState:
        async with Scripted("one") as backend:
            one = await asyncio.to_thread(sidecar, "--backend", backend.url, "--workers", "0")
            return await asyncio.to_thread(look, one)

    state = asyncio.run(run())
    assert state.values["tokens"]["sources"] == {"cloud": 16, "compute": 14}
    assert state.values["tokens"]["requests"]["ok"] == 1
    (row,) = state.rows["requests"].values()
    assert (row[1].startswith("m at "), row[2:5]) == (True, [30, 16, {"cloud": 16}])
    (backends,) = state.rows["backends"].values()
    assert (backends[0], backends[3]) == ("healthy", 1)
    assert state.rows["contexts"] == state.rows["peers"] == {}
    assert state.values["store"]["tiers"]["disk"][1] > 0


def test_from_elsewhere_only_a_key_for_status_opens_it(sidecar: Callable[..., Any], tmp_path: Path) -> None:
    file = KeyFile(tmp_path / "tenants.json")
    keys = {name: file.add(name, (name,)) for name in ("answers", "status", "admin")}  # type: ignore[arg-type]
    one = sidecar("--keys", str(tmp_path / "tenants.json"), "--workers", "0")
    elsewhere = {"x-forwarded-for": "10.0.0.1"}
    found = {}
    for name, key in [("", ""), *keys.items()]:
        headers = elsewhere | ({"authorization": f"Bearer {key}"} if key else {})
        with httpx.stream("GET", f"{one.url}/api/events", headers=headers) as answer:
            found[name] = answer.status_code
        assert httpx.get(f"{one.url}/api/status", headers=headers).status_code == found[name]
        assert httpx.get(f"{one.url}/", headers=headers).status_code == 200
    assert found == {"": 403, "answers": 403, "status": 200, "admin": 200}
    with feed(one.url) as wait:  # of this machine
        assert wait(lambda state: True).values["daemon"]["failing"] == ""

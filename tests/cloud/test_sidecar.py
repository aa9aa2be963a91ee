"""The sidecar as a process: serves peers, computes for them, passes answers on, and loses nothing when it ends."""

from __future__ import annotations

import asyncio
import json
import runpy
import signal
import ssl
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from ctxreuse.bus.protocol.base import PutRequest
from ctxreuse.bus.remote import FetchRequest
from ctxreuse.bus.transport import BusClient, ClientOptions
from ctxreuse.identity.keys import prefix_keys
from ctxreuse.peer.serve.engine import compute_blocks
from support.certificates import Authority
from support.scripted import STREAM, Scripted
from support.sidecar import Edge
from support.waiting import async_until, patient, until

ROOT = Path(__file__).parents[2]


def link(bus: str, space: bytes) -> BusClient:
    client = BusClient(bus, ClientOptions(name="test", spaces=(space,)))
    until(lambda: client.state == "up")
    return client


def whole(buffer: Any) -> list[bytes]:
    """The bytes of all blocks of a fetch, when it has ended."""
    until(lambda: buffer.ended is not None)
    assert buffer.ended == ""
    return [bytes(view.buffer) for view in buffer.views(buffer.count)]


def test_it_computes_serves_takes_and_loses_nothing(
    sidecar: Callable[..., Any], tiny_folder: Path, tiny_engine: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    space = tiny_engine.space
    rng = np.random.default_rng(0)
    asked, given = (rng.integers(0, 250, 64 * 6).astype("<i4") for _ in range(2))
    first = sidecar("--workers", "1", "--model", str(tiny_folder))
    with link(first.bus, space.digest) as client:
        assert client.welcome is not None
        salt = client.welcome.salt
        keys = prefix_keys(space.digest, salt, asked, 64)
        made = whole(client.fetch(FetchRequest(space, asked), keys, compute=True))
        assert len(made) == 6
        assert whole(client.fetch(FetchRequest(space, asked), keys)) == made

        mine = [bytes(item.data) for item in compute_blocks(tiny_engine, salt, given, 0)]
        mine_keys = prefix_keys(space.digest, salt, given, 64)
        stored = client.put(
            PutRequest(space.digest, mine_keys, [len(data) for data in mine]), mine.__getitem__, timeout=patient(30)
        )
        assert stored.taken == tuple(range(6))
        # Nobody finds it before it was audited.
        found = until(lambda: (m := client.match(space.digest, mine_keys, 5)) and m.blocks == 6 and m)
        assert found.blocks == 6
        status = first.status()
        assert status["workers"]["processes"][0]["jobs"] == 1
        assert status["transfers"]["taken"] == 6
        assert [peer["user"] for peer in status["peers"]] == ["local"]
    runpy.run_path(str(ROOT / "examples" / "cloud_share.py"))["main"](first.bus, str(tiny_folder))
    said = capsys.readouterr().out
    assert "first device: 31 blocks computed by the cloud" in said
    assert "second device: 31 blocks stored by the cloud" in said
    assert "the same next token: True" in said
    assert first.stop() == 0
    assert not first.ready_file.exists()
    assert {"ready", "draining", "stopped"} <= {line["message"] for line in first.lines()}

    second = sidecar("--workers", "1", "--model", str(tiny_folder))
    with link(second.bus, space.digest) as client:
        assert client.welcome is not None
        assert client.welcome.salt == salt
        assert whole(client.fetch(FetchRequest(space, asked), keys)) == made
        assert whole(client.fetch(FetchRequest(space, given), mine_keys)) == mine
        worker = second.status()["workers"]["processes"][0]["pid"]
        second.kill()
        until(lambda: not psutil.pid_exists(worker))  # nobody told it: it saw that its node is gone
        third = sidecar("--workers", "0")
    with link(third.bus, space.digest) as client:
        assert whole(client.fetch(FetchRequest(space, given), mine_keys)) == mine
    assert third.stop() == 0


def test_a_stream_ends_before_the_sidecar_does(sidecar: Callable[..., Any]) -> None:
    async def test() -> None:
        import aiohttp

        async with Scripted("a") as a:
            a.pause = 0.2
            one = await asyncio.to_thread(sidecar, "--workers", "0", "--backend", a.url)
            async with aiohttp.ClientSession() as client:
                body = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
                async with client.get(one.url + "/readyz") as response:
                    assert response.status == 200
                asking = asyncio.create_task(ask(client, one.url, body))
                await async_until(lambda: a.open == 1)
                one.process.send_signal(signal.SIGTERM)
                assert await asking == (200, b"".join(STREAM))
                with pytest.raises(aiohttp.ClientConnectionError):
                    await ask(client, one.url, body)
            assert await asyncio.to_thread(one.process.wait, 30) == 0

    asyncio.run(asyncio.wait_for(test(), patient(90)))


def test_our_own_edge_daemon_as_a_backend_over_https(
    sidecar: Callable[..., Any], tiny_folder: Path, tmp_path: Path
) -> None:
    authority = Authority(tmp_path)
    files = [dict(zip(("CERTIFICATE", "KEY"), map(str, authority.issue(name)))) for name in ("edge", "cloud")]
    edge = Edge(tmp_path, tiny_folder, **{f"CTXREUSE_EDGE__TLS_{name}": file for name, file in files[0].items()})
    trusting = ssl.create_default_context(cafile=str(authority.file))
    try:
        env = {f"CTXREUSE_CLOUD__TLS_{name}": file for name, file in files[1].items()}
        one = sidecar("--workers", "0", "--backend", edge.url, SSL_CERT_FILE=str(authority.file), **env)
        assert edge.url.startswith("https:")
        assert one.url.startswith("https:")

        def call(path: str, body: Any = None, method: str | None = None) -> bytes:
            headers = {"content-type": "application/json", "x-request-id": "through"}
            data = json.dumps(body).encode() if body is not None else None
            request = urllib.request.Request(one.url + path, data, headers, method=method)
            with urllib.request.urlopen(request, timeout=patient(60), context=trusting) as answer:
                assert answer.headers["x-request-id"] == "through"
                found: bytes = answer.read()
                return found

        def counted(kind: str) -> float:
            text = call("/metrics").decode()
            return float(text.partition(f'ctxreuse_proxy_tokens_total{{kind="{kind}"}} ')[2].split()[0])

        # As its image asks.
        image = (ROOT / "cloud" / "deploy" / "Dockerfile").read_text()
        check = image.partition('"-c", \\\n    "')[2].partition('"]')[0]
        exec(check.replace("/var/lib/ctxreuse-cloud/store/cloud.json", str(one.ready_file)), {})

        model = json.loads(call("/v1/models"))["data"][0]["id"]
        messages = [{"role": "system", "content": "Be brief. " * 30}, {"role": "user", "content": "Hello"}]
        body = {"model": model, "messages": messages, "max_tokens": 4, "temperature": 0}
        whole = json.loads(call("/v1/chat/completions", body))
        more = {"stream": True, "stream_options": {"include_usage": True}}
        streamed = call("/v1/chat/completions", body | more)
        events = [json.loads(line[6:]) for line in streamed.split(b"\n\n") if line.startswith(b"data: {")]
        text = "".join(choice["delta"].get("content") or "" for event in events for choice in event["choices"])
        assert text == whole["choices"][0]["message"]["content"]
        assert streamed.rstrip().endswith(b"data: [DONE]")
        # The second request found the first one's context, and the sidecar counted that.
        cached = events[-1]["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached > 0
        assert counted("cached") == cached

        before = counted("prompt")
        given = {"model": model, "input": "Hello " * 40, "max_output_tokens": 16}
        first = json.loads(call("/v1/responses", given))
        second = {"model": model, "input": "And?", "previous_response_id": first["id"], "max_output_tokens": 16}
        made = call("/v1/responses", second | {"stream": True})
        done = json.loads(made.decode().strip().rpartition("data: ")[2])["response"]
        assert done["previous_response_id"] == first["id"]
        assert counted("prompt") - before == first["usage"]["input_tokens"] + done["usage"]["input_tokens"]
        assert json.loads(call(f"/v1/responses/{done['id']}"))["id"] == done["id"]
        assert json.loads(call(f"/v1/responses/{done['id']}", method="DELETE"))["deleted"]
        with pytest.raises(urllib.error.HTTPError, match="404"):
            call(f"/v1/responses/{done['id']}")

        before = counted("completion")
        asked = {
            "model": model,
            "max_tokens": 5,
            "temperature": 0,
            "messages": messages[1:],
            "system": "Be brief. " * 30,
        }
        said = json.loads(call("/v1/messages", asked))
        call("/v1/messages", asked | {"stream": True})
        assert counted("completion") - before == 2 * said["usage"]["output_tokens"]
        tokens = json.loads(call("/tokenize", {"model": model, "prompt": "Hello"}))["tokens"]
        assert json.loads(call("/detokenize", {"model": model, "tokens": tokens}))["prompt"]
    finally:
        edge.end()


async def ask(client: Any, url: str, body: Any) -> tuple[int, bytes]:
    async with client.post(url + "/v1/chat/completions", json=body) as response:
        return response.status, await response.read()


def test_what_it_tells_and_to_whom(sidecar: Callable[..., Any], tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("master")
    one = sidecar("--workers", "0", "--drain", "2s", CTXREUSE_CLOUD__ADMIN_TOKEN_FILE=str(token))

    def get(path: str, **headers: str) -> tuple[int, bytes]:
        try:
            with urllib.request.urlopen(
                urllib.request.Request(one.url + path, headers=headers), timeout=patient(10)
            ) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read()

    assert get("/healthz")[0] == get("/readyz")[0] == get("/health")[0] == 200
    assert b"ctxreuse_bus_peers 0.0" in get("/metrics", Host="cloud.example")[1]
    assert get("/api/status")[0] == 200
    assert get("/api/status", Host="cloud.example")[0] == 403
    for odd in ("evil.com\\@127.0.0.1", "127.0.0.1:99999"):
        assert get("/api/status", Host=odd)[0] == 403
    # Through a proxy of this machine, as nginx sends it by default.
    for name in ("X-Forwarded-For", "Forwarded", "X-Real-IP", "Via"):
        for path in ("/api/status", "/api/why/x", "/v1/models"):
            assert get(path, **{name: "1.2.3.4"})[0] == 403
    far = {"Host": "cloud.example", "X-Forwarded-For": "1.2.3.4", "Authorization": "Bearer master"}
    assert [get(path, **far)[0] for path in ("/api/status", "/api/why/x")] == [200, 404]
    assert get("/api/status", **{**far, "Authorization": "Bearer wrong"})[0] == 403
    assert get("/nothing")[0] == 404
    status, body = get("/v1/chat/completions")
    assert (status, json.loads(body)["error"]["type"]) == (503, "no_backend")
    assert one.stop() == 0

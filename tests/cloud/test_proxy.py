"""The proxy over real sockets: what passes, what is tried again, what breaks, who may ask and how much."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from ctxreuse_cloud.proxy.tenants import Tenants
from yarl import URL

from ctxreuse.config import BackendConfig
from ctxreuse.daemon.key_file import KeyFile
from support.scripted import STREAM, RunningProxy, Scripted, fronted
from support.waiting import async_until, patient

WHOLE = b"".join(STREAM)


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), patient(20)))


def test_a_stream_passes_as_it_came_and_its_usage_is_counted() -> None:
    async def test() -> None:
        async with Scripted("a") as a, fronted(a) as front:
            trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
            sent = {"x-request-id": "id-1", "traceparent": trace, "x-hop": "1", "connection": "x-hop", "cookie": "c=1"}
            status, body, headers = await front.ask("/v1/chat/completions?beta=1", headers=sent, temperature=0.5)
            assert (status, body) == (200, WHOLE)
            assert headers["content-type"] == "text/event-stream"
            assert headers["x-request-id"] == "id-1"
            assert "x-hop" not in headers
            path, got, raw = a.seen[0]
            assert path == "/v1/chat/completions?beta=1"
            assert json.loads(raw)["temperature"] == 0.5
            assert (got["traceparent"], got["x-request-id"]) == (trace, "id-1")
            assert not {"x-hop", "cookie", "authorization"} & set(got)
            tokens = [
                front.count("ctxreuse_proxy_tokens_total", kind=kind) for kind in ("prompt", "cached", "completion")
            ]
            assert tokens == [30, 16, 3]
            assert front.count("ctxreuse_proxy_requests_total", outcome="ok") == 1

    run(test)


def test_pieces_are_not_gathered() -> None:
    async def test() -> None:
        async with Scripted("a") as a, fronted(a) as front:
            a.steps = asyncio.Semaphore(1)
            pieces = []
            body = {"model": "m", "messages": [{"role": "user"}]}
            async with front.client.post(front.url + "/v1/chat/completions", json=body) as response:
                async for piece in response.content.iter_any():
                    pieces.append(piece)
                    a.steps.release()  # no piece is sent before the one ahead of it is here
            assert pieces == STREAM

    run(test)


def test_a_json_answer_and_the_list_of_models() -> None:
    async def test() -> None:
        async with Scripted("a", ["m", "n"]) as a, Scripted("b", ["n", "o"]) as b, fronted(a, b) as front:
            a.plan = ["json"]
            status, body, _ = await front.ask("/v1/embeddings", input="x", messages=None)
            assert (status, json.loads(body)["usage"]["prompt_tokens"]) == (200, 30)
            async with front.client.get(front.url + "/v1/models") as response:
                listed = (await response.json())["data"]
            assert [(row["id"], row["owned_by"]) for row in listed] == [("m", "a"), ("n", "a"), ("o", "b")]
            for name, expected in (("o", 200), ("p", 404)):
                async with front.client.get(f"{front.url}/v1/models/{name}") as response:
                    assert response.status == expected
            assert (await front.ask(model="o"))[0] == 200
            assert [json.loads(body)["model"] for _, _, body in b.seen] == ["o"]
            assert (await front.ask(model="unknown to all"))[0] == 200  # servers of one model often take any name

    run(test)


@pytest.mark.parametrize("fault", ["drop", "garbage", "headers", 500, 503, 408, 429])
def test_what_fails_before_the_first_byte_is_tried_elsewhere(fault: str | int) -> None:
    async def test() -> None:
        async with Scripted("a") as a, Scripted("b") as b, fronted(a, b) as front:
            await front.ask()
            first, other = (a, b) if a.seen else (b, a)
            first.plan = [fault]
            status, body, _ = await front.ask()
            assert (status, body) == (200, WHOLE)
            assert (len(first.seen), len(other.seen)) == (2, 1)
            assert front.count("ctxreuse_proxy_retries_total") == 1
            failures = front.count("ctxreuse_proxy_failures_total", backend=first.name)
            assert failures == (0 if fault == 429 else 1)  # busy is not ill

    run(test)


def test_a_backend_that_is_away_is_tried_elsewhere_whatever_was_asked() -> None:
    async def test() -> None:
        async with Scripted("a") as a, Scripted("b") as b, fronted(a, b) as front:
            await a.__aexit__()
            for i in range(8):
                messages = [{"role": "user", "content": str(i)}]
                assert (await front.ask("/v1/responses", messages=messages))[0] == 200
            assert len(b.seen) == 8
            await a.start(a.port)  # so that leaving the block finds it running

    run(test)


def test_what_a_backend_may_have_kept_is_sent_once() -> None:
    async def test() -> None:
        async with Scripted("a") as a, fronted(a) as front:
            a.plan = ["drop"]
            status, body, _ = await front.ask("/v1/responses")
            assert status == 502
            assert json.loads(body)["error"]["type"] == "upstream_error"
            assert len(a.seen) == 1

    run(test)


def test_the_last_error_is_the_backends_own() -> None:
    async def test() -> None:
        async with Scripted("a") as a, fronted(a, attempts=2) as front:
            a.plan = [503, 500]
            status, body, headers = await front.ask()
            assert (status, headers["x-from"]) == (500, "a")
            assert json.loads(body)["error"]["message"] == "a says 500"
            assert len(a.seen) == 2
            a.plan = [404]
            assert (await front.ask())[0] == 404  # not ours to repeat
            assert len(a.seen) == 3

    run(test)


def test_a_stream_that_breaks_ends_with_an_error_event() -> None:
    async def test() -> None:
        async with Scripted("a") as a, fronted(a) as front:
            a.plan = ["torn"]
            status, body, _ = await front.ask()
            assert status == 200
            events = body.split(b"\n\n")
            assert events[:2] == [piece.strip() for piece in STREAM[:2]]
            assert json.loads(events[2].removeprefix(b"data: "))["error"]["code"] == 502
            assert events[3:] == [b""]  # the half of an event was held back
            assert len(a.seen) == 1
            assert front.count("ctxreuse_proxy_requests_total", outcome="broken") == 1

    run(test)


def test_a_caller_who_leaves_takes_the_request_with_it() -> None:
    async def test() -> None:
        async with Scripted("a") as a, fronted(a) as front:
            a.plan = ["flood", "hang"]
            for n in (1, 2):
                asking = asyncio.create_task(front.ask())
                await async_until(lambda n=n: len(a.seen) == n and a.sent)
                asking.cancel()
                await asyncio.gather(asking, return_exceptions=True)
                await async_until(lambda: front.proxy.running == 0)
            assert front.backends.all[0].outstanding == 0
            assert front.count("ctxreuse_proxy_requests_total", outcome="cancelled") == 2
            await async_until(lambda: a.open <= 1)  # `hang` does not read; `flood` was cut
            assert (await front.ask())[0] == 200
            assert front.backends.all[0].failures == 0

    run(test)


def test_a_slow_reader_holds_the_backend_back() -> None:
    async def test() -> None:
        async with Scripted("a") as a, fronted(a, silence=1.0) as front:
            a.plan = ["flood"]
            reader, writer = await asyncio.open_connection("127.0.0.1", int(front.url.rpartition(":")[2]))
            writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n{}")
            await reader.read(1)  # and no more
            await async_until(lambda: front.count("ctxreuse_proxy_requests_total", outcome="stalled") == 1)
            # What the system's socket buffers and ours took, of a stream without end.
            assert a.sent < 32 << 20
            writer.close()

    run(test)


def test_a_circuit_opens_and_closes_again() -> None:
    async def test() -> None:
        async with Scripted("a") as a, fronted(a, attempts=1) as front:
            now = 100.0
            backend = front.backends.all[0]
            backend.clock = lambda: now
            a.plan = [500] * 5
            assert [(await front.ask())[0] for _ in range(5)] == [500] * 5
            status, _, headers = await front.ask()
            assert (status, len(a.seen)) == (503, 5)
            assert int(headers["retry-after"]) >= 1
            assert backend.status().breaker == "open"
            now += 60
            assert backend.status().breaker == "half-open"
            assert (await front.ask())[0] == 200
            assert backend.status().breaker == "closed"

    run(test)


def test_retries_stop_when_most_requests_fail() -> None:
    async def test() -> None:
        async with Scripted("a") as a, Scripted("b") as b, fronted(a, b) as front:
            a.plan, b.plan = [503] * 200, [503] * 200
            for backend in front.backends.all:
                backend.breaker._limit = 1000
            await asyncio.gather(*(front.ask(messages=[{"content": str(i)}]) for i in range(30)))
            assert len(a.seen) + len(b.seen) <= 30 + 10 + 0.2 * 30

    run(test)


def test_a_context_stays_with_its_backend_and_overflows_to_one_other() -> None:
    async def test() -> None:
        async with (
            Scripted("a") as a,
            Scripted("b") as b,
            Scripted("c") as c,
            fronted(a, b, c, router="affinity") as front,
        ):
            for _ in range(5):
                await front.ask(messages=[{"content": "same"}, {"content": "other"}])
            assert sorted(len(server.seen) for server in (a, b, c)) == [0, 0, 5]
            for i in range(30):
                await front.ask(messages=[{"content": f"context {i}"}])
            assert all(len(server.seen) > 2 for server in (a, b, c))

    run(test)


def keyed(tmp_path: Path) -> tuple[KeyFile, Tenants, str, str]:
    file = KeyFile(tmp_path / "keys.json")
    ada, bob = file.add("ada"), file.add("bob")
    return file, Tenants(file), ada, bob


def test_keys_tenants_and_salts(tmp_path: Path) -> None:
    async def test() -> None:
        file, tenants, ada, bob = keyed(tmp_path)
        async with Scripted("a") as a:
            (tmp_path / "backend.key").write_text("upstream\n")
            row = BackendConfig(url=a.url, name="a", cache_salt=True, api_key_file=str(tmp_path / "backend.key"))
            async with fronted(a, tenants=tenants, rows=[row]) as front:
                for key in ("", "Bearer wrong", f"Basic {ada}", f"Bearer {ada}x"):
                    status, _, headers = await front.ask(headers={"authorization": key})
                    assert (status, headers["www-authenticate"]) == (401, "Bearer")
                assert not a.seen
                for key in (ada, bob, ada):
                    headers = {"authorization": f"Bearer {key}"}
                    assert (await front.ask(headers=headers, cache_salt="bob's"))[0] == 200
                salts = [json.loads(body)["cache_salt"] for _, _, body in a.seen]
                assert salts[0] == salts[2] != salts[1]
                assert all(len(salt) == 32 for salt in salts)
                assert {got["authorization"] for _, got, _ in a.seen} == {"Bearer upstream"}
                file.revoke("ada")
                assert tenants.keys is not None
                assert tenants.keys.refresh()
                assert (await front.ask(headers={"authorization": f"Bearer {ada}"}))[0] == 401
                assert (await front.ask(headers={"authorization": f"Bearer {bob}"}))[0] == 200

    run(test)


def test_a_callers_salt_reaches_no_backend() -> None:
    async def test() -> None:
        async with Scripted("a") as a, fronted(a) as front:
            assert (await front.ask(cache_salt="mine"))[0] == 200
            raw = b'{"model":"m","cache\\u005fsalt":"x","prompt":"p","cache_salt":"y"}'
            async with front.client.post(front.url + "/v1/completions", data=raw) as response:
                assert response.status == 200
            assert [("cache_salt" in json.loads(body)) for _, _, body in a.seen] == [False, False]

    run(test)


def test_a_tenant_has_a_limit_of_its_own(tmp_path: Path) -> None:
    async def test() -> None:
        _, tenants, ada, bob = keyed(tmp_path)
        async with Scripted("a") as a, fronted(a, tenants=tenants, tenant_requests=2) as front:
            a.plan = ["hang", "hang"]
            one = {"authorization": f"Bearer {ada}"}
            hanging = [asyncio.create_task(front.ask(headers=one)) for _ in range(2)]
            await async_until(lambda: len(a.seen) == 2)
            status, body, headers = await front.ask(headers=one)
            assert (status, headers["retry-after"]) == (429, "1")
            assert json.loads(body)["error"]["type"] == "rate_limit_error"
            assert (await front.ask(headers={"authorization": f"Bearer {bob}"}))[0] == 200
            for task in hanging:
                task.cancel()
            await asyncio.gather(*hanging, return_exceptions=True)
            await async_until(lambda: front.proxy.running == 0)
            assert (await front.ask(headers=one))[0] == 200

    run(test)


async def slow(front: RunningProxy, key: str, sent: int) -> tuple[int, str]:
    """Ask with a body of which so many bytes come, and then no more."""

    async def pieces() -> AsyncIterator[bytes]:
        yield b" " * sent
        await asyncio.Event().wait()

    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    async with front.client.post(front.url + "/v1/chat/completions", data=pieces(), headers=headers) as answer:
        return answer.status, (await answer.json())["error"]["type"]


def test_each_tenant_has_a_share_of_the_memory_for_bodies(tmp_path: Path) -> None:
    async def test() -> None:
        _, tenants, ada, bob = keyed(tmp_path)
        limits: dict[str, Any] = {"max_body": 400_000, "max_bodies": 1_000_000}
        async with Scripted("a") as a, fronted(a, tenants=tenants, **limits) as front:
            first = [asyncio.create_task(slow(front, ada, 240_000)) for _ in range(2)]
            await async_until(lambda: front.proxy.bodies.reserved == 480_000)
            assert await slow(front, ada, 240_000) == (429, "rate_limit_error")
            assert await slow(front, bob, 300_000) == (503, "server_error"), "half of what is left is 260,000"
            assert (await front.ask(headers={"authorization": f"Bearer {bob}"}, user="x" * 200_000))[0] == 200
            for task in first:
                task.cancel()
            await asyncio.gather(*first, return_exceptions=True)
            await async_until(lambda: front.proxy.bodies.reserved == 0)
            assert (await front.ask(headers={"authorization": f"Bearer {ada}"}, user="x" * 390_000))[0] == 200

    run(test)


def test_bodies_have_a_deadline(tmp_path: Path) -> None:
    async def test() -> None:
        _, tenants, ada, _ = keyed(tmp_path)
        async with Scripted("a") as a, fronted(a, tenants=tenants, receive=0.2) as front:
            assert await slow(front, ada, 100) == (408, "invalid_request_error")
            await async_until(lambda: front.proxy.bodies.reserved == 0)
            assert a.seen == []

    run(test)


@pytest.mark.parametrize(
    ("body", "headers", "status"),
    [
        (b"{", {}, 400),
        (b"[]", {}, 400),
        (b'{"model": 3}', {}, 400),
        (b'{"messages": {}}', {}, 400),
        (b"\xff\xfe", {}, 400),
        (b'{"messages": ' + b"[" * 60_000, {}, 400),
        (b"--x", {"content-type": "multipart/form-data; boundary=x"}, 400),  # a salt could hide in there
        (b" " * 70_000, {}, 413),
        (b'{"prompt": "p"}', {"host": "evil.example"}, 403),
        (b'{"prompt": "p"}', {"origin": "https://evil.example"}, 403),
        (b'{"prompt": "p"}', {"origin": "http://["}, 403),
        (b'{"prompt": "p"}', {"host": "["}, 403),
        (b'{"prompt": "p"}', {"x-forwarded-for": "1.2.3.4"}, 403),
        (b'{"prompt": "p"}', {"via": "1.1 gate"}, 403),
    ],
)
def test_what_is_refused_reaches_no_backend(body: bytes, headers: dict[str, str], status: int) -> None:
    async def test() -> None:
        async with Scripted("a") as a, fronted(a, max_body=65_536) as front:
            for data in (body, _pieces(body)):
                async with front.client.post(front.url + "/v1/chat/completions", data=data, headers=headers) as answer:
                    assert answer.status == status
                    assert (await answer.json())["error"]["code"] == status
            assert not a.seen
            assert front.proxy.running == 0

    run(test)


@pytest.mark.parametrize(
    "path",
    [
        "/v1/../reset",
        "/v1/%2e%2e/reset",
        "/v1/x/../../reset",
        "/v1/.",
        "/v1/x%3Fy",
        "/v1/%252e%252e/reset",
        "/v1/a%0d%0ab",
        "/v1/..%2Freset",
        "/v1/x\\..\\reset",
        "/v1//reset",
        "/v1/x;/../../reset",
        "/v1/",
    ],
)
def test_a_path_leads_nowhere_else_on_a_backend(path: str) -> None:
    async def test() -> None:
        async with Scripted("a") as a, fronted(a) as front:
            url = URL(front.url + path, encoded=True)
            async with front.client.post(url, json={"prompt": "p"}) as answer:
                assert (answer.status, (await answer.json())["error"]["code"]) == (404, 404)
            assert not a.seen
            assert (await front.ask("/v1/responses/resp_1:x/cancel"))[0] == 200

    run(test)


async def _pieces(body: bytes) -> Any:
    for at in range(0, len(body), 30_000):
        yield body[at : at + 30_000]


def test_without_backends_the_answer_says_so() -> None:
    async def test() -> None:
        async with fronted() as front:
            status, body, _ = await front.ask()
            assert status == 503
            assert "no backend is configured" in json.loads(body)["error"]["message"]

    run(test)


def test_an_ill_backend_is_left_alone_until_it_is_well() -> None:
    from ctxreuse_cloud.proxy.health import check_backend

    async def test() -> None:
        async with Scripted("a") as a, fronted(a) as front, aiohttp.ClientSession() as pool:
            backend = front.backends.all[0]
            a.health = 503
            await check_backend(pool, backend, 1.0)
            assert (backend.healthy, backend.error) == (False, "/health answers 503")
            assert (await front.ask())[0] == 503
            a.health = 404  # no such path: the list of models is the sign of life
            await check_backend(pool, backend, 1.0)
            assert (await front.ask())[0] == 200
            assert len(a.seen) == 1

    run(test)

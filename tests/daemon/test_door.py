"""The door: who may ask, under which names, with how large a request, and how long it may take to arrive."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from ctxreuse.config.hosts import is_loopback
from ctxreuse.daemon.access import Access, from_here, host_names, is_forwarded
from ctxreuse.daemon.bodies import BodyBudget, NoRoomError
from ctxreuse.daemon.client import Client
from ctxreuse.daemon.key_file import read_keys
from ctxreuse.daemon.keys import Keys
from ctxreuse.daemon.middleware import read_body
from ctxreuse.daemon.protocol import protocol
from ctxreuse.errors import ConfigError
from support.waiting import patient, until

Serve = Callable[..., Client]


def test_files_of_keys(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    assert read_keys("") == ()
    file.write_text("# all of them\none # mine\n\n two\n")
    assert read_keys(str(file)) == ("one", "two")
    file.write_text("# none\n")
    with pytest.raises(ConfigError, match="file is empty"):
        read_keys(str(file))
    with pytest.raises(ConfigError, match="cannot be read"):
        read_keys(str(tmp_path / "absent"))


def test_web_pages_and_programs() -> None:
    programs = [("localhost:1", ""), ("127.0.0.1", ""), ("[::1]:7351", "http://localhost:3000")]
    pages = [("evil.example", ""), ("", ""), ("127.0.0.1", "https://evil.example"), ("127.0.0.1", "null")]
    odd = [("[", ""), ("127.0.0.1", "http://["), ("a@evil.example", ""), ("127.0.0.1@evil.example", "")]
    odd += [("evil.com\\@127.0.0.1", ""), ("127.0.0.1:99999", ""), ("127.0.0.1:", ""), ("localhost/x", "")]
    odd += [("127.0.0.1", "http://evil.com\\@127.0.0.1"), ("127.0.0.1", "http://127.0.0.1/x"), ("127.0.0.1 ", "")]
    assert all(from_here(*given) for given in programs)
    assert not any(from_here(*given) for given in (*pages, *odd))


def test_loopback_and_not() -> None:
    assert all(map(is_loopback, ("localhost", "127.0.0.1", "127.8.8.8", "::1", "[::1]")))
    assert not any(map(is_loopback, ("", "0.0.0.0", "::", "10.0.0.1", "localhost.evil.example", "127.0.0.1.evil")))


def test_names_that_count_as_this_machine() -> None:
    names = host_names("0.0.0.0", "Box.lan, [fd00::1]  other")
    assert names == {"0.0.0.0", "box.lan", "fd00::1", "other"}
    assert all(from_here(host, "", names) for host in ("BOX.lan:7351", "[fd00::1]:1", "0.0.0.0", "localhost"))
    assert from_here("box.lan", "http://other:3000", names)
    assert not from_here("box.lan", "http://evil.example", names)
    assert not from_here("box.lan.evil.example", "", names)


def test_headers_of_proxies() -> None:
    for name in ("forwarded", "via", "x-forwarded-for", "x-forwarded-host", "x-real-ip"):
        assert is_forwarded([(b"host", b"localhost"), (name.encode(), b"1.2.3.4")])
    assert not is_forwarded([(b"host", b"localhost"), (b"x-request-id", b"via")])


def raw(client: Client, text: bytes, *, wait: float = 20.0) -> tuple[int, bytes]:
    """Send bytes and read to the end; the status (0: closed without a word) and the body."""
    host, port = client.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=patient(wait)) as link:
        link.sendall(text)
        answer = b""
        try:
            while piece := link.recv(1 << 16):
                answer += piece
        except ConnectionResetError:
            pass
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]) if head else 0, body


def get(client: Client, path: str, **headers: str) -> tuple[int, bytes]:
    lines = {"host": "127.0.0.1", "connection": "close"} | {name.replace("_", "-"): v for name, v in headers.items()}
    head = "\r\n".join([f"GET {path} HTTP/1.1", *(f"{name}: {value}" for name, value in lines.items())])
    return raw(client, head.encode() + b"\r\n\r\n")


async def hello(request: Request) -> Response:
    return JSONResponse({"admin": request.scope["state"].get("admin", False)})


ROUTES = [Route(path, hello) for path in ("/v1/models", "/api/status", "/api/why/1", "/healthz", "/metrics")]


def test_who_is_served_without_keys(serve: Serve) -> None:
    client = serve(*ROUTES, access=Access(names={"box.lan"}, admin=[Keys.of("secret", scopes=("admin",))]))
    assert get(client, "/v1/models")[0] == get(client, "/v1/models", host="box.lan:1")[0] == 200
    for headers in ({"host": "rebound.evil.com"}, {"origin": "http://evil.com"}, {"host": "evil.com\\@127.0.0.1"}):
        assert get(client, "/v1/models", **headers)[0] == get(client, "/metrics", **headers)[0] == 403
        assert get(client, "/healthz", **headers)[0] == 200, "a probe may use any name"
    for path in ("/v1/models", "/api/status", "/api/why/1"):
        status, body = get(client, path, x_forwarded_for="1.2.3.4")
        assert (status, json.loads(body)["error"]["type"]) == (403, "permission_error")
    assert get(client, "/api/status", authorization="Bearer wrong", host="evil.com")[0] == 403
    for path in ("/api/status", "/api/why/1"):
        status, body = get(client, path, authorization="Bearer secret", host="evil.com", forwarded="for=1.2.3.4")
        assert (status, json.loads(body)) == (200, {"admin": True})
    assert get(client, "/v1/models", authorization="Bearer secret", host="evil.com")[0] == 403, "it opens only these"


def test_on_a_trusted_network_a_proxy_may_ask_but_not_for_what_others_asked(serve: Serve) -> None:
    client = serve(*ROUTES, access=Access(forwarded=True))
    assert get(client, "/v1/models", x_real_ip="1.2.3.4")[0] == 200
    assert get(client, "/api/status")[0] == 200
    assert get(client, "/api/status", x_real_ip="1.2.3.4")[0] == 403


def test_headers_have_a_deadline(serve: Serve) -> None:
    client = serve(*ROUTES, receive=0.5)
    began = time.monotonic()
    status, body = raw(client, b"GET /v1/models HTTP/1.1\r\nhost: 127.0.0.1\r\nx-slow: ")
    assert (status, json.loads(body)["error"]["code"]) == (408, "request_timeout")
    assert raw(client, b"") == (0, b""), "nothing was asked"
    assert 0.4 < time.monotonic() - began < patient(10)
    # The second request of a connection, too; and a whole one is served whatever follows it.
    first = b"GET /v1/models HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n"
    status, body = raw(client, first + b"GET /v1/mod")
    assert status == 200
    assert b"408 Request Timeout" in body


def test_a_flood_of_what_is_not_http_is_told_in_few_lines(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    client = serve(*ROUTES)
    for sent in (b"\0\1\2\r\n\r\n", b"GET / HTTP/1.1\r\nhost: 127.0.0.1\r\nupgrade: x\r\nconnection: close\r\n\r\n"):
        for _ in range(12):
            assert raw(client, sent)[0] in (400, 404)
    told = [record for record in caplog.records if record.name == "uvicorn.error" and record.levelname == "WARNING"]
    assert len(told) == 10
    assert get(client, "/v1/models")[0] == 200


def posting(serve: Serve, **limits: float) -> tuple[Client, BodyBudget]:
    async def size(request: Request) -> Response:
        return JSONResponse(len(await read_body(request, 1 << 20)))

    bodies = BodyBudget(int(limits.pop("total", 1 << 20)), limits.pop("seconds", 30.0))
    route = Route("/v1/size", size, methods=["POST"])
    return serve(route, access=Access(keys=Keys.of("a", "b")), bodies=bodies, **limits), bodies


def beginning(client: Client, key: str, length: int, sent: int) -> socket.socket:
    """Send a request's head and the first bytes of its body."""
    host, port = client.url.removeprefix("http://").split(":")
    link = socket.create_connection((host, int(port)), timeout=patient(20))
    head = f"POST /v1/size HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\ncontent-length: {length}\r\n\r\n"
    link.sendall(head.encode() + b"x" * sent)
    return link


def answer(link: socket.socket) -> tuple[int, bytes]:
    data = b""
    while b"\r\n\r\n" not in data:
        data += link.recv(1 << 16)
    head, _, body = data.partition(b"\r\n\r\n")
    length = int(head.lower().partition(b"content-length:")[2].split()[0])
    while len(body) < length:
        body += link.recv(1 << 16)
    return int(head.split()[1]), body


def test_bodies_have_a_deadline(serve: Serve) -> None:
    client, _ = posting(serve, seconds=0.5, receive=0.5)
    with beginning(client, "a", 1000, 10) as link:
        status, body = answer(link)
        assert (status, json.loads(body)["error"]["code"]) == (408, "request_timeout")
        link.sendall(b"x")
        assert link.recv(100) == b"", "what comes late is not waited for"


def test_bodies_under_way_share_one_budget_and_a_key_has_half_of_what_is_left(serve: Serve) -> None:
    client, bodies = posting(serve, total=1 << 20)
    links = [beginning(client, "a", 255_000, 250_000) for _ in range(2)]
    try:
        until(lambda: bodies.reserved == 500_000)
        with beginning(client, "a", 300_000, 250_000) as third:
            status, body = answer(third)
            assert (status, json.loads(body)["error"]["code"]) == (429, "too_many_requests")
        # Half of the half that is left.
        with beginning(client, "b", 250_000, 250_000) as other:
            assert answer(other) == (200, b"250000")
        with beginning(client, "b", 400_000, 400_000) as large:
            status, body = answer(large)
            assert (status, json.loads(body)["error"]["code"]) == (503, "no_memory")
        links[0].sendall(b"x" * 5_000)
        assert answer(links[0]) == (200, b"255000")
        until(lambda: bodies.reserved == 250_000)
        with beginning(client, "a", 200_000, 200_000) as again:
            assert answer(again) == (200, b"200000")
    finally:
        for link in links:
            link.close()


def test_a_budget_returns_what_a_request_held() -> None:
    budget = BodyBudget(100, 1.0)
    with budget.body(None) as take:
        take(100)
        with pytest.raises(NoRoomError), budget.body(None) as more:
            more(1)
        assert budget.reserved == 100
    assert budget.reserved == 0


def test_a_key_file_that_others_may_read_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "keys"
    file.write_text("one")
    file.chmod(0o640)
    with caplog.at_level(logging.WARNING):
        assert read_keys(str(file)) == ("one",)
    assert f"chmod 600 {file}" in caplog.text
    caplog.clear()
    file.chmod(0o600)
    read_keys(str(file))
    assert not caplog.text


class Written(asyncio.Transport):
    """What a connection wrote, write by write; then None if it closed."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[bytes | None] = []

    def write(self, data: Any) -> None:
        self.writes.append(bytes(data))

    def close(self) -> None:
        self.writes.append(None)

    def is_closing(self) -> bool:
        return None in self.writes


def test_an_answer_is_one_write_and_a_stream_is_not_held_back() -> None:
    turn = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"4")]})
        await send({"type": "http.response.body", "body": b"on", "more_body": True})
        if scope["path"] == "/slow":
            await turn.wait()
        await send({"type": "http.response.body", "body": b"ce", "more_body": False})

    async def ask(path: bytes) -> tuple[list[bytes | None], list[bytes | None]]:
        config = uvicorn.Config(app, http=protocol(5.0), log_config=None, access_log=False, lifespan="off")
        config.load()
        transport, server = Written(), uvicorn.Server(config)
        connection: Any = config.http_protocol_class(config=config, server_state=server.server_state, app_state={})
        connection.connection_made(transport)
        connection.data_received(b"GET " + path + b" HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        for _ in range(20):
            await asyncio.sleep(0)
        before = list(transport.writes)
        turn.set()
        for _ in range(20):
            await asyncio.sleep(0)
        connection.connection_lost(None)
        return before, transport.writes

    _, writes = asyncio.run(ask(b"/"))
    assert writes[0] is not None
    assert writes[0].endswith(b"\r\n\r\nonce")
    assert set(writes[1:]) == {None}  # and what was left was written before it closed
    turn.clear()
    before, writes = asyncio.run(ask(b"/slow"))
    assert len(before) == 1
    assert before[0] is not None
    assert before[0].endswith(b"\r\n\r\non")
    assert (writes[1], set(writes[2:])) == (b"ce", {None})


def test_what_is_for_a_client_that_has_left_is_not_written() -> None:
    """uvloop raises for a transport that has closed, where asyncio's own loop is silent."""
    transport = Written()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"once", "more_body": False})
        transport.close()  # before the loop's next turn, in which it would be written

    async def ask() -> None:
        config = uvicorn.Config(app, http=protocol(5.0), log_config=None, access_log=False, lifespan="off")
        config.load()
        server = uvicorn.Server(config)
        connection: Any = config.http_protocol_class(config=config, server_state=server.server_state, app_state={})
        connection.connection_made(transport)
        connection.data_received(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n")
        for _ in range(20):
            await asyncio.sleep(0)
        connection.connection_lost(None)

    asyncio.run(ask())
    assert set(transport.writes) == {None}

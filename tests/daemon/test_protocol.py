"""HTTP connections by their bytes: what is whole is answered, in turn; what is not costs little, and ends."""

from __future__ import annotations

import asyncio
import random
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise

import pytest
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from ctxreuse.daemon.access import Access
from ctxreuse.daemon.client import Client
from support.waiting import patient, until

Serve = Callable[..., Client]

HEAD = b"POST /v1/echo HTTP/1.1\r\nhost: 127.0.0.1\r\n"
LAST = b"connection: close\r\n"
GET = b"GET /v1/names HTTP/1.1\r\nhost: 127.0.0.1\r\n"

gone: list[bool] = []
late = threading.Event()


async def echo(request: Request) -> Response:
    return Response(await request.body())


async def names(request: Request) -> Response:
    return PlainTextResponse(",".join(sorted(request.headers)))


async def trailing(request: Request) -> Response:
    await request.body()
    return PlainTextResponse(",".join(sorted(request.headers)))


async def waits(request: Request) -> Response:
    """Wait until the caller has gone."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
    gone.append(True)
    return Response()


async def pieces(request: Request) -> Response:
    async def each() -> AsyncIterator[bytes]:
        for piece in (b"one ", b"two ", b"three"):
            yield piece

    return StreamingResponse(each())


async def waited_for(request: Request) -> Response:
    async def each() -> AsyncIterator[bytes]:
        await asyncio.to_thread(late.wait, patient(10))
        yield b"after all"

    return StreamingResponse(each())


ROUTES = [
    Route("/v1/late", waited_for),
    Route("/v1/echo", echo, methods=["POST"]),
    Route("/v1/trailing", trailing, methods=["POST"]),
    Route("/v1/names", names),
    Route("/v1/waits", waits, methods=["GET", "POST"]),
    Route("/v1/pieces", pieces),
]


@pytest.fixture
def client(serve: Serve) -> Client:
    return serve(*ROUTES, access=Access(), receive=5.0)


@contextmanager
def link(client: Client) -> Iterator[socket.socket]:
    host, port = client.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=patient(20)) as made:
        yield made


def rest(made: socket.socket) -> bytes:
    """Read to the end."""
    found = b""
    try:
        while piece := made.recv(1 << 16):
            found += piece
    except ConnectionResetError:
        pass
    return found


def said(client: Client, *sent: bytes) -> list[tuple[int, bytes]]:
    """Send pieces, each by itself; status and body of each answer that has a length, until the connection ends."""
    with link(client) as made:
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            for number, piece in enumerate(sent):
                time.sleep(0.05 if number else 0)
                made.sendall(piece)
        except (BrokenPipeError, ConnectionResetError):
            pass
        data = rest(made)
    found = []
    while data:
        head, _, data = data.partition(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length:")[2].split()[0])
        found.append((int(head.split()[1]), data[:length]))
        data = data[length:]
    return found


def post(body: bytes, *more: bytes) -> bytes:
    return HEAD + b"".join(more) + b"content-length: %d\r\n\r\n" % len(body) + body


def test_requests_sent_at_once_are_answered_in_turn(client: Client) -> None:
    sent = post(b"first") + post(b"x" * 300_000) + post(b"third", LAST)
    assert [body[:5] for _, body in said(client, sent)] == [b"first", b"xxxxx", b"third"]
    # In pieces that end anywhere, in lines and bodies too.
    cuts = [0, 3, 40, 90, 91, 100, len(sent) - 40, len(sent) - 6, len(sent)]
    assert [status for status, _ in said(client, *(sent[a:b] for a, b in pairwise(cuts)))] == [200] * 3
    chunks = HEAD + b"transfer-encoding: chunked\r\n\r\n3\r\none\r\n4;a=b\r\n two\r\n0\r\n\r\n"
    assert said(client, chunks + post(b"next", LAST)) == [(200, b"one two"), (200, b"next")]


def test_a_connection_sends_few_requests_ahead(client: Client) -> None:
    answers = said(client, post(b"x") * 2_000)
    assert [status for status, _ in answers[:-1]] == [200] * (len(answers) - 1)
    assert answers[-1][0] == 400
    assert 10 < len(answers) < 100


def test_what_is_whole_is_answered_before_what_is_no_http_is_told(client: Client) -> None:
    assert said(client, post(b"whole") + b"\0\1\2") == [(200, b"whole"), (400, b"Invalid HTTP request received.")]
    bad = HEAD + b"transfer-encoding: chunked\r\n\r\nzz\r\n"
    assert [status for status, _ in said(client, post(b"a") + post(b"b") + bad)] == [200, 200, 400]
    assert [status for status, _ in said(client, post(b"a") + bad)] == [200, 400]
    assert [status for status, _ in said(client, HEAD + b"transfer-encoding: chunked\r\n\r\n", b"zz\r\n")] == [400]


@pytest.mark.parametrize(
    "sent",
    [
        b"\0\1\2\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 30,  # TLS
        b"POST /v1/echo\r\n\r\n",
        b"GET /v1/names HTTP/1.1\r\n\r\n",
        GET + b"host: localhost\r\n\r\n",
        b"GET /\xff HTTP/1.1\r\nhost: x\r\n\r\n",
        b"CONNECT 127.0.0.1:22 HTTP/1.1\r\nhost: x\r\n\r\n",
        GET + b"a b: c\r\n\r\n",
        GET + b"a: \0\r\n\r\n",
        GET + b"a : b\r\n\r\n",
        HEAD + b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        HEAD + b"transfer-encoding: chunked\r\ncontent-length: 5\r\n\r\n0\r\n\r\n",
        HEAD + b"content-length: 5\r\ncontent-length: 6\r\n\r\nhello",
        HEAD + b"content-length: -1\r\n\r\n",
        HEAD + b"content-length: 99999999999999999999999\r\n\r\n",
        HEAD + b"transfer-encoding: chunked, x\r\n\r\n0\r\n\r\n",
        HEAD + b"transfer-encoding: chunked\r\n\r\n-1\r\n\r\n",
        HEAD + b"transfer-encoding: chunked\r\n\r\nffffffffffffffffffff\r\n\r\n",
    ],
)
def test_what_is_no_http_is_refused_and_the_connection_ends(client: Client, sent: bytes) -> None:
    assert [status for status, _ in said(client, sent)] == [400]
    assert said(client, post(b"others", LAST)) == [(200, b"others")]


@pytest.mark.parametrize(
    "begun",
    [
        b"GET /",
        GET + b"x: ",
        GET,
        HEAD + b"transfer-encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n",
        HEAD + b"transfer-encoding: chunked\r\n\r\n1;",
    ],
    ids=["url", "value", "lines", "trailers", "extension"],
)
def test_heads_and_trailers_without_end_are_refused(client: Client, begun: bytes) -> None:
    """Before much more than 64 KiB of one have come, and half a megabyte that the kernel holds."""
    with link(client) as made:
        made.sendall(begun)
        line, sent = b"a: b\r\n" * 100 if begun.endswith(b"\n") else b"x" * 600, 0
        try:
            while sent < 64 << 20:
                time.sleep(0.001)
                sent += made.send(line)
        except (BrokenPipeError, ConnectionResetError):
            pass
        assert sent < 2 << 20


def test_a_large_head_that_has_an_end_is_served(client: Client) -> None:
    lines = b"".join(b"x-%d: %s\r\n" % (n, b"y" * 1000) for n in range(50))
    ((status, body),) = said(client, GET + lines + LAST + b"\r\n")
    assert status == 200
    assert body.count(b"x-") == 50


def test_trailers_are_no_headers(client: Client) -> None:
    head = b"POST /v1/trailing HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n"
    assert said(client, head, b"1\r\nx\r\n0\r\nauthorization: Bearer x\r\n\r\n") == [
        (200, b"connection,host,transfer-encoding")
    ]


def test_nothing_is_switched_to_and_the_request_is_served_with_its_body(client: Client) -> None:
    """Java's client asks each server for HTTP/2 like this, with the body behind it."""
    wish = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAEAAEAAAAIAAAABAAMAAABk\r\n"
    sent = post(b"one", wish) + post(b"two", wish) + post(b"three", LAST)
    assert said(client, sent) == [(200, b"one"), (200, b"two"), (200, b"three")]
    head, body = post(b"", wish).replace(b": 0", b": 7"), b"apart 7"
    assert said(client, head, body, post(b"next", LAST)) == [(200, body), (200, b"next")]
    chunks = HEAD + wish + b"transfer-encoding: chunked\r\n\r\n3\r\none\r\n0\r\n\r\n"
    assert said(client, chunks + post(b"next", LAST)) == [(200, b"one"), (200, b"next")]
    get = GET + b"connection: upgrade\r\nupgrade: websocket\r\nsec-websocket-key: x\r\n\r\n"
    assert [status for status, _ in said(client, get + post(b"next", LAST))] == [200, 200]


def test_an_older_client_gets_no_chunks(client: Client) -> None:
    with link(client) as made:
        made.sendall(b"GET /v1/pieces HTTP/1.0\r\nhost: 127.0.0.1\r\n\r\n")
        head, _, body = rest(made).partition(b"\r\n\r\n")
    assert body == b"one two three"
    assert b"transfer-encoding" not in head.lower()
    assert said(client, b"POST /v1/echo HTTP/1.0\r\nhost: 127.0.0.1\r\ncontent-length: 3\r\n\r\none") == [(200, b"one")]


def test_heads_of_answers_come_without_a_body_and_before_one_that_is_late(client: Client) -> None:
    head = b"HEAD /v1/names HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n"
    with link(client) as made:
        made.sendall(head + head + b"\0")
        found = rest(made)
    assert [found.count(b"HTTP/1.1 %d" % status) for status in (200, 400)] == [2, 1]
    assert found.endswith(b"Invalid HTTP request received.")
    with link(client) as made:
        made.sendall(b"GET /v1/late HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n")
        assert made.recv(1 << 16).endswith(b"\r\n\r\n")
        late.set()
        assert b"after all" in made.recv(1 << 16)


def test_a_client_that_waits_for_a_word_before_the_body_gets_it(client: Client) -> None:
    with link(client) as made:
        made.sendall(HEAD + LAST + b"expect: 100-continue\r\ncontent-length: 3\r\n\r\n")
        assert made.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
        made.sendall(b"abc")
        assert rest(made).endswith(b"\r\n\r\nabc")


@pytest.mark.parametrize("more", [b"", b"GET /v1/na"], ids=["alone", "begun"])
def test_one_that_leaves_is_noticed(client: Client, more: bytes) -> None:
    gone.clear()
    with link(client) as made:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        made.sendall(b"POST /v1/waits HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 1\r\n\r\nx" + more)
        time.sleep(0.2)
    until(lambda: bool(gone))


def test_random_bytes_stop_nothing(client: Client) -> None:
    rng = random.Random(7)
    valid = [post(b"x" * 50), GET + b"\r\n", HEAD + b"transfer-encoding: chunked\r\n\r\n3\r\none\r\n0\r\n\r\n"]
    for _ in range(150):
        data = bytearray(b"".join(rng.choices(valid, k=3)))
        for _ in range(rng.randrange(1, 6)):
            at = rng.randrange(len(data))
            data[at : at + rng.randrange(3)] = rng.randbytes(rng.randrange(3))
        with link(client) as made:
            made.sendall(data)
            made.shutdown(socket.SHUT_WR)
            made.settimeout(0.02)
            try:
                made.recv(1 << 16)
            except (TimeoutError, ConnectionResetError):
                pass
    assert said(client, post(b"still", LAST)) == [(200, b"still")]

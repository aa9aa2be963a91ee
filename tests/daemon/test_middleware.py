"""The front door and the client that knocks: ids, keys, who may ask; errors keep their kind from end to end."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from ctxreuse.daemon.client import Client
from ctxreuse.daemon.middleware import read_body
from ctxreuse.daemon.openai import DONE, event
from ctxreuse.errors import ConfigError, ContextTooLongError, EngineError, LinkDownError, SessionError
from support.waiting import patient, until

Serve = Callable[..., Client]


def raising(error: Exception) -> Route:
    async def fail(_: Request) -> Response:
        raise error

    return Route("/fail", fail)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ContextTooLongError("too long"), ContextTooLongError),
        (SessionError("nobody"), SessionError),
        (EngineError("broken"), EngineError),
        (LinkDownError("away"), LinkDownError),
        (ConfigError("odd"), EngineError),
    ],
)
def test_errors_keep_their_kind(serve: Serve, error: Exception, kind: type[Exception]) -> None:
    with pytest.raises(kind, match=str(error)) as raised:
        serve(raising(error)).call("GET", "/fail")
    assert type(raised.value) is kind


def test_keys(serve: Serve) -> None:
    async def hello(_: Request) -> Response:
        return JSONResponse({"hello": 1})

    assert serve(Route("/x", hello), keys=("a", "b"), key="b").call("GET", "/x") == {"hello": 1}
    with pytest.raises(ConfigError, match="key"):
        serve(Route("/x", hello), keys=("a", "b"), key="c").call("GET", "/x")
    with pytest.raises(ConfigError, match="key"):
        serve(Route("/x", hello), keys=("a",)).call("GET", "/x")


def test_refused_requests_of_one_caller_fill_no_log(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    async def hello(_: Request) -> Response:
        return JSONResponse({"hello": 1})

    client = serve(Route("/x", hello), raising(RuntimeError("odd")), keys=("a",), key="a")
    caplog.set_level("INFO", "ctxreuse.daemon.middleware")
    for _ in range(40):
        with pytest.raises(EngineError):
            client.call("GET", "/fail")
        client.call("GET", "/x")
    until(lambda: sum("/x" in record.getMessage() for record in caplog.records) == 40)  # written after the answer
    lines = [record.getMessage() for record in caplog.records]
    assert 10 <= sum("/fail" in line or "request failed" in line for line in lines) <= 14


def test_a_body_has_a_limit(serve: Serve) -> None:
    async def size(request: Request) -> Response:
        return JSONResponse(len(await read_body(request, 1000)))

    client = serve(Route("/size", size, methods=["POST"]))
    assert client.call("POST", "/size", "x" * 998) == 1000
    with pytest.raises(EngineError, match="1,000 bytes"):
        client.call("POST", "/size", "x" * 5_000_000)


def test_streams_end_or_break(serve: Serve) -> None:
    def streaming(*parts: bytes) -> Any:
        async def stream(_: Request) -> Response:
            async def every() -> Any:
                for part in parts:
                    yield part

            return StreamingResponse(every())

        return stream

    whole = (event({"n": 1}), event({"n": 2}), DONE)
    client = serve(
        Route("/whole", streaming(*whole), methods=["POST"]),
        Route("/cut", streaming(*whole[:-1]), methods=["POST"]),
        Route("/error", streaming(whole[0], event({"error": {"message": "it broke", "code": None}})), methods=["POST"]),
        Route("/odd", streaming(b"data: {\n\n"), methods=["POST"]),
    )
    assert list(client.stream("/whole", {})) == [{"n": 1}, {"n": 2}]
    for path, kind, says in (
        ("/cut", LinkDownError, "broke off during an answer"),
        ("/error", EngineError, "it broke"),
        ("/odd", LinkDownError, "broke off"),
    ):
        events = client.stream(path, {})
        with pytest.raises(kind, match=says):
            list(events)
        events.close()


def test_a_stranger_on_the_port_is_no_daemon() -> None:
    import socket

    with socket.socket() as stranger:
        stranger.bind(("127.0.0.1", 0))
        stranger.listen()

        def answer() -> None:
            peer, _ = stranger.accept()
            with peer:
                peer.recv(1000)
                peer.sendall(b"220 mail.example ready\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(LinkDownError):
            Client(f"http://127.0.0.1:{stranger.getsockname()[1]}", timeout=patient(20)).call("GET", "/")
        thread.join()

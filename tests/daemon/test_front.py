"""The front door and the client that knocks: ids, keys, who may ask; errors keep their kind from end to end."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route, Router

from ctxreuse.daemon.client import Client
from ctxreuse.daemon.front import Front, from_here, is_loopback, read_body, read_keys
from ctxreuse.daemon.life import Daemon
from ctxreuse.daemon.openai import DONE, event
from ctxreuse.errors import ConfigError, ContextTooLongError, EngineError, LinkDownError, SessionError
from ctxreuse.metrics import Metrics

Serve = Callable[..., Client]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """serve(*routes, keys=()) starts a server in a thread and gives a client for it."""
    started: list[tuple[Daemon, threading.Thread]] = []

    def start(*routes: Route, keys: tuple[str, ...] = (), key: str = "") -> Client:
        daemon = Daemon("test", drain=0)
        app = Front(Router(routes), metrics=Metrics(), route=str, keys=keys)
        url = daemon.bind()

        class Nothing(nullcontext[None]):
            pass

        thread = threading.Thread(target=daemon.run, args=(app, Nothing))
        thread.start()
        started.append((daemon, thread))
        return Client(url.replace("//", f"//{key}@") if key else url, timeout=20)

    yield start
    for daemon, thread in started:
        daemon.stop()
        thread.join(20)
        assert not thread.is_alive()


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
        ("/cut", LinkDownError, "in the middle"),
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
            Client(f"http://127.0.0.1:{stranger.getsockname()[1]}", timeout=20).call("GET", "/")
        thread.join()


def test_files_of_keys(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    assert read_keys("") == ()
    file.write_text("# all of them\none # mine\n\n two\n")
    assert read_keys(str(file)) == ("one", "two")
    file.write_text("# none\n")
    with pytest.raises(ConfigError, match="no key"):
        read_keys(str(file))
    with pytest.raises(ConfigError, match="cannot be read"):
        read_keys(str(tmp_path / "absent"))


def test_web_pages_and_programs() -> None:
    programs = [("localhost:1", ""), ("127.0.0.1", ""), ("[::1]:7351", "http://localhost:3000")]
    pages = [("evil.example", ""), ("", ""), ("127.0.0.1", "https://evil.example"), ("127.0.0.1", "null")]
    odd = [("[", ""), ("127.0.0.1", "http://["), ("a@evil.example", ""), ("127.0.0.1@evil.example", "")]
    assert all(from_here(*given) for given in programs)
    assert not any(from_here(*given) for given in (*pages, *odd))


def test_loopback_and_not() -> None:
    assert all(map(is_loopback, ("localhost", "127.0.0.1", "127.8.8.8", "::1", "[::1]")))
    assert not any(map(is_loopback, ("", "0.0.0.0", "::", "10.0.0.1", "localhost.evil.example", "127.0.0.1.evil")))

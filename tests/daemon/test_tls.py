"""HTTPS: what clients verify, a certificate that is replaced while answers run, and files that are broken."""

from __future__ import annotations

import asyncio
import ssl
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route, Router

from ctxreuse.config import EdgeConfig
from ctxreuse.daemon.client import Client
from ctxreuse.daemon.lifecycle import Daemon, read_address
from ctxreuse.daemon.middleware import ApiMiddleware
from ctxreuse.daemon.tls import ServerCertificate, certificate_of
from ctxreuse.errors import ConfigError, LinkDownError
from ctxreuse.metrics import Metrics
from support.certificates import Authority
from support.waiting import patient, until


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture
def files(authority: Authority, tmp_path: Path) -> tuple[Path, Path]:
    """The certificate and the key that the daemon serves with."""
    made = authority.issue("first")
    mine = tmp_path / "served.pem", tmp_path / "served.key"
    for source, place in zip(made, mine):
        replace(source, place)
    return mine


def replace(source: Path, place: Path) -> None:
    fresh = place.with_suffix(".new")
    fresh.write_bytes(source.read_bytes())
    fresh.chmod(0o600)
    fresh.replace(place)


class Ticking:
    """A daemon with HTTPS; ``/ticks`` streams a line whenever the test asks for one, and ends with ``end``."""

    def __init__(self, files: tuple[Path, Path], address: Path) -> None:
        self.lines: asyncio.Queue[bytes] = asyncio.Queue()
        certificate = ServerCertificate(*map(str, files))
        self.daemon = Daemon("test", drain=5, certificate=certificate, address_file=address)
        self.url = self.daemon.bind()

        async def hello(_: Request) -> Response:
            return JSONResponse({"hello": 1})

        async def ticks(_: Request) -> Response:
            async def every() -> AsyncIterator[bytes]:
                while (line := await self.lines.get()) != b"end\n":
                    yield line

            return StreamingResponse(every())

        router = Router([Route("/hello", hello), Route("/ticks", ticks)])
        app = ApiMiddleware(router, metrics=Metrics(), route=str)
        self._thread = threading.Thread(target=self.daemon.run, args=(app, nullcontext_factory))
        self._thread.start()
        until(lambda: address.exists())

    def say(self, line: str) -> None:
        loop = self.daemon._loop
        assert loop is not None
        loop.call_soon_threadsafe(self.lines.put_nowait, f"{line}\n".encode())

    def end(self) -> None:
        self.daemon.stop()
        self._thread.join(patient(20))
        assert not self._thread.is_alive()


def nullcontext_factory() -> nullcontext[None]:
    return nullcontext()


@pytest.fixture
def ticking(files: tuple[Path, Path], tmp_path: Path) -> Iterator[Ticking]:
    daemon = Ticking(files, tmp_path / "address.json")
    yield daemon
    daemon.end()


def served_name(daemon: Ticking, authority: Authority) -> str:
    """The common name in the certificate that a new connection is shown."""
    import socket

    context = ssl.create_default_context(cafile=str(authority.file))
    port = int(daemon.url.rsplit(":", 1)[1])
    with (
        socket.create_connection(("127.0.0.1", port), timeout=patient(5)) as raw,
        context.wrap_socket(raw, server_hostname="127.0.0.1") as link,
    ):
        found = link.getpeercert()
        assert found is not None
        return str(dict(pair for row in found["subject"] for pair in row)["commonName"])  # type: ignore[misc]


def test_a_certificate_is_replaced_while_an_answer_runs(
    ticking: Ticking, files: tuple[Path, Path], authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "ctxreuse.daemon.lifecycle")
    trusting = ssl.create_default_context(cafile=str(authority.file))
    with (
        httpx.Client(base_url=ticking.url, verify=trusting, timeout=patient(5)) as http,
        http.stream("GET", "/ticks") as answer,
    ):
        lines = answer.iter_lines()
        ticking.say("one")
        assert next(lines) == "one"
        assert served_name(ticking, authority) == "first"

        other = authority.issue("second")
        replace(other[0], files[0])  # half: the key is still that of the first
        until(lambda: "the old stays in use" in caplog.text)
        assert served_name(ticking, authority) == "first"
        replace(other[1], files[1])
        until(lambda: "TLS certificate read again" in caplog.messages)
        assert served_name(ticking, authority) == "second"

        ticking.say("two")
        assert next(lines) == "two"
        files[0].write_text("broken")
        files[1].unlink()
        until(lambda: sum("the old stays in use" in line for line in caplog.messages) > 1)
        assert served_name(ticking, authority) == "second"
        ticking.say("three")
        ticking.say("end")
        assert list(lines) == ["three"]


def test_clients_verify_whom_they_talk_to(
    ticking: Ticking, authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(LinkDownError, match="not to be trusted") as refused:
        Client(ticking.url, timeout=patient(5)).call("GET", "/hello")
    assert "SSL_CERT_FILE" in refused.value.fix
    with pytest.raises(httpx.ConnectError):
        httpx.get(ticking.url + "/hello", timeout=patient(5))
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.file))
    assert Client(ticking.url, timeout=patient(5)).call("GET", "/hello") == {"hello": 1}
    with pytest.raises(LinkDownError, match="no daemon answers"):
        Client(ticking.url.replace("https", "http"), timeout=patient(5)).call("GET", "/hello")


def test_commands_of_the_machine_trust_the_daemons_own_certificate_only(
    ticking: Ticking, authority: Authority, tmp_path: Path
) -> None:
    found = read_address(tmp_path / "address.json")
    assert found is not None
    assert found.url == ticking.url
    assert Client(found.url, certificate=found.certificate, timeout=patient(5)).call("GET", "/hello") == {"hello": 1}
    other = authority.issue("other")[0]
    chain = tmp_path / "chain.pem"  # the authority behind the certificate is not trusted for others
    chain.write_bytes(other.read_bytes() + authority.file.read_bytes())
    with pytest.raises(LinkDownError, match="not to be trusted"):
        Client(found.url, certificate=str(chain), timeout=patient(5)).call("GET", "/hello")


def test_settings_that_cannot_be_served_with(files: tuple[Path, Path], authority: Authority, tmp_path: Path) -> None:
    certificate, key = map(str, files)
    assert certificate_of(EdgeConfig()) is None
    assert certificate_of(EdgeConfig(tls_certificate=certificate, tls_key=key)) is not None
    both = tmp_path / "both.pem"
    both.write_bytes(files[0].read_bytes() + files[1].read_bytes())
    assert certificate_of(EdgeConfig(tls_certificate=str(both))) is not None
    odd: list[tuple[str, str, Callable[[], object]]] = [
        (certificate, "", lambda: None),
        (certificate, str(authority.issue("odd")[1]), lambda: None),
        (str(tmp_path / "absent"), key, lambda: None),
        (str(tmp_path), key, lambda: None),
        (str(tmp_path / "garbage"), key, lambda: (tmp_path / "garbage").write_bytes(b"\0" * 100)),
        ("", key, lambda: None),
    ]
    for one, other, prepare in odd:
        prepare()
        with pytest.raises(ConfigError) as refused:
            certificate_of(EdgeConfig(tls_certificate=one, tls_key=other))
        assert refused.value.fix

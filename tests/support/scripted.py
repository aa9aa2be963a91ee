"""A small OpenAI-like server on a real socket that answers as a test tells it to, and the proxy in front of some."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Any

import aiohttp
import uvicorn
from ctxreuse_cloud.proxy.backends import Backends, connections
from ctxreuse_cloud.proxy.counts import ProxyCounts
from ctxreuse_cloud.proxy.health import HealthChecker
from ctxreuse_cloud.proxy.observers import Observers
from ctxreuse_cloud.proxy.pauses import PauseTracker
from ctxreuse_cloud.proxy.proxy import Proxy
from ctxreuse_cloud.proxy.request_log import ProxyRequestLog
from ctxreuse_cloud.proxy.stored import StoredObjects
from ctxreuse_cloud.proxy.tenants import Tenants
from prometheus_client import CollectorRegistry

from ctxreuse.config import BackendConfig, CloudConfig
from ctxreuse.daemon.bodies import BodyBudget
from ctxreuse.routing import Router
from support.waiting import patient

USAGE = {"prompt_tokens": 30, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 16}}


def event(text: str, **more: Any) -> bytes:
    return b"data: " + json.dumps({"choices": [{"index": 0, "delta": {"content": text}}], **more}).encode() + b"\n\n"


STREAM = [event("a"), event("b"), event("c"), event("", usage=USAGE), b"data: [DONE]\n\n"]


class Scripted:
    """``plan`` is taken from the left, one entry a POST request; when it is empty, ``stream``.

    ``stream``, ``json``, ``flood`` (without end), ``hang``; ``drop`` (no answer), ``garbage``, ``headers`` (and no
    body), ``torn`` (two events and a half); a number: that status; a content type and pieces, the last of which may be
    None: the connection is cut there. What is in ``stored`` is answered, others are 404; ``asked``: methods and paths.
    """

    def __init__(self, name: str, models: Iterable[str] = ("m",)) -> None:
        self.name, self.models = name, list(models)
        self.plan: list[str | int | tuple[str, Sequence[bytes | None]]] = []
        self.stored: set[str] = set()
        self.asked: list[str] = []
        self.seen: list[tuple[str, dict[str, str], bytes]] = []
        self.health = 200
        #: Answers ``/tokenize``, which is no entry of the plan.
        self.tokenize: Callable[[Any], list[int]] | None = None
        self.pause = 0.0
        self.steps: asyncio.Semaphore | None = None  # to be acquired for each piece of a stream
        self.open = self.sent = 0
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def __aenter__(self) -> Scripted:
        await self.start()
        return self

    async def start(self, port: int = 0) -> None:
        self._server = await asyncio.start_server(self._connection, "127.0.0.1", port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        await self._server.wait_closed()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                while await self._request(reader, writer):
                    pass
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _request(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        method, path, _ = head[0].split(" ")
        headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in head[1:] if line)}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        if path not in ("/health", "/v1/models"):
            self.asked.append(f"{method} {path}")
        if method != "POST":
            await self._get(path, writer)
            return True
        if path == "/tokenize" and self.tokenize is not None:
            found = json.dumps({"tokens": self.tokenize(json.loads(body)), "max_model_len": 1000}).encode()
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(found) + found)
            await writer.drain()
            return True
        self.seen.append((path, headers, body))
        self.open += 1
        try:
            return await self._answer(self.plan.pop(0) if self.plan else "stream", writer)
        finally:
            self.open -= 1

    async def _get(self, path: str, writer: asyncio.StreamWriter) -> None:
        body = json.dumps({"data": [{"id": name} for name in self.models]}).encode() if "models" in path else b"{}"
        status = 200 if "models" in path else self.health
        if path.startswith("/v1/responses/"):
            known = path.split("/")[3].partition("?")[0] in self.stored
            status, body = (200, b'{"stored": "%s"}' % self.name.encode()) if known else (404, b"{}")
        elif path != "/health" and "models" not in path:
            body = json.dumps({"from": self.name}).encode()
        writer.write(b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n" % (status, len(body)) + body)
        await writer.drain()

    async def _answer(self, how: str | int | tuple[str, Sequence[bytes | None]], writer: asyncio.StreamWriter) -> bool:
        """True if the connection lives on."""
        if isinstance(how, tuple):
            head = b"HTTP/1.1 200 OK\r\nContent-Type: %s\r\nTransfer-Encoding: chunked\r\n\r\n"
            writer.write(head % how[0].encode())
            for one in how[1]:
                if one is None:
                    await writer.drain()
                    return False
                if self.steps is not None:
                    await self.steps.acquire()
                writer.write(b"%x\r\n%s\r\n" % (len(one), one))
            writer.write(b"0\r\n\r\n")
            await writer.drain()
            return True
        if isinstance(how, int):
            body = json.dumps({"error": {"message": f"{self.name} says {how}"}}).encode()
            head = b"HTTP/1.1 %d X\r\nContent-Type: application/json\r\nX-From: %s\r\nContent-Length: %d\r\n\r\n"
            writer.write(head % (how, self.name.encode(), len(body)) + body)
            await writer.drain()
            return True
        if how == "drop":
            return False
        if how == "garbage":
            writer.write(b"\x16\x03\x01 no HTTP at all\r\n\r\n")
            await writer.drain()
            return False
        if how == "hang":
            await asyncio.sleep(60)
        if how == "json":
            body = json.dumps({"choices": [], "usage": USAGE}).encode()
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body))
            writer.write(body)
            await writer.drain()
            return True
        head = b"Content-Type: text/event-stream\r\nConnection: x-hop\r\nX-Hop: 1\r\nTransfer-Encoding: chunked\r\n\r\n"
        writer.write(b"HTTP/1.1 200 OK\r\n" + head)
        await writer.drain()
        if how == "headers":
            return False
        pieces: Iterable[bytes] = STREAM
        if how == "torn":
            pieces = [event("a"), event("b"), event("c")[:9]]
        elif how == "flood":
            pieces = (event("x" * 4000) for _ in iter(int, 1))
        for piece in pieces:
            if self.steps is not None:
                await self.steps.acquire()
            writer.write(b"%x\r\n%s\r\n" % (len(piece), piece))
            await writer.drain()
            self.sent += len(piece)
            await asyncio.sleep(self.pause)
        if how == "torn":
            return False
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        return True


class RunningProxy:
    """A running proxy: its ``url``, its parts, and a client."""

    def __init__(self, url: str, client: aiohttp.ClientSession, proxy: Proxy, backends: Backends) -> None:
        self.url, self.client, self.proxy, self.backends = url, client, proxy, backends
        self.registry = CollectorRegistry()

    async def ask(self, path: str = "/v1/chat/completions", **more: Any) -> tuple[int, bytes, Any]:
        headers = more.pop("headers", {})
        body = {"model": "m", "stream": True, "messages": [{"role": "system", "content": "one"}]} | more
        async with self.client.post(self.url + path, json=body, headers=headers) as response:
            return response.status, await response.read(), response.headers

    def count(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(name, labels) or 0.0


@contextlib.asynccontextmanager
async def fronted(
    *servers: Scripted,
    tenants: Tenants | None = None,
    rows: Iterable[BackendConfig] = (),
    stored: StoredObjects | None = None,
    **settings: Any,
) -> AsyncIterator[RunningProxy]:
    """The proxy in front of ``servers``, looked at once, served by uvicorn."""
    configs = list(rows) or [BackendConfig(url=server.url, name=server.name) for server in servers]
    settings = {"connect": patient(1), "silence": patient(5)} | settings
    config = CloudConfig(backends=tuple(configs), **settings)
    router = Router(config.backend_tokens) if config.router == "price" else None
    backends, tenants = Backends(configs, router=router), tenants or Tenants(None)
    async with connections(config.connect, config.silence) as pool:
        registry = CollectorRegistry()
        counts = ProxyCounts(registry, backends)
        observers = Observers(counts, ProxyRequestLog(), PauseTracker(registry))
        proxy = Proxy(config, backends, tenants, pool, observers, BodyBudget(config.max_bodies, config.receive), stored)
        await HealthChecker(pool, backends, 1.0).once()
        server = uvicorn.Server(
            uvicorn.Config(proxy, port=0, lifespan="off", log_config=None, access_log=False, server_header=False)
        )
        serving = asyncio.create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0.005)
        port = server.servers[0].sockets[0].getsockname()[1]
        try:
            async with aiohttp.ClientSession() as client:
                front = RunningProxy(f"http://127.0.0.1:{port}", client, proxy, backends)
                front.registry = registry
                yield front
        finally:
            server.should_exit = True
            await serving

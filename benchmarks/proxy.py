"""Streaming answers through the cloud sidecar against asking the backend directly, 64 events an answer.

The backend is a minimal streaming server in a process of its own, so that what is measured is the sidecar. ``paced``:
an event each 5 ms from the start of the answer, as an engine decodes. With 8 clients this is far below what the machine
can do, so that what is added is delay, not lack of processor: only there is a bar. With 64 clients (12,800 events a
second, each through three processes) two cores are busy. ``full``: the backend sends as fast as it can. Load generator,
backend and sidecar share the machine, so that on two cores a direct answer leaves a core free and one through the
sidecar does not: these rows say how many answers a second there are. Rounds through the sidecar and without it take
turns. ``CTXREUSE_PROXY_BACKENDS`` may name real servers as further rows: ``vllm=http://127.0.0.1:8000,…`` (one that
ends an answer when the next request comes must be told not to: ``llama_cpp.server --interrupt_requests False``).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit
from urllib.request import urlopen

import msgspec

from benchmarks.sidecars import Proxied, Sidecar
from ctxreuse.bench.measure import Options
from ctxreuse.bench.report import Figure
from ctxreuse.errors import EngineError

__all__ = ["backend", "run"]

EVENTS, PACE, PROMPT = 64, 0.005, 1024

_BACKEND = """
import asyncio, sys, time
EVENTS = int(sys.argv[1])
EVENT = b'data: {"id":"x","object":"chat.completion.chunk","choices":[{"index":0,"delta":{"content":"word "}}]}\\n\\n'
ANSWER = (b'{"id":"x","object":"chat.completion","created":1,"model":"m","choices":[{"index":0,"message":{"role":'
    b'"assistant","content":"ok"},"finish_reason":"stop"}],"usage":{"prompt_tokens":10,"completion_tokens":1,'
    b'"total_tokens":11}}')
HEAD = b"HTTP/1.1 200 OK\\r\\nContent-Type: %s\\r\\nTransfer-Encoding: chunked\\r\\n\\r\\n"
def chunk(data):
    return b"%x\\r\\n%s\\r\\n" % (len(data), data)
async def serve(reader, writer):
    try:
        while True:
            head = (await reader.readuntil(b"\\r\\n\\r\\n")).lower()
            fields = dict(line.split(b": ", 1) for line in head.split(b"\\r\\n")[1:] if line)
            body = await reader.readexactly(int(fields.get(b"content-length", 0)))
            if head.startswith(b"get"):
                body = b'{"object":"list","data":[{"id":"m"}]}'
                writer.write(HEAD % b"application/json" + chunk(body) + b"0\\r\\n\\r\\n")
                continue
            if b'"stream":true' not in body:
                writer.write(HEAD % b"application/json" + chunk(ANSWER) + b"0\\r\\n\\r\\n")
                continue
            pace = float(fields.get(b"x-pace", 0))
            writer.write(HEAD % b"text/event-stream")
            due = time.monotonic()
            for _ in range(EVENTS):
                writer.write(chunk(EVENT))
                due += pace
                await asyncio.sleep(due - time.monotonic() if pace else 0)
            writer.write(chunk(b"data: [DONE]\\n\\n") + b"0\\r\\n\\r\\n")
            await writer.drain()
    except (asyncio.IncompleteReadError, ConnectionError):
        pass
    finally:
        writer.close()
async def main():
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()
asyncio.run(main())
"""


class _Seen(NamedTuple):
    """Seconds to the first byte and to the last of each answer, and of the whole round."""

    first: list[float]
    whole: list[float]
    seconds: float

    def at(self, share: float) -> float:
        return sorted(self.whole)[min(len(self.whole) - 1, int(len(self.whole) * share))]


class _Pair(NamedTuple):
    """Paired rounds: medians over rounds of what the sidecar adds (seconds), answers a second of both ways, and the CPU
    seconds that an answer costs the sidecar."""

    p50: float
    p99: float
    first: float
    direct_p50: float
    direct_p99: float
    rate: float
    direct_rate: float
    cpu: float


def run(options: Options) -> list[Figure]:
    """Figures in milliseconds and answers a second."""
    rounds, answers = options.pick(2, 7), options.pick(160, 640)
    with tempfile.TemporaryDirectory(prefix="ctxreuse-bench-") as folder, backend() as place:
        real = _named(os.environ.get("CTXREUSE_PROXY_BACKENDS", ""))
        with Sidecar(Path(folder) / "mock", [place]) as sidecar:
            options.step("one client")
            alone = asyncio.run(_rounds(place, sidecar, 1, answers // 8, rounds, 0.0))
            found = {}
            for clients in (8, 64):
                options.step(f"{clients} clients, full")
                found[clients, "full"] = asyncio.run(_rounds(place, sidecar, clients, answers, rounds, 0.0))
                options.step(f"{clients} clients, paced")
                found[clients, "paced"] = asyncio.run(_rounds(place, sidecar, clients, answers, rounds, PACE))
        figures = _figures(alone, found)
        for name, other in real.items():
            options.step(f"8 clients, {name}")
            with Sidecar(Path(folder) / name, [other]) as sidecar:
                pair = asyncio.run(_rounds(other, sidecar, 8, 24, options.pick(1, 3), 0.0, _model(other)))
            figures += _added(f"8 clients, {name}", pair)
    return figures


def _figures(alone: _Pair, found: dict[tuple[int, str], _Pair]) -> list[Figure]:
    figures = _added("one client, full", alone)
    first = 1e3 * alone.first
    figures.append(Figure(metric="one client, full: added to the first byte", value=first, unit="ms", better="lower"))
    for (clients, pace), pair in found.items():
        figures += _added(f"{clients} clients, {pace}", pair, bar=20.0 if (clients, pace) == (8, "paced") else None)
        metric = f"{clients} clients, {pace}: CPU of an answer"
        figures.append(Figure(metric=metric, value=1e3 * pair.cpu, unit="ms", better="lower"))
        if pace == "full":
            name = f"answers of {EVENTS} events, {clients} clients"
            note = "bound: the backend asked directly; load, backend and sidecar share the machine"
            figures.append(Figure(metric=name, value=pair.rate, unit="1/s", bound=pair.direct_rate, note=note))
    return figures


def _added(name: str, pair: _Pair, bar: float | None = None) -> list[Figure]:
    """What the sidecar adds to whole answers; the baseline is the answer itself, asked directly."""
    rows = (("p50", pair.p50, pair.direct_p50, None), ("p99", pair.p99, pair.direct_p99, bar))
    return [
        Figure(
            metric=f"{name}: added {share}",
            value=1e3 * value,
            unit="ms",
            baseline=1e3 * direct,
            better="lower",
            bar=limit,
            note="baseline: the whole answer, asked directly" if limit else "",
        )
        for share, value, direct, limit in rows
    ]


async def _rounds(
    direct: str, sidecar: Proxied, clients: int, answers: int, rounds: int, pace: float, model: str = "m"
) -> _Pair:
    seen: list[tuple[_Seen, _Seen]] = []
    costs: list[float] = []
    for turn in range(-1, rounds):
        pair: dict[str, _Seen] = {}
        for place in (direct, sidecar.url) if turn % 2 else (sidecar.url, direct):
            before = sidecar.seconds
            pair[place] = await _load(place, clients, answers if turn >= 0 else clients, pace, model)
            if place == sidecar.url and turn >= 0:
                costs.append((sidecar.seconds - before) / answers)
        if turn >= 0:
            seen.append((pair[direct], pair[sidecar.url]))

    def median(values: list[float]) -> float:
        return statistics.median(values)

    return _Pair(
        median([b.at(0.5) - a.at(0.5) for a, b in seen]),
        median([b.at(0.99) - a.at(0.99) for a, b in seen]),
        median([median(b.first) - median(a.first) for a, b in seen]),
        median([a.at(0.5) for a, _ in seen]),
        median([a.at(0.99) for a, _ in seen]),
        median([len(b.whole) / b.seconds for _, b in seen]),
        median([len(a.whole) / a.seconds for a, _ in seen]),
        median(costs),
    )


async def _load(url: str, clients: int, answers: int, pace: float, model: str = "m") -> _Seen:
    """``clients`` connections, each asking again as soon as it has its answer, ``answers`` in all."""
    parts = urlsplit(url)
    body = msgspec.json.encode(
        {
            "model": model,
            "stream": True,
            "max_tokens": EVENTS,
            "messages": [{"role": "user", "content": "x " * (PROMPT // 2)}],
        }
    )
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Type: application/json\r\n"
        f"X-Pace: {pace}\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    request, seen, left = head.encode() + body, _Seen([], [], 0.0), iter(range(answers))

    async def client() -> None:
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
        for _ in left:
            await _ask(reader, writer, request, seen)
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    started = time.perf_counter()
    async with asyncio.timeout(300):
        await asyncio.gather(*(client() for _ in range(clients)))
    return seen._replace(seconds=time.perf_counter() - started)


async def _ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes, seen: _Seen) -> None:
    started = time.perf_counter()
    writer.write(request)
    data = first = await reader.read(1 << 16)
    seen.first.append(time.perf_counter() - started)
    if not first.startswith(b"HTTP/1.1 200"):
        raise EngineError(f"the answer is {first[:100]!r}")
    while not data.endswith(b"\r\n0\r\n\r\n"):
        piece = await reader.read(1 << 16)
        if not piece:
            raise EngineError("the answer broke off")
        data = data[-16:] + piece
    seen.whole.append(time.perf_counter() - started)


@contextlib.contextmanager
def backend() -> Iterator[str]:
    """A minimal server: answers of `EVENTS` events, or of one token as a whole; yields its address."""
    with subprocess.Popen([sys.executable, "-c", _BACKEND, str(EVENTS)], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.kill()


def _model(url: str) -> str:
    """The first model that a server lists. Raises EngineError if it lists none."""
    try:
        with urlopen(f"{url}/v1/models", timeout=10) as answer:
            return str(msgspec.json.decode(answer.read())["data"][0]["id"])
    except (OSError, msgspec.MsgspecError, LookupError, TypeError) as error:
        raise EngineError(f"a backend names no model: {error}", where=url) from None


def _named(text: str) -> dict[str, str]:
    """``name=url,…`` as a table. Raises EngineError for what is none."""
    rows = [row.partition("=") for row in text.split(",") if row]
    if any(not name or not urlsplit(url).port for name, _, url in rows):
        raise EngineError(f"CTXREUSE_PROXY_BACKENDS is {text!r}", fix="Write vllm=http://127.0.0.1:8000")
    return {name: url.rstrip("/").removesuffix("/v1") for name, _, url in rows}

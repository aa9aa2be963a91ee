"""What a proxy in front of inference servers adds to an answer of one token: ours, vllm-router, ContextPilot's.

Prompts of 1 and 32 KB, most of it shared, the question new each time; one client, or eight at once, on connections that
stay open. Behind the sidecar and vllm-router (``cache_aware``) are three servers, so that they route by what each was
sent: ours prices all three for every request. ContextPilot's proxy knows one. The server is the minimal one of bench
`proxy` in a process of its own. Figures are medians over rounds of the median of a round less that of asking directly
in the same round; ways take turns. Peers: of the Python that ``CTXREUSE_PEERS`` names, those that it has; the value
beside ours is the best one's.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from benchmarks.proxy import backend
from benchmarks.sidecars import ContextPilot, Sidecar, VllmRouter
from ctxreuse.bench.measure import Options
from ctxreuse.bench.report import Figure
from ctxreuse.errors import EngineError

__all__ = ["DIRECT", "OURS", "ask", "figures", "run"]

DIRECT, OURS = "directly", "ours"
_SERVERS = 3
#: Milliseconds that may be added to the median of one client, by KB of the prompt.
_BARS: dict[int, float] = {1: 0.5, 32: 0.6}


async def ask(url: str, size: int, clients: int, answers: int, seed: int) -> list[float]:
    """Seconds of each of so many whole answers, after as many as there are clients that do not count."""
    parts, numbers, seen = urlsplit(url), iter(range(answers)), list[float]()
    shared = f"{size} " + "x " * (size * 512)

    def request(number: int) -> bytes:
        messages = [{"role": "system", "content": shared}, {"role": "user", "content": f"Question {seed} {number}"}]
        body = msgspec.json.encode({"model": "m", "max_tokens": 1, "messages": messages})
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Type: application/json\r\n"
        return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body

    async def client(first: int) -> None:
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
        await _one(reader, writer, request(first))
        for number in numbers:
            data = request(number)
            began = time.perf_counter()
            await _one(reader, writer, data)
            seen.append(time.perf_counter() - began)
        writer.close()

    async with asyncio.timeout(300):
        await asyncio.gather(*(client(-1 - n) for n in range(clients)))
    return seen


async def _one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes) -> None:
    writer.write(request)
    head = await reader.readuntil(b"\r\n\r\n")
    fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:] if line)
    if not head.startswith(b"HTTP/1.1 200"):
        raise EngineError(f"the answer is {head[:200]!r}")
    if length := int(fields.get(b"content-length", 0)):
        await reader.readexactly(length)
    else:
        await reader.readuntil(b"0\r\n\r\n")


def run(options: Options) -> list[Figure]:
    """Every way in turns."""
    python, rounds = os.environ.get("CTXREUSE_PEERS", ""), options.pick(2, 9)
    with ExitStack() as stack, tempfile.TemporaryDirectory(prefix="ctxreuse-bench-") as place:
        folder = Path(place)
        urls = [stack.enter_context(backend()) for _ in range(_SERVERS)]
        ways = {DIRECT: urls[0], OURS: stack.enter_context(Sidecar(folder / "sidecar", urls)).url}
        if python and VllmRouter.program(python).exists():
            ways["vllm-router"] = stack.enter_context(VllmRouter(python, folder / "router.log", urls)).url
        if python and ContextPilot.there(python):
            ways["ContextPilot"] = stack.enter_context(ContextPilot(python, folder / "pilot.log", urls[0])).url
        found = list[Figure]()
        for clients in (1, 8):
            for size in _BARS:
                options.step(f"{size} KB, {clients} clients")
                found += figures(size, clients, asyncio.run(_rounds(ways, size, clients, rounds, options)))
    return found


async def _rounds(
    ways: Mapping[str, str], size: int, clients: int, rounds: int, options: Options
) -> dict[str, list[float]]:
    """Medians of each round, by way."""
    found: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(-1, rounds):
        for way in list(ways) if number % 2 else list(ways)[::-1]:
            seen = await ask(ways[way], size, clients, options.pick(40, 300) if number >= 0 else clients, number)
            if number >= 0:
                found[way].append(statistics.median(seen))
    return found


def figures(size: int, clients: int, medians: Mapping[str, Sequence[float]]) -> list[Figure]:
    """What is added, in milliseconds."""
    direct = medians[DIRECT]
    added = {
        way: 1e3 * statistics.median(value - bare for value, bare in zip(values, direct))
        for way, values in medians.items()
        if way != DIRECT
    }
    others = {way: value for way, value in added.items() if way != OURS}
    listed = "".join(f"; {way} {value:.3f}" for way, value in others.items())
    return [
        Figure(
            metric=f"{size} KB, {clients} client{'s' if clients > 1 else ''}: added p50",
            value=added[OURS],
            unit="ms",
            better="lower",
            baseline=1e3 * statistics.median(direct),
            peer=min(others.values(), default=None),
            bar=_BARS[size] if clients == 1 else None,
            note=f"baseline: the whole answer, asked directly{listed}",
        )
    ]

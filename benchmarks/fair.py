"""First tokens of one tenant while another one floods the daemon over HTTP, against alone, and llama.cpp's server.

The first asks one question after another, each with a prompt of its own and for two tokens. The other keeps several
requests with long prompts open. The peer knows no tenants, and has a slot for each request. ``--model``: a GGUF file,
or a known name, instead of SmolLM2.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import statistics
import tempfile
import time
from pathlib import Path
from random import Random

import httpx

from benchmarks.agents_http import Daemon, ninety_fifth, prose
from benchmarks.children import Child
from ctxreuse.bench.measure import Options
from ctxreuse.bench.report import Figure
from ctxreuse.errors import EngineError

__all__ = ["OPTIONS", "run"]

OPTIONS = ("model",)
_KEYS = ("the-quiet-one", "the-flood")
_QUESTIONS, _FLOOD, _SHORT, _LONG, _WAIT = 24, 6, 120, 600, 600.0
#: Tokens of the other's answers, and of the first one's: one more than is timed, as the last comes when KV is kept.
_TOKENS, _FEW = 16, 2
#: How many times as late the 95th percentile may be.
_BAR = 2.0


async def first_token(http: httpx.AsyncClient, key: str, words: int, tokens: int, seed: int) -> float:
    """Ask with a prompt that nothing is known of, read the answer, and return the seconds to its first piece."""
    messages = [{"role": "user", "content": prose(Random(seed), words)}]
    body = {"messages": messages, "max_tokens": tokens, "temperature": 0, "stream": True, "ignore_eos": True}
    began, first = time.perf_counter(), 0.0
    headers = {"authorization": f"Bearer {key}"}
    async with http.stream("POST", "/v1/chat/completions", json=body, headers=headers) as answer:
        if answer.status_code != 200:
            raise EngineError(
                f"{answer.status_code}: {(await answer.aread()).decode()[:300]}", where=str(http.base_url)
            )
        async for line in answer.aiter_lines():
            if '"content":"' in line.replace(" ", "") and not first:
                first = time.perf_counter() - began
    return first


async def flood(http: httpx.AsyncClient, number: int) -> None:
    """Ask for ever."""
    for turn in range(1_000_000):
        with contextlib.suppress(httpx.TransportError):
            await first_token(http, _KEYS[1], _LONG, _TOKENS, 1_000_000 * (number + 1) + turn)


async def measure(url: str, questions: int, round_number: int) -> tuple[list[float], list[float]]:
    """Seconds to the first tokens of the one tenant, alone and beside the other."""
    # A connection each: the peer closes idle ones while the next request is on its way.
    limits = httpx.Limits(max_connections=2 * _FLOOD, max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=url, timeout=_WAIT, limits=limits) as http:
        seeds = iter(range(100_000 * round_number, 100_000 * (round_number + 1)))
        await first_token(http, _KEYS[0], _SHORT, _FEW, next(seeds))
        alone = [await first_token(http, _KEYS[0], _SHORT, _FEW, next(seeds)) for _ in range(questions)]
        others = [asyncio.create_task(flood(http, number)) for number in range(_FLOOD)]
        await asyncio.sleep(2.0)  # until all of them are under way
        beside = [await first_token(http, _KEYS[0], _SHORT, _FEW, next(seeds)) for _ in range(questions)]
        for other in others:
            other.cancel()
        await asyncio.gather(*others, return_exceptions=True)
    return alone, beside


def run(options: Options) -> list[Figure]:
    """Ours, then the peer."""
    from ctxreuse.models import get_gguf

    model = options.model or "smollm2"
    path = Path(model) if model.endswith(".gguf") else get_gguf(model)
    threads, questions = os.cpu_count() or 1, options.pick(3, _QUESTIONS)
    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder) / "keys"
        keys.write_text("\n".join(_KEYS), "utf-8")
        keys.chmod(0o600)
        options.step("fair", 0, 2)
        daemon = Daemon(str(path), Path(folder) / "store", threads, {"CTXREUSE_EDGE__API_KEY_FILE": str(keys)})
        ours = asyncio.run(measure(daemon.url, questions, 1))
        daemon.close()
    options.step("fair", 1, 2)
    with Child("benchmarks.llama_server", path, threads, _FLOOD + 1, 2048) as peer:
        theirs = asyncio.run(measure(peer.said, questions, 2))
    alone, beside = map(ninety_fifth, ours)
    other_alone, other_beside = map(ninety_fifth, theirs)
    return [
        Figure(
            metric="flooded",
            value=beside / alone,
            unit="times alone",
            peer=other_beside / other_alone,
            bound=1.0,
            better="lower",
            bar=None if options.quick else _BAR,
            note=f"95th percentile of first tokens: {beside:.2f} s beside {_FLOOD} requests of {_LONG} words, alone"
            f" {alone:.2f}; peer {other_beside:.2f}, alone {other_alone:.2f}; medians {statistics.median(ours[1]):.2f}"
            f" and {statistics.median(theirs[1]):.2f}",
        )
    ]

"""What the edge's HTTP door adds to an answer whose prompt is in memory, and a start of the daemon; beside llama.cpp's.

The bare way is the same engine, in its own process too, that is given the same messages through the library. All take
turns. ``--model``: a GGUF file, or a known name, instead of SmolLM2.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import httpx

from benchmarks.agents_http import Daemon, prose
from benchmarks.children import Child
from ctxreuse.bench.measure import Options
from ctxreuse.bench.report import Figure
from ctxreuse.engines import open_engine
from ctxreuse.engines.process import ChildEngine
from ctxreuse.engines.prompt import encode_prompt
from ctxreuse.engines.sampling import SamplingParams
from ctxreuse.engines.text import Message
from ctxreuse.errors import EngineError
from ctxreuse.runtime import Runtime, RuntimeOptions

__all__ = ["OPTIONS", "run"]

OPTIONS = ("model",)
_TOKENS, _WAIT = 4, 600.0
#: Bytes of a prompt: milliseconds that the door may add.
_BARS = {1_024: 0.5, 32_768: 0.7}

#: Answers messages, and returns when the last token has come.
Asked = Callable[[list[dict[str, str]]], None]


def over_http(http: httpx.Client) -> Asked:
    """Ask a server, and read its events."""

    def ask(messages: list[dict[str, str]]) -> None:
        body: dict[str, Any] = {
            "messages": messages, "max_tokens": _TOKENS, "temperature": 0, "stream": True, "ignore_eos": True,
        }  # fmt: skip
        with http.stream("POST", "/v1/chat/completions", json=body) as answer:
            if answer.status_code != 200:
                raise EngineError(f"{answer.status_code}: {answer.read().decode()[:300]}", where=str(http.base_url))
            for _ in answer.iter_lines():
                pass

    return ask


def in_process(runtime: Runtime) -> Asked:
    """Ask an engine through the library."""
    text, sampling = runtime.text, SamplingParams(max_tokens=_TOKENS, ignore_eos=True)
    assert text is not None

    def ask(messages: list[dict[str, str]]) -> None:
        found = encode_prompt(text, [Message(one["role"], one["content"]) for one in messages])
        prompt = runtime.request(found.ids, parts=found.parts, branches=found.ends)
        runtime.complete(prompt, sampling).drain()

    return ask


def prompt_of(size: int) -> list[dict[str, str]]:
    """A conversation of one message of ``size`` bytes."""
    return [{"role": "user", "content": prose(Random(size), size)[:size]}]


def seconds(ask: Asked, messages: list[dict[str, str]]) -> float:
    """Seconds of one answer."""
    while True:
        began = time.perf_counter()
        try:
            ask(messages)
        except httpx.RemoteProtocolError:  # llama.cpp's server closes connections that it said it keeps
            continue
        return time.perf_counter() - began


def started(path: Path, folder: Path, threads: int) -> float:
    """Seconds from starting the daemon to the end of a first answer of a few tokens."""
    began = time.perf_counter()
    daemon = Daemon(str(path), folder, threads)
    with httpx.Client(base_url=daemon.url, timeout=_WAIT) as http:
        over_http(http)(prompt_of(1_024))
    found = time.perf_counter() - began
    daemon.close()
    return found


def peer_started(path: Path, threads: int) -> float:
    """The same for llama.cpp's server."""
    began = time.perf_counter()
    with Child("benchmarks.llama_server", path, threads, 1, 8192) as peer:
        with httpx.Client(base_url=peer.said, timeout=_WAIT) as http:
            over_http(http)(prompt_of(1_024))
        return time.perf_counter() - began


def run(options: Options) -> list[Figure]:
    """Medians over rounds in which all take turns."""
    from ctxreuse.models import get_gguf

    model = options.model or "smollm2"
    path = Path(model) if model.endswith(".gguf") else get_gguf(model)
    threads, rounds = os.cpu_count() or 1, options.pick(3, 150)
    figures: list[Figure] = []
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "store"
        starts = [(started(path, store, threads), peer_started(path, threads)) for _ in range(options.pick(1, 3))]
        daemon, engine = Daemon(str(path), store, threads), open_engine(path, isolate=True, threads=threads)
        runtime = Runtime(engine, None, RuntimeOptions(context_cache_bytes=8 << 30))
        with Child("benchmarks.llama_server", path, threads, 1, 8192) as peer:
            https = [httpx.Client(base_url=url, timeout=_WAIT) for url in (daemon.url, peer.said)]
            ways = [over_http(https[0]), in_process(runtime), over_http(https[1])]
            for number, size in enumerate(_BARS):
                options.step("api", number, len(_BARS))
                figures += compared(size, ways, rounds, quick=options.quick)
            for http in https:
                http.close()
        runtime.close()
        if isinstance(engine, ChildEngine):
            engine.close()
        daemon.close()
    ours, theirs = (statistics.median(one[at] for one in starts) for at in (0, 1))
    note = "from the command to four tokens behind 1 KB; ours has the prompt on disk but for the first time"
    return [*figures, Figure(metric="start", value=ours, unit="s", peer=theirs, better="lower", note=note)]


def compared(size: int, ways: list[Asked], rounds: int, *, quick: bool) -> list[Figure]:
    """Time an answer by each way in turns: ours, the bare one, the peer's."""
    messages = prompt_of(size)
    for ask in ways:
        for _ in range(2):
            seconds(ask, messages)
    found = [[seconds(ask, messages) for ask in ways] for _ in range(rounds)]
    ours, bare, theirs = (1e3 * statistics.median(one[at] for one in found) for at in range(3))
    added = 1e3 * statistics.median(one[0] - one[1] for one in found)
    name = f"{size >> 10}k"
    return [
        Figure(
            metric=f"added_{name}",
            value=added,
            unit="ms",
            better="lower",
            bar=None if quick else _BARS[size],
            note=f"median over {rounds} rounds of an answer of {_TOKENS} tokens over HTTP, less the same without",
        ),
        Figure(
            metric=f"answer_{name}",
            value=ours,
            unit="ms",
            baseline=bare,
            peer=theirs,
            better="lower",
            note="median to the last token, streamed; baseline: without HTTP",
        ),
    ]

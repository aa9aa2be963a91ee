"""Several agents on one daemon over HTTP, against llama.cpp's own server with the same GGUF.

Each agent streams its whole chat in every turn: a system prompt that all share, a first message of its own, answers of
32 tokens, pauses. The peer has as many slots as there are agents. Both run in turns, on all cores. ``--model``: a GGUF
file, or a known name, instead of SmolLM2. Where ``CTXREUSE_VLLM`` names an environment with vLLM, its server is
compared with a daemon on torch in bfloat16 as well.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import httpx

from benchmarks.children import Child
from benchmarks.vllm_server import VllmServer
from ctxreuse.bench.measure import Options
from ctxreuse.bench.report import Figure
from ctxreuse.errors import EngineError

__all__ = ["OPTIONS", "SLOT_TOKENS", "Daemon", "made", "ninety_fifth", "prose", "run", "talk"]

OPTIONS = ("model",)
_SYSTEM, _FIRST, _LATER = 700, (280, 420), 12  # words
_TOKENS, _PAUSE, SLOT_TOKENS = 32, 2.0, 4096
_WAIT = 600.0


class Turn(NamedTuple):
    """Seconds of one answer to its first token and between tokens, and how many tokens it has."""

    first: float
    gaps: list[float]
    tokens: int


class Round(NamedTuple):
    """All turns of all agents, each agent's in order, and seconds from first to last."""

    agents: list[list[Turn]]
    seconds: float

    def starts(self) -> list[float]:
        """Seconds to the first token of each agent's first turn."""
        return [turns[0].first for turns in self.agents]

    def later(self) -> list[float]:
        """Seconds to the first token of all other turns."""
        return [turn.first for turns in self.agents for turn in turns[1:]]

    def gaps(self) -> list[float]:
        """Seconds between tokens."""
        return [gap for turns in self.agents for turn in turns for gap in turn.gaps]

    def speed(self) -> float:
        """Tokens a second, of all agents together."""
        return sum(turn.tokens for turns in self.agents for turn in turns) / self.seconds


class Daemon:
    """``ctxreuse-edge serve`` over a folder. Close it."""

    def __init__(self, model: str, folder: Path, threads: int, settings: Mapping[str, str] | None = None) -> None:
        """``settings``: further ones, as variables of the environment."""
        env = os.environ | {"CTXREUSE_CONFIG": "", "CTXREUSE_ENGINE__THREADS": str(threads), **(settings or {})}
        command = [sys.executable, "-m", "ctxreuse_edge", "serve", "--model", model, "--port", "0"]
        ready = folder / "edge.json"
        ready.unlink(missing_ok=True)
        with open(folder.with_suffix(".log"), "ab") as log:
            self._process = subprocess.Popen([*command, "--store", str(folder)], env=env, stdout=log, stderr=log)
        end = time.monotonic() + _WAIT
        while not ready.exists():
            if self._process.poll() is not None or time.monotonic() > end:
                raise EngineError("the daemon did not start", where=str(folder.with_suffix(".log")))
            time.sleep(0.05)
        self.url = json.loads(ready.read_text("utf-8"))["url"]

    @property
    def pid(self) -> int:
        """The daemon's process."""
        return self._process.pid

    def kill(self) -> None:
        """End it by SIGKILL."""
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(60)


class Agent:
    """One chat, which grows by a question and an answer in each turn."""

    def __init__(self, number: int, system: str) -> None:
        self._rng = Random(number)
        first = prose(self._rng, self._rng.randint(*_FIRST))
        self._messages = [{"role": "system", "content": system}, {"role": "user", "content": first}]

    async def turn(self, http: httpx.AsyncClient, url: str, model: str) -> Turn:
        """Ask, wait for the whole answer, and add both to the chat."""
        body: dict[str, Any] = {
            "model": model, "messages": self._messages, "max_tokens": _TOKENS, "temperature": 0, "stream": True,
            "ignore_eos": True,
        }  # fmt: skip
        began, times, text = time.perf_counter(), list[float](), ""
        async with http.stream("POST", url + "/v1/chat/completions", json=body) as answer:
            if answer.status_code != 200:
                raise EngineError(f"{answer.status_code}: {(await answer.aread()).decode()[:300]}", where=url)
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    for choice in json.loads(line[6:]).get("choices", ()):
                        piece = choice.get("delta", {}).get("content")
                        if piece:
                            times.append(time.perf_counter() - began)
                            text += piece
        self._messages += [
            {"role": "assistant", "content": text},
            {"role": "user", "content": prose(self._rng, _LATER)},
        ]
        return Turn(times[0], [b - a for a, b in pairwise(times)], _TOKENS)

    async def pause(self) -> None:
        """Do something else."""
        await asyncio.sleep(self._rng.uniform(0, _PAUSE))


def prose(rng: Random, count: int) -> str:
    """Return that many words, and a full stop."""
    return " ".join(rng.choice(_VOCABULARY) for _ in range(count)) + "."


_VOCABULARY = (
    "lamp",
    "tower",
    "harbour",
    "wind",
    "clock",
    "keeper",
    "boat",
    "oil",
    "night",
    "signal",
    "storm",
    "coast",
)


async def talk(url: str, agents: Sequence[Agent], turns: int, model: str = "") -> Round:
    """Let all agents talk at once."""

    async def one(http: httpx.AsyncClient, agent: Agent) -> list[Turn]:
        found = []
        for number in range(turns):
            if number:
                await agent.pause()
            found.append(await agent.turn(http, url, model))
        return found

    limits = httpx.Limits(max_connections=len(agents))
    async with httpx.AsyncClient(timeout=_WAIT, limits=limits) as http:
        began = time.perf_counter()
        found = await asyncio.gather(*(one(http, agent) for agent in agents))
        return Round(list(found), time.perf_counter() - began)


def made(count: int, round_number: int) -> list[Agent]:
    """Return agents with a system prompt of their round."""
    system = prose(Random(1_000 + round_number), _SYSTEM)
    return [Agent(10_000 * round_number + n, system) for n in range(count)]


def ninety_fifth(values: Sequence[float]) -> float:
    """The 95th percentile."""
    return sorted(values)[min(int(0.95 * len(values)), len(values) - 1)]


def run(options: Options) -> list[Figure]:
    """Fresh servers for each number of agents."""
    from ctxreuse.models import get, get_gguf

    model = options.model or "smollm2"
    path = Path(model) if model.endswith(".gguf") else get_gguf(model)
    threads, turns = os.cpu_count() or 1, options.pick(2, 6)
    counts = options.pick((2,), (1, 2, 4, 8, 16))
    figures: list[Figure] = []
    for step, count in enumerate(counts):
        options.step("agents", step, len(counts))
        with tempfile.TemporaryDirectory() as folder:
            daemon = Daemon(str(path), Path(folder) / "store", threads)
            ours = asyncio.run(talk(daemon.url, made(count, step), turns))
            daemon.close()
        with Child("benchmarks.llama_server", path, threads, count, SLOT_TOKENS) as peer:
            theirs = asyncio.run(talk(peer.said, made(count, step), turns))
        figures += compared(count, ours, theirs)
    place = os.environ.get("CTXREUSE_VLLM", "")
    for count in (2, 4, 8) if place and not model.endswith(".gguf") else ():
        options.step(f"{count} agents on vLLM")
        figures += against_vllm(Path(place), str(get(model)), threads, count, turns)
    return figures


def against_vllm(place: Path, model: str, threads: int, count: int, turns: int) -> list[Figure]:
    """The same against vLLM's server, for a daemon on torch."""
    torch = {"CTXREUSE_ENGINE__ENGINE": "torch", "CTXREUSE_ENGINE__DTYPE": "bfloat16"}
    with tempfile.TemporaryDirectory() as folder:
        daemon = Daemon(model, Path(folder) / "store", threads, torch)
        asyncio.run(talk(daemon.url, made(1, 98), 1))  # both are warm
        ours = asyncio.run(talk(daemon.url, made(count, 50 + count), turns))
        daemon.close()
        with VllmServer(place, model, Path(folder) / "vllm.log", count, SLOT_TOKENS) as peer:
            asyncio.run(talk(peer.url, made(1, 98), 1, "model"))  # it compiles with its first requests
            theirs = asyncio.run(talk(peer.url, made(count, 50 + count), turns, "model"))
    return compared(count, ours, theirs, prefix="vllm_", speed=0.9, first=1.1)


def compared(
    count: int, ours: Round, theirs: Round, *, prefix: str = "", speed: float = 1.0, first: float | None = None
) -> list[Figure]:
    """Figures of one number of agents; ``speed`` and ``first`` are shares of the peer's that are the bars."""
    later, other = ninety_fifth(ours.later()), ninety_fifth(theirs.later())
    starts = statistics.mean(theirs.starts())
    return [
        Figure(
            metric=f"{prefix}speed_{count}",
            value=ours.speed(),
            unit="tokens/s",
            peer=theirs.speed(),
            bar=speed * theirs.speed(),
            note="all agents, pauses included; 95th percentile between tokens:"
            f" {1e3 * ninety_fifth(ours.gaps()):.0f} ms, peer {1e3 * ninety_fifth(theirs.gaps()):.0f}; longest"
            f" {max(ours.gaps()):.1f} s, peer {max(theirs.gaps()):.1f}",
        ),
        Figure(
            metric=f"{prefix}first_{count}",
            value=statistics.mean(ours.starts()),
            unit="s",
            peer=starts,
            better="lower",
            bar=None if first is None else first * starts,
            note=f"mean of the first turns; the last one's {max(ours.starts()):.1f} s, peer {max(theirs.starts()):.1f}",
        ),
        Figure(
            metric=f"{prefix}later_{count}",
            value=later,
            unit="s",
            peer=other,
            better="lower",
            bar=0.9 * other,
            note="95th percentile of the first tokens of all other turns; medians"
            f" {statistics.median(ours.later()):.2f} s,"
            f" peer {statistics.median(theirs.later()):.2f}",
        ),
    ]

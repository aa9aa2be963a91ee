"""Time to the first token of chats that share beginnings, by which of three real workers gets each request.

Three daemons on SmolLM2, a thread each. They stand for three machines: where control groups can be made (Linux, as
root), each has a processor of its own, a part of what there is; elsewhere they take time from each other, and a worker
without requests is no free one. Some chats at once, each of several turns, begin with one of a few system prompts, some
far more often than others. Every rule gets fresh workers and the same chats, in turns. Ours is the sidecar with its
router (``price``); its other one (``affinity``) always sends one beginning to one worker. The simple rules are the
bench's own and ask the workers directly, so they save what a proxy takes; they know which requests run where, and the
last one what every worker was sent. Where ``CTXREUSE_PEERS`` names a Python with vllm-router, that is a rule too (its
``cache_aware``). Baseline: one after another. Peer: the best of all others in that figure. ``--model``: a GGUF file, or
a known name, instead of SmolLM2.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from random import Random
from typing import Any, Literal, NamedTuple

import httpx
from ctxreuse_cloud.proxy.routes import request_runs

from benchmarks.agents_http import Daemon, ninety_fifth, prose
from benchmarks.quotas import quota
from benchmarks.sidecars import Sidecar, VllmRouter
from ctxreuse.bench.measure import Options
from ctxreuse.bench.report import Figure
from ctxreuse.errors import EngineError
from ctxreuse.routing import KnownPrefixes

__all__ = ["OPTIONS", "Seen", "Workers", "chats", "figures", "run"]

OPTIONS = ("model",)
_WORKERS, _PROMPTS, _TOGETHER = 3, 5, 6
_SYSTEM, _QUESTION, _TOKENS, _PAUSE, _WAIT = (150, 240), (12, 30), 8, 1.0, 600.0
#: Of all cores, what the workers have together; the rest is for what is in front of them.
_SHARE = 0.75
OURS, AFFINITY, ROUTER = "price", "affinity", "vllm-router"
#: Rules of the bench, the plain one first.
SIMPLE = ("round robin", "random", "least load", "longest prefix")


class Seen(NamedTuple):
    """Seconds to the first token of one request, its prompt tokens, and those that were reused."""

    first: float
    prompt: int
    cached: int


class Workers:
    """Addresses of workers, and a simple rule that chooses among them; for one event loop."""

    def __init__(self, urls: Sequence[str], rule: str) -> None:
        self._urls, self._rule, self._number = urls, rule, -1
        self._chance = Random(7)
        self._running = [0] * len(urls)
        self._known = [KnownPrefixes(float("inf")) for _ in urls]

    def choose(self, messages: Sequence[dict[str, str]]) -> int:
        """Return the number of the worker for a chat, which it is sent now."""
        self._number += 1
        everyone = range(len(self._urls))
        runs = request_runs("", "", [(one["role"], one["content"].encode()) for one in messages])
        if self._rule == "random":
            chosen = self._chance.randrange(len(self._urls))
        elif self._rule == "least load":
            chosen = min(everyone, key=lambda n: self._running[n])
        elif self._rule == "longest prefix":
            chosen = max(everyone, key=lambda n: (self._known[n].match(runs), -self._running[n]))
        else:
            chosen = self._number % len(self._urls)
        self._known[chosen].note(runs)
        self._running[chosen] += 1
        return chosen

    def url(self, number: int) -> str:
        """Return its address."""
        return self._urls[number]

    def ended(self, number: int) -> None:
        """A request that was sent there has its answer."""
        self._running[number] -= 1


def chats(count: int, turns: int, seed: int) -> list[tuple[str, list[str]]]:
    """Return so many chats: a system prompt, and the user's questions."""
    rng = Random(seed)
    prompts = [f"Assistant {n}. {prose(rng, rng.randint(*_SYSTEM))}" for n in range(_PROMPTS)]
    weights = [1 / (rank + 1) for rank in range(_PROMPTS)]
    chosen = rng.choices(prompts, weights, k=count)
    return [(prompt, [prose(rng, rng.randint(*_QUESTION)) for _ in range(turns)]) for prompt in chosen]


async def talk(workers: Workers, given: Sequence[tuple[str, list[str]]], seed: int, model: str) -> list[Seen]:
    """Hold all chats, some at once, and return what was seen of each request."""
    left, found = list(enumerate(given))[::-1], list[Seen]()

    async def hold(http: httpx.AsyncClient) -> None:
        while left:
            number, (system, questions) = left.pop()
            rng, messages = Random(seed + number), [{"role": "system", "content": system}]
            for question in questions:
                await asyncio.sleep(rng.uniform(0, _PAUSE))
                messages.append({"role": "user", "content": question})
                place = workers.choose(messages)
                seen, text = await _ask(http, workers.url(place), messages, model)
                workers.ended(place)
                messages.append({"role": "assistant", "content": text})
                found.append(seen)

    limits = httpx.Limits(max_keepalive_connections=0)
    async with httpx.AsyncClient(timeout=_WAIT, limits=limits) as http:
        await asyncio.gather(*(hold(http) for _ in range(_TOGETHER)))
    return found


async def _ask(http: httpx.AsyncClient, url: str, messages: list[dict[str, str]], model: str) -> tuple[Seen, str]:
    body: dict[str, Any] = {
        "model": model, "messages": messages, "max_tokens": _TOKENS, "temperature": 0, "stream": True,
        "stream_options": {"include_usage": True}, "ignore_eos": True,
    }  # fmt: skip
    began, first, text, usage = time.perf_counter(), 0.0, "", dict[str, Any]()
    async with http.stream("POST", url + "/v1/chat/completions", json=body) as answer:
        if answer.status_code != 200:
            raise EngineError(f"{answer.status_code}: {(await answer.aread()).decode()[:300]}", where=url)
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[6:])
            usage = event.get("usage") or usage
            for choice in event.get("choices", ()):
                if piece := choice.get("delta", {}).get("content"):
                    first = first or time.perf_counter() - began
                    text += piece
    if not usage or not first:
        raise EngineError("an answer has no tokens, or does not count them", where=url)
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    return Seen(first, usage["prompt_tokens"], cached), text


def run(options: Options) -> list[Figure]:
    """Every rule with fresh workers, in turns."""
    from ctxreuse.models import get_gguf

    model = options.model or "smollm2"
    path = Path(model) if model.endswith(".gguf") else get_gguf(model)
    python = os.environ.get("CTXREUSE_PEERS", "")
    rules = (OURS, *SIMPLE, AFFINITY, *((ROUTER,) if python else ()))
    count, turns, rounds = options.pick(6, 16), options.pick(2, 3), options.pick(1, 2)
    found: dict[str, list[Seen]] = {rule: [] for rule in rules}
    for number in range(rounds):
        given = chats(count, turns, number)
        for step, rule in enumerate(rules if number % 2 == 0 else rules[::-1]):
            options.step(f"round {number + 1}, {rule}", number * len(rules) + step, rounds * len(rules))
            with ExitStack() as stack, tempfile.TemporaryDirectory(prefix="ctxreuse-bench-") as place:
                folder = Path(place)
                urls = list[str]()
                for worker in range(_WORKERS):
                    group = stack.enter_context(quota(_SHARE * (os.cpu_count() or 1) / _WORKERS))
                    daemon = Daemon(str(path), folder / f"worker{worker}", 1)
                    stack.callback(daemon.close)
                    urls.append(daemon.url)
                    if group is not None:
                        group.take(daemon.pid)
                workers = Workers(urls, rule)
                if rule in (OURS, AFFINITY):
                    settings = {"CTXREUSE_CLOUD__ROUTER": rule}
                    workers = Workers([stack.enter_context(Sidecar(folder / "sidecar", urls, settings)).url], rule)
                elif rule == ROUTER:
                    front = stack.enter_context(VllmRouter(python, folder / "router.log", urls))
                    workers = Workers([front.url], rule)
                name = httpx.get(urls[0] + "/v1/models").json()["data"][0]["id"]
                found[rule] += asyncio.run(talk(workers, given, number, name))
    return figures(found)


def figures(found: dict[str, list[Seen]]) -> list[Figure]:
    """Mean and 95th percentile of ours, the plain rule's and the best other's, and what was reused."""
    firsts = {rule: [one.first for one in seen] for rule, seen in found.items()}
    shares = {
        rule: 100 * sum(one.cached for one in seen) / sum(one.prompt for one in seen) for rule, seen in found.items()
    }
    return [
        _compared("first token, mean", "s", {rule: statistics.fmean(values) for rule, values in firsts.items()}),
        _compared("first token, 95th percentile", "s", {rule: ninety_fifth(values) for rule, values in firsts.items()}),
        _compared("prompt tokens reused", "%", shares, better="higher"),
    ]


def _compared(metric: str, unit: str, values: dict[str, float], better: Literal["higher", "lower"] = "lower") -> Figure:
    """Ours beside the others; a bar where less is better: the best of them."""
    others = {rule: value for rule, value in values.items() if rule != OURS}
    best = (min if better == "lower" else max)(others, key=lambda rule: others[rule])
    listed = ", ".join(f"{rule} {value:.3g}" for rule, value in others.items())
    return Figure(
        metric=metric,
        value=values[OURS],
        unit=unit,
        better=better,
        baseline=others[SIMPLE[0]],
        peer=others[best],
        bar=others[best] if better == "lower" else None,
        note=f"peer: {best}; all others: {listed}",
    )

"""Tasks of an agent with two tools over HTTP: valid calls, reuse of prompts, what constraints cost; against llama.cpp.

Each task is a chat of three questions; each is answered by a forced call and, with its result, by text. Both servers
have the same GGUF and all cores, and take turns. ``--model``: a GGUF file, or a known name, instead of SmolLM2.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import httpx
import msgspec

from benchmarks.agents_http import Daemon, prose
from benchmarks.children import Child
from ctxreuse.bench.measure import Options
from ctxreuse.bench.report import Figure
from ctxreuse.constrain import Grammar, GrammarCompiler
from ctxreuse.errors import EngineError

__all__ = ["OPTIONS", "run"]

OPTIONS = ("model",)
_TASKS, _QUESTIONS, _ANSWER, _LONG, _ROUNDS, _SCHEMAS = 10, 3, 24, 128, 5, 50
_SYSTEM = 1_000  # words
_WAIT = 600.0


class GetWeather(msgspec.Struct, forbid_unknown_fields=True):
    """Arguments of the first tool."""

    city: str
    days: int


class AddNumbers(msgspec.Struct, forbid_unknown_fields=True):
    """Arguments of the second tool."""

    a: int
    b: int
    unit: str | None


_ARGUMENTS: dict[str, Any] = {"get_weather": GetWeather, "add_numbers": AddNumbers}
_TEXT, _NUMBER = {"type": "string", "maxLength": 24}, {"type": "integer", "minimum": 0, "maximum": 9999}
_FIELDS: dict[str, dict[str, Any]] = {
    "get_weather": {"city": _TEXT, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "add_numbers": {"a": _NUMBER, "b": _NUMBER, "unit": {"anyOf": [_TEXT, {"type": "null"}]}},
}
_TOOLS = [
    {"type": "function", "function": {"name": name, "description": f"Use it to {name.replace('_', ' ')}.",
        "parameters": {
            "type": "object", "properties": fields, "required": list(fields), "additionalProperties": False,
        },
    }}
    for name, fields in _FIELDS.items()
]  # fmt: skip


class Played(NamedTuple):
    """What all tasks gave: calls, and those of them that are valid; of each prompt after a task's first the reused
    share, and that which was in the prompt and the answer before it."""

    calls: int
    valid: int
    shares: list[float]
    bounds: list[float]
    longest: int


def play(http: httpx.Client, tasks: int) -> Played:
    """Let an agent do the tasks, one after the other."""
    calls, valid, shares, bounds, longest = 0, 0, list[float](), list[float](), 0
    system = {"role": "system", "content": prose(Random(7), _SYSTEM)}
    for task in range(tasks):
        rng, messages, known = Random(task), [system], 0
        for _ in range(_QUESTIONS):
            messages.append({"role": "user", "content": prose(rng, 24)})
            for choice in ("required", "none"):
                body = {
                    "messages": messages, "tools": _TOOLS, "tool_choice": choice, "temperature": 1.0, "seed": task,
                    "parallel_tool_calls": False,
                }  # fmt: skip
                answer = _said(http, body | {"max_tokens": 200 if choice == "required" else _ANSWER})
                message, usage = answer["choices"][0]["message"], answer["usage"]
                length = usage["prompt_tokens"]
                if known:
                    shares.append(usage["prompt_tokens_details"]["cached_tokens"] / length)
                    bounds.append(min(known / length, 1.0))
                known, longest = length + usage["completion_tokens"], max(longest, length)
                messages.append({key: value for key, value in message.items() if value is not None})
                for call in message.get("tool_calls") or ():
                    calls, valid = calls + 1, valid + _is_valid(call["function"])
                    result = prose(rng, 12)
                    messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
    return Played(calls, valid, shares, bounds, longest)


def _is_valid(function: dict[str, str]) -> bool:
    try:
        msgspec.json.decode(function["arguments"], type=_ARGUMENTS[function["name"]])
    except (KeyError, ValueError):
        return False
    return True


def _said(http: httpx.Client, body: dict[str, Any]) -> Any:
    answer = http.post("/v1/chat/completions", json=body)
    if answer.status_code != 200:
        raise EngineError(f"{answer.status_code}: {answer.text[:300]}", where=str(http.base_url))
    return answer.json()


def step_seconds(http: httpx.Client, tokens: int, schema: dict[str, Any] | None) -> float:
    """Seconds a token of one answer of that many tokens, its first one left out."""
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": "Describe the harbour."}], "max_tokens": tokens, "temperature": 0,
        "stream": True, "stream_options": {"include_usage": True}, "ignore_eos": schema is None,
    }  # fmt: skip
    if schema is not None:
        body["response_format"] = {"type": "json_schema", "json_schema": {"name": "list", "schema": schema}}
    times, made = list[float](), 0
    with http.stream("POST", "/v1/chat/completions", json=body) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line[6:])
                times.append(time.perf_counter())
                made = (event.get("usage") or {}).get("completion_tokens", made)
    if made < tokens:
        raise EngineError(f"the answer has {made} tokens of {tokens}", where=str(http.base_url))
    return (times[-1] - times[0]) / (made - 1)


#: No answer of a few hundred tokens ends it.
_ENDLESS = {"type": "array", "items": {"type": "string", "minLength": 3, "maxLength": 30}, "minItems": 500}


class Steps(NamedTuple):
    """Medians of seconds a token, free and constrained, and how many times the free one the constrained one is."""

    free: float
    held: float
    ratio: float


def steps(https: Sequence[httpx.Client], rounds: int, tokens: int) -> list[Steps]:
    """Measure the servers in turns, free and constrained side by side."""
    found: list[list[tuple[float, float]]] = [[] for _ in https]
    for http in https:
        step_seconds(http, tokens, _ENDLESS)
    for _ in range(rounds):
        for mine, http in zip(found, https):
            mine.append((step_seconds(http, tokens, None), step_seconds(http, tokens, _ENDLESS)))
    return [
        Steps(
            statistics.median(free for free, _ in mine),
            statistics.median(held for _, held in mine),
            statistics.median(held / free for free, held in mine),
        )
        for mine in found
    ]


class Compiling(NamedTuple):
    """Seconds to read the vocabulary, to compile each schema, and to mask each token."""

    vocabulary: float
    schemas: list[float]
    masks: list[float]


def compiling(path: Path, schemas: int) -> Compiling:
    """Compile tools of many fields, and follow each with random logits."""
    import numpy as np

    from ctxreuse.engines.registry import read_text

    text, rng = read_text(path), np.random.default_rng(0)
    assert text is not None
    size = len(text.vocabulary().tokens)
    compiler = GrammarCompiler(text, size, text.stop_ids)
    began = time.perf_counter()
    compiler.warm()
    vocabulary, compiled, masks = time.perf_counter() - began, list[float](), list[float]()
    for number in range(schemas):
        fields = {f"{name}_{number}": kind for one in _FIELDS.values() for name, kind in one.items()}
        schema = {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}
        began = time.perf_counter()
        constraint = compiler.compile(Grammar.json_schema(schema))
        compiled.append(time.perf_counter() - began)
        ended = False
        for _ in range(100):
            logits = rng.normal(size=size).astype(np.float32)
            began = time.perf_counter()
            ended = constraint.advance(int(constraint.mask(logits).argmax()))
            masks.append(time.perf_counter() - began)
            if ended:
                break
    return Compiling(vocabulary, compiled, masks)


def run(options: Options) -> list[Figure]:
    """Both servers stay open, and take turns."""
    from ctxreuse.models import get_gguf

    model = options.model or "smollm2"
    path = Path(model) if model.endswith(".gguf") else get_gguf(model)
    threads, tasks = os.cpu_count() or 1, options.pick(2, _TASKS)
    rounds, tokens = options.pick(1, _ROUNDS), options.pick(16, _LONG)
    made = compiling(path, options.pick(5, _SCHEMAS))
    with tempfile.TemporaryDirectory() as folder:
        daemon = Daemon(str(path), Path(folder) / "store", threads)
        with Child("benchmarks.llama_server", path, threads, 1, 8192) as peer:
            # A connection for each request: llama.cpp's server closes some that it said it keeps.
            anew = httpx.Limits(max_keepalive_connections=0)
            https = [httpx.Client(base_url=url, timeout=_WAIT, limits=anew) for url in (daemon.url, peer.said)]
            played = []
            for step, http in enumerate(https):
                options.step("tools", step, len(https) + 1)
                played.append(play(http, tasks))
            options.step("tools", len(https), len(https) + 1)
            ours, theirs = steps(https, rounds, tokens)
            for http in https:
                http.close()
        daemon.close()
    return figures(played, ours, theirs, made, quick=options.quick)


def figures(played: Sequence[Played], ours: Steps, theirs: Steps, made: Compiling, *, quick: bool) -> list[Figure]:
    """Ours against the peer's."""
    mine, other = played
    mask, schema = statistics.mean(made.masks), statistics.median(made.schemas)
    return [
        Figure(
            metric="valid",
            value=100 * mine.valid / mine.calls,
            unit="%",
            peer=100 * other.valid / other.calls if other.calls else None,
            bar=100.0,
            note=f"of {mine.calls} forced calls: arguments that a strict parser of the tool takes"
            + (f"; peer: of {other.calls}" if other.calls else "; the peer ignores tools for this model's template"),
        ),
        Figure(
            metric="reused",
            value=100 * statistics.mean(mine.shares),
            unit="%",
            peer=100 * statistics.mean(other.shares),
            bound=100 * statistics.mean(mine.bounds),
            bar=None if quick else 95.0,
            note=f"of the prompts after a task's first, of {mine.longest:,} tokens at most; least"
            f" {100 * min(mine.shares):.1f}, peer {100 * min(other.shares):.1f}; bound: what the prompt and the answer"
            " before it have",
        ),
        Figure(
            metric="mask",
            value=100 * mask / ours.free,
            unit="% of a step",
            better="lower",
            bar=5.0,
            note=f"{1e6 * mask:.0f} µs a token, {1e6 * max(made.masks):.0f} at most; a step: {1e3 * ours.free:.1f} ms",
        ),
        Figure(
            metric="constrained_step",
            value=ours.ratio,
            unit="times free",
            peer=theirs.ratio,
            bound=1.0,
            better="lower",
            bar=None if quick else 1.05,
            note=f"over HTTP, JSON of a schema against free text: {1e3 * ours.held:.1f} ms a token, free"
            f" {1e3 * ours.free:.1f}; peer {1e3 * theirs.held:.1f}, free {1e3 * theirs.free:.1f}",
        ),
        Figure(
            metric="schema",
            value=1e3 * schema,
            unit="ms",
            better="lower",
            bar=50.0,
            note=f"first use of a schema of five fields; {1e3 * max(made.schemas):.1f} at most; the vocabulary is read"
            f" once, at the daemon's start: {1e3 * made.vocabulary:.0f} ms",
        ),
    ]

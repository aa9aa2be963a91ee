"""Agents on six frameworks through our adapters: how much of their prompts is reused from the second turn to the sixth.

Each agent has a system prompt of 1,500 words, and asks six questions; SmolLM2 answers, by the edge daemon, or for the
OpenAI Agents SDK in its own process. Between turns the memory is closed and opened again, so what the model is sent is
what the adapter brings back from disk. ``--model``: a GGUF file, or a known name, instead of SmolLM2.

``CTXREUSE_ADAPTERS`` names the environment with the frameworks, `.venv-adapters` of `make test-adapters`.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import NamedTuple

from benchmarks.agents_http import Daemon, prose
from ctxreuse.bench.measure import FRESH_TIMEOUT, Options
from ctxreuse.bench.report import Figure
from ctxreuse.errors import ConfigError, EngineError

__all__ = ["OPTIONS", "run"]

OPTIONS = ("model",)
_AGENTS = ("openai_agents", "langgraph", "llama_index", "google_adk", "mem0", "memory_tool")
_SYSTEM, _QUESTION, _QUESTIONS, _ANSWER = 1_500, 12, 6, 24  # words, words, questions, tokens


class _Request(NamedTuple):
    """A request of a turn, in tokens: what was reused of the prompt, the prompt, the answer."""

    turn: int
    cached: int
    prompt: int
    made: int


def run(options: Options) -> list[Figure]:
    """One agent after the other; each has words of its own, so none reuses what another had computed."""
    from ctxreuse.models import get_gguf

    place = Path(os.environ.get("CTXREUSE_ADAPTERS", ""))
    python = place / "bin" / "python"
    if not python.exists():
        fix = "Name .venv-adapters, which make test-adapters makes"
        raise ConfigError("CTXREUSE_ADAPTERS names no environment with the frameworks", where=str(place), fix=fix)
    model = options.model or "smollm2"
    path = Path(model) if model.endswith(".gguf") else get_gguf(model)
    figures = []
    with tempfile.TemporaryDirectory(prefix="ctxreuse-bench-") as folder:
        daemon = Daemon(str(path), Path(folder) / "store", os.cpu_count() or 1)
        try:
            for number, name in enumerate(_AGENTS):
                options.step("adapters", number, len(_AGENTS))
                rng, own = Random(name), Path(folder) / name
                own.mkdir()
                setup = {
                    "name": name, "url": daemon.url, "model": str(path), "folder": str(own),
                    "system": prose(rng, options.pick(300, _SYSTEM)), "tokens": _ANSWER,
                    "questions": [prose(rng, _QUESTION) for _ in range(options.pick(3, _QUESTIONS))],
                }  # fmt: skip
                figures.append(_figure(name, *_played(python, setup, own), quick=options.quick))
        finally:
            daemon.close()
    return figures


def _played(python: Path, setup: dict[str, object], folder: Path) -> tuple[list[_Request], str]:
    """Let an agent ask; returns its requests, and the framework with its version."""
    program = Path(__file__).with_name("adapters_child.py")
    env = os.environ | {
        "CTXREUSE_CONFIG": "", "HF_HUB_OFFLINE": "1", "MEM0_DIR": str(folder), "MEM0_TELEMETRY": "False",
        "PYTHONPATH": "",
    }  # fmt: skip
    # -P: beside this program lie modules with names of others
    command = [str(python), "-P", "-W", "ignore", str(program), json.dumps(setup)]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=FRESH_TIMEOUT, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise EngineError(f"the agent failed: {last}", where=str(setup["name"]))
    made = json.loads(done.stdout.strip().splitlines()[-1])
    return [_Request(*row) for row in made["rows"]], made["package"]


def _figure(name: str, requests: list[_Request], package: str, *, quick: bool) -> Figure:
    later = [one for one in requests if one.turn > 1]
    prompts = sum(one.prompt for one in later)
    known = sum(min(past.prompt + past.made, one.prompt) for past, one in pairwise(requests) if one.turn > 1)
    least = min(one.cached / one.prompt for one in later)
    return Figure(
        metric=name,
        value=100 * sum(one.cached for one in later) / prompts,
        unit="% of prompts",
        bound=100 * known / prompts,
        bar=None if quick else 95.0,
        note=f"{package}; {len(later)} prompts of {later[0].prompt:,} to {later[-1].prompt:,} tokens, least"
        f" {100 * least:.1f}; bound: what the prompt and the answer before it have",
    )

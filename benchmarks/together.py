"""Answers of several agents at once on one engine: tokens a second, and who waits for whom (live).

Each agent has a context of its own and decodes; requests that compute at the same time share the engine's passes. The
baseline computes one context a pass, as an engine does that cannot batch. The bound is the rate of one agent times
their number: a pass that reads the weights once for all would take no longer than one for one. Then agents that begin
with the same system prompt come at once, and nothing is cached: seconds to their first tokens, against agents whose
system prompts differ. Last a long prompt comes while one agent decodes: its longest gap between two tokens, in steps.
``--model``: another than SmolLM2.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from benchmarks.archive import model_for
from ctxreuse.bench.measure import Options
from ctxreuse.bench.report import Figure
from ctxreuse.engines.base import Engine, Logits
from ctxreuse.engines.sampling import SamplingParams
from ctxreuse.engines.stepping import step_one_by_one
from ctxreuse.errors import CtxReuseError
from ctxreuse.identity.keys import Tokens
from ctxreuse.runtime import Runtime, RuntimeOptions
from ctxreuse.runtime.steps.slices import UNSEEN

__all__ = ["OPTIONS", "Measured", "cold", "measure", "run"]

OPTIONS = ("model",)
_AGENTS, _CONTEXT, _LONG, _ANSWER = (1, 2, 4, 8), 700, 3_000, 32
#: A long prompt may make the others' step so many times as long.
_STALL = 3.0
#: Agents that come at once, tokens of their system prompt and of what each has of its own.
_COLD, _SYSTEM, _OWN = 4, 1_000, 100


class _Unshared:
    """The engine, one context a pass."""

    batches = False

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def step(self, batch: Any, *, limit: int | None = None, rows: Any = ()) -> list[Logits | CtxReuseError | None]:
        return step_one_by_one(self._engine, batch, None, 512)


class Measured(NamedTuple):
    """Tokens a second of all, and the seconds between two tokens of each agent."""

    rate: float
    gaps: Sequence[float]


def measure(
    engine: Engine, agents: int, context: int, answer: int, long: int = 0, *, stall: float = UNSEEN
) -> Measured:
    """Let ``agents`` answer at once behind ``context`` tokens each.

    ``long``: tokens of a prompt that comes meanwhile; who decodes stops when it is computed. ``stall``: see
    `RuntimeOptions`.
    """
    rng = np.random.default_rng(agents)
    runtime = Runtime(engine, None, RuntimeOptions(context_cache_bytes=4 << 30, stall=stall))
    prompts = [_prompt(rng, engine, context) for _ in range(agents)]
    for prompt in prompts:
        runtime.warm(prompt)
    gaps: list[float] = []
    decoding = threading.Barrier(agents + 1)
    ended = threading.Event()

    def decode(prompt: Tokens) -> None:
        pieces, last = runtime.complete(prompt, SamplingParams(max_tokens=answer, ignore_eos=True)), 0.0
        decoding.wait()
        for _ in pieces:
            now = time.perf_counter()
            if last:
                gaps.append(now - last)
            last = now
            if long and ended.is_set() and gaps:  # the prompt may be shorter than two tokens take
                break

    threads = [threading.Thread(target=decode, args=(prompt,)) for prompt in prompts]
    for thread in threads:
        thread.start()
    decoding.wait()
    began = time.perf_counter()
    if long:
        runtime.warm(_prompt(rng, engine, long))
        ended.set()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - began
    runtime.close()
    return Measured(agents * answer / seconds, gaps)


def cold(engine: Engine, agents: int, system: int, own: int, *, shared: bool) -> float:
    """Return the mean seconds to the first token of ``agents`` that come at once.

    ``shared``: they begin with the same ``system`` tokens; else each has as many of its own.
    """
    rng = np.random.default_rng(agents)
    runtime = Runtime(engine, None, RuntimeOptions(context_cache_bytes=0))
    first = _prompt(rng, engine, system)
    prompts = [
        np.concatenate([first if shared else _prompt(rng, engine, system), _prompt(rng, engine, own)])
        for _ in range(agents)
    ]
    seconds: list[float] = []
    starting = threading.Barrier(agents)

    def ask(prompt: Tokens) -> None:
        starting.wait()
        began = time.perf_counter()
        answer = runtime.complete(prompt, SamplingParams(max_tokens=1, ignore_eos=True))
        next(answer)
        seconds.append(time.perf_counter() - began)

    threads = [threading.Thread(target=ask, args=(prompt,)) for prompt in prompts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    runtime.close()
    return statistics.mean(seconds)


def _prompt(rng: np.random.Generator, engine: Engine, count: int) -> Tokens:
    return rng.integers(0, engine.space.vocab_size, count).astype("<i4")


def run(options: Options) -> list[Figure]:
    """Tokens a second of all agents together; first tokens of cold ones; the longest gap while a prompt comes."""
    engine = model_for(options.model or "smollm2", options)
    unshared: Engine = _Unshared(engine)
    rounds, answer = options.pick(1, 3), options.pick(4, _ANSWER)
    figures, one = [], 0.0
    for agents in options.pick(_AGENTS[:2], _AGENTS):
        shared, alone = [], []
        for number in range(rounds):
            options.step(f"{agents} agents", number, rounds)
            shared.append(measure(engine, agents, options.pick(70, _CONTEXT), answer))
            alone.append(measure(unshared, agents, options.pick(70, _CONTEXT), answer))
        rate = statistics.median(one.rate for one in shared)
        one = one or rate
        gaps = sorted(gap for each in shared for gap in each.gaps)
        figures.append(
            Figure(
                metric=f"decode_{agents}",
                value=rate,
                unit="tokens/s",
                baseline=statistics.median(one.rate for one in alone),
                bound=agents * one,
                note=f"of all; between tokens {1e3 * gaps[len(gaps) // 2]:.0f} ms, 95th percentile "
                f"{1e3 * gaps[len(gaps) * 95 // 100]:.0f} ms",
            )
        )
    options.step("cold agents with the same system prompt")
    system, own = options.pick(70, _SYSTEM), options.pick(20, _OWN)
    waits = [[cold(engine, _COLD, system, own, shared=shared) for shared in (True, False)] for _ in range(rounds)]
    figures.append(
        Figure(
            metric=f"cold_{_COLD}",
            value=statistics.median(wait[0] for wait in waits),
            unit="s",
            baseline=statistics.median(wait[1] for wait in waits),
            better="lower",
            note=f"mean first token of {_COLD} agents at once behind a system prompt of {system:,} tokens and {own} of "
            f"their own, nothing cached; baseline: system prompts that differ; ratio "
            f"{statistics.median(one / other for one, other in waits):.2f}",
        )
    )
    options.step("a long prompt while one decodes")
    long, ratios = options.pick(300, _LONG), []
    for _ in range(rounds):
        step = statistics.median(measure(engine, 1, 300, answer).gaps)
        longest = [
            max(measure(this, 1, 300, 2_000, long, stall=stall).gaps)
            for this, stall in ((engine, UNSEEN), (engine, 0.0), (unshared, UNSEEN))
        ]
        ratios.append([gap / step for gap in longest])
    *stalls, alone_stall = (statistics.median(one) for one in zip(*ratios))
    for metric, value, how in (
        ("stall", stalls[0], f"engine.stall as it is, {1e3 * UNSEEN:.0f} ms"),
        ("stall_0", stalls[1], "engine.stall 0: three steps"),
    ):
        figures.append(
            Figure(
                metric=metric,
                value=value,
                unit="steps",
                baseline=alone_stall,
                bound=1.0,
                better="lower",
                bar=None if options.quick else _STALL,
                note="longest gap between two tokens while a prompt of "
                f"{long:,} tokens is computed, median of {rounds}; a step alone takes {1e3 * step:.0f} ms; {how}",
            )
        )
    return figures

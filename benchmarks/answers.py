"""Eight answers to one prompt: seconds to all first tokens and to all answers, and the memory of their prompt.

They are made from one prefill, whose context forks. The baseline of the whole is eight requests, one after another, of
which all but the first find the prompt in memory; the bound is one request. ``--model``: another than SmolLM2.
"""

from __future__ import annotations

import statistics
import time
from typing import NamedTuple

import numpy as np

from benchmarks.archive import model_for
from ctxreuse.bench.measure import Options
from ctxreuse.bench.report import Figure
from ctxreuse.engines.base import Engine
from ctxreuse.engines.sampling import SamplingParams
from ctxreuse.identity.keys import Tokens
from ctxreuse.runtime import Runtime, RuntimeOptions
from ctxreuse.runtime.answers import pieces_in_turn

__all__ = ["OPTIONS", "Measured", "measure", "run"]

OPTIONS = ("model",)
_ANSWERS, _PROMPT, _TOKENS = 8, 2_000, 32
#: The first tokens of all may come so many times as late as that of one.
_FIRST = 1.3


class Measured(NamedTuple):
    """Seconds to the last first token and to the end, and bytes of contexts in memory."""

    first: float
    whole: float
    memory: int


def measure(engine: Engine, prompt: Tokens, answers: int, tokens: int) -> Measured:
    """Make ``answers`` of ``tokens`` tokens each to a prompt that nothing is cached of."""
    runtime = Runtime(engine, None, RuntimeOptions(context_cache_bytes=8 << 30))
    sampling = SamplingParams(max_tokens=tokens, temperature=1.0, seed=1, ignore_eos=True)
    began, first = time.perf_counter(), dict[int, float]()
    for number, _ in pieces_in_turn(runtime.complete_many(prompt, sampling.answers(answers))):
        first.setdefault(number, time.perf_counter() - began)
    whole, memory = time.perf_counter() - began, runtime.context_cache.nbytes
    runtime.close()
    return Measured(max(first.values()), whole, memory)


def one_by_one(engine: Engine, prompt: Tokens, answers: int, tokens: int) -> float:
    """Return the seconds of as many requests, one after another, behind what the first has left in memory."""
    runtime = Runtime(engine, None, RuntimeOptions(context_cache_bytes=8 << 30))
    sampling = SamplingParams(max_tokens=tokens, temperature=1.0, seed=1, ignore_eos=True)
    began = time.perf_counter()
    for one in sampling.answers(answers):
        runtime.complete(prompt, one).drain()
    seconds = time.perf_counter() - began
    runtime.close()
    return seconds


def run(options: Options) -> list[Figure]:
    """Medians of rounds in which all ways take turns, each with a prompt of its own."""
    engine = model_for(options.model or "smollm2", options)
    rng, rounds = np.random.default_rng(0), options.pick(1, 3)
    length, tokens = options.pick(60, _PROMPT), options.pick(4, _TOKENS)

    def prompt() -> Tokens:
        return rng.integers(0, engine.space.vocab_size, length).astype("<i4")

    measure(engine, prompt(), 2, 2)
    many, one, apart = [], [], []
    for number in range(rounds):
        options.step("answers", number, rounds)
        many.append(measure(engine, prompt(), _ANSWERS, tokens))
        one.append(measure(engine, prompt(), 1, tokens))
        apart.append(one_by_one(engine, prompt(), _ANSWERS, tokens))
    first, whole = (statistics.median(m[at] for m in many) for at in (0, 1))
    alone = one[0].memory
    return [
        Figure(
            metric="first_tokens",
            value=statistics.median(m.first / o.first for m, o in zip(many, one)),
            unit="times one",
            bound=1.0,
            better="lower",
            bar=None if options.quick else _FIRST,
            note=f"first tokens of all {_ANSWERS} answers to {length:,} tokens after {first:.2f} s",
        ),
        Figure(
            metric="answers",
            value=whole,
            unit="s",
            baseline=statistics.median(apart),
            bound=statistics.median(o.whole for o in one),
            better="lower",
            note=f"{_ANSWERS} answers of {tokens} tokens; bound: one of them",
        ),
        Figure(
            metric="memory",
            value=many[0].memory / alone,
            unit="times one",
            baseline=float(_ANSWERS),
            bound=1.0,
            better="lower",
            note=f"bytes of all contexts; one has {alone / 1e6:.0f} MB with its room",
        ),
    ]

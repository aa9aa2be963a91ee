"""First tokens behind contexts that are restored from disk, against computing them, for each engine.

A store on disk has the context, whose pages are in the system's page cache; the engine has nothing of it. The baseline
computes context and question, the bound has the context in its memory already. All is CPU time of one thread, so that
other programs on the machine count little; of restores and of the bound the least of three. Levels are exact. SmolLM2
takes 8,192 tokens, so longer contexts are those of Gemma 3 270M in llama.cpp, most of whose layers see 512 tokens only.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

from benchmarks.onnx import seconds
from ctxreuse.bench.measure import Options
from ctxreuse.bench.report import Figure
from ctxreuse.engines import open_engine
from ctxreuse.engines.base import Engine
from ctxreuse.engines.sampling import SamplingParams
from ctxreuse.models import get, get_gguf
from ctxreuse.models.build import build
from ctxreuse.runtime import Runtime, RuntimeOptions
from ctxreuse.runtime.load import load_prefix
from ctxreuse.store import BlockStore

__all__ = ["restored", "run"]

_QUESTION, _ROUNDS = 32, 3
#: Times as fast as computing that a context of so many tokens is to be; and as slow as one in memory, at most.
_BARS, _BOUND = {2_048: 25.0, 32_000: 100.0}, 1.1
_SHORT, _LONG = (2_048, 4_096, 8_000), (16_000, 32_000)


def restored(engine: Engine, context: int) -> tuple[float, float, float]:
    """CPU seconds to the first token behind ``context`` stored tokens: restored, computed, and in memory."""
    ids = np.random.default_rng(context).integers(100, engine.space.vocab_size - 100, context + _QUESTION)
    prompt = ids.astype("<i4")
    with tempfile.TemporaryDirectory() as folder, BlockStore.open(Path(folder) / "store") as store:
        runtime = Runtime(engine, store, RuntimeOptions(context_cache_bytes=0))

        def first() -> None:
            next(runtime.complete(prompt, SamplingParams(max_tokens=1, ignore_eos=True)))

        full = seconds(first)
        store.flush()
        first()  # maps what is stored
        found = min(seconds(first) for _ in range(_ROUNDS))
        live, memory = engine.new_context(context + _QUESTION), float("inf")
        load_prefix(engine, store, live, runtime.request(prompt), context // engine.space.block_tokens)
        runtime.close()
    assert live.n == context
    for _ in range(_ROUNDS):
        memory = min(memory, seconds(engine.prefill, live, prompt[context:]))
        if not engine.crop(live, context):
            break  # windows that were passed are gone
    return found, full, memory


def run(options: Options) -> list[Figure]:
    """Every engine at every length."""
    os.environ["OMP_NUM_THREADS"] = "1"
    engines: dict[str, tuple[Callable[[], str], str, tuple[int, ...]]] = {
        "llama_cpp": (lambda: str(get_gguf("smollm2")), "llama_cpp", options.pick((128,), _SHORT)),
        "llama_cpp, gemma": (lambda: str(get_gguf("gemma3-270m")), "llama_cpp", options.pick((), _LONG)),
        "onnxruntime": (lambda: str(build("smollm2", "int4", progress=False)), "onnxruntime", options.pick((), _SHORT)),
        "torch": (lambda: str(get("smollm2")), "torch", options.pick((), _SHORT)),
    }
    figures = []
    for name, (place, kind, contexts) in engines.items():
        engine = open_engine(place(), engine=kind, threads=1) if contexts else None
        for number, context in enumerate(contexts):
            assert engine is not None
            options.step(name, number, len(contexts))
            figures += _figures(name, context, *restored(engine, context))
    return figures


def _figures(engine: str, context: int, found: float, full: float, memory: float) -> list[Figure]:
    return [
        Figure(
            metric=f"{context:,} tokens, {engine}",
            value=full / found,
            unit="x",
            bound=full / memory,
            bar=_BARS.get(context),
            note=f"CPU {1e3 * found:.0f} ms to the first token behind {context:,} stored ones and {_QUESTION} new ones,"
            f" {full:.2f} s computed, {1e3 * memory:.0f} ms with the context in memory",
        ),
        Figure(
            metric=f"{context:,} tokens, {engine}, over the bound",
            value=found / memory,
            unit="x",
            bound=1.0,
            better="lower",
            bar=_BOUND,
        ),
    ]

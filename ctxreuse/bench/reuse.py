"""Time to first token with a stored 2,048-token context, against full prefill and the cache already in memory.

Each round is a fresh process: it opens the engine (weights loaded, memory reserved, short warm-up prefills, as any
server does at start), then answers 2,048 stored tokens and a 32-token question three ways: from the store on
disk (its pages are in the system's page cache), with the same KV already in the engine's memory (the bound), and by
prefilling everything (the baseline; the quicker of ours and plain transformers). The peer is llama.cpp's slot restore
with the same weights in its own format, if ``llama_cpp`` is importable or CTXREUSE_LLAMA_PYTHON names a Python that has
it: its seconds are its own, so compare the ratios to its own prefill.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from ctxreuse.bench.measure import FRESH_TIMEOUT, Options, fresh
from ctxreuse.bench.report import Figure
from ctxreuse.errors import EngineError

if TYPE_CHECKING:
    from ctxreuse.engines import Engine
    from ctxreuse.identity.keys import Tokens

__all__ = ["answer", "fill", "run"]

T = TypeVar("T")
CONTEXT, QUESTION, MODEL = 2048, 32, "smollm2"

_LLAMA = """
import ctypes, json, sys, time
import llama_cpp.llama_cpp as C
from llama_cpp import Llama
path, context, question, state = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
import numpy as np
prompt = np.random.default_rng(7).integers(100, 49000, context + question).tolist()
def open_():
    return Llama(path, n_ctx=context + question + 64, n_threads=2, n_threads_batch=2, n_batch=512, verbose=False)
ll = open_(); ctx = ll._ctx.ctx
ll.eval(prompt[:16]); ll.reset(); C.llama_memory_clear(C.llama_get_memory(ctx), True); ll.n_tokens = 0
start = time.perf_counter(); ll.eval(prompt); out = {"prefill": time.perf_counter() - start}
C.llama_memory_seq_rm(C.llama_get_memory(ctx), 0, context, -1)
tokens = (C.llama_token * context)(*prompt[:context])
C.llama_state_seq_save_file(ctx, state.encode(), 0, tokens, context)
C.llama_memory_clear(C.llama_get_memory(ctx), True)
got = (C.llama_token * context)(); n = ctypes.c_size_t()
start = time.perf_counter()
assert C.llama_state_seq_load_file(ctx, state.encode(), 0, got, context, ctypes.byref(n)) and n.value == context
ll.n_tokens = context; ll.input_ids[:context] = prompt[:context]
ll.eval(prompt[context:])
out["restore"] = time.perf_counter() - start
print(json.dumps(out))
"""


def _opened(dtype: str) -> tuple[Engine, Tokens]:
    """An engine as a server has it after its start, and the prompt: context and question."""
    from ctxreuse.engines import open_engine

    engine = open_engine(MODEL, dtype=dtype, reserve=CONTEXT + QUESTION + 64)
    # The libraries behind the first prefills of this size set themselves up.
    warm = engine.new_context(4 * QUESTION)
    for _ in range(3):
        engine.prefill(warm, np.arange(QUESTION, dtype="<i4"))
    ids = np.random.default_rng(7).integers(100, engine.space.vocab_size - 100, CONTEXT + QUESTION)
    return engine, ids.astype("<i4")


def fill(folder: str, dtype: str) -> None:
    """Prefill the context and store it in ``folder``."""
    from ctxreuse.runtime import Runtime, RuntimeOptions
    from ctxreuse.store import open_store

    engine, prompt = _opened(dtype)
    with open_store(folder) as store:
        Runtime(engine, store, RuntimeOptions(context_cache_bytes=0)).warm(prompt[:CONTEXT])
        store.flush()


def answer(folder: str, dtype: str) -> dict[str, float]:
    """Seconds to the first token by each way, and how far logits are apart; in a process of its own."""
    import torch
    from transformers import DynamicCache

    from ctxreuse.engines.torch_hf.engine import TorchEngine
    from ctxreuse.runtime import Runtime, RuntimeOptions
    from ctxreuse.store import open_store

    engine, prompt = _opened(dtype)
    assert isinstance(engine, TorchEngine)
    out: dict[str, float] = {}
    with open_store(folder) as store:
        runtime = Runtime(engine, store, RuntimeOptions(context_cache_bytes=0))
        out["stored"], done = _timed(lambda: runtime.prefill(prompt))
        assert done.usage.cached_tokens == CONTEXT, done.usage
        logits, context = done.logits, done.context
        # The bound: the same context, cropped back, is in memory already.
        cropped = []
        for _ in range(3):
            assert engine.crop(context, CONTEXT)
            seconds, again = _timed(partial(engine.prefill, context, prompt[CONTEXT:]))
            cropped.append(seconds)
        out["memory"] = statistics.median(cropped)
        out["differs"] = float(np.abs(logits - again).max())
        del context, done
        # Again in a process that has read the store once: what a running daemon sees.
        out["warm"], done = _timed(lambda: runtime.prefill(prompt))
        del done
    prefill, full = _timed(lambda: engine.prefill(engine.new_context(CONTEXT + QUESTION), prompt))
    out["full_differs"] = float(np.abs(logits - full).max())
    out["same_token"] = float(np.argmax(logits) == np.argmax(full))
    ids = torch.from_numpy(prompt.astype(np.int64))[None]
    engine.model.set_attn_implementation("sdpa")
    with torch.inference_mode():
        plain, _ = _timed(lambda: engine.model(ids, past_key_values=DynamicCache(), logits_to_keep=1).logits)
    return out | {"prefill": prefill, "plain": plain, "full": min(prefill, plain)}


def _timed(call: Callable[[], T]) -> tuple[float, T]:
    start = time.perf_counter()
    result = call()
    return time.perf_counter() - start, result


def run(options: Options) -> list[Figure]:
    """Figures in seconds and as ratios; medians over fresh processes."""
    with tempfile.TemporaryDirectory(prefix="ctxreuse-bench-") as folder:
        path = Path(folder)
        exact = _measure(options, path, "float32", options.pick(1, 5))
        fast = _measure(options, path, "bfloat16", options.pick(1, 3))
        options.step("llama.cpp, if it is installed")
        peer = _llama(path, options.pick(1, 3))
    return [
        Figure(
            metric="time to first token, stored context, fresh process",
            value=exact.median("stored"),
            unit="s",
            baseline=exact.median("full"),
            peer=peer["restore"] if peer else None,
            bound=exact.median("memory"),
            better="lower",
            note="float32; baseline: full prefill; peer: llama.cpp slot restore (f16 KV, 4-bit weights); "
            "bound: KV in memory",
        ),
        Figure(
            metric="faster than full prefill",
            value=exact.ratio("full", "stored"),
            unit="x",
            peer=peer["prefill"] / peer["restore"] if peer else None,
            bound=exact.ratio("full", "memory"),
            bar=20.0,
            note="peer: llama.cpp's restore against llama.cpp's own, slower prefill",
        ),
        Figure(
            metric="over the bound, fresh process",
            value=exact.ratio("stored", "memory"),
            unit="x",
            bound=1.0,
            better="lower",
            bar=1.2,
        ),
        Figure(
            metric="over the bound, running process",
            value=exact.ratio("warm", "memory"),
            unit="x",
            bound=1.0,
            better="lower",
            bar=1.2,
        ),
        Figure(
            metric="largest logit difference to full prefill",
            value=max(exact["full_differs"]),
            unit="logits",
            better="lower",
            bar=1e-3,
            note="float32, scale about 35",
        ),
        Figure(
            metric="first token equal to full prefill",
            value=statistics.mean(exact["same_token"]),
            unit="share",
            bar=1.0,
        ),
        Figure(
            metric="time to first token, bfloat16",
            value=fast.median("stored"),
            unit="s",
            baseline=fast.median("full"),
            peer=peer["restore"] if peer else None,
            bound=fast.median("memory"),
            better="lower",
            note="as the first figure, with half the bytes",
        ),
        Figure(
            metric="faster than full prefill, bfloat16",
            value=fast.ratio("full", "stored"),
            unit="x",
            bound=fast.ratio("full", "memory"),
        ),
    ]


class _Rounds(dict[str, list[float]]):
    """What the fresh processes measured, one number a round."""

    def median(self, name: str) -> float:
        return statistics.median(self[name])

    def ratio(self, over: str, under: str) -> float:
        """Median over rounds of one time divided by another of the same process."""
        return statistics.median(a / b for a, b in zip(self[over], self[under], strict=True))


def _measure(options: Options, folder: Path, dtype: str, rounds: int) -> _Rounds:
    options.step(f"{dtype}: prefilling and storing the context")
    fresh(fill, folder / dtype, dtype)
    found = _Rounds()
    for i in range(rounds):
        options.step(f"{dtype}: fresh process {i + 1} of {rounds}")
        for name, value in fresh(answer, folder / dtype, dtype).items():
            found.setdefault(name, []).append(float(value))
    return found


def _llama(folder: Path, rounds: int) -> Mapping[str, float] | None:
    """Median seconds of llama.cpp's own prefill and slot restore, or None if it is not installed."""
    python = os.environ.get("CTXREUSE_LLAMA_PYTHON", sys.executable)
    probe = subprocess.run([python, "-c", "import llama_cpp"], capture_output=True, check=False)
    if probe.returncode:
        return None
    from ctxreuse import models

    gguf = models.get(MODEL, progress=False, keep_gguf=True) / f"{MODEL}.gguf"
    if not gguf.exists():
        raise EngineError("the GGUF of the model is missing", where=str(gguf), fix=f"Run: ctxreuse model rm {MODEL}")
    runs: list[dict[str, Any]] = []
    for _ in range(rounds):
        command = [python, "-c", _LLAMA, str(gguf), str(CONTEXT), str(QUESTION), str(folder / "slot.bin")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=FRESH_TIMEOUT, check=False)
        if done.returncode:
            raise EngineError(f"llama.cpp failed: {done.stderr.strip()[-300:]}")
        runs.append(json.loads(done.stdout.strip().splitlines()[-1]))
    return {name: statistics.median(r[name] for r in runs) for name in ("prefill", "restore")}

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
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ctxreuse.bench.measure import FRESH_TIMEOUT, Options, fresh
from ctxreuse.bench.report import Figure
from ctxreuse.errors import EngineError

__all__ = ["run"]

CONTEXT, QUESTION, MODEL = 2048, 32, "smollm2"

_SETUP = """
import json, sys, time
import numpy as np
from ctxreuse.engines import open_engine
from ctxreuse.runtime import Runtime
from ctxreuse.store import open_store
path, context, question, model, dtype = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5]
engine = open_engine(model, dtype=dtype, reserve=context + question + 64)
# As any server at start: the libraries behind the first prefills of this size set themselves up.
warm = engine.start(4 * question)
for _ in range(3):
    engine.prefill(warm, np.arange(question, dtype="<i4"))
del warm
rng = np.random.default_rng(7)
prompt = rng.integers(100, engine.space.vocab_size - 100, context + question).astype("<i4")
def timed(call):
    start = time.perf_counter()
    result = call()
    return time.perf_counter() - start, result
"""

_FILL = (
    _SETUP
    + """
with open_store(path) as store:
    runtime = Runtime(engine, store, live_bytes=0)
    runtime.warm(prompt[:context])
    store.flush()
print(json.dumps({}))
"""
)

_ROUND = (
    _SETUP
    + """
out = {}
with open_store(path) as store:
    runtime = Runtime(engine, store, live_bytes=0)
    out["stored"], done = timed(lambda: runtime.prefill(prompt))
    assert done.usage.cached_tokens == context, done.usage
    logits, live = done.logits, done.live
    # The bound: the same context, cropped back, is in memory already.
    for name in ("memory_1", "memory_2", "memory_3"):
        assert engine.crop(live, context)
        out[name], again = timed(lambda: engine.prefill(live, prompt[context:]))
    out["differs"] = float(np.abs(logits - again).max())
    del live, done
    # Again in a process that has read the store once: what a running daemon sees.
    out["warm"], done = timed(lambda: runtime.prefill(prompt))
    del done
out["prefill"], full = timed(lambda: engine.prefill(engine.start(context + question), prompt))
out["full_differs"] = float(np.abs(logits - full).max())
out["same_token"] = bool(int(np.argmax(logits)) == int(np.argmax(full)))
import torch
from transformers import DynamicCache
ids = torch.from_numpy(prompt.astype(np.int64))[None]
engine.model.set_attn_implementation("sdpa")
with torch.inference_mode():
    out["plain"], _ = timed(lambda: engine.model(ids, past_key_values=DynamicCache(), logits_to_keep=1).logits)
print(json.dumps(out))
"""
)

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
    arguments = (folder / dtype, CONTEXT, QUESTION, MODEL, dtype)
    options.step(f"{dtype}: prefilling and storing the context")
    fresh(_FILL, *arguments)
    found = _Rounds()
    for i in range(rounds):
        options.step(f"{dtype}: fresh process {i + 1} of {rounds}")
        one = fresh(_ROUND, *arguments)
        one["memory"] = statistics.median(one[f"memory_{n}"] for n in (1, 2, 3))
        one["full"] = min(one["prefill"], one["plain"])
        for name, value in one.items():
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

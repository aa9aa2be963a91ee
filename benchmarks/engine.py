"""Decode and prefill through the engine's door against the bare loop of llama.cpp's library on the same weights (live).

Both run in turns, on one thread, and CPU time is compared, so that other work on the machine does not matter. The bare
loop fills the library's batch and calls ``llama_decode``, with a sequence for each context, and does not even look at
the logits. ``--model``: a GGUF file, or a known name, instead of SmolLM2.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import numpy as np

from ctxreuse.bench.measure import Options
from ctxreuse.bench.report import Figure
from ctxreuse.engines import open_engine
from ctxreuse.engines.llama_cpp.library import Batch, LlamaModel
from ctxreuse.errors import ConfigError, EngineError
from ctxreuse.identity.keys import Tokens

__all__ = ["OPTIONS", "run"]

OPTIONS = ("model",)
_CONTEXTS, _CONTEXT, _PREFILL = (1, 4, 8), 700, 512
#: Our door may cost 3 % of the library's own speed.
_BAR = 0.97


class _Bare:
    """Sequences 0 to ``streams`` in a llama.cpp context, and one batch for all of them."""

    def __init__(self, model: LlamaModel, cells: int, streams: int, most: int) -> None:
        self._calls = model.library.calls
        self._handle = self._calls.llama_init_from_model(model.handle, model.library.params(cells, streams, most))
        if not self._handle:
            raise EngineError("no memory for the bare loop")
        self._calls.llama_set_n_threads(self._handle, 1, 1)
        self._ids, self._at, self._slots, self._one = np.ones((4, most), np.int32)
        self._wanted = np.zeros(most, np.int8)
        self._places = (self._slots.ctypes.data + 4 * np.arange(most)).astype(np.uint64)

    def prefill(self, slot: int, ids: Tokens) -> None:
        """Compute a prompt from position 0 on."""
        n = len(ids)
        self._ids[:n], self._at[:n], self._slots[:n] = ids, np.arange(n), slot
        self._wanted[:n], self._wanted[n - 1] = 0, 1
        self._run(n)

    def decode(self, streams: int, at: int, token: int) -> None:
        """One token of each sequence."""
        self._ids[:streams], self._at[:streams], self._slots[:streams] = token, at, np.arange(streams)
        self._wanted[:streams] = 1
        self._run(streams)

    def crop(self, slot: int, n: int) -> None:
        """Forget what follows position ``n``."""
        self._calls.llama_memory_seq_rm(self._calls.llama_get_memory(self._handle), slot, n, -1)

    def close(self) -> None:
        """Free the memory."""
        self._calls.llama_free(self._handle)

    def _run(self, n: int) -> None:
        ids, at, one, places, wanted = (
            array.ctypes.data for array in (self._ids, self._at, self._one, self._places, self._wanted)
        )
        if self._calls.llama_decode(self._handle, Batch(n, ids, None, at, one, places, wanted)):
            raise EngineError("the bare loop failed")


def _compare(rounds: int, door: Callable[[], None], bare: Callable[[], None]) -> tuple[float, float, float]:
    """CPU seconds of each, and the median of the bare loop's share of the door's."""
    pairs = []
    for number in range(rounds):
        seconds = dict[Callable[[], None], float]()
        for one in (door, bare) if number % 2 else (bare, door):
            began = time.process_time()
            one()
            seconds[one] = time.process_time() - began
        pairs.append((seconds[door], seconds[bare]))
    return (
        statistics.median(a for a, _ in pairs),
        statistics.median(b for _, b in pairs),
        statistics.median(b / a for a, b in pairs),
    )


def run(options: Options) -> list[Figure]:
    """Tokens a CPU second, and the share of the library's own speed that comes through the door."""
    from ctxreuse.engines.llama_cpp import LlamaEngine

    options.step("opening the model")
    engine = open_engine(options.model or "smollm2", engine="llama_cpp", threads=1)
    if not isinstance(engine, LlamaEngine):
        raise ConfigError("the bench measures llama.cpp", where=options.model or "", fix="Name a GGUF file")
    rng, rounds, steps = np.random.default_rng(0), options.pick(2, 9), options.pick(2, 8)
    length, figures = options.pick(70, _CONTEXT), list[Figure]()
    one = np.array([7], np.int32)
    bare = _Bare(engine.model, 1024, max(_CONTEXTS), 768)

    def figure(name: str, tokens: int, found: Sequence[float]) -> None:
        door, plain, share = found
        note = f"{share:.3f} of the bare loop, one thread, tokens a second of CPU time"
        bar = None if options.quick else _BAR
        figures.append(Figure(metric=name, value=tokens / door, unit="tokens/s", baseline=tokens / plain, note=note))
        figures.append(Figure(metric=f"{name}_share", value=share, unit="x", bound=1.0, bar=bar))

    for count in _CONTEXTS:
        options.step(f"decoding {count}")
        contexts = [engine.new_context(length + 2 * steps * rounds) for _ in range(count)]
        for slot, context in enumerate(contexts):
            ids = rng.integers(0, engine.space.vocab_size, length).astype("<i4")
            engine.prefill(context, ids)
            bare.crop(slot, 0)
            bare.prefill(slot, ids)
        at = [length]

        def door(contexts: Sequence[object] = contexts) -> None:
            for _ in range(steps):
                engine.step([(context, one) for context in contexts])  # type: ignore[misc]

        def plain(count: int = count, at: list[int] = at) -> None:
            for _ in range(steps):
                bare.decode(count, at[0], 7)
                at[0] += 1

        door()
        plain()
        figure(f"decode_{count}", count * steps, _compare(rounds, door, plain))
    prompt = rng.integers(0, engine.space.vocab_size, options.pick(64, _PREFILL)).astype("<i4")
    options.step("prefill")

    def door_prefill() -> None:
        engine.prefill(engine.new_context(1024), prompt)

    def plain_prefill() -> None:
        bare.crop(0, 0)
        bare.prefill(0, prompt)

    figure("prefill", len(prompt), _compare(options.pick(1, 5), door_prefill, plain_prefill))
    bare.close()
    return figures

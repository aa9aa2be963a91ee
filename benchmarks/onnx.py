"""The engine onnxruntime beside the bare library: decode and prefill through its door.

The peer runs the same ONNX folder (SmolLM2, int4) with onnxruntime alone: one session with the same options, one buffer
for past and present, bound once. Eight contexts of the peer stand in one buffer from the start and decode in one pass.
All is CPU time of one thread, in rounds that take turns, so that other programs on the machine count little; ratios are
medians over rounds. ``--model``: another folder or known name.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import onnxruntime as ort

from ctxreuse.bench.measure import Options
from ctxreuse.bench.report import Figure
from ctxreuse.engines import open_engine
from ctxreuse.engines.base import Context, Engine
from ctxreuse.identity.keys import Tokens
from ctxreuse.models.build import build

__all__ = ["OPTIONS", "BareLoop", "run", "seconds"]

OPTIONS = ("model",)
_PROMPT, _SHORT, _ANSWER = 512, 128, 32
_SHARE = 0.97


class BareLoop:
    """onnxruntime on a folder, without this project: contexts side by side in one buffer a layer."""

    def __init__(self, folder: Path, contexts: int, capacity: int) -> None:
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        self.session = ort.InferenceSession(str(folder / "model.onnx"), options, providers=["CPUExecutionProvider"])
        self.contexts, self.n = contexts, 0
        self.binding, self.buffers = self.session.io_binding(), []
        dim = self._dim()
        for given in self.session.get_inputs():
            if given.name.startswith("past_key_values"):
                buffer = np.zeros((contexts, given.shape[1], capacity, dim), np.float32)
                self.buffers.append(buffer)
                for bind, name in (
                    (self.binding.bind_input, given.name),
                    (self.binding.bind_output, given.name.replace("past_key_values", "present")),
                ):
                    bind(name, "cpu", 0, np.float32, buffer.shape, buffer.ctypes.data)
        self._mask = np.ones((contexts, capacity), np.int64)
        *_, self._vocab = self.session.get_outputs()[0].shape

    def _dim(self) -> int:
        feed: dict[str, np.ndarray] = {"input_ids": np.ones((1, 1), np.int64), "attention_mask": np.ones((1, 1), "<i8")}
        for dim in (64, 16, 32, 128, 256):
            past = {
                one.name: np.zeros((1, one.shape[1], 0, dim), np.float32)
                for one in self.session.get_inputs()
                if one.name not in feed
            }
            try:
                self.session.run(["logits"], feed | past)
            except Exception:
                continue
            return dim
        raise ValueError("heads of no usual width")

    def run(self, ids: np.ndarray) -> np.ndarray:
        """Append ``ids`` [contexts, tokens] and return the last logits, [contexts, vocab]."""
        count = ids.shape[1]
        mask = np.ascontiguousarray(self._mask[:, : self.n + count])
        found = np.empty((self.contexts, 1, self._vocab), np.float32)
        for name, array in (("input_ids", ids), ("attention_mask", mask)):
            self.binding.bind_input(name, "cpu", 0, np.int64, array.shape, array.ctypes.data)
        self.binding.bind_output("logits", "cpu", 0, np.float32, found.shape, found.ctypes.data)
        self.session.run_with_iobinding(self.binding)
        self.n += count
        return found[:, -1]


def seconds(work: Callable[..., object], *given: object) -> float:
    """CPU seconds of this process for some work."""
    at = time.process_time()
    work(*given)
    return time.process_time() - at


def decode(engine: Engine, contexts: Sequence[Context], answer: int) -> None:
    """Let all contexts decode together, as the runtime's scheduler does."""
    last = [np.array([7], np.int32) for _ in contexts]
    for _ in range(answer):
        for number, logits in enumerate(engine.step(list(zip(contexts, last)))):
            assert isinstance(logits, np.ndarray)
            last[number] = np.array([logits.argmax()], np.int32)


def decode_bare(bare: BareLoop, answer: int) -> None:
    """The same with the bare library."""
    last = np.full((bare.contexts, 1), 7, np.int64)
    for _ in range(answer):
        last = bare.run(last).argmax(-1)[:, None]


def run(options: Options) -> list[Figure]:
    """Shares of the bare library's speed."""
    folder = build(options.model or "smollm2", "int4", progress=False)
    engine, rounds = open_engine(folder, threads=1), options.pick(1, 3)
    rng, answer = np.random.default_rng(3), options.pick(4, _ANSWER)
    figures = []
    for contexts, prompt in options.pick(((1, 70), (2, 70)), ((1, _PROMPT), (8, _SHORT))):
        ours: list[float] = []
        theirs: list[float] = []
        prefills: list[tuple[float, float]] = []
        bare = BareLoop(folder, contexts, 1024)
        for number in range(rounds):
            options.step(f"{contexts} contexts", number, rounds)
            ids = [rng.integers(0, engine.space.vocab_size, prompt).astype("<i4") for _ in range(contexts)]
            live, bare.n = [engine.new_context(1024) for _ in ids], 0
            stacked: Tokens = np.stack(ids).astype(np.int64)
            prefill = seconds(_prefill, engine, live, ids)
            prefills.append((prefill, seconds(bare.run, stacked)))
            decode(engine, live, 2)
            decode_bare(bare, 2)
            ours.append(seconds(decode, engine, live, answer))
            theirs.append(seconds(decode_bare, bare, answer))
        del live
        rate = contexts * answer / statistics.median(ours)
        figures.append(_share(f"decode_{contexts}", list(zip(ours, theirs)), rate, options))
        if contexts == 1:
            figures.append(_share("prefill", prefills, prompt / statistics.median(a for a, _ in prefills), options))
    return figures


def _prefill(engine: Engine, contexts: Sequence[Context], prompts: Sequence[Tokens]) -> None:
    for context, ids in zip(contexts, prompts):
        engine.prefill(context, ids)


def _share(metric: str, pairs: Sequence[tuple[float, float]], rate: float, options: Options) -> Figure:
    return Figure(
        metric=metric,
        value=statistics.median(theirs / ours for ours, theirs in pairs),
        unit="x",
        peer=1.0,
        bar=None if options.quick else _SHARE,
        note=f"of the bare library's speed; {rate:.0f} tokens a CPU second",
    )

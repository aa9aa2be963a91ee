"""Contexts that wait, kept quantised in the engine's memory and attended where they lie, against rows as computed.

SmolLM2 in float32 on this machine, its positions stretched to 32,768 (what is attended to, not what it says, is
measured). Contexts of some lengths, filled with rows of a real text relocated one behind another: how many fit into a
GiB; the first token of a question of 32 tokens, and each token after it, alone and for four contexts in one pass.
The baseline is the same context with its rows as they were computed (float32); for the first token the peer is loading
the context from disk. Kept in float16, twice as many contexts would fit as in float32. KL: of the next tokens of a
prose text behind 640 quantised ones, against exact rows.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any

import numpy as np

from ctxreuse.bench.measure import Options, paired
from ctxreuse.bench.report import Figure
from ctxreuse.block.format import parse
from ctxreuse.calibrate import default_texts
from ctxreuse.engines.chunks import CompressedFormat, Relocation
from ctxreuse.engines.text import HFText
from ctxreuse.engines.torch_hf import TorchEngine
from ctxreuse.engines.torch_hf.model import open_model
from ctxreuse.identity.keys import Tokens
from ctxreuse.runtime import Runtime, RuntimeOptions
from ctxreuse.store import BlockStore
from ctxreuse.testing.sealed import seal

__all__ = ["run"]

_LEVEL = "approx~kl-0.05"
_FORMATS: tuple[CompressedFormat, ...] = ("int8", "int4")
_SOURCE, _QUESTION, _LONGEST, _STRETCHED = 2_048, 32, 32_000, 32_768
_MORE, _FIRST, _DECODE = 3.5, 1.1, 3.0


class _Filled:
    """An engine, and contexts of any length whose rows are those of one text, again and again."""

    def __init__(self) -> None:
        model, folder = open_model("smollm2", "float32")
        model.config.max_position_embeddings = _STRETCHED
        self.engine = TorchEngine(model, HFText.open(folder))
        assert self.engine.text is not None
        text = "\n".join(default_texts()["held-out"]["prose"])
        self.ids: Tokens = np.asarray(self.engine.text.encode(text, markers=False)[: _SOURCE + _QUESTION], np.int32)
        self._views = [parse(data) for data in seal(self.engine, self.ids[:_SOURCE]).blocks]

    def context(self, tokens: int) -> Any:
        """A context of so many tokens, with room for a question and an answer."""
        size, made = self.engine.space.block_tokens, self.engine.new_context(tokens + 4 * _QUESTION)
        while made.n < tokens:
            blocks = min((tokens - made.n) // size, len(self._views))
            rows = [Relocation(made.n + i * size, view, 0, size) for i, view in enumerate(self._views[:blocks])]
            self.engine.chunks.insert_rows(made, self.ids[: blocks * size], rows, _LEVEL)
        return made

    def compressed(self, tokens: int, format: CompressedFormat) -> Any:
        made = self.context(tokens)
        self.engine.chunks.compress(made, format, _LEVEL)
        return made

    def first_token(self, context: Any) -> None:
        """Answer a question, and go back to where the context was."""
        n = context.n
        self.engine.prefill(context, self.ids[_SOURCE:])
        self.engine.crop(context, n)

    def decode(self, contexts: list[Any], tokens: count[int]) -> None:
        """One token of each."""
        number = next(tokens) % 1000 + 10
        self.engine.step([(one, np.array([number + i], np.int32)) for i, one in enumerate(contexts)])


def _kl(engine: TorchEngine, ids: Tokens, format: CompressedFormat | None) -> Any:
    context, steps = engine.new_context(), []
    engine.prefill(context, ids[:640])
    if format is not None:
        engine.chunks.compress(context, format, _LEVEL)
    for token in ids[640:672]:
        steps.append(engine.prefill(context, np.array([token], np.int32)))
    rows = np.stack(steps).astype(np.float64)
    rows -= rows.max(1, keepdims=True)
    return rows - np.log(np.exp(rows).sum(1, keepdims=True))


def run(options: Options) -> list[Figure]:
    """Contexts in a GiB, first tokens, tokens after them, and KL, by length and format."""
    filled = _Filled()
    figures: list[Figure] = []
    for tokens in options.pick((2_048,), (2_048, 8_192, _LONGEST)):
        options.step(f"{tokens:,} tokens")
        figures += _length(options, filled, tokens)
    options.step("KL")
    exact = _kl(filled.engine, filled.ids, None)
    for format in _FORMATS:
        off = exact - _kl(filled.engine, filled.ids, format)
        value = float((np.exp(exact) * off).sum(1).mean())
        figures.append(Figure(metric=f"KL of {format}, 640 tokens of prose", value=value, unit="nats", better="lower"))
    return figures


def _length(options: Options, filled: _Filled, tokens: int) -> list[Figure]:
    figures, plain = list[Figure](), filled.context(tokens)
    whole = 4 * filled.engine.space.token_nbytes // np.dtype(filled.engine.space.dtype).itemsize * plain.n
    kept = {format: filled.compressed(tokens, format) for format in _FORMATS}
    for format, one in kept.items():
        figures.append(
            Figure(
                metric=f"contexts of {tokens:,} tokens in a GiB, {format}",
                value=(1 << 30) / one.nbytes,
                unit="contexts",
                baseline=(1 << 30) / whole,
                bar=_MORE * 2 * (1 << 30) / whole if format == "int4" else None,
                note="baseline: float32 rows; the bar is 3.5 times what float16 rows would be"
                if format == "int4"
                else "",
            )
        )
    rounds = options.pick(3, 9)
    calls: dict[str, Callable[[], object]] = {"plain": partial(filled.first_token, plain)}
    calls |= {format: partial(filled.first_token, one) for format, one in kept.items()}
    with tempfile.TemporaryDirectory() as folder, BlockStore.open(folder, capacity=4 << 30) as store:
        if tokens == _SOURCE:
            runtime = Runtime(filled.engine, store, RuntimeOptions(context_cache_bytes=0))
            runtime.warm(filled.ids[:_SOURCE])
            store.flush()
            calls["disk"] = lambda: runtime.drop(runtime.prefill(filled.ids))
        first = paired(calls, rounds=rounds)
    for format in _FORMATS:
        figures.append(
            Figure(
                metric=f"first token behind {tokens:,} tokens, {format}",
                value=first[format] * 1e3,
                unit="ms",
                better="lower",
                baseline=first["plain"] * 1e3,
                peer=first["disk"] * 1e3 if "disk" in first else None,
                bar=_FIRST * first["plain"] * 1e3,
            )
        )
    for many in (1, 4) if tokens <= 8_192 else (1,):
        numbers = count()
        groups = {"plain": [plain, *(filled.context(tokens) for _ in range(many - 1))]}
        for format, one in kept.items():
            groups[format] = [one, *(filled.compressed(tokens, format) for _ in range(many - 1))]
        spent = paired({name: partial(filled.decode, of, numbers) for name, of in groups.items()}, rounds=3 * rounds)
        for format in _FORMATS:
            figures.append(
                Figure(
                    metric=f"a token of each of {many} behind {tokens:,}, {format}",
                    value=spent[format] * 1e3,
                    unit="ms",
                    better="lower",
                    baseline=spent["plain"] * 1e3,
                    bar=spent["plain"] * 1e3 / _DECODE if tokens == _LONGEST else None,
                )
            )
    return figures

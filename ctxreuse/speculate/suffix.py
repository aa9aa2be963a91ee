"""An index of the suffixes of token sequences: how a text that ends so has gone on before."""

from __future__ import annotations

import secrets
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ctxreuse.errors import ConfigError
from ctxreuse.identity.keys import Tokens
from ctxreuse.kernels.dispatch import native as _native

__all__ = ["DEPTH", "Continuation", "SuffixIndex"]

#: Tokens of a text's end that are compared at most.
DEPTH = 64
#: Tokens that are appended at a time, as the interpreter waits meanwhile: less than a millisecond.
_AT_ONCE = 4096
_LEAST = 1024
#: Made once: a name of a type is looked up in a tenth of the time of a draft.
_INT, _FLOAT = np.dtype("<i4"), np.dtype("<f4")


class Continuation(NamedTuple):
    """How a text may go on.

    Attributes:
        ids: tokens, int32 [n].
        shares: of each the share of the places that say so, weighted by how well they match: float32 [n], up to 1.
        matched: tokens in which the best place agrees with the text's end, up to `DEPTH`.
    """

    ids: Tokens
    shares: npt.NDArray[np.float32]
    matched: int


class SuffixIndex:
    """Texts as token ids, and where each of their suffixes was before. Any thread may call.

    The newest ``tokens`` are kept, at 20 bytes each, and memory grows with what there is. Work is bounded, whatever the
    texts are: a draft looks at 48 places, appending a token at none.
    """

    def __init__(self, tokens: int = 1 << 20) -> None:
        """``tokens``: most that are kept; the next lower power of two. Raises ConfigError for less than 1,024."""
        if tokens < _LEAST:
            raise ConfigError(f"an index of {tokens} tokens is of no use", fix=f"Give it at least {_LEAST}")
        self.most = 1 << (min(tokens, 1 << 30).bit_length() - 1)
        # Nobody can make texts that all fall into one of its chains.
        self._native = _native.suffix_open(self.most, secrets.randbits(63))

    def __len__(self) -> int:
        """Tokens that are kept, and the ends between texts."""
        return _native.suffix_figures(self._native)[0]

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""
        return _native.suffix_figures(self._native)[2]

    def add(self, ids: Tokens, *, begins: bool = True) -> None:
        """Append a text, or unless it ``begins`` what follows the last one; ids are 0 or more. Raises MemoryError."""
        ids = np.ascontiguousarray(ids, "<i4")
        for start in range(0, len(ids), _AT_ONCE):
            _native.suffix_append(self._native, ids[start : start + _AT_ONCE], begins and not start)

    def draft(self, tail: Tokens, count: int) -> Continuation:
        """Return how a text that ends in ``tail`` goes on, ``count`` tokens at most."""
        ids, shares = np.empty(count, _INT), np.empty(count, _FLOAT)
        made, matched = _native.suffix_continue(self._native, np.ascontiguousarray(tail[-DEPTH:], _INT), ids, shares)
        return Continuation(ids[:made], shares[:made], matched)

    def newest(self, count: int) -> Tokens:
        """Return the newest tokens, ``count`` at most, oldest first; -1 between texts."""
        ids = np.empty(count, "<i4")
        return ids[: _native.suffix_newest(self._native, ids)]

    def check(self) -> None:
        """Raise AssertionError where bounds are exceeded, or what is kept cannot be texts."""
        kept = self.newest(self.most)
        assert len(kept) == len(self) <= self.most, "miscounted tokens"
        assert int(kept.min(initial=0)) >= -1, "a token below 0"
        assert self.nbytes <= 20 * max(self.most, 1024) + 1024, "too many bytes"

"""Text of ids without their tokenizer, where the text of several is that of each, joined.

So it is with byte-level vocabularies, and with SentencePiece ones that do not drop a leading blank. A process without
the tokenizer can decode then; to ask the one that has it for each token takes two changes between processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ctxreuse.constrain.vocabulary import HasVocabulary, Vocabulary
from ctxreuse.engines.text import TextModel
from ctxreuse.identity.keys import Tokens

__all__ = ["TokenPieces", "pieces_of"]

#: Sequences that are compared with what the tokenizer makes of them, and their ids at most.
_TRIED, _LONG = 256, 8
#: What some tokenizers tidy up in a text of several tokens, and characters of several bytes.
_TIDIED = "a . b ? c ! d , e ' f n't g 'm h 's i 've j 're  k\n\n  l\t\u00e9\u4e16\U0001f600 \u00e9"


class TokenPieces(NamedTuple):
    """The bytes of all ids, one behind the other; ``ends`` int64 [ids]: where each ends. Special ids have none."""

    text: bytes
    ends: npt.NDArray[np.int64]

    def decode(self, ids: Sequence[int] | Tokens) -> str | None:
        """Return what the tokenizer would; None for an id that it may not know."""
        out, ends = [], self.ends
        for i in ids:
            if not 0 <= i < len(ends):
                return None
            out.append(self.text[ends[i - 1] if i else 0 : ends[i]])
        return b"".join(out).decode("utf-8", "replace")


def pieces_of(text: TextModel) -> TokenPieces | None:
    """Return the pieces of a model's ids if they can be joined, by trying. Takes up to a second."""
    if not isinstance(text, HasVocabulary):
        return None
    vocabulary = text.vocabulary()
    special = {*vocabulary.special}
    tokens = [b"" if i in special else token for i, token in enumerate(vocabulary.tokens)]
    if not tokens:
        return None
    pieces = TokenPieces(b"".join(tokens), np.cumsum([len(token) for token in tokens], dtype="<i8"))
    tried = [*_tried(vocabulary), text.encode(_TIDIED).tolist()]
    if any(pieces.decode(ids) != text.decode(ids) for ids in tried):
        return None
    return pieces


def _tried(vocabulary: Vocabulary) -> list[list[int]]:
    """Ids in sequences: drawn from all, from those that are parts of characters, and each that looks like a marker."""
    tokens, rng = vocabulary.tokens, Random(1)
    parts = [i for i, token in enumerate(tokens) if token.decode("utf-8", "replace").encode() != token] or [0]
    markers = [i for i, token in enumerate(tokens) if token[:1] in b"<[" and token[-1:] in b">]" and len(token) > 2]
    ranges = [range(len(tokens)), parts, [*range(min(len(tokens), 256)), *parts]]
    drawn = [[rng.choice(of) for _ in range(rng.randint(1, _LONG))] for of in ranges for _ in range(_TRIED)]
    return drawn + [[i, *drawn[n % _TRIED]] for n, i in enumerate([*markers, *vocabulary.special])]

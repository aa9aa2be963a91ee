"""The package `tokenizers` keeps the tokens of words that it has seen; this says of how many."""

from __future__ import annotations

from typing import Any

__all__ = ["bound_word_cache"]


def bound_word_cache(tokenizer: Any, most: int) -> None:
    """Let a ``tokenizers.Tokenizer`` keep the tokens of at most so many words.

    It keeps those of 10,000 words of up to 256 letters, for each thread and tokenizer: 65 MB where all are long. The
    package says nothing of how to set that; one that cannot be set is left as it is.
    """
    resize = getattr(tokenizer.model, "_resize_cache", None)  # models that look up whole words keep none
    if resize is not None:
        resize(most)

"""Texts and queries as the index sees them: words, phrases in quotes, and each sign of scripts without spaces."""

from __future__ import annotations

import re

__all__ = ["indexed", "snippet", "terms"]

#: Words of a query that are looked at.
MOST_TERMS = 64
#: Characters of a text that are indexed, and of a query that are read.
MOST_TEXT, MOST_QUERY = 1_000_000, 8192
#: Characters of a snippet on each side.
_AROUND = 60

# Chinese, Japanese and Korean are written without spaces: each sign is a word, and a row of them a phrase.
_SIGNS = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af\uf900-\ufaff"
_SIGN = re.compile(f"([{_SIGNS}])")
_TERM = re.compile(r'"([^"]*)"|(\w+)')


def indexed(text: str) -> str:
    """Return a text as it is given to the index."""
    return _SIGN.sub(r" \1 ", text[:MOST_TEXT]).replace("\0", " ")


def terms(query: str) -> list[str]:
    """Return the words and the phrases in quotes of a query, each once, as they are given to the index."""
    found: dict[str, None] = {}
    for phrase, word in _TERM.findall(query[:MOST_QUERY]):
        term = " ".join(re.findall(r"\w+", indexed(phrase or word)))
        if term:
            found.setdefault(term.casefold())
    return list(found)[:MOST_TERMS]


def snippet(content: str, words: list[str]) -> str:
    """Return the text around the first word, most wanted first, that stands in it in any form."""
    folded = content[:MOST_TEXT].casefold()
    at = length = 0
    for word in words:
        start = word.split(" ")[0]
        start = start if len(start) < 6 else start[: max(5, len(start) - 3)]  # before endings
        if (found := folded.find(start)) >= 0:
            at, length = min(found, len(content)), len(word)
            break
    first, last = max(0, at - _AROUND), at + length + _AROUND
    cut = " ".join(content[first:last].split())
    return ("…" if first else "") + cut + ("…" if last < len(content) else "")

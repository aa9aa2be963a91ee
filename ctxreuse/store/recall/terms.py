"""Texts and queries as the index sees them: words, phrases in quotes, and each sign of scripts without spaces."""

from __future__ import annotations

import re

__all__ = ["MOST_PASSAGES", "indexed", "passages", "snippet", "terms"]

#: Words of a query that are looked at.
MOST_TERMS = 64
#: Characters of a text that are indexed, and of a query that are read.
MOST_TEXT, MOST_QUERY = 1_000_000, 8192
#: Characters of a snippet on each side.
_AROUND = 60
#: Characters of a passage, about; a passage is half as long at least, and has so many of the next one as well, so that
#: a phrase that begins in it is found. And what bounds the passages of a text.
_PASSAGE, _SHARED = 400, 100
MOST_PASSAGES = 2 * MOST_TEXT // _PASSAGE + 1

# Chinese, Japanese and Korean are written without spaces: each sign is a word, and a row of them a phrase.
_SIGNS = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af\uf900-\ufaff"
_SIGN = re.compile(f"([{_SIGNS}])")
_END = re.compile(r"[.!?]\s|\n|[。！？]")
_TERM = re.compile(r'"([^"]*)"|(\w+)')


def indexed(text: str) -> str:
    """Return a text as it is given to the index."""
    return _SIGN.sub(r" \1 ", text[:MOST_TEXT]).replace("\0", " ")


def passages(text: str) -> list[str]:
    """Return the pieces of a text that are found and ranked by themselves: it all, if it is short.

    BM25 counts a word for less in a longer text, so a long turn would stand behind every short one that has the word.
    """
    text, found, start = text[:MOST_TEXT], list[str](), 0
    while len(text) - start > _PASSAGE + _PASSAGE // 2:
        piece = text[start : start + _PASSAGE]
        ends = [end.end() for end in _END.finditer(piece, _PASSAGE // 2)]
        length = ends[-1] if ends else max(piece.rfind(" ", _PASSAGE // 2) + 1, 0) or _PASSAGE
        found.append(text[start : start + length + _SHARED])
        start += length
    return [*found, text[start:]]


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

"""What was found in a memory as documents for a prompt, within a number of tokens."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, TypedDict

import msgspec

from ctxreuse.engines.text import TextModel
from ctxreuse.errors import ConfigError
from ctxreuse.html import table
from ctxreuse.store import Hit, Turn

__all__ = ["Recalled", "SearchLimits", "count_tokens", "gather"]

#: Bytes of a text that are about a token.
_BYTES = 4


class SearchLimits(TypedDict, total=False):
    """Limits of `Memory.search` and `Memory.recall`; see `Filters`."""

    session: str | None
    beside: str | None
    namespace: str | None
    role: str | None
    since: float | datetime | None
    where: Mapping[str, Any] | None


class Recalled(msgspec.Struct, frozen=True):
    """Documents for `Session.ask`, best first, the hits that they are of, and their tokens together."""

    documents: tuple[str, ...]
    hits: tuple[Hit, ...]
    tokens: int

    def _repr_html_(self) -> str:
        rows = [
            (one.score, one.session.name, one.turn.role, one.turn.content, ", ".join(one.explain)) for one in self.hits
        ]
        return table(("score", "session", "role", "text", "found by"), rows, f"{self.tokens:,} tokens")


def count_tokens(text: TextModel | None) -> Callable[[str], int]:
    """Return what counts the tokens of a text; without a model, about."""
    if text is None:
        return lambda document: -(-len(document.encode()) // _BYTES)
    encode = text.encode
    return lambda document: len(encode(document))


def gather(hits: Sequence[Hit], tokens: int, count: Callable[[str], int]) -> Recalled:
    """Return the documents of hits that fit into so many tokens; if none does, the beginning of the first."""
    if tokens < 1:
        raise ConfigError(f"tokens is {tokens}", fix="Give 1 or more")
    chosen, left = dict[str, Hit](), tokens
    for hit in hits:
        document = _document(hit.turn)
        # A token is seldom more than 16 bytes: what is far too long is not counted.
        if document not in chosen and len(document) <= 16 * left and (size := count(document)) <= left:
            chosen[document], left = hit, left - size
    if not chosen and hits:
        document = _cut(_document(hits[0].turn), tokens, count)
        chosen[document], left = hits[0], tokens - count(document)
    return Recalled(tuple(chosen), tuple(chosen.values()), tokens - left)


def _document(turn: Turn) -> str:
    """Return a turn as a document: the same text whenever it is recalled."""
    return f"[{turn.role}, {time.strftime('%Y-%m-%d', time.gmtime(turn.created))}]\n{turn.content}"


def _cut(document: str, tokens: int, count: Callable[[str], int]) -> str:
    low, high = 0, min(len(document), 16 * tokens)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if count(document[:middle]) <= tokens else (low, middle - 1)
    return document[:low]

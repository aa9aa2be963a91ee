"""Finding words in the turns that sessions reach."""

from __future__ import annotations

from collections.abc import Sequence

from ctxreuse.store.history import History
from ctxreuse.store.ledger_records import Hit, Session

__all__ = ["search"]

_AROUND = 60


def search(history: History, sessions: Sequence[Session], text: str, limit: int) -> list[Hit]:
    """Turns that hold every word of ``text`` (case folded), from the first session on and newest turn first.

    A turn that several sessions share is reported once, with the first of them.
    """
    words = text.casefold().split()
    hits: list[Hit] = []
    seen: set[int] = set()
    if not words:
        return hits
    for session in sessions:
        for id in history.up(session.head):
            if len(hits) >= limit:
                return hits
            if id in seen:
                break
            seen.add(id)
            turn = history.turn(id)
            folded = turn.content.casefold()
            if all(word in folded for word in words):
                hits.append(Hit(session, turn, _snippet(turn.content, folded, words[0])))
    return hits


def _snippet(content: str, folded: str, word: str) -> str:
    # Folding may change lengths ("ß"); then the place is off by a few characters, which a snippet can bear.
    at = min(folded.find(word), len(content))
    start, end = max(0, at - _AROUND), at + len(word) + _AROUND
    cut = " ".join(content[start:end].split())
    return ("…" if start else "") + cut + ("…" if end < len(content) else "")

"""Texts that are in no index, put in order by a query: the words and the scores of the index, for some thousands."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable

from ctxreuse.store.recall.stems import ENGLISH, tokenize
from ctxreuse.store.recall.terms import indexed, terms

__all__ = ["Words", "rank"]


class Words:
    """The words of some texts, in memory, by numbers that the caller gives them. For one thread at a time."""

    def __init__(self) -> None:
        self._db = sqlite3.connect(":memory:", check_same_thread=False, isolation_level=None)
        self._db.execute(f'CREATE VIRTUAL TABLE words USING fts5(text, tokenize="{tokenize(ENGLISH)}")')

    def put(self, texts: Iterable[tuple[int, str]]) -> None:
        """Add texts by number, each in the place of the one with that number, if any."""
        rows = ((number, indexed(text)) for number, text in texts)
        self._db.executemany("INSERT OR REPLACE INTO words(rowid, text) VALUES (?, ?)", rows)

    def remove(self, number: int) -> None:
        """Remove a text, if there is one of that number."""
        self._db.execute("DELETE FROM words WHERE rowid = ?", (number,))

    def rank(self, query: str) -> list[tuple[int, float]]:
        """Return the numbers of texts with any of the query's words and their BM25 scores, best first."""
        wanted = terms(query)
        if not wanted:
            return []
        match = " OR ".join(f'"{term}"' for term in wanted)
        sql = "SELECT rowid, -bm25(words) AS score FROM words WHERE words MATCH ? ORDER BY score DESC, rowid"
        return [(int(number), float(score)) for number, score in self._db.execute(sql, (match,))]

    def __del__(self) -> None:
        self._db.close()


def rank(query: str, texts: Iterable[str]) -> list[tuple[int, float]]:
    """Return the places of texts with any of the query's words and their BM25 scores, best first."""
    words = Words()
    words.put(enumerate(texts))
    return words.rank(query)

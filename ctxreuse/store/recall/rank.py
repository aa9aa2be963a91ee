"""Texts that are in no index, put in order by a query: the words and the scores of the index, for some thousands."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable

from ctxreuse.store.recall.tables import TOKENIZE
from ctxreuse.store.recall.terms import indexed, terms

__all__ = ["rank"]


def rank(query: str, texts: Iterable[str]) -> list[tuple[int, float]]:
    """Return the places of texts with any of the query's words and their BM25 scores, best first."""
    wanted = terms(query)
    if not wanted:
        return []
    db = sqlite3.connect(":memory:")
    try:
        db.execute(f'CREATE VIRTUAL TABLE words USING fts5(text, tokenize="{TOKENIZE}")')
        rows = ((place, indexed(text)) for place, text in enumerate(texts))
        db.executemany("INSERT INTO words(rowid, text) VALUES (?, ?)", rows)
        match = " OR ".join(f'"{term}"' for term in wanted)
        sql = "SELECT rowid, -bm25(words) AS score FROM words WHERE words MATCH ? ORDER BY score DESC, rowid"
        return [(int(place), float(score)) for place, score in db.execute(sql, (match,))]
    finally:
        db.close()

"""Search over the turns of a ledger: an index that follows it, asked with words, and put in order by BM25."""

from __future__ import annotations

import logging
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from ctxreuse.errors import SessionError, StoreClosedError, StoreError
from ctxreuse.store.ledger.derived import drop_index
from ctxreuse.store.ledger.ledger import Ledger
from ctxreuse.store.ledger.records import Hit
from ctxreuse.store.ledger.snapshot import LedgerSnapshot
from ctxreuse.store.recall.filters import Filters
from ctxreuse.store.recall.follow import StaleError, follow
from ctxreuse.store.recall.tables import Tables
from ctxreuse.store.recall.terms import snippet, terms

__all__ = ["Recall"]

log = logging.getLogger(__name__)

T = TypeVar("T")

#: Turns whose scores are computed, about: the most frequent words of a query are left out where there are rarer ones,
#: as they say least and take the longest.
_SCORED = 20_000
#: Hits of one search.
_MOST = 1000


class Recall:
    """Finds turns of a ledger by what they say. Any thread may call; one search at a time.

    The index lies beside the ledger and takes up what was written since the last search; nothing is done when turns are
    written. If it is missing, damaged, of another version or of another ledger, it is made again: about 50 µs a turn.
    """

    def __init__(self, ledger: Ledger, *, readonly: bool = False) -> None:
        """``readonly``: another process has the ledger open for writing, so the index is kept in memory."""
        self._ledger = ledger
        self._place: Path | None = None if readonly else ledger.path
        self._lock = threading.Lock()
        self._tables: Tables | None = None
        self._rows: set[bytes] = set()
        self._number = -1

    def search(self, query: str, filters: Filters, limit: int, *, explain: bool = False) -> list[Hit]:
        """Return turns with any of the words, best first. See `Memory.search`."""
        if not isinstance(query, str):
            raise SessionError(f"the query is {type(query).__name__}, not text", fix="Give a str")
        wanted, most = terms(query), min(max(limit, 0), _MOST)
        with self._lock:
            return self._on_index(lambda tables, now: self._search(tables, now, wanted, filters, most, explain))

    def _search(
        self, tables: Tables, now: LedgerSnapshot, wanted: list[str], filters: Filters, limit: int, explain: bool
    ) -> list[Hit]:
        conditions = filters.sql(lambda name: list(now.history.up(now.session(name).head)))
        counts = tables.counts(wanted)
        used, scored = list[str](), 0
        for term in sorted((term for term in wanted if counts[term]), key=counts.__getitem__):
            scored += counts[term]
            if used and scored > _SCORED:
                break
            used.append(term)
        found = tables.find(used, conditions, limit) if used and limit else []
        homes = tables.homes([id for id, _ in found])
        hits = []
        for rank, (id, score) in enumerate(found, 1):
            turn = now.history.turn(id)
            why = {"words": {"rank": rank, "score": score, "terms": used}} if explain else {}
            hits.append(Hit(now.session(homes[id]), turn, snippet(turn.content, used), score, why))
        return hits

    def _on_index(self, work: Callable[[Tables, LedgerSnapshot], T]) -> T:
        """Call ``work`` with an index that has all turns; one that cannot be used is made again, once."""
        try:
            return self._try(work)
        except (sqlite3.Error, OSError, StaleError) as error:
            log.warning("the index of recall is made again: %s", error)
        self._close()
        try:
            if self._place is not None:
                drop_index(self._place)
            return self._try(work)
        except (sqlite3.Error, OSError, StoreError) as error:
            if self._place is None or isinstance(error, StoreClosedError):
                raise (
                    error
                    if isinstance(error, StoreError)
                    else StoreError(f"the index of recall cannot be made: {error}")
                ) from None
            log.warning("the index of recall is kept in memory: %s", error)
        self._close()
        self._place = None
        return self._try(work)

    def _try(self, work: Callable[[Tables, LedgerSnapshot], T]) -> T:
        if self._tables is not None and self._tables.replaced:
            self._close()
        if self._tables is None:
            self._tables = Tables(self._place)
            self._rows, self._number = self._tables.rows(), -1
        with self._ledger.snapshot() as now:
            if now.number != self._number:
                rows = set(now.rows())
                if rows != self._rows:
                    follow(self._tables, now, self._rows, rows)
                self._rows, self._number = rows, now.number
            return work(self._tables, now)

    def _close(self) -> None:
        if self._tables is not None:
            self._tables.close()
            self._tables, self._number = None, -1

    def close(self) -> None:
        """Close the index. A search opens it again."""
        with self._lock:
            self._close()

"""Search over the turns of a ledger: an index that follows it, asked with words (BM25) and by meaning (vectors)."""

from __future__ import annotations

import functools
import logging
import sqlite3
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from ctxreuse.embed import Embedder, open_embedder
from ctxreuse.errors import ConfigError, SessionError, StoreClosedError, StoreError
from ctxreuse.store.ledger.derived import drop_index
from ctxreuse.store.ledger.ledger import Ledger
from ctxreuse.store.ledger.records import DamagedTurnError, Hit
from ctxreuse.store.ledger.snapshot import LedgerSnapshot
from ctxreuse.store.recall.filters import Filters
from ctxreuse.store.recall.follow import StaleError, follow
from ctxreuse.store.recall.fuse import fuse
from ctxreuse.store.recall.stems import ENGLISH, check_language
from ctxreuse.store.recall.tables import Tables
from ctxreuse.store.recall.terms import MOST_QUERY, snippet, terms

__all__ = ["EmbedderChoice", "Recall"]

log = logging.getLogger(__name__)

T = TypeVar("T")

#: Which embedder makes the vectors: that of the extra ``embed`` where it is installed, that of the extra
#: ``multilingual``, none, or one that is given.
EmbedderChoice = Embedder | Literal["auto", "multilingual", "none"]

#: Turns whose scores are computed, about: the most frequent words of a query are left out where there are rarer ones,
#: as they say least and take the longest. Four times as many find nothing more (bench recall).
_SCORED = 5_000
#: Hits of one search.
_MOST = 1000
#: Turns that each of words and vectors proposes, at least.
_PROPOSED = 100
#: Turns embedded at a time, at most, and seconds of it that a search waits for: 40 µs a sentence and 1 ms a page, or,
#: by a model, 14 ms a sentence. So a first batch is one turn, and a quick one is followed by one twice as large.
_BATCH, _PATIENCE = 64, 0.1
#: The same for all memories of a process: opening it takes .1 s, and 20 MB.
_open_shared = functools.cache(open_embedder)


class Recall:
    """Finds turns of a ledger by what they say. Any thread may call; one search at a time.

    The index lies beside the ledger and takes up what was written since the last search; nothing is done when turns are
    written. If it is missing, damaged, of another version or of another ledger, it is made again: about 50 µs a turn.
    Vectors come behind it, by searches and a thread that ends when all turns have theirs; those that have none yet are
    found by their words.
    """

    def __init__(
        self,
        ledger: Ledger,
        *,
        readonly: bool = False,
        embedder: EmbedderChoice = "auto",
        language: str = ENGLISH,
    ) -> None:
        """``readonly``: another process has the ledger open for writing, so the index is kept in memory.

        ``language``: of the texts. Raises ConfigError for one whose stems are not known.
        """
        self._language = check_language(language)
        self._ledger = ledger
        self._place: Path | None = None if readonly else ledger.path
        self._lock = threading.Lock()
        self._tables: Tables | None = None
        self._rows: set[bytes] = set()
        self._number = -1
        self._embedder = embedder
        self._batch = 1
        self._filling: threading.Thread | None = None
        self._closing = threading.Event()

    def search(self, query: str, filters: Filters, limit: int, *, explain: bool = False) -> list[Hit]:
        """Return turns with any of the words or of like meaning, best first. See `Memory.search`."""
        if not isinstance(query, str):
            raise SessionError(f"the query is {type(query).__name__}, not text", fix="Give a str")
        most = min(max(limit, 0), _MOST)
        with self._lock:
            found = self._on_index(lambda tables, now: self._search(tables, now, query, filters, most, explain))
            if self._tables is not None and self._opened() is not None and self._tables.pending(1):
                self._fill()
        return found

    def _search(
        self, tables: Tables, now: LedgerSnapshot, query: str, filters: Filters, limit: int, explain: bool
    ) -> list[Hit]:
        conditions = filters.sql(lambda name: list(now.history.up(now.session(name).head)))
        if not limit:
            return []
        proposed, wanted = max(limit, _PROPOSED), terms(query)
        counts = tables.counts(wanted)
        used, scored = list[str](), 0
        for term in sorted((term for term in wanted if counts[term]), key=counts.__getitem__):
            scored += counts[term]
            if used and scored > _SCORED:
                break
            used.append(term)
        words = list[tuple[int, float]]()
        if used:
            words = tables.find(used, conditions, proposed)
        elif not query.strip() and conditions[0] != "1":
            words = tables.newest(conditions, limit)
        near, cosines, embedder = list[tuple[int, float]](), dict[int, float](), self._opened()
        if embedder is not None and wanted:
            self._embed(tables, now, embedder, _PATIENCE)
            made = self._vectors_of(embedder, [query[:MOST_QUERY]])
            if made is not None:
                near = tables.vectors.nearest(made[0], proposed, conditions)
                cosines = tables.vectors.cosines_of(made[0], [turn for turn, _ in words])
        found = fuse(words, near, cosines)[:limit]
        homes = tables.homes([one.turn for one in found])
        hits = []
        for one in found:
            turn, why = now.history.turn(one.turn), {}
            if explain and one.words[0]:
                why["words"] = {"rank": one.words[0], "score": one.words[1], "terms": used}
            if explain and embedder is not None and (one.vectors[0] or one.turn in cosines):
                why["vectors"] = {"rank": one.vectors[0], "cosine": one.vectors[1], "embedder": embedder.name}
            hits.append(Hit(now.session(homes[one.turn]), turn, snippet(turn.content, used), one.score, why))
        return hits

    def _opened(self) -> Embedder | None:
        """Return the embedder; it is opened by the first search."""
        if self._embedder in ("auto", "multilingual"):
            requested = self._embedder == "multilingual"
            try:
                self._embedder = _open_shared(multilingual=requested)
            except ConfigError as error:
                log.log(logging.WARNING if requested else logging.INFO, "search goes by words alone: %s", error)
                self._embedder = "none"
        return None if self._embedder == "none" or isinstance(self._embedder, str) else self._embedder

    def _embed(self, tables: Tables, now: LedgerSnapshot, embedder: Embedder, seconds: float) -> bool:
        """Make vectors of turns that have none, for so many seconds; returns True if there are more."""
        tables.embed_all(embedder.name, embedder.dimensions)
        until = time.monotonic() + seconds
        while turns := tables.pending(_BATCH if seconds == float("inf") else self._batch):
            texts = []
            for id in turns:
                try:
                    texts.append(now.history.turn(id).content)
                except (SessionError, DamagedTurnError):  # removed or damaged since
                    texts.append("")
            began = time.monotonic()
            vectors = self._vectors_of(embedder, texts)
            if vectors is None:
                return False
            took = time.monotonic() - began
            if took < _PATIENCE / 4:
                self._batch = min(2 * self._batch, _BATCH)
            elif took > _PATIENCE:
                self._batch = max(self._batch // 2, 1)
            tables.add_vectors(turns, vectors)
            if time.monotonic() > until:
                return bool(tables.pending(1))
        return False

    def _vectors_of(self, embedder: Embedder, texts: list[str]) -> NDArray[np.float32] | None:
        """Return the vectors of texts; None if the embedder fails, which is not used again then."""
        try:
            made = np.asarray(embedder.embed(texts).vectors, np.float32)
            if made.shape != (len(texts), embedder.dimensions) or not np.isfinite(made).all():
                raise ValueError(f"its vectors are not finite, or not {embedder.dimensions} numbers each")
        except Exception as error:  # of someone else's code: words are found without it
            log.warning("search goes by words alone: the embedder %s failed: %s", embedder.name, error)
            self._embedder = "none"
            return None
        return made

    def _fill(self) -> None:
        """Have a thread make the vectors that are missing."""
        if self._filling is None or not self._filling.is_alive():
            self._filling = threading.Thread(target=self._run, name="ctxreuse-recall", daemon=True)
            self._filling.start()

    def _run(self) -> None:
        while not self._closing.is_set():
            try:
                if not self.update(_PATIENCE):
                    return
            except (StoreError, SessionError) as error:
                log.warning("vectors are not made: %s", error)
                return
            self._closing.wait(0.01)  # searches come first

    def update(self, seconds: float = float("inf")) -> bool:
        """Take up what was written since the last search, in idle time; returns True if vectors are still to be made.

        ``seconds``: of making vectors, at most.
        """
        with self._lock:
            embedder = self._opened()
            return self._on_index(
                lambda tables, now: embedder is not None and self._embed(tables, now, embedder, seconds)
            )

    def expired(self, now: float, count: int) -> list[str]:
        """Return sessions that expire up to a time, in seconds since 1970; pinned ones never do."""
        with self._lock:
            return self._on_index(lambda tables, _: tables.expired(now, count))

    def oldest(self, namespace: str) -> list[tuple[str, float, int, int]]:
        """Return sessions that are not pinned; see `Tables.oldest`."""
        with self._lock:
            return self._on_index(lambda tables, _: tables.oldest(namespace))

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
            self._tables = Tables(self._place, self._language)
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
        self._closing.set()
        if (filling := self._filling) is not None:
            filling.join()
        self._closing.clear()
        with self._lock:
            self._close()

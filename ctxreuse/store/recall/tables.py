"""The index on disk: an SQLite file with the words of each turn, its role, time, namespace and meta; its vectors."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ctxreuse.store.ledger.derived import INDEX
from ctxreuse.store.ledger.records import Session, Turn
from ctxreuse.store.recall.filters import field_value
from ctxreuse.store.recall.stems import ENGLISH, stems, tokenize
from ctxreuse.store.recall.terms import MOST_PASSAGES, indexed, passages
from ctxreuse.store.recall.vectors import VectorTable

__all__ = ["Tables"]

_FILE = "index.sqlite"
#: Of the tables below. A file of another version is made again.
_VERSION = 4
#: Passages that are read for each turn that is found: several may be of one.
_EACH = 4
#: The row of a passage is its number behind the turn's, in so many bits.
_BITS = MOST_PASSAGES.bit_length()
#: Turns from which a stem's count is remembered, and stems of which it is.
_FREQUENT, _KNOWN = 1000, 10_000
#: Fields of a turn's meta that can be searched for.
_FIELDS = 64

_SCHEMA = f"""
CREATE TABLE language(code TEXT);
CREATE TABLE rows(row BLOB PRIMARY KEY) WITHOUT ROWID;
CREATE TABLE sessions(id TEXT PRIMARY KEY, namespace TEXT, updated REAL, expires REAL, pinned INTEGER) WITHOUT ROWID;
CREATE INDEX sessions_expires ON sessions(expires) WHERE expires IS NOT NULL;
CREATE TABLE turns(
  id INTEGER PRIMARY KEY, session TEXT, namespace TEXT, role TEXT, created REAL, digest INTEGER, size INTEGER);
CREATE INDEX turns_session ON turns(session);
CREATE INDEX turns_namespace ON turns(namespace);
CREATE TABLE fields(name TEXT, value TEXT, turn INTEGER, PRIMARY KEY(name, value, turn)) WITHOUT ROWID;
CREATE INDEX fields_turn ON fields(turn);
CREATE VIRTUAL TABLE words USING fts5(text, tokenize="TOKENIZE");
CREATE TABLE embedder(name TEXT, dimensions INTEGER);
CREATE TABLE vectors(turn INTEGER PRIMARY KEY, place INTEGER, scale REAL);
CREATE TABLE pending(turn INTEGER PRIMARY KEY);
CREATE VIRTUAL TABLE vocabulary USING fts5vocab(words, row);
PRAGMA user_version = {_VERSION};
"""
#: Of the query's words as the tokenizer makes them, so that their counts can be looked up.
_QUERY = """
CREATE VIRTUAL TABLE temp.query USING fts5(text, tokenize="TOKENIZE");
CREATE VIRTUAL TABLE temp.stems USING fts5vocab(temp, query, instance);
"""


class Tables:
    """The tables in one connection; for one thread at a time. All methods raise sqlite3.Error."""

    def __init__(self, place: Path | None, language: str = ENGLISH) -> None:
        """Open the index of the store in a folder, or an empty one; None: in memory only.

        ``language``: of the texts, by which a word is found in its other forms; an index of another one is refused.
        """
        self._language, self._stems = language, stems(language)
        self.file: Path | None = None
        if place is not None:
            home = place / INDEX
            home.mkdir(mode=0o700, exist_ok=True)
            self.file = home / _FILE
        self._db = sqlite3.connect(self.file or ":memory:", check_same_thread=False, isolation_level=None)
        try:
            self._open()
            self._inode = self._now()
            #: Of stems that many turns have, how many: counting them takes .1 ms a thousand. Forgotten by whoever opens
            #: it again, or with the first of so many changes.
            self._frequent: dict[str, int] = {}
            self._changes = 0
            self.vectors = VectorTable(self._db, None if self.file is None else self.file.parent)
        except BaseException:
            self._db.close()
            raise

    def _open(self) -> None:
        run = self._db.execute
        # What a power cut takes are whole transactions, which are then made again.
        for setting in ("journal_mode=WAL", "synchronous=NORMAL", "trusted_schema=OFF", "temp_store=MEMORY"):
            run(f"PRAGMA {setting}")
        if run("PRAGMA user_version").fetchone()[0] != _VERSION:
            if run("SELECT count(*) FROM sqlite_master").fetchone()[0]:
                raise sqlite3.DatabaseError("the index has another version")
            how = _SCHEMA.replace("TOKENIZE", tokenize(self._language))
            self._db.executescript(f"BEGIN; {how} INSERT INTO language VALUES ('{self._language}'); COMMIT;")
        if run("SELECT code FROM language").fetchall() != [(self._language,)]:
            raise sqlite3.DatabaseError("the index is of another language")
        self._db.executescript(_QUERY.replace("TOKENIZE", tokenize(self._language)))

    def _now(self) -> tuple[int, int] | None:
        if self.file is None:
            return None
        try:
            found = os.stat(self.file)
        except FileNotFoundError:
            return None
        return found.st_dev, found.st_ino

    @property
    def replaced(self) -> bool:
        """True if the file was deleted or replaced since it was opened."""
        return self._now() != self._inode

    def rows(self) -> set[bytes]:
        """Return the rows of the sessions that it has followed."""
        return {bytes(row) for (row,) in self._db.execute("SELECT row FROM rows")}

    @contextlib.contextmanager
    def writing(self) -> Any:
        """Make one transaction of what is changed inside: all of it or nothing."""
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._db.execute("COMMIT")
        except BaseException:
            with contextlib.suppress(sqlite3.Error):
                self._db.execute("ROLLBACK")
                self.vectors.undo()
            raise

    def set_rows(self, left: Iterable[bytes], new: Iterable[bytes]) -> None:
        """Note the rows of sessions that it has followed."""
        self._db.executemany("DELETE FROM rows WHERE row = ?", ((row,) for row in left))
        self._db.executemany("INSERT INTO rows VALUES (?)", ((row,) for row in new))

    def digest(self, id: int) -> int | None:
        """Return the digest of a turn; None if it is not here."""
        found = self._db.execute("SELECT digest FROM turns WHERE id = ?", (id,)).fetchone()
        return None if found is None else int(found[0])

    def add(self, turn: Turn, session: str, namespace: str, digest: int) -> None:
        """Add a turn."""
        run = self._db.execute
        values = (turn.id, session, namespace, turn.role, turn.created, digest, len(turn.content))
        run("INSERT INTO turns VALUES (?, ?, ?, ?, ?, ?, ?)", values)
        run("INSERT INTO pending VALUES (?)", (turn.id,))
        self._changes += 1
        if self._changes >= _FREQUENT:
            self._frequent, self._changes = {}, 0
        texts = (self._stems(indexed(text)) for text in passages(turn.content))
        rows = ((turn.id << _BITS | number, text) for number, text in enumerate(texts))
        self._db.executemany("INSERT INTO words(rowid, text) VALUES (?, ?)", rows)
        for name, value in list(turn.meta.items())[:_FIELDS]:
            if (stored := field_value(value)) is not None:
                run("INSERT OR IGNORE INTO fields VALUES (?, ?, ?)", (name, stored, turn.id))

    def remove(self, ids: Sequence[int]) -> None:
        """Remove turns, and their vectors."""
        self.vectors.remove(ids)
        for id in ids:
            for table, column in (("turns", "id"), ("fields", "turn"), ("pending", "turn")):
                self._db.execute(f"DELETE FROM {table} WHERE {column} = ?", (id,))
            self._db.execute("DELETE FROM words WHERE rowid >= ? AND rowid < ?", (id << _BITS, (id + 1) << _BITS))

    def set_session(self, id: str, session: Session | None) -> None:
        """Note how long a session is to be kept; None: it is deleted."""
        self._db.execute("DELETE FROM sessions WHERE id = ?", (id,))
        if session is not None:
            values = (id, session.namespace, session.updated, session.expires, session.pinned)
            self._db.execute("INSERT INTO sessions VALUES (?, ?, ?, ?, ?)", values)

    def expired(self, now: float, count: int) -> list[str]:
        """Return sessions that expire up to a time, in seconds since 1970, the first one first."""
        found = self._db.execute(
            "SELECT id FROM sessions WHERE expires <= ? AND NOT pinned ORDER BY expires LIMIT ?", (now, count)
        )
        return [id for (id,) in found]

    def oldest(self, namespace: str) -> list[tuple[str, float, int, int]]:
        """Return the sessions of a namespace and those below it that are not pinned, the longest unchanged first.

        Each: its id, when it changed, its turns that no session before it has, and their characters.
        """
        where = (
            "" if not namespace else "AND (s.namespace = ?1 OR (s.namespace >= ?1 || '/' AND s.namespace < ?1 || '0'))"
        )
        text = (
            "SELECT s.id, s.updated, count(turns.id), coalesce(sum(turns.size), 0) FROM sessions AS s "
            f"LEFT JOIN turns ON turns.session = s.id WHERE NOT s.pinned {where} GROUP BY s.id ORDER BY s.updated"
        )
        found = self._db.execute(text, (namespace,) if namespace else ())
        return [(str(id), float(updated), int(turns), int(size)) for id, updated, turns, size in found]

    def pending(self, count: int) -> list[int]:
        """Return turns that are to have a vector, the newest first."""
        return [id for (id,) in self._db.execute("SELECT turn FROM pending ORDER BY turn DESC LIMIT ?", (count,))]

    def embed_all(self, name: str, dimensions: int) -> None:
        """Have vectors of this embedder. Where they are of another, all turns are to have new ones."""
        if self.vectors.of != (name, dimensions):
            with self.writing():
                self.vectors.clear(name, dimensions)
                self._db.execute("INSERT OR IGNORE INTO pending SELECT id FROM turns")

    def add_vectors(self, turns: Sequence[int], vectors: Any) -> None:
        """Add the vectors of turns, float32 [turns, dimensions]."""
        with self.writing():
            self.vectors.add(turns, vectors)
            self._db.executemany("DELETE FROM pending WHERE turn = ?", ((turn,) for turn in turns))

    def of_session(self, session: str) -> list[int]:
        """Return the turns that are here by a session, by id."""
        found = self._db.execute("SELECT id FROM turns WHERE session = ? ORDER BY id", (session,))
        return [id for (id,) in found]

    def move(self, ids: Iterable[int], session: str) -> None:
        """Note that turns are here by another session."""
        self._db.executemany("UPDATE turns SET session = ? WHERE id = ?", ((session, id) for id in ids))

    def counts(self, terms: Sequence[str]) -> dict[str, int]:
        """Return how many turns have each term, about; of a phrase, its rarest word."""
        run, found = self._db.execute, dict.fromkeys(terms, 0)
        run("DELETE FROM temp.query")
        self._db.executemany("INSERT INTO temp.query(rowid, text) VALUES (?, ?)", enumerate(map(self._stems, terms)))
        stems = run("SELECT doc, term FROM temp.stems").fetchall()
        least: dict[int, int] = {}
        for number, stem in stems:
            count = self._frequent.get(stem)
            if count is None:
                row = run("SELECT doc FROM vocabulary WHERE term = ?", (stem,)).fetchone()
                count = row[0] if row else 0
                if count >= _FREQUENT and len(self._frequent) < _KNOWN:
                    self._frequent[stem] = count
            least[number] = min(least.get(number, 1 << 62), count)
        found.update((terms[number], count) for number, count in least.items())
        return found

    def find(self, terms: Sequence[str], conditions: tuple[str, Sequence[Any]], limit: int) -> list[tuple[int, float]]:
        """Return turns with any of the terms and the BM25 score of their best passages, best first, then the newest."""
        match, most = " OR ".join(f'"{self._stems(term)}"' for term in terms), _EACH * limit
        while True:
            rows = self._passages(match, conditions, most)
            best: dict[int, float] = {}
            for row, score in sorted(rows, key=lambda row: (-row[1], -row[0])):
                best.setdefault(row >> _BITS, score)
            if len(best) >= limit or len(rows) < most:
                return list(best.items())[:limit]
            most *= _EACH  # one long turn can have all of the best passages

    def _passages(self, match: str, conditions: tuple[str, Sequence[Any]], most: int) -> list[tuple[int, float]]:
        """Return the rows and scores of the best passages, ``most`` of them."""
        where, values = conditions
        if where == "1":
            text = "SELECT rowid, -rank FROM words WHERE words MATCH ? ORDER BY rank LIMIT ?"
            return [(int(row), float(score)) for row, score in self._db.execute(text, (match, most))]
        found = self._db.execute(
            f"SELECT words.rowid, -bm25(words) AS score FROM words JOIN turns ON turns.id = words.rowid >> {_BITS} "
            f"WHERE words MATCH ? AND {where} ORDER BY score DESC, words.rowid DESC LIMIT ?",
            (match, *values, most),
        )
        return [(int(row), float(score)) for row, score in found]

    def newest(self, conditions: tuple[str, Sequence[Any]], limit: int) -> list[tuple[int, float]]:
        """Return the turns that meet the conditions, the newest first, all with the score 0."""
        where, values = conditions
        found = self._db.execute(f"SELECT id FROM turns WHERE {where} ORDER BY id DESC LIMIT ?", (*values, limit))
        return [(int(id), 0.0) for (id,) in found]

    def homes(self, ids: Sequence[int]) -> Mapping[int, str]:
        """Return the session that each turn is here by."""
        marks = ",".join("?" * len(ids))
        return dict(self._db.execute(f"SELECT id, session FROM turns WHERE id IN ({marks})", ids).fetchall())

    def close(self) -> None:
        """Close the connection."""
        with contextlib.suppress(sqlite3.Error):
            self._db.close()

"""Sessions, turns and token ids on disk, durable when a call returns: the memory from which all KV can be rebuilt."""

from __future__ import annotations

import difflib
import os
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import takewhile
from typing import Any, TypeVar

import lmdb
import msgspec

from ctxreuse.errors import SessionError, StoreError, StoreReadOnlyError
from ctxreuse.store.env import Env, explain
from ctxreuse.store.history import History, turn_key
from ctxreuse.store.ledger_open import open_ledger
from ctxreuse.store.ledger_records import (
    Hit,
    LedgerStats,
    NewTurn,
    Session,
    Turn,
    decode_id,
    decode_session,
    encode_id,
    encode_session,
    encode_turn,
    require_text,
)
from ctxreuse.store.owner import Owner, claim, folder
from ctxreuse.store.search import search

__all__ = ["Ledger"]

T = TypeVar("T")

_MAP_SIZE = 1 << 36
_NAME_BYTES = 480
_LIST = "Session names can be listed with sessions()"


class Ledger:
    """The durable part of a store. Any thread may call; every change is on disk when its call returns.

    Use ``open``. Raises StoreFullError when there is no room (nothing acknowledged is lost, and the call may be
    repeated when there is), StoreReadOnlyError and StoreClosedError; SessionError for what does not exist.
    """

    def __init__(self, env: Env, owner: Owner | None, clock: Callable[[], float]) -> None:
        self._env, self._owner, self._clock = env, owner, clock

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        *,
        readonly: bool = False,
        clock: Callable[[], float] = time.time,
        map_size: int = _MAP_SIZE,
        boot: str | None = None,
    ) -> Ledger:
        """Open the ledger in folder ``path`` (its files lie in ``path/ledger``), creating it if need be.

        Raises StoreOwnedError while another process writes here, StoreError for a path that cannot hold a store and
        for a ledger that is damaged: it is never dropped.
        """
        place = folder(path, readonly=readonly)
        home = place / "ledger"
        if readonly:
            if not (home / "data.mdb").exists():
                fix = "Open it for writing once to create it"
                raise StoreError("there is no ledger here", where=str(home), fix=fix)
            return cls(open_ledger(home, map_size, _walk, readonly=True), None, clock)
        owner = claim(place, "ledger", boot=boot, clock=clock)
        try:
            return cls(open_ledger(home, map_size, _walk, readonly=False), owner, clock)
        except BaseException:
            owner.end("ledger", clean=False)
            raise

    @contextmanager
    def _read(self) -> Iterator[tuple[Any, History]]:
        try:
            with self._env.read() as txn:
                yield txn, History(txn, self._env.tables["turns"])
        except lmdb.Error as error:
            raise explain(error, self._env.path) from None

    def _write(self, work: Callable[[Any, History], T]) -> T:
        if self._owner is None:
            fix = "Open it without readonly=True, or ask the process that owns it"
            raise StoreReadOnlyError("the ledger was opened for reading", where=str(self._env.path), fix=fix)
        try:
            return self._env.write(lambda txn: work(txn, History(txn, self._env.tables["turns"])))
        except lmdb.Error as error:
            raise explain(error, self._env.path) from None

    def _find(self, txn: Any, name: str) -> Session:
        raw_id, key = None, require_text(name, "a session name")
        if len(name) == 32:
            try:
                raw_id = bytes.fromhex(name)
            except ValueError:
                pass
        raw = txn.get(raw_id, db=self._env.tables["sessions"]) if raw_id else None
        if raw is None:
            raw_id = txn.get(key, db=self._env.tables["names"]) if 0 < len(key) <= _NAME_BYTES else None
            raw = txn.get(raw_id, db=self._env.tables["sessions"]) if raw_id is not None else None
        if raw is None:
            raise SessionError(f"there is no session {name!r}", fix=self._near(txn, name))
        return decode_session(bytes(raw_id or b""), raw)

    def _near(self, txn: Any, name: str) -> str:
        keys = txn.cursor(db=self._env.tables["names"]).iternext(values=False)
        names = [bytes(key).decode(errors="replace") for key in keys]
        near = difflib.get_close_matches(name, names, 3, 0.5)
        return f"Did you mean {' or '.join(repr(one) for one in near)}?" if near else _LIST

    def _save(self, txn: Any, session: Session) -> Session:
        txn.put(bytes.fromhex(session.id), encode_session(session), db=self._env.tables["sessions"])
        return session

    def _name(self, txn: Any, name: str, session_id: str) -> None:
        key = require_text(name, "a session name")
        if not key or len(key) > _NAME_BYTES or not name.isprintable() or name != name.strip():
            fix = f"Use 1 to {_NAME_BYTES} bytes of printable text without spaces at the ends"
            raise SessionError(f"{name[:60]!r} cannot name a session", fix=fix)
        if not txn.put(key, bytes.fromhex(session_id), db=self._env.tables["names"], overwrite=False):
            raise SessionError(f"there is already a session {name!r}", fix="Choose another name")

    def _born(self, txn: Any, name: str | None, head: int, origin: str | None, lossy: str | None = None) -> Session:
        id = uuid.uuid4().hex
        name = f"session-{id[:8]}" if name is None else name
        self._name(txn, name, id)
        now = self._clock()
        return self._save(txn, Session(id, name, head, origin, head if origin else 0, now, now, lossy))

    def create(self, name: str | None = None, head: int = 0, lossy: str | None = None) -> Session:
        """A new session that starts at turn ``head``; without a name it gets ``session-`` and part of its id.

        ``lossy``: see `allow`.

        Raises SessionError if the name is taken or the turn unknown.
        """

        def work(txn: Any, history: History) -> Session:
            history.links(head)
            return self._born(txn, name, head, None, lossy)

        return self._write(work)

    def append(self, session: str, turns: Sequence[NewTurn], *, expected_head: int | None = None) -> list[Turn]:
        """Add turns at the end of a session (id or name), all or none; returns them with their ids.

        Raises SessionError if the head is not ``expected_head`` (someone else appended meanwhile).
        """

        def work(txn: Any, history: History) -> list[Turn]:
            found = self._expect(txn, session, expected_head)
            head, now, added = found.head, self._clock(), []
            id = self._next_id(txn)
            for new in turns:
                raw = encode_turn(history.child_of(head), new, now if new.created is None else new.created)
                txn.put(turn_key(id), raw, db=self._env.tables["turns"], append=True)
                if new.tokens is not None:
                    self._put_tokens(txn, id, new.space or b"", new.tokens)
                added.append(history.turn(id))
                head, id = id, id + 1
            txn.put(b"next", encode_id(id), db=self._env.tables["info"])
            self._save(txn, msgspec.structs.replace(found, head=head, updated=now))
            return added

        return self._write(work)

    def _next_id(self, txn: Any) -> int:
        # Ids are never used twice, not even when gc() removed the last ones.
        raw = txn.get(b"next", db=self._env.tables["info"])
        return decode_id(raw) if raw is not None else 1

    def _expect(self, txn: Any, session: str, head: int | None) -> Session:
        found = self._find(txn, session)
        if head is not None and found.head != head:
            fix = "Read the session again and repeat, or fork it"
            raise SessionError(f"session {found.name!r} is at turn {found.head}, not {head}", fix=fix)
        return found

    def fork(self, session: str, name: str | None = None, at: int | None = None) -> Session:
        """A new session that shares everything up to turn ``at`` (default: the head), and what the first one allows.

        O(log length), one small record.

        Raises SessionError if ``at`` is not in the session's history.
        """

        def work(txn: Any, history: History) -> Session:
            found = self._find(txn, session)
            head = found.head if at is None else at
            if not history.ancestor(head, found.head):
                fix = "List the session's turns for the ids it has"
                raise SessionError(f"turn {head} is not in session {found.name!r}", fix=fix)
            return self._born(txn, name, head, found.id, found.lossy)

        return self._write(work)

    def move(self, session: str, head: int, *, expected_head: int | None = None) -> Session:
        """Set a session's head to any known turn, or to 0: rollback, or taking over the work of a fork."""

        def work(txn: Any, history: History) -> Session:
            found = self._expect(txn, session, expected_head)
            history.links(head)
            return self._save(txn, msgspec.structs.replace(found, head=head, updated=self._clock()))

        return self._write(work)

    def allow(self, session: str, lossy: str | None) -> Session:
        """Set the worst level of KV that a session allows: a name, ``exact``, or None to leave it to the memory."""

        def work(txn: Any, _: History) -> Session:
            return self._save(txn, msgspec.structs.replace(self._find(txn, session), lossy=lossy))

        return self._write(work)

    def rename(self, session: str, name: str) -> Session:
        """Give a session another name. Raises SessionError if it is taken."""

        def work(txn: Any, _: History) -> Session:
            found = self._find(txn, session)
            if name == found.name:
                return found
            self._name(txn, name, found.id)
            txn.delete(found.name.encode(), db=self._env.tables["names"])
            return self._save(txn, msgspec.structs.replace(found, name=name, updated=self._clock()))

        return self._write(work)

    def delete(self, session: str) -> None:
        """Forget a session. Its turns stay until ``gc``, and as long as another session reaches them."""

        def work(txn: Any, _: History) -> None:
            found = self._find(txn, session)
            txn.delete(found.name.encode(), db=self._env.tables["names"])
            txn.delete(bytes.fromhex(found.id), db=self._env.tables["sessions"])

        self._write(work)

    def session(self, session: str) -> Session:
        """The session of an id or name; raises SessionError with near names if there is none."""
        with self._read() as (txn, _):
            return self._find(txn, session)

    def _sessions(self, txn: Any) -> list[Session]:
        found = [decode_session(bytes(id), raw) for id, raw in txn.cursor(db=self._env.tables["sessions"])]
        return sorted(found, key=lambda session: (session.updated, session.head, session.id), reverse=True)

    def sessions(self, limit: int | None = None, offset: int = 0) -> list[Session]:
        """Sessions, the one changed last first. O(all sessions), about 20 ms for 10,000."""
        with self._read() as (txn, _):
            return self._sessions(txn)[offset:][:limit]

    def count(self) -> int:
        """How many sessions there are."""
        return self.stats().sessions

    def turn(self, id: int) -> Turn:
        """One turn. Raises SessionError if unknown."""
        with self._read() as (_, history):
            return history.turn(id)

    def turns(self, head: int) -> list[Turn]:
        """The history that ends at ``head``, root first; empty for 0. Raises SessionError if unknown."""
        with self._read() as (_, history):
            return [history.turn(id) for id in history.up(head)][::-1]

    def ancestor(self, a: int, b: int) -> bool:
        """True if turn ``a`` is ``b`` or stands in its history (0 stands in all). Raises SessionError if unknown."""
        with self._read() as (_, history):
            return history.ancestor(a, b)

    def common(self, a: int, b: int) -> int:
        """The last turn that two histories share, 0 if none. Raises SessionError if unknown."""
        with self._read() as (_, history):
            return history.common(a, b)

    def _put_tokens(self, txn: Any, id: int, space: bytes, tokens: bytes) -> None:
        if len(space) != 32 or len(tokens) % 4:
            fix = "Give a space digest of 32 bytes and int32 token ids"
            raise SessionError(f"{len(tokens)} bytes of tokens for a space of {len(space)} bytes", fix=fix)
        txn.put(turn_key(id) + space, tokens, db=self._env.tables["tokens"])

    def put_tokens(self, id: int, space: bytes, tokens: bytes) -> None:
        """Keep the token ids (int32 little-endian) of a turn's text in the space with this 32-byte digest."""
        self.put_all_tokens(space, {id: tokens})

    def put_all_tokens(self, space: bytes, tokens: Mapping[int, bytes]) -> None:
        """`put_tokens` of many turns in one transaction: one wait for the disk instead of one each."""

        def work(txn: Any, history: History) -> None:
            for id, ids in tokens.items():
                history.raw(id)
                self._put_tokens(txn, id, space, ids)

        self._write(work)

    def tokens(self, id: int, space: bytes) -> bytes | None:
        """Token ids kept for a turn in a space, or None."""
        with self._read() as (txn, _):
            raw = txn.get(turn_key(id) + space, db=self._env.tables["tokens"])
            return bytes(raw) if raw is not None else None

    def spaces(self, id: int) -> list[bytes]:
        """Digests of the spaces in which token ids of a turn are kept."""
        with self._read() as (txn, _):
            cursor, prefix = txn.cursor(db=self._env.tables["tokens"]), turn_key(id)
            keys = cursor.iternext(values=False) if cursor.set_range(prefix) else iter(())
            return [bytes(key[8:]) for key in takewhile(lambda key: key[:8] == prefix, keys)]

    def search(self, text: str, limit: int = 20) -> list[Hit]:
        """Turns reachable from a session that hold all words of ``text``, whatever their case; newest first."""
        with self._read() as (txn, history):
            return search(history, self._sessions(txn), text, limit)

    def gc(self) -> int:
        """Remove turns (and their tokens) that no session reaches; returns how many turns."""

        def work(txn: Any, history: History) -> int:
            turns, tokens = self._env.tables["turns"], self._env.tables["tokens"]
            reached = self._reached(txn, history)
            gone = [key for key in txn.cursor(db=turns).iternext(values=False) if key not in reached]
            unreached = set(gone)
            stale = [key for key in txn.cursor(db=tokens).iternext(values=False) if key[:8] in unreached]
            for table, keys in ((turns, gone), (tokens, stale)):
                for key in keys:
                    txn.delete(key, db=table)
            return len(gone)

        return self._write(work)

    def _reached(self, txn: Any, history: History) -> set[bytes]:
        reached: set[bytes] = set()
        for session in self._sessions(txn):
            for id in history.up(session.head):
                key = turn_key(id)
                if key in reached:
                    break
                reached.add(key)
        return reached

    def stats(self) -> LedgerStats:
        """Counts and size."""
        with self._read() as (txn, _):
            entries = {name: int(txn.stat(table)["entries"]) for name, table in self._env.tables.items()}
        return LedgerStats(entries["sessions"], entries["turns"], entries["tokens"], self._env.file_bytes())

    def check(self) -> None:
        """Raises AssertionError where links, names or counts disagree. O(all entries)."""
        with self._read() as (txn, history):
            tables = self._env.tables
            names = {bytes(key): bytes(id) for key, id in txn.cursor(db=tables["names"])}
            sessions = self._sessions(txn)
            assert names == {s.name.encode(): bytes.fromhex(s.id) for s in sessions}, "names and sessions differ"
            known = {bytes(key) for key in txn.cursor(db=tables["turns"]).iternext(values=False)}
            top = self._next_id(txn)
            for key in known:
                id = int.from_bytes(key, "big")
                turn, links = history.turn(id), history.links(id)
                assert turn.parent < id < top, f"turn {id} after {turn.parent}, next id is {top}"
                assert links == history.child_of(turn.parent), f"turn {id} has links {links}"
            for session in sessions:
                assert not session.head or turn_key(session.head) in known, f"session {session.name!r} has no head"
            for key in txn.cursor(db=tables["tokens"]).iternext(values=False):
                assert bytes(key[:8]) in known, "tokens of a turn that is not there"

    def close(self) -> None:
        """Give the ledger back. A second call does nothing."""
        self._env.close()
        if self._owner is not None:
            self._owner.end("ledger", clean=True)

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _walk(env: Env) -> None:
    Ledger(env, None, time.time).check()

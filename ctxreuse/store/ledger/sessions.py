"""The sessions of a ledger inside one transaction: found by id or name, written with their names and their order."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from itertools import islice, takewhile
from typing import Any

from msgspec import structs

from ctxreuse.errors import SessionError, StoreDamagedError
from ctxreuse.store.ledger.recent import RecentSessions
from ctxreuse.store.ledger.records import FIX, Session, decode_session, encode_session, require_text

__all__ = ["SessionTable"]

_NAME_BYTES = 480
#: Names that a misspelt one is compared with, at most.
_NEAR = 500
_LIST = "Session names can be listed with sessions()"


class SessionTable:
    """The sessions in one transaction, which it must not outlive; for the transaction's thread."""

    def __init__(self, txn: Any, tables: Mapping[str, Any]) -> None:
        self._txn, self._sessions, self._names = txn, tables["sessions"], tables["names"]
        #: In the order of their last change.
        self.recent = RecentSessions(txn, tables)

    def find(self, name: str) -> Session:
        """Return the session of an id or name. Raises SessionError, which suggests similar names."""
        raw_id, key = None, require_text(name, "a session name")
        if len(name) == 32:
            try:
                raw_id = bytes.fromhex(name)
            except ValueError:
                pass
        raw = self._txn.get(raw_id, db=self._sessions) if raw_id else None
        if raw is None:
            raw_id = self._txn.get(key, db=self._names) if 0 < len(key) <= _NAME_BYTES else None
            raw = self._txn.get(raw_id, db=self._sessions) if raw_id is not None else None
        if raw is None:
            raise SessionError(f"there is no session {name!r}", fix=self._near(name))
        found = decode_session(bytes(raw_id or b""), raw)
        if found.name != name and found.id != name.lower():
            raise StoreDamagedError(f"the name {name!r} leads to session {found.name!r}", fix=FIX)
        return found

    def _near(self, name: str) -> str:
        start, names = require_text(name, "a session name")[:_NAME_BYTES], dict[str, None]()
        # Comparing takes 70 µs a name: those that begin alike, the longest beginning first.
        for length in range(len(start), -1, -1):
            alike = islice(self._starting(start[:length]), _NEAR - len(names))
            names.update((bytes(key).decode(errors="replace"), None) for key, _ in alike)
        near = difflib.get_close_matches(name, names, 3, 0.5)
        return f"Did you mean {' or '.join(repr(one) for one in near)}?" if near else _LIST

    def _starting(self, start: bytes) -> Iterator[tuple[Any, Any]]:
        """Iterate over the names that begin so, and their ids."""
        cursor = self._txn.cursor(db=self._names)
        rows = iter(cursor) if cursor.set_range(start) else iter(())
        return takewhile(lambda row: row[0][: len(start)] == start, rows)

    def by_name(self, prefix: str, offset: int) -> Iterator[Session]:
        """Iterate over sessions by name from the first with that prefix on, but the first ``offset``."""
        for _, raw_id in islice(self._starting(require_text(prefix, "a prefix")), offset, None):
            yield decode_session(bytes(raw_id), self._txn.get(raw_id, b"", db=self._sessions))

    def named(self, prefix: str) -> set[bytes]:
        """The ids of sessions whose names begin so."""
        return {bytes(id) for _, id in self._starting(require_text(prefix, "a prefix"))} if prefix else set()

    def free_name(self, name: str) -> bytes:
        """Return the key of a new name. Raises SessionError if it cannot be one, or is taken."""
        key = require_text(name, "a session name")
        if not key or len(key) > _NAME_BYTES or not name.isprintable() or name != name.strip():
            fix = f"Use 1 to {_NAME_BYTES} bytes of printable text without spaces at the ends"
            raise SessionError(f"{name[:60]!r} cannot name a session", fix=fix)
        if self._txn.get(key, db=self._names) is not None:
            raise SessionError(f"there is already a session {name!r}", fix="Choose another name")
        return key

    def add(self, session: Session) -> Session:
        """Write a new session and its name; returns it. Raises what `free_name` raises."""
        self._txn.put(self.free_name(session.name), bytes.fromhex(session.id), db=self._names)
        return self._put(None, session)

    def change(self, session: Session, **changes: Any) -> Session:
        """Write a session with some fields changed; returns it. Raises what `free_name` raises for a new name."""
        changed = structs.replace(session, **changes)
        if changed.name != session.name:
            self._txn.put(self.free_name(changed.name), bytes.fromhex(session.id), db=self._names)
            self._txn.delete(session.name.encode(), db=self._names)
        return self._put(session, changed)

    def _put(self, before: Session | None, session: Session) -> Session:
        self._txn.put(bytes.fromhex(session.id), encode_session(session), db=self._sessions)
        self.recent.replace(before, session)
        return session

    def remove(self, session: Session) -> None:
        """Delete a session and its name."""
        self._txn.delete(session.name.encode(), db=self._names)
        self._txn.delete(bytes.fromhex(session.id), db=self._sessions)
        self.recent.replace(session, None)

    def check(self) -> None:
        """Raise AssertionError where names, sessions and their order disagree. O(sessions)."""
        self.recent.check()
        names = {bytes(key): bytes(id) for key, id in self._txn.cursor(db=self._names)}
        sessions = {one.name.encode(): bytes.fromhex(one.id) for one in self.recent.newest_first()}
        assert names == sessions, "names and sessions differ"

"""One state of a ledger, for readers that follow it: the rows of its sessions, and its turns."""

from __future__ import annotations

from typing import Any

from xxhash import xxh3_64_intdigest

from ctxreuse.store.ledger.history import History
from ctxreuse.store.ledger.recent import row_parts
from ctxreuse.store.ledger.records import Session
from ctxreuse.store.ledger.sessions import SessionTable

__all__ = ["LedgerSnapshot"]


class LedgerSnapshot:
    """A ledger inside one read transaction, which it must not outlive; for the transaction's thread.

    ``number``: of the transaction that wrote last; ``history``: the turns.
    """

    def __init__(self, txn: Any, history: History, sessions: SessionTable) -> None:
        self.number: int = txn.id()
        self.history, self._sessions = history, sessions

    def rows(self) -> list[bytes]:
        """Return 32 bytes for each session, oldest change first: other bytes whenever it changes. See `parts`."""
        return self._sessions.recent.rows()

    @staticmethod
    def parts(row: bytes) -> tuple[str, int]:
        """Return a session's id and its head, from its row."""
        return row_parts(row)

    def session(self, id_or_name: str) -> Session:
        """Return a session. Raises SessionError."""
        return self._sessions.find(id_or_name)

    def digest(self, id: int) -> int:
        """Return a digest of a turn as it is stored, 63 bits. Raises SessionError for one that is not there."""
        return xxh3_64_intdigest(self.history.raw(id)) >> 1

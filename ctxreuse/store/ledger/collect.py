"""Turns that no session reaches any more, deleted with their token ids."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ctxreuse.store.ledger.history import History, turn_key
from ctxreuse.store.ledger.sessions import SessionTable

__all__ = ["collect"]


def collect(txn: Any, history: History, tables: Mapping[str, Any]) -> int:
    """Delete turns, and their tokens, that no session reaches; returns the number of turns. O(all entries)."""
    sessions = SessionTable(txn, tables)
    reached = _reached(history, sessions)
    for session in list(sessions.recent.newest_first()):
        # The turn where a fork began may go; what is left of the history there is where it began now.
        begun = session.forked_at if history.has(session.forked_at) else 0
        begun = next((id for id in history.up(begun) if turn_key(id) in reached), 0)
        if begun != session.forked_at:
            sessions.change(session, forked_at=begun)
    lost = [key for key in txn.cursor(db=tables["turns"]).iternext(values=False) if key not in reached]
    unreached = set(lost)
    stale = [key for key in txn.cursor(db=tables["tokens"]).iternext(values=False) if key[:8] in unreached]
    for name, keys in (("turns", lost), ("tokens", stale)):
        for key in keys:
            txn.delete(key, db=tables[name])
    return len(lost)


def _reached(history: History, sessions: SessionTable) -> set[bytes]:
    reached: set[bytes] = set()
    for session in sessions.recent.newest_first():
        for id in history.up(session.head):
            key = turn_key(id)
            if key in reached:
                break
            reached.add(key)
    return reached

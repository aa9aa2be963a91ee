"""Bringing the index to the state of the ledger: turns that sessions reach come in, those that none reaches leave."""

from __future__ import annotations

from contextlib import suppress

from ctxreuse.errors import SessionError
from ctxreuse.store.ledger.records import DamagedTurnError
from ctxreuse.store.ledger.snapshot import LedgerSnapshot
from ctxreuse.store.recall.tables import Tables

__all__ = ["StaleError", "follow"]


class StaleError(Exception):
    """The index has other turns than the ledger under the same ids: it was made from another one."""


def follow(tables: Tables, now: LedgerSnapshot, before: set[bytes], after: set[bytes]) -> None:
    """Take over what changed since the index was at the rows ``before``. Raises StaleError, sqlite3.Error."""
    past, new = before - after, after - before
    with tables.writing():
        heads = dict(now.parts(row) for row in new)
        for session, head in heads.items():
            record = now.session(session)
            tables.set_session(session, record)
            _add(tables, now, session, head, record.namespace)
        for row in past:
            session, old = now.parts(row)
            head = heads.get(session, 0)
            if session not in heads:
                tables.set_session(session, None)
            if not (head and _reaches(now, old, head)):
                _leave(tables, now, session, head, after)
        tables.set_rows(past, new)


def _add(tables: Tables, now: LedgerSnapshot, session: str, head: int, namespace: str) -> None:
    """Add the turns of a session that are not here yet; all before one that is here are here."""
    with suppress(DamagedTurnError):  # what is before damaged links cannot be known
        for id in now.history.up(head):
            digest, here = now.digest(id), tables.digest(id)
            if here is not None:
                if here != digest:
                    raise StaleError(f"turn {id} is another one")
                return
            with suppress(DamagedTurnError):  # it cannot be read, so it is not found
                tables.add(now.history.turn(id), session, namespace, digest)


def _leave(tables: Tables, now: LedgerSnapshot, session: str, head: int, after: set[bytes]) -> None:
    """Remove the turns that a session had and reaches no more, unless another session reaches them."""
    # They stood in one line, so who reaches any of them reaches the first.
    left = [id for id in tables.of_session(session) if not _reaches(now, id, head)]
    for row in sorted(after, reverse=True) if left else ():
        if not left:
            return
        other, top = now.parts(row)
        if _reaches(now, left[0], top):
            stays = [id for id in left if _reaches(now, id, top)]
            tables.move(stays, other)
            left = [id for id in left if id not in set(stays)]
    tables.remove(left)


def _reaches(now: LedgerSnapshot, id: int, head: int) -> bool:
    with suppress(SessionError, DamagedTurnError):  # removed by gc
        return bool(head) and now.history.ancestor(id, head)
    return False

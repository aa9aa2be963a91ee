"""All records of a ledger, read and compared with their checksums."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ctxreuse.errors import StoreDamagedError
from ctxreuse.store.ledger.history import History, turn_key
from ctxreuse.store.ledger.items import ItemTable
from ctxreuse.store.ledger.records import DamagedTurnError, decode_session, decode_tokens, decode_turn, is_checked
from ctxreuse.store.ledger.sessions import SessionTable
from ctxreuse.store.types import Progress

__all__ = ["check_records", "read_records"]


def read_records(
    txn: Any, history: History, tables: Mapping[str, Any], checked_from: int, progress: Progress | None = None
) -> tuple[list[str], int]:
    """Return what is wrong with records, and how many turns have no checksum. O(all bytes).

    ``checked_from``: the first turn that was written when every record had a checksum.
    """
    bad: dict[int, str] = {}
    problems: list[str] = []
    unchecked = done = 0
    total = sum(int(txn.stat(tables[name])["entries"]) for name in ("turns", "tokens"))
    for name in ("turns", "tokens"):
        for key, raw in txn.cursor(db=tables[name]):
            id = int.from_bytes(key[:8], "big")
            try:
                if name == "turns":
                    decode_turn(id, raw)
                    unchecked += not is_checked(raw)
                else:
                    decode_tokens(bytes(key), raw, checked=id >= checked_from)
            except DamagedTurnError as error:
                bad.setdefault(id, str(error))
            done += 1
            if progress is not None and (done == total or not done % 1000):
                progress(done, total)
    homes: dict[int, list[str]] = {id: [] for id in bad}
    for key, raw in txn.cursor(db=tables["sessions"]):
        try:
            session = decode_session(bytes(key), raw)
            for id in history.reaches(session.head, set(bad)) if bad else ():
                homes[id].append(repr(session.name))
        except StoreDamagedError as error:
            problems.append(error.what)
    for id, why in bad.items():
        problems.append(f"{why} (session {', '.join(sorted(homes[id]))})" if homes[id] else why)
    problems += ItemTable(txn, tables).damaged()
    return problems, unchecked


def check_records(txn: Any, history: History, tables: Mapping[str, Any], next_id: int) -> None:
    """Raise AssertionError where links, names or counts disagree. O(all entries)."""
    sessions = SessionTable(txn, tables)
    sessions.check()
    known = {bytes(key) for key in txn.cursor(db=tables["turns"]).iternext(values=False)}
    for key in known:
        id = int.from_bytes(key, "big")
        turn, links = history.turn(id), history.links(id)
        assert turn.parent < id < next_id, f"turn {id} after {turn.parent}, next id is {next_id}"
        assert links == history.child_of(turn.parent), f"turn {id} has links {links}"
    for session in sessions.recent.newest_first():
        assert not session.head or turn_key(session.head) in known, f"session {session.name!r} has no head"
    for key in txn.cursor(db=tables["tokens"]).iternext(values=False):
        assert bytes(key[:8]) in known, "tokens of a turn that is not there"

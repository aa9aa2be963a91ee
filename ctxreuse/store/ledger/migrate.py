"""Records of earlier versions of a ledger, rewritten as those of this one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ctxreuse.store.ledger.history import History, turn_key
from ctxreuse.store.ledger.records import (
    NewTurn,
    decode_session,
    decode_tokens,
    decode_turn,
    encode_id,
    encode_session,
    encode_tokens,
    encode_turn,
    is_checked,
)

__all__ = ["migrate_records"]


def migrate_records(txn: Any, history: History, tables: Mapping[str, Any], checked_from: int) -> int:
    """Give every record a checksum, in one transaction; returns the number of turns that had none.

    Raises DamagedTurnError, StoreDamagedError for one that cannot be read: nothing is changed then.
    """
    turns, tokens, sessions = tables["turns"], tables["tokens"], tables["sessions"]
    old = [bytes(key) for key, raw in txn.cursor(db=turns) if not is_checked(raw)]
    for key in old:
        id = int.from_bytes(key, "big")
        turn, links = decode_turn(id, txn.get(key, db=turns)), history.links(id)
        raw = encode_turn(id, links, NewTurn(turn.role, turn.content, turn.meta), turn.created)
        txn.put(turn_key(id), raw, db=turns)
    bare = [bytes(key) for key in txn.cursor(db=tokens).iternext(values=False)]
    for key in bare:
        if int.from_bytes(key[:8], "big") < checked_from:
            ids = decode_tokens(key, txn.get(key, db=tokens), checked=False)
            txn.put(key, encode_tokens(key, ids), db=tokens)
    for key in [bytes(key) for key in txn.cursor(db=sessions).iternext(values=False)]:
        txn.put(key, encode_session(decode_session(key, txn.get(key, db=sessions))), db=sessions)
    txn.put(b"checked", encode_id(b"checked", 1), db=tables["info"])
    return len(old)

"""A whole ledger written at once, under the ids that its records had elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from itertools import islice
from typing import Any

from ctxreuse.store.ledger.history import History, turn_key
from ctxreuse.store.ledger.ledger import Ledger
from ctxreuse.store.ledger.records import NewTurn, Session, encode_id, encode_turn
from ctxreuse.store.ledger.sessions import SessionTable
from ctxreuse.store.ledger.tokens import TokenTable
from ctxreuse.store.types import Progress

__all__ = ["adopt"]


def adopt(
    ledger: Ledger,
    sessions: Iterable[Session],
    turns: Mapping[int, tuple[int, NewTurn]],
    tokens: Iterable[tuple[bytes, bytes]],
    next_id: int,
    progress: Progress | None = None,
) -> None:
    """Write sessions, turns (with the turn before each) and token ids into a new ledger.

    In transactions of a thousand, the sessions in the last. Raises what methods of `Ledger` that write raise.
    """
    tables = ledger._env.tables

    def put_turns(batch: list[int], txn: Any, history: History) -> None:
        for id in batch:
            parent, new = turns[id]
            raw = encode_turn(id, history.child_of(parent), new, new.created or 0.0)
            txn.put(turn_key(id), raw, db=tables["turns"], append=True)

    def put_tokens(batch: list[tuple[bytes, bytes]], txn: Any, _: History) -> None:
        for key, ids in batch:
            TokenTable(txn, tables).put(int.from_bytes(key[:8], "big"), key[8:], ids)

    def put_sessions(txn: Any, _: History) -> None:
        for session in sessions:
            SessionTable(txn, tables).add(session)
        txn.put(b"next", encode_id(b"next", next_id), db=tables["info"])

    done = 0
    for ids in _batches(sorted(turns)):
        ledger._write(partial(put_turns, ids))
        done += len(ids)
        if progress is not None:
            progress(done, len(turns))
    for rows in _batches(tokens):
        ledger._write(partial(put_tokens, rows))
    ledger._write(put_sessions)


def _batches(values: Iterable[Any]) -> Iterator[list[Any]]:
    left = iter(values)
    while batch := list(islice(left, 1000)):
        yield batch

"""The ids of a context, stored with its last turn: all of them, or those behind what the context at an earlier turn
has, so that a conversation of many stored steps takes the room of one."""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

from ctxreuse.identity.keys import Tokens, as_tokens
from ctxreuse.store import Ledger, NewTurn

__all__ = ["ids_at", "with_ids"]

#: First in a record: all ids follow; or how many turns before there is another record, how many of its ids the context
#: begins with, and the other ids. No ids are negative, nor are these marks those of the sessions of agents.
_WHOLE, _BEHIND = -1, -3


def with_ids(turn: NewTurn, ids: Tokens, space: bytes, known: Tokens | None = None, back: int = 0) -> NewTurn:
    """Return the last turn of a context with the ids of all of it.

    Args:
        turn: the turn.
        ids: of the context.
        space: digest of their model space.
        known: ids of the context at the turn ``back`` turns before, if they are stored.
        back: 1 for the turn before.
    """
    shared = 0
    if known is not None:
        size = min(len(known), len(ids))
        differs = np.flatnonzero(known[:size] != ids[:size])
        shared = int(differs[0]) if len(differs) else size
    head = [_BEHIND, back, shared] if shared else [_WHOLE]
    packed = np.concatenate([head, ids[shared:]]).astype("<i4").tobytes()
    return msgspec.structs.replace(turn, tokens=packed, space=space)


def ids_at(ledger: Ledger, turn: int, space: bytes) -> Tokens | None:
    """Return the ids of the context that ends at a turn, int32 [n]; None if they are not stored."""
    pieces: list[npt.NDArray[np.int32]] = []
    count: int | None = None
    while count != 0:
        raw = ledger.tokens(turn, space)
        record = np.frombuffer(raw, "<i4") if raw and len(raw) % 4 == 0 else np.array([0], "<i4")
        if record[0] == _WHOLE:
            shared, own = 0, record[1:]
        elif record[0] == _BEHIND and len(record) >= 3 and record[1] > 0 and record[2] > 0:
            shared, own = int(record[2]), record[3:]
            turn = ledger.before(turn, int(record[1]))
        else:
            return None
        pieces.append(own if count is None else own[: max(count - shared, 0)])
        count = shared if count is None else min(shared, count)
    return as_tokens(np.concatenate(pieces[::-1]))

"""Stored responses of ``/v1/responses``: each a session of the ledger that shares the turns of the one it continues."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec

from ctxreuse.daemon.middleware import CALLER
from ctxreuse.daemon.responses import Item, ResponseObject
from ctxreuse.errors import SessionError
from ctxreuse.identity.keys import Tokens
from ctxreuse.store import Ledger, NewTurn, Turn, new_session_id
from ctxreuse_edge.contexts import OWNER, RECORD, RESPONSES, NamedContexts, session_of
from ctxreuse_edge.token_records import ids_at, with_ids

__all__ = ["Continued", "StoredResponses", "new_response_id"]

#: In the meta of the last turn: how many of the items before it are the response's output.
_OUTPUTS = "outputs"


#: Seconds between two looks for what is kept no longer, and how many are deleted at a time.
_LOOK, _BATCH = 3600.0, 100


class Continued(NamedTuple):
    """A stored response that another continues: its session, the turn of its last item, and all items up to that."""

    session: str
    head: int
    items: list[Item]


def new_response_id() -> str:
    """Return an id that no response has."""
    return RESPONSES + new_session_id()


class StoredResponses:
    """All stored responses of one daemon. Thread-safe.

    A response is a session with its id as a name. Its turns are the items of the conversation, one each, and behind
    them one that has the rest: what continues the response shares the items, and not its instructions. Methods raise
    SessionError for an unknown response, and for that of another API key.
    """

    def __init__(
        self,
        ledger: Ledger,
        contexts: NamedContexts,
        forget: Callable[[str], Any],
        *,
        seconds: float = math.inf,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """
        Args:
            ledger: where they are kept.
            contexts: knows which are pinned.
            forget: deletes a session and what was computed for it.
            seconds: how long they are kept.
            clock: seconds since 1970.
        """
        self._ledger, self._contexts, self._forget = ledger, contexts, forget
        self._seconds, self._clock, self._next = seconds, clock, 0.0

    def store(
        self,
        response: ResponseObject,
        given: Sequence[Item],
        made: Sequence[Item],
        continued: Continued | None,
        ids: Tokens,
        space: bytes,
    ) -> None:
        """Keep a response, on disk when the call returns, in one step.

        Args:
            response: with an id that no other has.
            given: the items of its input.
            made: those of its output, at least one.
            continued: the response that it continues; two may continue one.
            ids: of the prompt and the answer.
            space: digest of the model space of these.
        """
        record = msgspec.json.encode(msgspec.structs.replace(response, output=[])).decode()
        items = [item.turn for item in (*given, *made)]
        known = ids_at(self._ledger, continued.head, space) if continued is not None else None
        items[-1] = with_ids(items[-1], ids, space, known, len(items))
        meta = {_OUTPUTS: len(made)} | ({OWNER: caller} if (caller := CALLER.get()) else {})
        turns = [*items, with_ids(NewTurn(RECORD, record, meta), ids, space, ids, 1)]
        id = response.id.removeprefix(RESPONSES)
        if continued is None:
            self._ledger.create(response.id, turns=turns, id=id)
            return
        try:
            self._ledger.create(response.id, continued.head, turns=turns, id=id, origin=continued.session)
        except SessionError as error:
            fix = "Send the whole conversation as input"
            raise SessionError("the response that it continues was deleted meanwhile", fix=fix) from error

    def continued(self, id: str) -> Continued:
        """Return what continues a response."""
        session, turns, _ = self._find(id)
        return Continued(session, turns[-2].id, [Item.kept(turn) for turn in turns[:-1]])

    def get(self, id: str) -> dict[str, Any]:
        """Return a response as its client was given it."""
        _, turns, outputs = self._find(id)
        found: dict[str, Any] = msgspec.json.decode(turns[-1].content)
        return found | {"output": [Item.kept(turn).plain for turn in turns[-1 - outputs : -1]]}

    def input_items(self, id: str) -> list[dict[str, Any]]:
        """Return all items that a response answered, those of the responses before it too; the first one first."""
        _, turns, outputs = self._find(id)
        return [Item.kept(turn).plain for turn in turns[: -1 - outputs]]

    def delete(self, id: str) -> None:
        """Delete a response, and KV that nothing else shares; what continues it keeps its own history."""
        self._find(id)
        self._forget(id)

    def expire(self) -> None:
        """Delete the texts of responses that are kept no longer, some at a time; their KV is evicted where its room is
        needed. Call it often: it looks once an hour."""
        now = self._clock()
        if now < self._next or math.isinf(self._seconds):
            return
        listed, pinned = self._ledger.sessions(prefix=RESPONSES), self._contexts.pinned
        old = [one for one in listed if one.created < now - self._seconds and one.id not in pinned]
        for session in old[:_BATCH]:
            with contextlib.suppress(SessionError):  # deleted meanwhile
                self._ledger.delete(session.id)
        if len(old) <= _BATCH:
            self._next = now + _LOOK
            if old:
                self._ledger.gc()

    def _find(self, id: str) -> tuple[str, list[Turn], int]:
        """Return the session of a response, its turns with the record last, and how many items are its output."""
        try:
            session = session_of(self._ledger, id if id.startswith(RESPONSES) else "-")
        except SessionError:
            raise _unknown(id) from None
        turns = self._ledger.turns(session.head)
        if session.name != id or len(turns) < 2 or turns[-1].role != RECORD:
            raise _unknown(id)
        return session.id, turns, int(turns[-1].meta[_OUTPUTS])


def _unknown(id: str) -> SessionError:
    what = f"there is no stored response {id[:80]!r}"
    return SessionError(what, fix="It was deleted, made with store false, or its stream was cut before its end")

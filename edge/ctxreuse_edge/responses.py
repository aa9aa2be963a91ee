"""Stored responses of ``/v1/responses``: each a session of the ledger that shares the turns of the one it continues."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec

from ctxreuse.daemon.responses import Item, ResponseObject
from ctxreuse.errors import SessionError
from ctxreuse.identity.keys import Tokens
from ctxreuse.store import Ledger, NewTurn, Turn, new_session_id
from ctxreuse_edge.contexts import RESPONSES, with_tokens

__all__ = ["Continued", "StoredResponses", "new_response_id"]

#: In the last turn's meta: the response without its id and output, as JSON; how many of its turns are its output.
_RECORD, _OUTPUTS = "response", "outputs"


class Continued(NamedTuple):
    """A stored response that another continues: its session, and its last turn, which may be another's later; and all
    items up to it."""

    session: str
    head: int
    items: list[Item]


def new_response_id() -> str:
    """Return an id that no response has."""
    return RESPONSES + new_session_id()


class StoredResponses:
    """All stored responses of one daemon. Thread-safe.

    A response is a session with its id as a name. Its turns are the items of the conversation, one each; instructions
    are none of them, as the next response has its own. Methods raise SessionError for an unknown response.
    """

    def __init__(self, ledger: Ledger, forget: Callable[[str], Any]) -> None:
        """``forget``: deletes a session and what was computed for it."""
        self._ledger, self._forget = ledger, forget

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
        turns = [item.turn for item in (*given, *made)]
        last = turns[-1]
        meta = {**last.meta, _RECORD: record, _OUTPUTS: len(made)}
        turns[-1] = with_tokens(NewTurn(last.role, last.content, meta), ids, space)
        self._ledger.create(
            response.id,
            continued.head if continued is not None else 0,
            turns=turns,
            id=response.id.removeprefix(RESPONSES),
            origin=continued.session if continued is not None else None,
        )

    def continued(self, id: str) -> Continued:
        """Return what continues a response."""
        session, turns, _ = self._find(id)
        return Continued(session, turns[-1].id, [Item.kept(turn) for turn in turns])

    def get(self, id: str) -> dict[str, Any]:
        """Return a response as its client was given it."""
        _, turns, outputs = self._find(id)
        found: dict[str, Any] = msgspec.json.decode(turns[-1].meta[_RECORD])
        return found | {"output": [_shown(turn) for turn in turns[len(turns) - outputs :]]}

    def input_items(self, id: str) -> list[dict[str, Any]]:
        """Return all items that a response answered, those of the responses before it too; the first one first."""
        _, turns, outputs = self._find(id)
        return [Item.kept(turn).plain for turn in turns[: len(turns) - outputs]]

    def delete(self, id: str) -> None:
        """Delete a response, and KV that nothing else shares; what continues it keeps its own history."""
        self._find(id)
        self._forget(id)

    def _find(self, id: str) -> tuple[str, list[Turn], int]:
        """Return the session, the turns and the number of outputs of a response."""
        try:
            session = self._ledger.session(id if id.startswith(RESPONSES) else "-")
        except SessionError:
            raise _unknown(id) from None
        turns = self._ledger.turns(session.head)
        if session.name != id or not turns or not isinstance(turns[-1].meta.get(_RECORD), str):
            raise _unknown(id)
        return session.id, turns, int(turns[-1].meta[_OUTPUTS])


def _unknown(id: str) -> SessionError:
    what = f"there is no stored response {id[:80]!r}"
    return SessionError(what, fix="It was deleted, made with store false, or its stream was cut before its end")


def _shown(turn: Turn) -> dict[str, Any]:
    return Item.kept(turn).plain

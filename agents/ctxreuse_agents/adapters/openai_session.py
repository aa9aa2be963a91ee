"""A session of the OpenAI Agents SDK that is a session of a memory: forks, search and ``why`` work on its chats."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from ctxreuse.daemon.openai import ApiError
from ctxreuse.daemon.responses import InputItem, input_items
from ctxreuse.errors import SessionError
from ctxreuse.store import NewTurn, Turn
from ctxreuse_agents.adapters.frameworks import framework
from ctxreuse_agents.memory import Memory
from ctxreuse_agents.session import Session

with framework("openai-agents", "0.20", "0.25"):
    from agents import SessionSettings

__all__ = ["OpenAISession"]

#: Field of a turn's meta with the item as the SDK gave it, where the turn alone does not say all of it.
_WHOLE = "openai"


class OpenAISession:
    """What ``Runner.run(…, session=)`` takes: each item is a turn. Any thread and any event loop may call.

    Attributes:
        session: the session that it is, to fork, search or explain. A fork is a session for the SDK by `of`.
        session_settings: the SDK's ``SessionSettings``, whose ``limit`` is the number of items that it reads. A dict
            of its fields will do.
    """

    def __init__(
        self, memory: Memory, session_id: str, *, namespace: str | None = None, session_settings: Any = None
    ) -> None:
        """Use the session with that id or name, which is created if there is none.

        Args:
            memory: whose session; the caller closes it.
            session_id: its id or name.
            namespace: see `Memory.session`.
            session_settings: see above.
        """
        self.session = memory.session(session_id, namespace=namespace)
        self.session_id, self.session_settings = session_id, _settings(session_settings)

    @classmethod
    def of(cls, session: Session, *, session_settings: Any = None) -> OpenAISession:
        """Return it for a session that there is, such as a fork."""
        found = cls.__new__(cls)
        found.session, found.session_id, found.session_settings = session, session.id, _settings(session_settings)
        return found

    async def get_items(self, limit: int | None = None) -> list[Any]:
        """Return the items, or the last so many, oldest first."""
        most = self.session_settings.limit if limit is None else limit
        turns = await asyncio.to_thread(self.session.turns)
        wanted = turns if most is None else turns[-most:] if most > 0 else []
        return [_item_of(turn) for turn in wanted]

    async def add_items(self, items: Sequence[Any]) -> None:
        """Append items: all of them or none. Raises SessionError for what is no JSON."""
        turns = [_turn_of(item) for item in items]
        await asyncio.to_thread(self.session.extend, turns)

    async def pop_item(self) -> Any:
        """Remove the last item and return it; None if there is none."""
        turn = await asyncio.to_thread(self._pop)
        return None if turn is None else _item_of(turn)

    async def clear_session(self) -> None:
        """Remove all items. Forks keep theirs; `Memory.gc` deletes the rest."""
        await asyncio.to_thread(self.session.rollback, 0)

    def _pop(self) -> Turn | None:
        core = self.session._core
        with core.lock.hold():
            turns = core.turns()
            if turns:
                core.rollback(-1)
        return turns[-1] if turns else None


def _settings(given: Any) -> Any:
    if not isinstance(given, Mapping):
        return SessionSettings() if given is None else given
    if unknown := sorted(set(given) - {field.name for field in dataclasses.fields(SessionSettings)}):
        raise TypeError(f"Unknown session settings: {', '.join(unknown)}")
    return SessionSettings(**given)


def _turn_of(item: Any) -> NewTurn:
    """Return the turn of an item: in words of the chat where it has any, with the whole item beside them if need be."""
    try:
        raw = msgspec.json.encode(item)
        whole = msgspec.json.decode(raw)
    except (TypeError, ValueError, RecursionError) as error:
        raise SessionError(f"an item cannot be stored: {error}", fix="Give items as the SDK has them: JSON") from None
    if not isinstance(whole, dict):
        raise SessionError(f"an item is {type(item).__name__}, not a dict", fix="Give items as the SDK has them")
    try:
        found = input_items([msgspec.convert(whole, InputItem)])
    except (msgspec.ValidationError, ApiError):
        found = []  # pictures, files, calls of hosted tools: no words of the chat
    if found:
        message = found[0].message
        turn = NewTurn("system" if message.role == "developer" else message.role, message.content, message.meta)
    else:
        turn = NewTurn("assistant", "")
    if whole == {"role": turn.role, "content": turn.content}:
        return turn
    return msgspec.structs.replace(turn, meta={**turn.meta, _WHOLE: raw.decode()})


def _item_of(turn: Turn) -> Any:
    raw = turn.meta.get(_WHOLE)
    if isinstance(raw, str):
        try:
            return msgspec.json.decode(raw)
        except (msgspec.DecodeError, RecursionError):
            pass  # a turn of somebody else's
    return {"role": turn.role if turn.role in ("system", "user", "assistant") else "user", "content": turn.content}

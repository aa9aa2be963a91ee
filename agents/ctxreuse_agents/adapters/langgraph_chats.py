"""The chats in LangGraph's threads as sessions, so that they can be searched, forked, explained and asked on."""

from __future__ import annotations

import hashlib
import json
import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from ctxreuse.engines.text import Message, ToolCall
from ctxreuse.errors import CtxReuseError, SessionError
from ctxreuse.store import NewTurn
from ctxreuse_agents._session import SessionCore
from ctxreuse_agents.adapters.named import session_name
from ctxreuse_agents.memory import Memory
from ctxreuse_agents.session import Session

__all__ = ["NAMESPACE", "ThreadChats"]

log = logging.getLogger(__name__)

#: The namespace of the sessions, and what their names begin with.
NAMESPACE = _ROOM = "langgraph"
#: Characters of a name; of a longer one stand its beginning and a digest.
_LONGEST, _BEGINNING = 300, 200
#: Seconds that a graph waits for a session whose answer has not ended, which may be for long.
_PATIENCE = 0.5
#: Sessions whose turns are remembered, so that they need not be read to be compared.
_MOST_KNOWN = 16
_ROLES = {"human": "user", "ai": "assistant", "function": "tool", "developer": "system"}


class ThreadChats:
    """Sessions named ``langgraph:THREAD``, each with the messages of its thread's newest checkpoint.

    They follow it: what is added to one by others is replaced when the thread goes on. Any thread may call.
    """

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        #: Of the sessions that were written last: the ids of their turns, and what they say.
        self._known: OrderedDict[str, tuple[list[int], list[NewTurn]]] = OrderedDict()

    def session(self, thread: str) -> Session:
        """Return the session of a thread. Raises SessionError if it has no chat."""
        return self._memory.session(_name(thread), create=False)

    def follow(self, thread: str, messages: object, newest: Callable[[], bool]) -> None:
        """Have the session say what the messages of a checkpoint do, unless ``newest`` says that another came since.

        What is no list of messages is left alone. A message that cannot be stored as text, and an answer that is still
        being read, leave the session as it is: the checkpoint has all in any case, and the next one makes up for it.
        """
        turns = _turns_of(messages)
        if not turns:
            return
        try:
            core = self._memory.session(_name(thread), namespace=NAMESPACE)._core
            with core.lock.hold(_PATIENCE):
                if newest():
                    self._write(core, turns)
        except CtxReuseError as error:
            log.warning("the chat of thread %r is behind its checkpoints: %s", thread, error)

    def _write(self, core: SessionCore, turns: list[NewTurn]) -> None:
        ids, here = self._known.pop(core.id, ([], []))
        if core.record.head != (ids[-1] if ids else 0):
            found = core.turns()
            ids, here = [one.id for one in found], [NewTurn(one.role, one.content, one.meta) for one in found]
        same = _same(turns, here)
        if same < max(len(here), len(turns)):
            added = self._memory.ledger.append(core.id, turns[same:], after=ids[same - 1] if same else 0)
            ids = [*ids[:same], *(one.id for one in added)]
        self._known[core.id] = ids, turns
        while len(self._known) > _MOST_KNOWN:
            self._known.popitem(last=False)

    def delete(self, thread: str) -> None:
        """Delete the session of a thread, if it has one."""
        with suppress(SessionError):
            self._memory.delete(_name(thread))

    def copy(self, source: str, target: str) -> None:
        """Have the session of a thread in the place of another's: as a fork, which shares all of its turns."""
        with suppress(SessionError):
            session = self.session(source)
            self.delete(target)
            session.fork(_name(target))


def _name(thread: str) -> str:
    name = session_name(_ROOM, thread)
    return name if len(name) <= _LONGEST else name[:_BEGINNING] + hashlib.sha256(name.encode()).hexdigest()


def _same(turns: Sequence[NewTurn], others: Sequence[NewTurn]) -> int:
    """Return how many turns at the beginning are the same."""
    pairs = enumerate(zip(turns, others))
    return next((at for at, (one, other) in pairs if one != other), min(len(turns), len(others)))


def _turns_of(messages: object) -> list[NewTurn]:
    """Return the turns of a list of messages; none if it holds anything else."""
    if not isinstance(messages, list):
        return []
    turns = [_turn_of(one) for one in messages]
    return [one for one in turns if one is not None] if None not in turns else []


def _turn_of(message: Any) -> NewTurn | None:
    read: Callable[[str], Any] = message.get if isinstance(message, Mapping) else partial(_field, message)
    role, content, id = read("role") or read("type"), read("content"), read("id")
    if not isinstance(role, str) or not isinstance(content, str | list):
        return None
    calls = tuple(_call_of(one) for one in read("tool_calls") or () if isinstance(one, Mapping))
    kept = Message("", "", tool_calls=calls, tool_call_id=str(read("tool_call_id") or ""))
    meta = {**kept.meta, **({"message": id} if isinstance(id, str) else {})}
    return NewTurn(_ROLES.get(role, role), _text_of(content), meta)


def _field(message: object, name: str) -> Any:
    return getattr(message, name, None)


def _text_of(content: str | list[Any]) -> str:
    if isinstance(content, str):
        return content
    parts = [one if isinstance(one, str) else one.get("text") for one in content if isinstance(one, str | Mapping)]
    return "\n".join(one for one in parts if isinstance(one, str))


def _call_of(call: Mapping[str, Any]) -> ToolCall:
    arguments = json.dumps(call.get("args") or {}, ensure_ascii=False, default=str)
    return ToolCall(str(call.get("name") or ""), arguments, str(call.get("id") or ""))

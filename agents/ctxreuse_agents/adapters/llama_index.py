"""LlamaIndex on a memory: chats that are sessions, and a block of its memory that recalls what was said before."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec

from ctxreuse.errors import SessionError
from ctxreuse.store import NewTurn, Turn
from ctxreuse_agents.adapters.frameworks import framework
from ctxreuse_agents.adapters.named import key_of, session_name
from ctxreuse_agents.memory import Memory
from ctxreuse_agents.session import Session

with framework("llama-index-core", "0.14", "0.15"):
    from llama_index.core.bridge.pydantic import PrivateAttr
    from llama_index.core.llms import ChatMessage, MessageRole
    from llama_index.core.memory import BaseMemoryBlock
    from llama_index.core.storage.chat_store.base import BaseChatStore

__all__ = ["LlamaIndexChatStore", "LlamaIndexMemoryBlock"]

_ROOM = "llama-index"
#: Field of a turn's meta with the message as LlamaIndex had it, where the turn alone does not say all of it.
_WHOLE = "llama_index"
_ROLES = {"developer": "system", "function": "tool", "chatbot": "assistant", "model": "assistant"}
#: Characters that are about a token.
_CHARS = 4
#: Messages that a block looks for what is said on.
_LATEST = 2


class LlamaIndexChatStore(BaseChatStore):  # type: ignore[misc]
    """A chat store whose chats are sessions, named ``llama-index:KEY``. Any thread and any event loop may call."""

    _memory: Any = PrivateAttr()

    def __init__(self, memory: Memory) -> None:
        """Use a memory, which the caller closes."""
        super().__init__()
        self._memory = memory

    @classmethod
    def class_name(cls) -> str:
        """Return the name under which LlamaIndex writes it."""
        return "LlamaIndexChatStore"

    def session(self, key: str) -> Session:
        """Return the session of a chat, to fork, search or explain. It is created if there is none."""
        found: Session = self._memory.session(session_name(_ROOM, key))
        return found

    def set_messages(self, key: str, messages: list[Any]) -> None:
        """Replace a chat."""
        turns, core = [_turn_of(message) for message in messages], self.session(key)._core
        with core.lock.hold():
            self._memory.ledger.append(core.id, turns, after=0)

    def get_messages(self, key: str) -> list[Any]:
        """Return a chat; empty if there is none."""
        found = self._find(key)
        return [] if found is None else [_message_of(turn) for turn in found.turns()]

    def add_message(self, key: str, message: Any) -> None:
        """Append a message."""
        self.session(key).extend([_turn_of(message)])

    def delete_messages(self, key: str) -> list[Any] | None:
        """Delete a chat and return it; None if there is none."""
        found = self._find(key)
        if found is None:
            return None
        messages = [_message_of(turn) for turn in found.turns()]
        self._memory.delete(found)
        return messages

    def delete_message(self, key: str, idx: int) -> Any:
        """Delete the message at a place and return it; None if there is none."""
        found = self._find(key)
        if found is None:
            return None
        core = found._core
        with core.lock.hold():
            turns = core.turns()
            if not -len(turns) <= idx < len(turns):
                return None
            core.edit(turns[idx], None, None)
        return _message_of(turns[idx])

    def delete_last_message(self, key: str) -> Any:
        """Delete the last message and return it; None if there is none."""
        return self.delete_message(key, -1)

    def get_keys(self) -> list[str]:
        """Return the keys of all chats."""
        return [key_of(session.name) for session in self._memory.sessions(prefix=f"{_ROOM}:")]

    def _find(self, key: str) -> Session | None:
        try:
            found: Session = self._memory.session(session_name(_ROOM, key), create=False)
        except SessionError:
            return None
        return found


class LlamaIndexMemoryBlock(BaseMemoryBlock[str]):  # type: ignore[misc]
    """A block of LlamaIndex's ``Memory``: what leaves its short-term memory is stored, and recalled by words.

    No model is called.
    """

    name: str = "recalled"
    tokens: int = 512
    session: str = "llama-index memory"
    namespace: str = ""

    _memory: Any = PrivateAttr()

    def __init__(self, memory: Memory, **fields: Any) -> None:
        """Use a memory, which the caller closes.

        Args:
            memory: where messages are stored and looked for.
            fields: of LlamaIndex's blocks (``name``, ``priority``, …); ``tokens``: of what is recalled, at most;
                ``session``: name of the session that takes messages; ``namespace``: its, to which recalling is limited.
        """
        super().__init__(**fields)
        self._memory = memory

    async def _aget(self, messages: list[Any] | None = None, **given: Any) -> str:
        query = " ".join(message.content or "" for message in (messages or [])[-_LATEST:])
        if not query.strip():
            return ""
        found = await asyncio.to_thread(self._memory.recall, query, self.tokens, namespace=self.namespace)
        return "\n\n".join(found.documents)

    async def _aput(self, messages: list[Any]) -> None:
        turns = [_turn_of(message) for message in messages]
        await asyncio.to_thread(self._extend, turns)

    def _extend(self, turns: Sequence[NewTurn]) -> None:
        self._memory.session(self.session, namespace=self.namespace).extend(list(turns))

    async def atruncate(self, content: str, tokens_to_truncate: int) -> str | None:
        """Leave out so many tokens at the end, where what fits least stands."""
        return content[: max(len(content) - _CHARS * tokens_to_truncate, 0)] or None


def _turn_of(message: Any) -> NewTurn:
    role = message.role.value if isinstance(message.role, MessageRole) else str(message.role)
    turn = NewTurn(_ROLES.get(role, role), message.content or "")
    plain = ChatMessage(role=turn.role, content=turn.content)
    if plain.model_dump() == message.model_dump():
        return turn
    return msgspec.structs.replace(turn, meta={_WHOLE: message.model_dump_json()})


def _message_of(turn: Turn) -> Any:
    raw = turn.meta.get(_WHOLE)
    if isinstance(raw, str):
        return ChatMessage.model_validate_json(raw)
    known = turn.role in {role.value for role in MessageRole}
    return ChatMessage(role=turn.role if known else "user", content=turn.content)

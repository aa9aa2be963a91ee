"""Google's ADK on a memory: its sessions are sessions here, each event a turn, and its memory is a search."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

import msgspec

from ctxreuse.errors import SessionError
from ctxreuse.store import NewTurn, Turn
from ctxreuse.store.items import Items, ItemTable, item_key
from ctxreuse_agents.adapters.frameworks import framework
from ctxreuse_agents.adapters.named import key_of, namespace_of, session_name
from ctxreuse_agents.memory import Memory
from ctxreuse_agents.session import Session

with framework("google-adk", "2.10", "2.14"):
    from google.adk.errors.already_exists_error import AlreadyExistsError
    from google.adk.errors.session_not_found_error import SessionNotFoundError
    from google.adk.events.event import Event
    from google.adk.memory.base_memory_service import BaseMemoryService, SearchMemoryResponse
    from google.adk.memory.memory_entry import MemoryEntry
    from google.adk.sessions.base_session_service import BaseSessionService, ListSessionsResponse
    from google.adk.sessions.session import Session as AdkSession
    from google.genai.types import Content

__all__ = ["AdkMemoryService", "AdkSessionService"]

_ROOM, _MEMORY = "adk", "adk-memory"
#: Memories that a search returns at most, as ADK's own does.
_FOUND = 10
_SCOPES = ("app:", "user:")


class AdkSessionService(BaseSessionService):  # type: ignore[misc]
    """A session service whose sessions are named ``adk:APP/USER/ID``. Any thread and any event loop may call.

    State of a session is that of its events; state of users and apps stands beside them.
    """

    def __init__(self, memory: Memory) -> None:
        """Use a memory, which the caller closes."""
        self._memory, self._items = memory, Items(memory.ledger)

    def session(self, app_name: str, user_id: str, session_id: str) -> Session:
        """Return the session here of one of ADK's, to fork, search or explain. Raises SessionError."""
        return self._memory.session(session_name(_ROOM, app_name, user_id, session_id), create=False)

    async def create_session(
        self, *, app_name: str, user_id: str, state: dict[str, Any] | None = None, session_id: str | None = None
    ) -> Any:
        """Create a session; see ADK."""
        return await asyncio.to_thread(self._create, app_name, user_id, state or {}, session_id)

    async def get_session(self, *, app_name: str, user_id: str, session_id: str, config: Any = None) -> Any:
        """Return a session with its events; None if there is none."""
        return await asyncio.to_thread(self._get, app_name, user_id, session_id, config)

    async def list_sessions(self, *, app_name: str, user_id: str | None = None) -> Any:
        """Return sessions without their events, last changed last."""
        return await asyncio.to_thread(self._list, app_name, user_id)

    async def delete_session(self, *, app_name: str, user_id: str, session_id: str) -> None:
        """Delete a session, if there is one."""
        with suppress(SessionError):
            await asyncio.to_thread(self._delete, app_name, user_id, session_id)

    async def get_user_state(self, *, app_name: str, user_id: str) -> dict[str, Any]:
        """Return the state of a user."""
        return await asyncio.to_thread(self._scoped, "user:", app_name, user_id)

    async def append_event(self, session: Any, event: Any) -> Any:
        """Append an event to a session, which is durable then; see ADK. One that is there already is not added."""
        if event.partial:
            return event
        try:
            stored = await asyncio.to_thread(self.session, session.app_name, session.user_id, session.id)
        except SessionError:
            raise SessionNotFoundError(f"Session {session.id} not found.") from None
        self._apply_temp_state(session, event)
        event = self._trim_temp_delta_state(event)
        if await asyncio.to_thread(self._append, stored, session.app_name, session.user_id, event):
            self._commit_event_to_session(session, event)
            session.last_update_time = event.timestamp
        return event

    def _create(self, app: str, user: str, state: Mapping[str, Any], given: str | None) -> Any:
        id = (given or "").strip() or str(uuid.uuid4())
        own, scoped = _split(state)
        try:
            # The state that it begins with is a turn of the system's without text, so that both are there or neither.
            turns = [NewTurn("system", "", {"adk_state": _json(own)})]
            name, space = session_name(_ROOM, app, user, id), namespace_of(_ROOM, app, user)
            self._memory.ledger.create(name, turns=turns, namespace=space)
        except SessionError as error:
            if "already" not in error.what:
                raise
            raise AlreadyExistsError(f"Session with id {id} already exists.") from None
        self._items.write(lambda table: _add_scoped(table, app, user, scoped))
        return self._get(app, user, id, None)

    def _get(self, app: str, user: str, id: str, config: Any) -> Any:
        try:
            session = self.session(app, user, id.strip())
        except SessionError:
            return None
        self._settle(session, app, user)
        events = [event for turn in session.turns() if (event := _event_of(turn)) is not None]
        found = self._shown(session, app, user, events)
        if config is not None:
            if config.num_recent_events is not None:
                events = events[-config.num_recent_events :] if config.num_recent_events else []
            if config.after_timestamp is not None:
                events = [event for event in events if event.timestamp >= config.after_timestamp]
        found.events = events
        return found

    def _shown(self, session: Session, app: str, user: str, events: Sequence[Any]) -> Any:
        record, turns = session.record, session.turns()
        state = _from_json(turns[0].meta.get("adk_state")) if turns else {}
        for event in events:
            state |= _split(event.actions.state_delta)[0] if event.actions else {}
        for scope in _SCOPES:
            state |= {scope + name: value for name, value in self._scoped(scope, app, user).items()}
        last = events[-1].timestamp if events else record.created
        return AdkSession(
            id=key_of(record.name), app_name=app, user_id=user, state=state, events=[], last_update_time=last
        )

    def _list(self, app: str, user: str | None) -> Any:
        space = namespace_of(_ROOM, app) if user is None else namespace_of(_ROOM, app, user)
        found = []
        for session in self._memory.sessions(namespace=space):
            owner = user if user is not None else key_of(f":{session.name.rpartition('/')[0]}")
            events = [event for turn in session.turns() if (event := _event_of(turn)) is not None]
            found.append(self._shown(session, app, owner, events))
        return ListSessionsResponse(sessions=sorted(found, key=lambda one: (one.last_update_time, one.user_id, one.id)))

    def _delete(self, app: str, user: str, id: str) -> None:
        session = self.session(app, user, id.strip())
        self._memory.delete(session)
        self._items.write(lambda table: table.delete(item_key("adk", "settled", session.id)))

    def _append(self, session: Session, app: str, user: str, event: Any) -> bool:
        new, core = _turn_of(event), session._core
        with core.lock.hold():
            if any(turn.meta.get("event") == event.id and _event_of(turn) == event for turn in core.turns()):
                return False
            core.extend([new])
        self._settle(session, app, user)
        return True

    def _settle(self, session: Session, app: str, user: str) -> None:
        """Take over what events say of the state of app and user, as far as that was not done before."""
        key = item_key("adk", "settled", session.id)
        with self._items.read() as table:
            done = int.from_bytes(table.get(key) or b"", "big")
        head = session.head
        if done >= head:
            return
        new = [event for turn in session.turns() if turn.id > done and (event := _event_of(turn)) is not None]

        def work(table: ItemTable) -> None:
            for event in new:
                _add_scoped(table, app, user, _split(event.actions.state_delta)[1] if event.actions else {})
            table.put(key, head.to_bytes(8, "big"))

        self._items.write(work)

    def _scoped(self, scope: str, app: str, user: str) -> dict[str, Any]:
        with self._items.read() as table:
            return _from_json(table.get(_scope_key(scope, app, user)))


class AdkMemoryService(BaseMemoryService):  # type: ignore[misc]
    """A memory service: events by user, found as `Memory.search` does. Any thread may call."""

    def __init__(self, memory: Memory) -> None:
        """Use a memory, which the caller closes."""
        self._memory, self._items = memory, Items(memory.ledger)

    async def add_session_to_memory(self, session: Any) -> None:
        """Add the events of a session, as far as they are not there yet."""
        await asyncio.to_thread(self._add, session.app_name, session.user_id, session.id, list(session.events), {})

    async def add_events_to_memory(
        self,
        *,
        app_name: str,
        user_id: str,
        events: Sequence[Any],
        session_id: str | None = None,
        custom_metadata: Mapping[str, object] | None = None,
    ) -> None:
        """Add events, as far as they are not there yet."""
        await asyncio.to_thread(self._add, app_name, user_id, session_id or "", list(events), custom_metadata or {})

    async def add_memory(
        self,
        *,
        app_name: str,
        user_id: str,
        memories: Sequence[Any],
        custom_metadata: Mapping[str, object] | None = None,
    ) -> None:
        """Add memories as they are."""
        events = [
            Event(id=one.id or str(uuid.uuid4()), author=one.author or "user", content=one.content) for one in memories
        ]
        await asyncio.to_thread(self._add, app_name, user_id, "", events, custom_metadata or {})

    async def search_memory(self, *, app_name: str, user_id: str, query: str) -> Any:
        """Return ten memories of a user, those first that say most of what is searched for."""
        space = namespace_of(_MEMORY, app_name, user_id)
        hits = await asyncio.to_thread(self._memory.search, query, _FOUND, namespace=space)
        return SearchMemoryResponse(memories=[_entry_of(hit.turn) for hit in hits])

    async def delete_memory(self, *, app_name: str, user_id: str, memory_id: str | None = None) -> None:
        """Delete a memory; it is not added again with its session."""
        if memory_id is not None:
            await asyncio.to_thread(self._remove, app_name, user_id, memory_id)

    def _add(self, app: str, user: str, id: str, events: Iterable[Any], metadata: Mapping[str, object]) -> None:
        name, space = session_name(_MEMORY, app, user, id), namespace_of(_MEMORY, app, user)
        core = self._memory.session(name, namespace=space)._core
        with core.lock.hold(), self._items.read() as table:
            known = {turn.meta.get("event") for turn in core.turns()}
            new = [_turn_of(event, metadata) for event in events if event.content and event.content.parts]
            fresh = [one for one in new if one.meta["event"] not in known]
            wanted = [one for one in fresh if table.get(_deleted_key(app, user, one.meta["event"])) is None]
            core.extend(wanted)

    def _remove(self, app: str, user: str, id: str) -> None:
        self._items.write(lambda table: table.put(_deleted_key(app, user, id), b""))
        for session in self._memory.sessions(namespace=namespace_of(_MEMORY, app, user)):
            core = session._core
            with core.lock.hold():
                found = next((turn for turn in core.turns() if turn.meta.get("event") == id), None)
                if found is not None:
                    core.edit(found, None, None)


def _turn_of(event: Any, metadata: Mapping[str, object] | None = None) -> NewTurn:
    parts = event.content.parts if event.content and event.content.parts else []
    text = "\n".join(part.text for part in parts if part.text)
    results = any(part.function_response for part in parts)
    role = "tool" if results else "user" if event.author == "user" else "assistant"
    raw = event.model_dump_json(exclude_none=True, by_alias=True)
    return NewTurn(role, text, {**(metadata or {}), "event": event.id, "adk": raw}, created=event.timestamp)


def _event_of(turn: Turn) -> Any:
    raw = turn.meta.get("adk")
    return Event.model_validate_json(raw) if isinstance(raw, str) else None


def _entry_of(turn: Turn) -> Any:
    event = _event_of(turn)
    time = datetime.fromtimestamp(turn.created, UTC).isoformat()
    if event is None:
        content = Content(role="user", parts=[{"text": turn.content}])
        return MemoryEntry(content=content, author=turn.role, timestamp=time)
    known = ("event", "adk")
    more = {name: value for name, value in turn.meta.items() if name not in known}
    return MemoryEntry(id=event.id, content=event.content, author=event.author, timestamp=time, custom_metadata=more)


def _split(state: Mapping[str, Any] | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the state of a session, and that of apps and users with its prefixes; what is temporary is left out."""
    given = {name: value for name, value in (state or {}).items() if not name.startswith("temp:")}
    scoped = {name: value for name, value in given.items() if name.startswith(_SCOPES)}
    return {name: value for name, value in given.items() if name not in scoped}, scoped


def _add_scoped(table: ItemTable, app: str, user: str, state: Mapping[str, Any]) -> None:
    for scope in _SCOPES:
        new = {name.removeprefix(scope): value for name, value in state.items() if name.startswith(scope)}
        if new:
            key = _scope_key(scope, app, user)
            table.put(key, _json(_from_json(table.get(key)) | new).encode())


def _scope_key(scope: str, app: str, user: str) -> bytes:
    return item_key("adk", "app", app) if scope == "app:" else item_key("adk", "user", app, user)


def _deleted_key(app: str, user: str, id: str) -> bytes:
    return item_key("adk", "deleted", app, user, id)


def _json(state: Mapping[str, Any]) -> str:
    try:
        return msgspec.json.encode(state, enc_hook=str).decode()
    except (TypeError, ValueError, RecursionError) as error:
        raise SessionError(f"the state cannot be stored: {error}", fix="Use values that JSON has") from None


def _from_json(raw: object) -> dict[str, Any]:
    found = msgspec.json.decode(raw) if isinstance(raw, str | bytes) else {}
    return found if isinstance(found, dict) else {}

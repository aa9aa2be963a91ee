"""The tools of the MCP server over one memory: what clients may ask for, checked, and what they get, as JSON values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta

from ctxreuse.errors import CtxReuseError, SessionError
from ctxreuse.store import NewTurn, Turn, new_session_id
from ctxreuse_agents.memory import Memory
from ctxreuse_agents.recalled import SearchLimits
from ctxreuse_agents.session import Session

__all__ = ["MEMORY_TOOLS", "Arguments", "ToolRefusedError", "ToolSpec", "call_tool", "cursor_of", "offset_of"]

#: Characters of a text and of a name.
_TEXT, _NAME = 1_000_000, 400
#: Entries of a page, and characters of each of its texts; a session is read in full by its turns.
PAGE, MOST_PAGE, _PREVIEW = 20, 100, 300
#: In the meta of a turn: the call that made it; and turns among which that of a call made again is looked for.
_CALL, _BACK = "call", 100
#: Characters of a page of turns, about: it ends behind the turn that passes them.
_PAGE_TEXT = 40_000

Name = Annotated[str, Meta(min_length=1, max_length=_NAME)]
Namespace = Annotated[
    str, Meta(max_length=_NAME, description="Whose it is, such as user/agent/run; it and those below it.")
]
Limit = Annotated[int, Meta(ge=1, le=MOST_PAGE, description="Entries at most.")]
Cursor = Annotated[str, Meta(max_length=40, description="`next` of the page before.")]


class ToolRefusedError(Exception):
    """A call that cannot be done, in words for the client: never with a path of this machine."""


class Arguments(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Arguments of a tool."""


class _Remember(Arguments, frozen=True):
    text: Annotated[str, Meta(min_length=1, max_length=_TEXT)]
    namespace: Namespace = ""
    session: Annotated[str, Meta(max_length=_NAME, description="Add it to this session; default: one of its own.")] = ""
    role: Annotated[str, Meta(min_length=1, max_length=40)] = "user"
    meta: dict[str, str | int | float | bool | None] = {}
    ttl_seconds: Annotated[float | None, Meta(description="Forget it after so long; for a session of its own.")] = None
    pin: Annotated[bool, Meta(description="Keep it whatever its age; for a session of its own.")] = False
    #: Given by who passes a call on, so that one that is made ``again`` is done once.
    id: Annotated[str, Meta(pattern="^([0-9a-f]{32})?$")] = ""
    again: bool = False


class _Recall(Arguments, frozen=True):
    query: Annotated[str, Meta(max_length=8192)]
    tokens: Annotated[int, Meta(ge=1, le=100_000, description="Of all texts together, at most.")] = 1024
    limit: Limit = PAGE
    namespace: Namespace = ""
    session: str = ""
    role: str = ""
    since: Annotated[float | None, Meta(description="Seconds since 1970.")] = None
    where: Annotated[
        dict[str, str | int | float | bool | None], Meta(max_length=32, description="Values of its meta.")
    ] = {}
    explain: bool = False


class _List(Arguments, frozen=True):
    namespace: Namespace = ""
    prefix: Annotated[str, Meta(max_length=_NAME, description="Of the sessions' names.")] = ""
    session: Annotated[str, Meta(max_length=_NAME, description="List its turns.")] = ""
    limit: Limit = PAGE
    cursor: Cursor = ""


class _Forget(Arguments, frozen=True):
    session: Annotated[Name, Meta(description="The id that `remember` gave, or a session's id or name.")]
    turn: Annotated[Annotated[int, Meta(ge=1)] | None, Meta(description="Only this turn of it.")] = None


class _Fork(Arguments, frozen=True):
    session: Name
    name: Annotated[str, Meta(max_length=_NAME)] = ""
    turn: Annotated[Annotated[int, Meta(ge=1)] | None, Meta(description="Only up to this turn.")] = None


class _Why(Arguments, frozen=True):
    session: Name
    query: Annotated[
        str,
        Meta(max_length=8192, description="Why this finds its turns; default: what its last answer reused."),
    ] = ""


class ToolSpec(NamedTuple):
    """A tool: its name, what it takes, the function of a memory and its arguments, and whether it only reads."""

    name: str
    arguments: type[Arguments]
    call: Callable[[Memory, Any], dict[str, Any]]
    about: str
    reads: bool


def _remember(memory: Memory, given: _Remember) -> dict[str, Any]:
    if given.session:
        session = memory.session(given.session, namespace=given.namespace or None)
        turn = _said_before(session, given.id) if given.again else None
        if turn is None:
            turn = session.append(given.role, given.text, **{**given.meta, _CALL: given.id})
        return {"id": session.id, "session": session.name, "turn": turn.id}
    id, turns = given.id or new_session_id(), [NewTurn(given.role, given.text, given.meta)]
    how: dict[str, Any] = {"namespace": given.namespace, "ttl": given.ttl_seconds, "pin": given.pin}
    try:
        session = memory.create(f"memory-{id}", turns=turns, id=id, **how)
    except SessionError:
        if not given.again:
            raise
        session = memory.session(id, create=False)  # it was done, and its answer was lost
    return {"id": session.id, "session": session.name, "turn": session.head}


def _said_before(session: Session, id: str) -> Turn | None:
    return next((turn for turn in reversed(session.turns()[-_BACK:]) if turn.meta.get(_CALL) == id), None)


def _recall(memory: Memory, given: _Recall) -> dict[str, Any]:
    limits: SearchLimits = {"namespace": given.namespace or None, "session": given.session or None}
    limits |= {"role": given.role or None, "since": given.since, "where": given.where or None}
    found = memory.recall(given.query, given.tokens, limit=given.limit, **limits)
    texts = []
    for text, hit in zip(found.documents, found.hits):
        one = {"id": hit.session.id, "session": hit.session.name, "turn": hit.turn.id, "text": text}
        texts.append({**one, "score": hit.score, **({"explain": hit.explain} if given.explain else {})})
    return {"found": texts, "tokens": found.tokens}


def _list(memory: Memory, given: _List) -> dict[str, Any]:
    offset = offset_of(given.cursor)
    if given.session:
        return _page_of_turns(memory, given.session, offset, given.limit)
    found = memory.sessions(given.limit + 1, offset, prefix=given.prefix, namespace=given.namespace)
    shown = [_shown(memory, session) for session in found[: given.limit]]
    return {"sessions": [one for one in shown if one], **cursor_of(offset, given.limit, len(found) > given.limit)}


def _shown(memory: Memory, session: Session) -> dict[str, Any] | None:
    try:
        record = session.record
        last = memory.ledger.turn(record.head) if record.head else None
    except SessionError:  # deleted since
        return None
    text = "" if last is None else last.content
    return {
        "id": record.id,
        "name": record.name,
        "namespace": record.namespace,
        "turns": 0 if last is None else last.depth,
        "updated": record.updated,
        "expires": record.expires,
        "pinned": record.pinned,
        "last": text if len(text) <= _PREVIEW else f"{text[:_PREVIEW]}…",
    }


def _page_of_turns(memory: Memory, session: str, offset: int = 0, limit: int = PAGE) -> dict[str, Any]:
    """Return turns of a session from the first but ``offset`` on."""
    turns, page, size = memory.session(session, create=False).turns(), [], 0
    for turn in turns[offset : offset + limit]:
        page.append({"turn": turn.id, "role": turn.role, "text": turn.content, "created": turn.created})
        size += len(turn.content)
        if size > _PAGE_TEXT:
            break
    return {"turns": page, **cursor_of(offset, len(page), offset + len(page) < len(turns))}


def _forget(memory: Memory, given: _Forget) -> dict[str, Any]:
    session = memory.session(given.session, create=False)
    if given.turn is None:
        memory.delete(session)
    else:
        session.edit(given.turn, None)
    return {"forgotten": given.session, **({} if given.turn is None else {"turn": given.turn})}


def _fork(memory: Memory, given: _Fork) -> dict[str, Any]:
    fork = memory.session(given.session, create=False).fork(given.name or None, at=given.turn)
    return {"id": fork.id, "session": fork.name, "namespace": fork.record.namespace}


def _why(memory: Memory, given: _Why) -> dict[str, Any]:
    session = memory.session(given.session, create=False)
    if not given.query:
        explanation: dict[str, Any] = msgspec.to_builtins(session.why())
        return explanation
    hits = memory.search(given.query, PAGE, explain=True, session=session.id)
    return {"found": [{"turn": hit.turn.id, "snippet": hit.snippet, "why": hit.explain} for hit in hits]}


#: All tools.
MEMORY_TOOLS = (
    ToolSpec("remember", _Remember, _remember, "Keep a text, durable when this returns.", False),
    ToolSpec("recall", _Recall, _recall, "Find what was kept, by words and by meaning, best first.", True),
    ToolSpec("list", _List, _list, "List sessions, the last changed first, or a session's turns.", True),
    ToolSpec("forget", _Forget, _forget, "Delete a session, or one turn of it.", False),
    ToolSpec("fork", _Fork, _fork, "Make a session that begins as another one; nothing is copied.", False),
    ToolSpec("why", _Why, _why, "Say why something was found, or what an answer reused.", True),
)


def call_tool(memory: Memory, specs: Mapping[str, ToolSpec], name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Check the arguments and call a tool. Raises ToolRefusedError, in words that have no path of this machine."""
    spec = specs.get(name)
    if spec is None:
        raise ToolRefusedError(f"there is no tool {name[:60]!r}. Use one of {', '.join(specs)}")
    try:
        return spec.call(memory, msgspec.convert(given, spec.arguments))
    except msgspec.ValidationError as error:
        raise ToolRefusedError(f"arguments of {name}: {error}") from None
    except CtxReuseError as error:
        raise ToolRefusedError(f"{error.what}. {error.fix}" if error.fix else error.what) from None


def offset_of(cursor: str) -> int:
    """Return where a page begins. Raises ToolRefusedError for what is no cursor."""
    if not cursor:
        return 0
    if not (cursor.isascii() and cursor.isdigit()) or len(cursor) > 12:
        raise ToolRefusedError(f"{cursor[:40]!r} is no cursor. Give `next` of the page before")
    return int(cursor)


def cursor_of(offset: int, count: int, more: bool) -> dict[str, str]:
    """Return the field ``next`` of a page, if there is another."""
    return {"next": str(offset + count)} if more else {}

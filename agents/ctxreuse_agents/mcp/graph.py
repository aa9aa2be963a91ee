"""The tools of the reference memory server, by their names: entities, relations and observations, kept as sessions.

An entity is a session of the namespace ``graph``; its turns are the entity, its observations and its relations. So what
is kept by these tools is found by ``recall``, and each change is one durable turn.
"""

from __future__ import annotations

from typing import Annotated, Any, TypedDict

import msgspec
from msgspec import Meta

from ctxreuse.errors import SessionError
from ctxreuse.store import NewTurn, Turn
from ctxreuse_agents.mcp.tools import PAGE, Arguments, Cursor, Limit, Name, ToolSpec, cursor_of, offset_of
from ctxreuse_agents.memory import Memory
from ctxreuse_agents.session import Session

__all__ = ["GRAPH_TOOLS"]

#: The namespace, and what the names of its sessions begin with.
NAMESPACE, _PREFIX = "graph", "entity:"
#: Entries of one call, and characters of an observation.
_MANY, _TEXT = 1000, 100_000

_Text = Annotated[str, Meta(min_length=1, max_length=_TEXT)]


class _Entity(msgspec.Struct, frozen=True, rename="camel"):
    name: Annotated[str, Meta(min_length=1, max_length=300)]
    entity_type: Name
    observations: Annotated[list[_Text], Meta(max_length=_MANY)] = []


class _Relation(msgspec.Struct, frozen=True, rename={"source": "from", "relation_type": "relationType"}):
    source: Name
    to: Name
    relation_type: Name


class _Observed(msgspec.Struct, frozen=True, rename="camel"):
    entity_name: Name
    contents: Annotated[list[_Text], Meta(max_length=_MANY)]


class _Unobserved(msgspec.Struct, frozen=True, rename="camel"):
    entity_name: Name
    observations: Annotated[list[_Text], Meta(max_length=_MANY)]


class _CreateEntities(Arguments, frozen=True):
    entities: Annotated[list[_Entity], Meta(max_length=_MANY)]


class _Relations(Arguments, frozen=True):
    relations: Annotated[list[_Relation], Meta(max_length=_MANY)]


class _AddObservations(Arguments, frozen=True):
    observations: Annotated[list[_Observed], Meta(max_length=_MANY)]


class _DeleteEntities(Arguments, frozen=True, rename="camel"):
    entity_names: Annotated[list[Name], Meta(max_length=_MANY)]


class _DeleteObservations(Arguments, frozen=True):
    deletions: Annotated[list[_Unobserved], Meta(max_length=_MANY)]


class _ReadGraph(Arguments, frozen=True):
    limit: Limit = PAGE
    cursor: Cursor = ""


class _SearchNodes(Arguments, frozen=True):
    query: Annotated[str, Meta(max_length=8192)]
    limit: Limit = PAGE


class _OpenNodes(Arguments, frozen=True):
    names: Annotated[list[Name], Meta(max_length=100)]


class _Shown(TypedDict):
    entities: list[dict[str, Any]]
    relations: list[dict[str, str]]


def _session(memory: Memory, entity: str) -> Session:
    try:
        return memory.session(_PREFIX + entity, create=False)
    except SessionError:
        raise SessionError(f"there is no entity {entity[:60]!r}", fix="Use create_entities") from None


def _create(memory: Memory, given: _CreateEntities) -> dict[str, Any]:
    made = []
    for one in given.entities:
        turns = [NewTurn("system", f"{one.name} ({one.entity_type})", {"type": one.entity_type})]
        turns += [_observation(one.name, text) for text in dict.fromkeys(one.observations)]
        try:
            memory.create(_PREFIX + one.name, turns=turns, namespace=NAMESPACE)
        except SessionError:
            if not _known(memory, one.name):
                raise
            continue
        made.append(one)
    return {"entities": msgspec.to_builtins(made)}


def _known(memory: Memory, entity: str) -> bool:
    try:
        memory.ledger.session(_PREFIX + entity)
    except SessionError:
        return False
    return True


def _relate(memory: Memory, given: _Relations) -> dict[str, Any]:
    made = []
    for one in given.relations:
        session, new = _session(memory, one.source), _relation(one)
        _session(memory, one.to)
        if new.meta not in [turn.meta for turn in session.turns()]:
            session.extend([new])
            made.append(one)
    return {"relations": msgspec.to_builtins(made)}


def _observe(memory: Memory, given: _AddObservations) -> dict[str, Any]:
    results = []
    for one in given.observations:
        session = _session(memory, one.entity_name)
        known = {text for turn in session.turns() if (text := _observed(turn)) is not None}
        added = [text for text in dict.fromkeys(one.contents) if text not in known]
        session.extend([_observation(one.entity_name, text) for text in added])
        results.append({"entityName": one.entity_name, "addedObservations": added})
    return {"results": results}


def _delete(memory: Memory, given: _DeleteEntities) -> dict[str, Any]:
    done = []
    for name in given.entity_names:
        if _known(memory, name):
            memory.delete(_PREFIX + name)
            done.append(name)
        while hits := memory.search("", 1000, namespace=NAMESPACE, where={"to": name}):
            for hit in hits:
                memory.session(hit.session.id).edit(hit.turn, None)
    return {"deleted": done}


def _unobserve(memory: Memory, given: _DeleteObservations) -> dict[str, Any]:
    for one in given.deletions:
        if _known(memory, one.entity_name):
            _remove(memory, one.entity_name, [_observation(one.entity_name, text) for text in one.observations])
    return {"deleted": len(given.deletions)}


def _unrelate(memory: Memory, given: _Relations) -> dict[str, Any]:
    for one in given.relations:
        if _known(memory, one.source):
            _remove(memory, one.source, [_relation(one)])
    return {"deleted": len(given.relations)}


def _remove(memory: Memory, entity: str, what: list[NewTurn]) -> None:
    session, unwanted = _session(memory, entity), [(new.content, dict(new.meta)) for new in what]
    while found := [turn for turn in session.turns() if (turn.content, turn.meta) in unwanted]:
        session.edit(found[-1], None)


def _read(memory: Memory, given: _ReadGraph) -> dict[str, Any]:
    offset = offset_of(given.cursor)
    found = memory.sessions(given.limit + 1, offset, prefix=_PREFIX)
    return {**_shown(found[: given.limit]), **cursor_of(offset, given.limit, len(found) > given.limit)}


def _search(memory: Memory, given: _SearchNodes) -> dict[str, Any]:
    hits = memory.search(given.query, 4 * given.limit, namespace=NAMESPACE)
    ids = list(dict.fromkeys(hit.session.id for hit in hits))[: given.limit]
    return {**_shown([memory.session(id, create=False) for id in ids])}


def _open(memory: Memory, given: _OpenNodes) -> dict[str, Any]:
    return {**_shown([_session(memory, name) for name in dict.fromkeys(given.names) if _known(memory, name)])}


def _observation(entity: str, text: str) -> NewTurn:
    return NewTurn("user", f"{entity}: {text}", {"observed": entity})


def _relation(one: _Relation) -> NewTurn:
    return NewTurn("user", f"{one.source} {one.relation_type} {one.to}", {"to": one.to, "relation": one.relation_type})


def _observed(turn: Turn) -> str | None:
    entity = turn.meta.get("observed")
    return turn.content[len(entity) + 2 :] if isinstance(entity, str) else None


def _shown(sessions: list[Session]) -> _Shown:
    shown: _Shown = {"entities": [], "relations": []}
    for session in sessions:
        try:
            name, turns = session.name, session.turns()
        except SessionError:  # deleted since
            continue
        if not name.startswith(_PREFIX):
            continue
        name = name.removeprefix(_PREFIX)
        kind = next((turn.meta["type"] for turn in turns if "type" in turn.meta), "")
        observed = [text for turn in turns if (text := _observed(turn)) is not None]
        shown["entities"].append({"name": name, "entityType": kind, "observations": observed})
        shown["relations"] += [
            {"from": name, "to": turn.meta["to"], "relationType": turn.meta["relation"]}
            for turn in turns
            if "relation" in turn.meta
        ]
    return shown


#: All tools.
GRAPH_TOOLS = (
    ToolSpec("create_entities", _CreateEntities, _create, "Create entities; known names stay.", False),
    ToolSpec("create_relations", _Relations, _relate, "Create relations; known ones stay.", False),
    ToolSpec("add_observations", _AddObservations, _observe, "Add observations to entities.", False),
    ToolSpec("delete_entities", _DeleteEntities, _delete, "Delete entities and their relations.", False),
    ToolSpec("delete_observations", _DeleteObservations, _unobserve, "Delete observations.", False),
    ToolSpec("delete_relations", _Relations, _unrelate, "Delete relations.", False),
    ToolSpec("read_graph", _ReadGraph, _read, "Read the entities, a page at a time.", True),
    ToolSpec("search_nodes", _SearchNodes, _search, "Find entities by words and by meaning.", True),
    ToolSpec("open_nodes", _OpenNodes, _open, "Read entities by their names.", True),
)

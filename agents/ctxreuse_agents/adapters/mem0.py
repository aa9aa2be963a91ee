"""The calls of mem0 on a memory: facts by user, agent and run. Adding one calls no model."""

from __future__ import annotations

import hashlib
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from itertools import takewhile
from typing import Any

import msgspec

from ctxreuse.errors import ConfigError, SessionError
from ctxreuse.store import NewTurn, Turn
from ctxreuse.store.items import Items, ItemTable, item_key
from ctxreuse_agents.adapters.named import namespace_of
from ctxreuse_agents.memory import Memory
from ctxreuse_agents.session import Session

__all__ = ["Mem0Memory"]

_NAME, _OWNERS = "mem0:", ("user_id", "agent_id", "run_id")
_EXPIRES, _UPDATED = "expiration_date", "updated_at"
#: Facts that a search looks through for those that have not expired.
_MOST = 1000
Extract = Callable[[list[dict[str, Any]]], Sequence[str]]


class Mem0Memory:
    """Facts, each a session of one turn, so that `Memory.search`, forgetting and backups know them.

    The methods have mem0's names, arguments and results. Any thread may call.
    """

    def __init__(
        self, memory: Memory, *, extract: Extract | None = None, clock: Callable[[], float] = time.time
    ) -> None:
        """Use a memory, which the caller closes.

        Args:
            memory: where facts are stored.
            extract: returns the facts in messages, such as a model's summary of them; called by `add` only, with
                ``infer``. Without it each message is a fact as it stands.
            clock: seconds since 1970.
        """
        self._memory, self._extract, self._clock = memory, extract, clock
        self._items = Items(memory.ledger)

    def add(
        self,
        messages: str | Mapping[str, Any] | Sequence[Mapping[str, Any]],
        *,
        user_id: str | None = None,
        agent_id: str | None = None,
        run_id: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        infer: bool = True,
        expiration_date: str | None = None,
    ) -> dict[str, Any]:
        """Store facts; all of them are on disk when it returns.

        Args:
            messages: a text, or messages with ``role`` and ``content``; those of the system are left out.
            user_id: whose; at least one of the three ids is needed.
            agent_id: see above.
            run_id: see above.
            metadata: values that can be searched for, as MessagePack has them.
            infer: call ``extract``, if there is one.
            expiration_date: the last day, as ``2027-01-31``, on which they are found.
        """
        owners = _owners({"user_id": user_id, "agent_id": agent_id, "run_id": run_id})
        if expiration_date is not None:
            _day(expiration_date)
        given = _messages(messages)
        if infer and self._extract is not None:
            facts = [("user", fact) for fact in self._extract(given)]
        else:
            facts = [(str(one["role"]), one["content"]) for one in given]
        meta = {**(metadata or {}), **owners, **({_EXPIRES: expiration_date} if expiration_date else {})}
        results = []
        for role, fact in facts:
            id = str(uuid.uuid4())
            turns = [NewTurn(role, fact, meta, created=self._clock())]
            self._memory.ledger.create(_NAME + id, turns=turns, namespace=_namespace(owners))
            self._note(id, "ADD", None, fact)
            results.append({"id": id, "memory": fact, "event": "ADD"})
        return {"results": results}

    def search(
        self,
        query: str,
        *,
        user_id: str | None = None,
        agent_id: str | None = None,
        run_id: str | None = None,
        filters: Mapping[str, Any] | None = None,
        top_k: int | None = None,
        limit: int = 20,
        threshold: float = 0.0,
        show_expired: bool = False,
    ) -> dict[str, Any]:
        """Return facts that say what is searched for, best first; ``score``: from 0 to 1, more is better.

        Args:
            query: words; see `Memory.search`.
            user_id: whose; at least one of the three ids is needed, here or in ``filters``.
            agent_id: see above.
            run_id: see above.
            filters: values of ids and metadata.
            top_k: facts at most.
            limit: the same.
            threshold: the least score.
            show_expired: with those whose last day is over.
        """
        owners, where = self._limits({"user_id": user_id, "agent_id": agent_id, "run_id": run_id}, filters)
        most = limit if top_k is None else top_k
        found = self._memory.search(query, _MOST, namespace=_narrowest(owners), where={**owners, **where})
        results: list[dict[str, Any]] = []
        for hit in found:
            score = hit.score / (1.0 + hit.score)
            if len(results) < most and score >= threshold and (show_expired or not self._expired(hit.turn)):
                results.append({**_fact(hit.session.name, hit.turn), "score": score})
        return {"results": results}

    def get(self, memory_id: str) -> dict[str, Any] | None:
        """Return a fact; None if there is none."""
        session = self._find(memory_id)
        return None if session is None else _fact(session.name, session.turns()[0])

    def get_all(
        self,
        *,
        user_id: str | None = None,
        agent_id: str | None = None,
        run_id: str | None = None,
        filters: Mapping[str, Any] | None = None,
        top_k: int | None = None,
        limit: int = 100,
        show_expired: bool = False,
    ) -> dict[str, Any]:
        """Return facts, last changed first; for the arguments see `search`."""
        owners, where = self._limits({"user_id": user_id, "agent_id": agent_id, "run_id": run_id}, filters)
        most, results = limit if top_k is None else top_k, list[dict[str, Any]]()
        for session in self._sessions({**owners, **where}):
            turn = session.turns()[0]
            if len(results) >= most:
                break
            if show_expired or not self._expired(turn):
                results.append(_fact(session.name, turn))
        return {"results": results}

    def update(self, memory_id: str, data: str) -> dict[str, Any]:
        """Replace a fact's text. Raises SessionError if there is none."""
        core = self._needed(memory_id)._core
        with core.lock.hold():
            old = core.turns()[0]
            new = NewTurn(old.role, data, {**old.meta, _UPDATED: self._clock()}, created=old.created)
            self._memory.ledger.append(core.id, [new], after=0, expected_head=core.record.head)
        self._note(memory_id, "UPDATE", old.content, data)
        return {"message": "Memory updated successfully!"}

    def delete(self, memory_id: str) -> dict[str, Any]:
        """Delete a fact, and the texts in its history. Raises SessionError if there is none."""
        self._memory.delete(self._needed(memory_id))
        self._items.write(lambda table: _forget(table, memory_id))
        self._note(memory_id, "DELETE", None, None)
        return {"message": "Memory deleted successfully!"}

    def delete_all(
        self, *, user_id: str | None = None, agent_id: str | None = None, run_id: str | None = None
    ) -> dict[str, Any]:
        """Delete all facts of a user, an agent or a run."""
        for session in self._sessions(_owners({"user_id": user_id, "agent_id": agent_id, "run_id": run_id})):
            self.delete(session.name.removeprefix(_NAME))
        return {"message": "Memories deleted successfully!"}

    def history(self, memory_id: str) -> list[dict[str, Any]]:
        """Return what was done with a fact, oldest first; after `delete` without its texts."""
        with self._items.read() as table:
            found = [msgspec.msgpack.decode(raw) for _, raw in table.scan(item_key("mem0", "history", memory_id))]
        return [
            {
                "id": hashlib.sha256(f"{memory_id} {number}".encode()).hexdigest()[:32],
                "memory_id": memory_id,
                "old_memory": old,
                "new_memory": new,
                "event": event,
                "created_at": _time(at),
                "updated_at": _time(at),
                "is_deleted": event == "DELETE",
            }
            for number, (event, old, new, at) in enumerate(found)
        ]

    def reset(self) -> None:
        """Delete all facts of everybody."""
        for session in self._memory.sessions(prefix=_NAME):
            self.delete(session.name.removeprefix(_NAME))

    def _note(self, id: str, event: str, old: str | None, new: str | None) -> None:
        def work(table: ItemTable) -> None:
            number = len(table.keys(item_key("mem0", "history", id)))
            body = msgspec.msgpack.encode((event, old, new, self._clock()))
            table.put(item_key("mem0", "history", id, f"{number:08}"), body)

        self._items.write(work)

    def _limits(
        self, ids: Mapping[str, str | None], filters: Mapping[str, Any] | None
    ) -> tuple[dict[str, str], dict[str, Any]]:
        rest = dict(filters or {})
        given = {name: ids[name] if ids[name] is not None else rest.pop(name, None) for name in _OWNERS}
        return _owners(given), rest

    def _sessions(self, where: Mapping[str, Any]) -> list[Session]:
        every = self._memory.sessions(namespace=_narrowest(where))
        return [
            session
            for session in every
            if session.name.startswith(_NAME)
            and (turns := session.turns())
            and all(turns[0].meta.get(name) == value for name, value in where.items())
        ]

    def _find(self, memory_id: str) -> Session | None:
        try:
            session = self._memory.session(_NAME + memory_id, create=False)
        except SessionError:
            return None
        return session if session.head else None

    def _needed(self, memory_id: str) -> Session:
        session = self._find(memory_id)
        if session is None:
            raise SessionError(f"there is no memory {str(memory_id)[:60]!r}", fix="get_all() lists them")
        return session

    def _expired(self, turn: Turn) -> bool:
        last = turn.meta.get(_EXPIRES)
        return isinstance(last, str) and _day(last) < datetime.fromtimestamp(self._clock(), UTC).date().isoformat()


def _owners(given: Mapping[str, Any]) -> dict[str, str]:
    found = {name: value for name in _OWNERS if (value := given.get(name)) is not None}
    wrong = next((name for name, value in found.items() if not isinstance(value, str) or not value.strip()), None)
    if wrong is not None:
        raise ConfigError(f"{wrong} is {found[wrong]!r}", fix="Give a text that is not empty")
    if not found:
        raise ConfigError("nothing says whose memories", fix="Give user_id, agent_id or run_id")
    return found


def _namespace(owners: Mapping[str, str]) -> str:
    return namespace_of("mem0", *map(owners.get, _OWNERS))


def _narrowest(owners: Mapping[str, Any]) -> str:
    """The namespace that all of them are in or below; others in it differ by their meta."""
    return namespace_of("mem0", *(owners[name] for name in takewhile(owners.__contains__, _OWNERS)))


def _messages(given: Any) -> list[dict[str, Any]]:
    """Messages with a text, as dicts. Raises ConfigError."""
    every = [{"role": "user", "content": given}] if isinstance(given, str) else given
    every = [every] if isinstance(every, Mapping) else every
    if not isinstance(every, Sequence):
        raise ConfigError(f"messages is {type(given).__name__}", fix="Give a text, or messages with role and content")
    found = []
    for one in every:
        if not isinstance(one, Mapping) or not isinstance(one.get("content"), str) or not one.get("role"):
            raise ConfigError("a message has no role or no text", fix="Give messages with role and content")
        if one["role"] != "system" and one["content"].strip():
            found.append(dict(one))
    return found


def _fact(name: str, turn: Turn) -> dict[str, Any]:
    known = {*_OWNERS, _UPDATED, _EXPIRES}
    metadata = {key: value for key, value in turn.meta.items() if key not in known}
    updated = turn.meta.get(_UPDATED)
    return {
        "id": name.removeprefix(_NAME),
        "memory": turn.content,
        "hash": hashlib.md5(turn.content.encode(), usedforsecurity=False).hexdigest(),
        "metadata": metadata or None,
        "created_at": _time(turn.created),
        "updated_at": _time(updated) if isinstance(updated, float) else None,
        "role": turn.role,
        **{key: turn.meta[key] for key in (*_OWNERS, _EXPIRES) if key in turn.meta},
    }


def _forget(table: ItemTable, id: str) -> None:
    for key, raw in list(table.scan(item_key("mem0", "history", id))):
        event, _, _, at = msgspec.msgpack.decode(raw)
        table.delete(key)
        table.put(key, msgspec.msgpack.encode((event, None, None, at)))


def _day(text: str) -> str:
    try:
        return datetime.fromisoformat(text).date().isoformat()
    except ValueError:
        raise ConfigError(f"expiration_date is {text[:40]!r}", fix="Give a day such as 2027-01-31") from None


def _time(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat()

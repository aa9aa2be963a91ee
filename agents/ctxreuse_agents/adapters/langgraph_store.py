"""LangGraph's long-term store in a memory's folder: values by namespace and key, with filters, search and expiry."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec

from ctxreuse.errors import ConfigError, SessionError
from ctxreuse.store.items import Items, ItemTable, item_key
from ctxreuse.store.recall.rank import rank
from ctxreuse_agents.adapters.frameworks import framework
from ctxreuse_agents.memory import Memory

with framework("langgraph-checkpoint", "4.2", "4.4"):
    from langgraph.store.base import (
        BaseStore,
        GetOp,
        Item,
        ListNamespacesOp,
        PutOp,
        SearchItem,
        SearchOp,
    )

__all__ = ["LangGraphStore"]

_AREA, _EXPIRY = ("langgraph", "store"), ("langgraph", "expiry")
#: Expired values that one write deletes at most.
_SWEPT = 200
#: A read that would set the end of a value's life later by less than this share of it writes nothing.
_REFRESH = 0.01
_COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    "$eq": lambda value, other: bool(value == other),
    "$ne": lambda value, other: bool(value != other),
    "$gt": lambda value, other: float(value) > float(other),
    "$gte": lambda value, other: float(value) >= float(other),
    "$lt": lambda value, other: float(value) < float(other),
    "$lte": lambda value, other: float(value) <= float(other),
}


class _Row(msgspec.Struct, frozen=True, array_like=True):
    """A value; times are seconds since 1970. ``life``: in seconds, 0: without end. ``index``: see `PutOp`."""

    namespace: tuple[str, ...]
    key: str
    value: dict[str, Any]
    created: float
    updated: float
    life: float = 0.0
    expires: float = 0.0
    index: bool | list[str] = True

    def over(self, now: float) -> bool:
        """True if its life has ended."""
        return bool(self.life) and self.expires <= now

    def text(self) -> str:
        """What a search looks at."""
        if isinstance(self.index, bool):
            return "\n".join(_texts(self.value)) if self.index else ""
        return "\n".join(text for path in self.index for text in _texts(_at(self.value, path)))


_row = msgspec.msgpack.Decoder(_Row)


class LangGraphStore(BaseStore):  # type: ignore[misc]
    """A store for agents whose values lie in a memory's folder. Any thread and any event loop may call.

    A search with a query puts values with its words first, in any of their forms, by BM25; no model is called.
    """

    supports_ttl = True

    def __init__(
        self, memory: Memory, *, ttl: Mapping[str, Any] | None = None, clock: Callable[[], float] | None = None
    ) -> None:
        """Use a memory, which the caller closes.

        Args:
            memory: where values are stored.
            ttl: LangGraph's ``TTLConfig``: ``default_ttl`` in minutes, ``refresh_on_read``. What has expired is not
                returned, and later writes delete it.
            clock: seconds since 1970; None: the memory's, which goes on evenly where the machine's is set.
        """
        self._items, self._clock = Items(memory.ledger), clock or memory._state.keeper.clock.now
        self.ttl_config = dict(ttl) if ttl is not None else None

    def batch(self, ops: Iterable[Any]) -> list[Any]:
        """Carry out operations: reads see what was before the batch, writes are one transaction."""
        every, now = list(ops), self._clock()
        results: list[Any] = []
        puts: dict[bytes, PutOp] = {}
        refreshed: dict[bytes, _Row] = {}
        with self._items.read() as table:
            for op in every:
                if isinstance(op, GetOp):
                    row = _get(table, _key(op.namespace, op.key), now)
                    results.append(None if row is None else Item(**_fields(row)))
                    self._refresh(op, [row] if row is not None else [], now, refreshed)
                elif isinstance(op, SearchOp):
                    found = _search(table, op, now)
                    results.append([SearchItem(**_fields(row), score=score) for row, score in found])
                    self._refresh(op, [row for row, _ in found], now, refreshed)
                elif isinstance(op, ListNamespacesOp):
                    results.append(_namespaces(table, op, now))
                elif isinstance(op, PutOp):
                    puts[_key(op.namespace, op.key)] = op
                    results.append(None)
                else:
                    raise ConfigError(f"a store cannot carry out {type(op).__name__}")
        if puts or refreshed:
            self._items.write(lambda table: self._write(table, puts, refreshed, now))
        return results

    async def abatch(self, ops: Iterable[Any]) -> list[Any]:
        """`batch`, with the disk waited for in a thread."""
        return await asyncio.to_thread(self.batch, list(ops))

    @staticmethod
    def _refresh(op: Any, rows: Sequence[_Row], now: float, into: dict[bytes, _Row]) -> None:
        for row in rows if op.refresh_ttl else ():
            if row.life and now + row.life - row.expires > _REFRESH * row.life:
                into[_key(row.namespace, row.key)] = msgspec.structs.replace(row, expires=now + row.life)

    @staticmethod
    def _write(table: ItemTable, puts: Mapping[bytes, Any], refreshed: Mapping[bytes, _Row], now: float) -> None:
        for key, row in refreshed.items():
            if key not in puts and (stored := _get(table, key, now)) is not None and stored.updated == row.updated:
                _put(table, key, row, stored)
        for key, op in puts.items():
            before = _get(table, key, 0.0)
            if op.value is None:
                _drop(table, key, before)
                continue
            life = 60.0 * op.ttl if op.ttl is not None else 0.0
            index = True if op.index is None else list(op.index) if op.index else False
            created = before.created if before is not None and not before.over(now) else now
            row = _Row(tuple(op.namespace), op.key, dict(op.value), created, now, life, now + life, index)
            _put(table, key, row, before)
        expired = []
        for at, (key, body) in enumerate(table.scan(item_key(*_EXPIRY))):
            if at == _SWEPT or float(key.split(b"\0")[2]) > now:
                break
            expired.append(body)
        for key in expired:
            _drop(table, key, _get(table, key, 0.0))


def _get(table: ItemTable, key: bytes, now: float) -> _Row | None:
    body = table.get(key)
    row = None if body is None else _row.decode(body)
    return None if row is None or (now and row.over(now)) else row


def _put(table: ItemTable, key: bytes, row: _Row, before: _Row | None) -> None:
    _drop(table, key, before)
    try:
        body = msgspec.msgpack.encode(row)
        _row.decode(body)
    except (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError) as error:
        fix = "Use str keys and None, bool, int of 64 bits, float, str, bytes, list or dict as values"
        raise SessionError(f"the value of {row.key[:60]!r} cannot be stored: {error}", fix=fix) from None
    table.put(key, body)
    if row.life:
        table.put(_expiry_key(key, row), key)


def _drop(table: ItemTable, key: bytes, row: _Row | None) -> None:
    if row is not None:
        table.delete(key)
        if row.life:
            table.delete(_expiry_key(key, row))


def _rows(table: ItemTable, prefix: Sequence[str], now: float) -> Iterator[_Row]:
    for _, body in table.scan(item_key(*_AREA, *prefix)):
        row = _row.decode(body)
        if row.namespace[: len(prefix)] == tuple(prefix) and not row.over(now):
            yield row


def _search(table: ItemTable, op: Any, now: float) -> list[tuple[_Row, float | None]]:
    wanted = op.filter or {}
    found = [
        row
        for row in _rows(table, op.namespace_prefix, now)
        if all(_matches(row.value.get(name), value) for name, value in wanted.items())
    ]
    first, last = max(op.offset, 0), max(op.offset, 0) + max(op.limit, 0)
    scores = dict(rank(op.query, [row.text() for row in found])) if op.query else {}
    order = [*scores, *(place for place in range(len(found)) if place not in scores)]
    return [(found[place], scores.get(place)) for place in order[first:last]]


def _namespaces(table: ItemTable, op: Any, now: float) -> list[tuple[str, ...]]:
    fixed: list[str] = []
    for condition in op.match_conditions or ():
        if condition.match_type not in ("prefix", "suffix"):
            raise ConfigError(f"there is no match of type {condition.match_type!r}", fix="Use prefix or suffix")
        path = list(condition.path)
        known = path[: path.index("*")] if "*" in path else path
        if condition.match_type == "prefix" and len(known) > len(fixed):
            fixed = known
    found = {row.namespace for row in _rows(table, fixed, now)}
    found = {one for one in found if all(_fits(one, condition) for condition in op.match_conditions or ())}
    cut = sorted({one[: op.max_depth] for one in found} if op.max_depth is not None else found)
    return cut[max(op.offset, 0) : max(op.offset, 0) + max(op.limit, 0)]


def _fits(namespace: tuple[str, ...], condition: Any) -> bool:
    path = tuple(condition.path)
    part = namespace[: len(path)] if condition.match_type == "prefix" else namespace[-len(path) :]
    return not path or (len(part) == len(path) and all(want in ("*", has) for has, want in zip(part, path)))


def _matches(value: Any, wanted: Any) -> bool:
    if isinstance(wanted, Mapping):
        if any(name.startswith("$") for name in wanted):
            return all(_compare(value, name, other) for name, other in wanted.items())
        return isinstance(value, Mapping) and all(_matches(value.get(name), one) for name, one in wanted.items())
    if isinstance(wanted, list | tuple):
        same = isinstance(value, list | tuple) and len(value) == len(wanted)
        return same and all(_matches(one, other) for one, other in zip(value, wanted))
    return bool(value == wanted)


def _compare(value: Any, name: str, other: Any) -> bool:
    if name not in _COMPARE:
        raise ConfigError(f"there is no comparison {name!r}", fix=f"Use {', '.join(_COMPARE)}")
    try:
        return _COMPARE[name](value, other)
    except (TypeError, ValueError):  # a value that is no number, or is missing
        return False


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for one in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(one)


def _at(value: Any, path: str) -> Any:
    for name in path.replace("[", ".").replace("]", "").split("."):
        if name in ("$", "", "*"):
            continue
        if isinstance(value, Mapping):
            value = value.get(name)
        elif isinstance(value, list):
            value = value[int(name)] if name.lstrip("-").isdigit() and -len(value) <= int(name) < len(value) else None
    return value


def _fields(row: _Row) -> dict[str, Any]:
    times = {name: datetime.fromtimestamp(getattr(row, name[:7]), UTC) for name in ("created_at", "updated_at")}
    return {"namespace": row.namespace, "key": row.key, "value": row.value, **times}


def _key(namespace: Sequence[str], key: str) -> bytes:
    return item_key(*_AREA, *namespace, key)


def _expiry_key(key: bytes, row: _Row) -> bytes:
    return item_key(*_EXPIRY, f"{row.expires:017.3f}", hashlib.sha256(key).hexdigest()[:32])

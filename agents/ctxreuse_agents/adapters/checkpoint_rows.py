"""Checkpoints of LangGraph and what was written on them as items, and which of them go when there are too many."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import msgspec

from ctxreuse.store.items import ItemTable, item_key
from ctxreuse_agents.adapters.checkpoint_values import StoredValue, digests_of, sweep

__all__ = [
    "CheckpointRow",
    "Place",
    "WriteRow",
    "copy_thread",
    "delete_runs",
    "delete_thread",
    "find",
    "get",
    "has_write",
    "keep_latest",
    "newest_first",
    "put",
    "put_write",
    "retain",
    "writes",
]

#: Checkpoints that are deleted before values that none has any more are: that takes a look at all of a thread.
_SWEEP = 32
_AREA = "langgraph"


class Place(NamedTuple):
    """A thread, and a graph in it (``""``: the outermost)."""

    thread: str
    namespace: str


class CheckpointRow(msgspec.Struct, frozen=True, array_like=True):
    """A checkpoint: bytes of what is not a value, where its values are, its run, and the channels stored as deltas.

    ``place``: its thread and namespace, as its key may have them shortened.
    """

    id: str
    parent: str | None
    checkpoint: tuple[str, bytes]
    metadata: tuple[str, bytes]
    values: dict[str, StoredValue]
    run: str = ""
    delta: list[str] = []
    place: tuple[str, str] = ("", "")


class WriteRow(msgspec.Struct, frozen=True, array_like=True):
    """What a task wrote to a channel, the ``number``-th of its writes."""

    path: str
    task: str
    number: int
    channel: str
    value: StoredValue


_checkpoint = msgspec.msgpack.Decoder(CheckpointRow)
_write = msgspec.msgpack.Decoder(WriteRow)
_place = msgspec.msgpack.Decoder(tuple[str, str, str])
_encode = msgspec.msgpack.encode


def get(table: ItemTable, place: Place, id: str) -> CheckpointRow | None:
    """Return a checkpoint."""
    raw = table.get(_key(place, id))
    return None if raw is None else _checkpoint.decode(raw)


def put(table: ItemTable, place: Place, row: CheckpointRow) -> None:
    """Write a checkpoint."""
    table.put(_key(place, row.id), _encode(msgspec.structs.replace(row, place=tuple(place))))
    if row.run:
        table.put(_run_key(row.run, place, row.id), _encode((*place, row.id)))


def newest_first(table: ItemTable, place: Place) -> Iterator[str]:
    """Iterate over the ids of the checkpoints in a place; they sort by time."""
    for _, raw in table.scan(item_key(_AREA, "checkpoint", *place), reverse=True):
        yield _checkpoint.decode(raw).id


def find(table: ItemTable, thread: str | None, namespace: str | None) -> list[tuple[Place, str]]:
    """Return the checkpoints of a thread and namespace, or of all, newest first."""
    parts = [] if thread is None else [str(thread)] if namespace is None else [str(thread), namespace]
    found = [_checkpoint.decode(raw) for _, raw in table.scan(item_key(_AREA, "checkpoint", *parts))]
    places = [(Place(*row.place), row.id) for row in found if namespace is None or row.place[1] == namespace]
    return sorted(places, key=lambda one: one[1], reverse=True)


def has_write(table: ItemTable, place: Place, id: str, task: str, number: int) -> bool:
    """Return True if a task's write of that number is there."""
    return table.get(_write_key(place, id, task, number)) is not None


def put_write(table: ItemTable, place: Place, id: str, row: WriteRow) -> None:
    """Write what a task wrote on a checkpoint."""
    table.put(_write_key(place, id, row.task, row.number), _encode(row))


def writes(table: ItemTable, place: Place, id: str) -> list[WriteRow]:
    """Return what was written on a checkpoint, in the order in which LangGraph applies it."""
    found = [_write.decode(raw) for _, raw in table.scan(item_key(_AREA, "write", *place, id))]
    return sorted(found, key=lambda row: (row.path, row.task, row.number))


def delete_thread(table: ItemTable, thread: str) -> None:
    """Delete all of a thread."""
    for place, id in find(table, thread, None):
        _delete(table, place, id)
    for kind in ("checkpoint", "write", "value", "removed"):
        for key in table.keys(item_key(_AREA, kind, thread)):
            table.delete(key)


def delete_runs(table: ItemTable, runs: Sequence[str]) -> set[str]:
    """Delete the checkpoints of runs; returns their threads."""
    threads: set[str] = set()
    for run in runs:
        for _, raw in list(table.scan(item_key(_AREA, "run", run))):
            thread, namespace, id = _place.decode(raw)
            _delete(table, Place(thread, namespace), id)
            threads.add(thread)
    for thread in threads:
        _sweep(table, thread)
    return threads


def copy_thread(table: ItemTable, source: str, target: str) -> None:
    """Copy all of a thread; what the other has under the same ids is replaced."""
    for place, id in find(table, source, None):
        row, there = get(table, place, id), Place(target, place.namespace)
        assert row is not None
        put(table, there, row)
        for write in writes(table, place, id):
            put_write(table, there, id, write)
    before, after = item_key(_AREA, "value", source), item_key(_AREA, "value", target)
    for key, body in list(table.scan(before)):
        table.put(after + key[len(before) :], body)


def keep_latest(table: ItemTable, thread: str) -> None:
    """Delete all checkpoints of a thread but the newest of each namespace, and what that is made from."""
    ids: dict[Place, list[str]] = {}
    for place, id in find(table, thread, None):
        ids.setdefault(place, []).append(id)
    for place, all_of in ids.items():
        _delete_all(table, place, all_of[1:], kept=all_of[:1])
    _sweep(table, thread)


def retain(table: ItemTable, place: Place, keep: int) -> None:
    """Delete the oldest checkpoints of a place beyond ``keep``, and those of subgraphs that ran before the others.

    A subgraph whose namespace names a task (``node:id``) is never entered again once the graph around it has gone on.
    """
    newest = list(newest_first(table, place))
    if len(newest) <= keep:
        return
    oldest = newest[keep - 1]
    removed = _delete_all(table, place, newest[keep:], kept=newest[:keep])
    if not place.namespace:
        passed = [(one, id) for one, id in find(table, place.thread, None) if ":" in one.namespace and id < oldest]
        for one, id in passed:
            _delete(table, one, id)
        removed += len(passed)
    key = item_key(_AREA, "removed", place.thread)
    total = removed + int.from_bytes(table.get(key) or b"", "big")
    if total >= _SWEEP:
        _sweep(table, place.thread)
        total = 0
    table.put(key, total.to_bytes(4, "big"))


def _delete_all(table: ItemTable, place: Place, ids: Iterable[str], *, kept: Sequence[str]) -> int:
    """Delete checkpoints, but those that deltas of the kept ones are made from; returns how many it deleted."""
    needed = _made_from(table, place, kept)
    unneeded = [id for id in ids if id not in needed]
    for id in unneeded:
        _delete(table, place, id)
    return len(unneeded)


def _made_from(table: ItemTable, place: Place, kept: Iterable[str]) -> set[str]:
    needed: set[str] = set()
    for id in kept:
        row = get(table, place, id)
        missing = set() if row is None else set(row.delta) - set(row.values)
        while missing and row is not None and row.parent is not None:
            needed.add(row.parent)
            row = get(table, place, row.parent)
            missing -= set() if row is None else set(row.values)
    return needed


def _delete(table: ItemTable, place: Place, id: str) -> None:
    row = get(table, place, id)
    if row is not None and row.run:
        table.delete(_run_key(row.run, place, id))
    table.delete(_key(place, id))
    for key in table.keys(item_key(_AREA, "write", *place, id)):
        table.delete(key)


def _sweep(table: ItemTable, thread: str) -> None:
    values = [one for _, raw in table.scan(item_key(_AREA, "checkpoint", thread)) for one in _of(raw)]
    values += [_write.decode(raw).value for _, raw in table.scan(item_key(_AREA, "write", thread))]
    sweep(table, thread, digests_of(table, thread, values))


def _of(raw: bytes) -> Iterable[StoredValue]:
    return _checkpoint.decode(raw).values.values()


def _key(place: Place, id: str) -> bytes:
    return item_key(_AREA, "checkpoint", *place, id)


def _write_key(place: Place, id: str, task: str, number: int) -> bytes:
    return item_key(_AREA, "write", *place, id, task, str(number))


def _run_key(run: str, place: Place, id: str) -> bytes:
    return item_key(_AREA, "run", run, *place, id)

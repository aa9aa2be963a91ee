"""Checkpoints of LangGraph in a memory's folder: each part of a state is stored once, and old ones can be dropped."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any

from ctxreuse.errors import ConfigError
from ctxreuse.store.items import Items, ItemTable
from ctxreuse_agents.adapters import checkpoint_rows as rows
from ctxreuse_agents.adapters.checkpoint_rows import CheckpointRow, Place, WriteRow
from ctxreuse_agents.adapters.checkpoint_values import StoredValue, Values
from ctxreuse_agents.adapters.frameworks import framework
from ctxreuse_agents.adapters.langgraph_chats import ThreadChats
from ctxreuse_agents.memory import Memory
from ctxreuse_agents.session import Session

with framework("langgraph-checkpoint", "4.2", "4.4"):
    from langgraph.checkpoint.base import (
        WRITES_IDX_MAP,
        BaseCheckpointSaver,
        CheckpointTuple,
        get_checkpoint_id,
        get_checkpoint_metadata,
    )

__all__ = ["LangGraphSaver"]

_STRATEGIES = ("keep_latest", "delete")


class LangGraphSaver(BaseCheckpointSaver):  # type: ignore[misc]
    """A checkpointer whose data lies in a memory's folder. Any thread and any event loop may call.

    Each element of a list and each other value is stored once in a thread, however many checkpoints have it, so a
    history of messages costs what its messages do. What a call wrote is on disk when it returns.

    The chat of a thread is a session, too (`session`), which follows the newest checkpoint.
    """

    def __init__(
        self, memory: Memory, *, keep: int | None = None, chats: str | None = "messages", serde: Any = None
    ) -> None:
        """Use a memory, which the caller closes.

        Args:
            memory: where checkpoints are stored.
            keep: checkpoints of a thread that are kept, newest first, and as many of each subgraph that has a history
                of its own; None: all.
            chats: the channel whose messages are the chat of a thread; None: chats become no sessions.
            serde: how values become bytes; default: LangGraph's.
        """
        if keep is not None and keep < 1:
            raise ConfigError(f"keep is {keep}", fix="Keep 1 checkpoint or more, or all with None")
        super().__init__(serde=serde)
        self._items, self._keep = Items(memory.ledger), keep
        self._chats, self._channel = ThreadChats(memory), chats

    def session(self, thread_id: str) -> Session:
        """Return the session of a thread's chat, to search, fork, explain or, in a fork, ask on.

        Raises SessionError if there is none.
        """
        return self._chats.session(str(thread_id))

    # Reading

    def get_tuple(self, config: Any) -> Any:
        """Return a checkpoint, the newest without an id; None if there is none."""
        place = _place(config)
        with self._items.read() as table:
            id = get_checkpoint_id(config) or next(rows.newest_first(table, place), None)
            return None if id is None else self._load(table, place, id)

    def list(
        self,
        config: Any,
        *,
        filter: Mapping[str, Any] | None = None,
        before: Any = None,
        limit: int | None = None,
    ) -> Iterator[Any]:
        """Iterate over checkpoints, newest first: of a thread, or of all without a ``config``."""
        configurable = config["configurable"] if config else {}
        only, latest = (get_checkpoint_id(one) if one else None for one in (config, before))
        with self._items.read() as table:
            found = rows.find(table, configurable.get("thread_id"), configurable.get("checkpoint_ns"))
        left = -1 if limit is None else max(limit, 0)
        for place, id in found:
            if not left:
                return
            if (only and id != only) or (latest and id >= latest):
                continue
            with self._items.read() as table:
                one = self._load(table, place, id, filter or {})
            if one is not None:
                left -= 1
                yield one

    def _load(self, table: ItemTable, place: Place, id: str, filter: Mapping[str, Any] | None = None) -> Any:
        row = rows.get(table, place, id)
        if row is None:
            return None
        metadata = self.serde.loads_typed(row.metadata)
        if any(metadata.get(name) != value for name, value in (filter or {}).items()):
            return None
        values = Values(table, place.thread, self.serde)
        checkpoint = self.serde.loads_typed(row.checkpoint)
        checkpoint["channel_values"] = {name: values.get(stored) for name, stored in row.values.items()}
        return CheckpointTuple(
            config=_config(place, id),
            checkpoint=checkpoint,
            metadata=metadata,
            parent_config=_config(place, row.parent) if row.parent else None,
            pending_writes=[(one.task, one.channel, values.get(one.value)) for one in rows.writes(table, place, id)],
        )

    # Writing

    def put(self, config: Any, checkpoint: Any, metadata: Any, new_versions: Mapping[str, Any]) -> Any:
        """Store a checkpoint; returns its config."""
        place, parent = _place(config), config["configurable"].get("checkpoint_id")
        whole = get_checkpoint_metadata(config, metadata)
        bare = {name: value for name, value in checkpoint.items() if name != "channel_values"}
        encoded = self.serde.dumps_typed(bare), self.serde.dumps_typed(whole)
        channels, versions = checkpoint["channel_values"], checkpoint["channel_versions"]

        def work(table: ItemTable) -> None:
            before = rows.get(table, place, parent) if parent else None
            values, stored = Values(table, place.thread, self.serde), dict[str, StoredValue]()
            for name, value in channels.items():
                if before is not None and name in before.values and name not in new_versions:
                    stored[name] = before.values[name]
                elif name in versions or name in new_versions:
                    stored[name] = values.put(value)
            rows.put(
                table,
                place,
                CheckpointRow(
                    checkpoint["id"],
                    parent,
                    *encoded,
                    stored,
                    run=str(whole.get("run_id") or ""),
                    delta=_delta_channels(whole),
                ),
            )
            if self._keep is not None:
                rows.retain(table, place, self._keep)

        self._items.write(work)
        if self._channel in new_versions or (self._channel in channels and not parent):
            self._follow(place, checkpoint["id"], channels.get(self._channel))
        return _config(place, checkpoint["id"])

    def _follow(self, place: Place, id: str, messages: object) -> None:
        def newest() -> bool:
            with self._items.read() as table:
                return next(rows.newest_first(table, place), None) == id

        if not place.namespace:
            self._chats.follow(place.thread, messages, newest)

    def put_writes(self, config: Any, writes: Sequence[tuple[str, Any]], task_id: str, task_path: str = "") -> None:
        """Store what a task wrote on a checkpoint; what is there already stays, but for errors and interrupts."""
        place, id = _place(config), config["configurable"]["checkpoint_id"]

        def work(table: ItemTable) -> None:
            values = Values(table, place.thread, self.serde)
            for at, (channel, value) in enumerate(writes):
                number = WRITES_IDX_MAP.get(channel, at)
                if number < 0 or not rows.has_write(table, place, id, task_id, number):
                    row = WriteRow(task_path, task_id, number, channel, values.put(value))
                    rows.put_write(table, place, id, row)

        self._items.write(work)

    def delete_thread(self, thread_id: str) -> None:
        """Delete all of a thread."""
        self._items.write(lambda table: rows.delete_thread(table, str(thread_id)))
        self._chats.delete(str(thread_id))

    def delete_for_runs(self, run_ids: Sequence[str]) -> None:
        """Delete the checkpoints of some runs, and what was written on them."""
        for thread in self._items.write(lambda table: rows.delete_runs(table, [str(run) for run in run_ids])):
            left = self.get_tuple({"configurable": {"thread_id": thread}})
            if left is None:
                self._chats.delete(thread)
            elif self._channel is not None:
                place, id = Place(thread, ""), left.config["configurable"]["checkpoint_id"]
                self._follow(place, id, left.checkpoint["channel_values"].get(self._channel))

    def copy_thread(self, source_thread_id: str, target_thread_id: str) -> None:
        """Copy all of a thread."""
        self._items.write(lambda table: rows.copy_thread(table, str(source_thread_id), str(target_thread_id)))
        self._chats.copy(str(source_thread_id), str(target_thread_id))

    def prune(self, thread_ids: Sequence[str], *, strategy: str = "keep_latest") -> None:
        """Delete all checkpoints of some threads, or all but the newest of each namespace.

        Those before it that delta channels are made from stay.
        """
        if strategy not in _STRATEGIES:
            raise ConfigError(f"there is no strategy {strategy!r}", fix=f"Use {' or '.join(_STRATEGIES)}")

        def work(table: ItemTable) -> None:
            for thread in map(str, thread_ids):
                if strategy == "delete":
                    rows.delete_thread(table, thread)
                else:
                    rows.keep_latest(table, thread)

        self._items.write(work)
        if strategy == "delete":
            for thread in map(str, thread_ids):
                self._chats.delete(thread)

    # For event loops: the disk is waited for in a thread

    async def aget_tuple(self, config: Any) -> Any:
        """`get_tuple`"""
        return await asyncio.to_thread(self.get_tuple, config)

    async def alist(
        self,
        config: Any,
        *,
        filter: Mapping[str, Any] | None = None,
        before: Any = None,
        limit: int | None = None,
    ) -> AsyncIterator[Any]:
        """`list`"""
        found = self.list(config, filter=filter, before=before, limit=limit)
        while (one := await asyncio.to_thread(next, found, None)) is not None:
            yield one

    async def aput(self, config: Any, checkpoint: Any, metadata: Any, new_versions: Mapping[str, Any]) -> Any:
        """`put`"""
        return await asyncio.to_thread(self.put, config, checkpoint, metadata, new_versions)

    async def aput_writes(
        self, config: Any, writes: Sequence[tuple[str, Any]], task_id: str, task_path: str = ""
    ) -> None:
        """`put_writes`"""
        await asyncio.to_thread(self.put_writes, config, writes, task_id, task_path)

    async def adelete_thread(self, thread_id: str) -> None:
        """`delete_thread`"""
        await asyncio.to_thread(self.delete_thread, thread_id)

    async def adelete_for_runs(self, run_ids: Sequence[str]) -> None:
        """`delete_for_runs`"""
        await asyncio.to_thread(self.delete_for_runs, run_ids)

    async def acopy_thread(self, source_thread_id: str, target_thread_id: str) -> None:
        """`copy_thread`"""
        await asyncio.to_thread(self.copy_thread, source_thread_id, target_thread_id)

    async def aprune(self, thread_ids: Sequence[str], *, strategy: str = "keep_latest") -> None:
        """`prune`"""
        await asyncio.to_thread(self.prune, thread_ids, strategy=strategy)


def _place(config: Any) -> Place:
    configurable = config["configurable"]
    return Place(str(configurable["thread_id"]), str(configurable.get("checkpoint_ns", "")))


def _config(place: Place, id: str) -> dict[str, Any]:
    names = {"thread_id": place.thread, "checkpoint_ns": place.namespace, "checkpoint_id": id}
    return {"configurable": names}


def _delta_channels(metadata: Mapping[str, Any]) -> list[str]:
    counters = metadata.get("counters_since_delta_snapshot")
    return sorted(counters) if isinstance(counters, Mapping) else []

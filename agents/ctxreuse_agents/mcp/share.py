"""One memory for many MCP servers: the process that opens it first serves the others over a socket in its folder.

Each client of MCP starts a server of its own, and a memory has one process that writes it. If that one ends or is
killed, the next that is asked opens the memory, and calls that had no answer are made again. On the socket stand
frames: their length as 4 bytes, little-endian, then MessagePack: ``[number, tool, arguments]``, and back ``[number,
result, refusal]``.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import socket
import struct
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from ctxreuse.errors import StoreError, StoreOwnedError
from ctxreuse.store import new_session_id
from ctxreuse.store.idle_compaction import IdleCompaction
from ctxreuse_agents.mcp.graph import GRAPH_TOOLS
from ctxreuse_agents.mcp.tools import MEMORY_TOOLS, ToolRefusedError, call_tool
from ctxreuse_agents.memory import Memory

__all__ = ["CommonMemory"]

_SPECS = {spec.name: spec for spec in (*MEMORY_TOOLS, *GRAPH_TOOLS)}
_SOCKET = "mcp.sock"
#: Bytes of a frame at most: a page of results, or an import of many entities.
_FRAME = 64 << 20
_LENGTH = struct.Struct("<I")
#: Seconds that a call waits for a memory that another process is opening or about to leave, and between two tries.
_PATIENCE, _AGAIN = 15.0, 0.05
#: Seconds between two looks for what is to be tidied, embedded and compacted.
_IDLE = 30.0


class CommonMemory:
    """Calls of tools, done here or by the process that has the memory open. For one event loop."""

    def __init__(self, folder: Path, open_memory: Callable[[], Memory]) -> None:
        self._folder, self._open_memory = folder, open_memory
        self._memory: Memory | None = None
        self._listening: asyncio.Server | None = None
        self._owner: _Link | None = None
        self._lock = asyncio.Lock()
        self._answers: set[asyncio.Task[None]] = set()
        self._connections: dict[asyncio.Task[Any], asyncio.StreamWriter] = {}
        self._idling: asyncio.Task[None] | None = None
        self._last = time.monotonic()
        self._closing = False

    async def open(self) -> None:
        """Open the memory, or find the process that has it; else the first call does. Raises what opening raises."""
        await self._reach(time.monotonic() + _PATIENCE)

    async def call(self, tool: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Call a tool. Raises ToolRefusedError, and StoreError if the memory can be had neither here nor there.

        A call whose answer was lost with the process that made it is made again.
        """
        if tool == "remember":
            arguments = {**arguments, "id": new_session_id()}  # so that one made again is done once
        until = time.monotonic() + _PATIENCE
        while True:
            try:
                owner = await self._reach(until)
            except StoreOwnedError:  # its words have the other program's command, with paths
                fix = "Give the servers a --folder of their own; to attach them to a daemon, add --engine ADDRESS"
                raise ToolRefusedError(f"another program, no MCP server, has this memory open. {fix}") from None
            if owner is None:
                return await self._call_here(tool, arguments)
            try:
                return await owner.call(tool, arguments)
            except ConnectionError:
                owner.close()
                if time.monotonic() > until:
                    raise StoreError("the process that has the memory open does not answer") from None
                await asyncio.sleep(_AGAIN)
                if tool == "remember":
                    arguments = {**arguments, "again": True}

    async def _call_here(self, tool: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        self._last, memory = time.monotonic(), self._memory
        assert memory is not None
        return await asyncio.to_thread(call_tool, memory, _SPECS, tool, arguments)

    async def _reach(self, until: float) -> _Link | None:
        """Return a connection to the process that has the memory; None: this one has it, maybe from now on."""
        async with self._lock:
            while self._memory is None:
                if self._owner is not None and not self._owner.closed:
                    return self._owner
                self._owner = await _connect(self._folder)
                if self._owner is not None:
                    return self._owner
                try:
                    await self._take()
                except StoreOwnedError:
                    if time.monotonic() > until:
                        raise
                    await asyncio.sleep(_AGAIN)
            return None

    async def _take(self) -> None:
        memory = await asyncio.to_thread(self._open_memory)
        try:
            self._listening = await asyncio.start_unix_server(self._accept, sock=_listen(self._folder))
        except OSError as error:
            memory.close()
            raise StoreError(f"other servers cannot be let in: {error.strerror}") from None
        self._memory = memory
        self._idling = asyncio.ensure_future(self._idle(memory))

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections[task] = writer
        found = writer.get_extra_info("socket")
        _, user, _ = struct.unpack("3i", found.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        try:
            while user == os.getuid() and (frame := await _read(reader)) is not None:
                number, tool, arguments = msgspec.msgpack.decode(frame, type=tuple[int, str, dict[str, Any]])
                answer = asyncio.ensure_future(self._answer(writer, number, tool, arguments))
                self._answers.add(answer)
                answer.add_done_callback(self._answers.discard)
        except (OSError, msgspec.MsgspecError, asyncio.CancelledError):
            pass  # the caller calls again, or has ended; or this server ends
        finally:
            if not self._closing:
                writer.close()
                del self._connections[task]

    async def _answer(self, writer: asyncio.StreamWriter, number: int, tool: str, arguments: dict[str, Any]) -> None:
        result: dict[str, Any] | None = None
        refusal = ""
        try:
            result = await self._call_here(tool, arguments)
        except ToolRefusedError as error:
            refusal = str(error)
        except Exception as error:
            refusal = f"{tool} failed: {type(error).__name__}"
        with contextlib.suppress(OSError):
            await _write(writer, [number, result, refusal])

    async def _idle(self, memory: Memory) -> None:
        compaction = IdleCompaction(memory.ledger.deleted_since, memory.compact, lambda: False, time.time)
        while True:
            await asyncio.sleep(_IDLE)
            if time.monotonic() - self._last < _IDLE / 2:
                continue
            with contextlib.suppress(StoreError):
                await asyncio.to_thread(_look_after, memory, compaction)

    async def close(self) -> None:
        """Close the memory once what was called is answered, or the connection to the process that has it."""
        self._closing = True
        if self._owner is not None:
            self._owner.close()
        if self._listening is not None:
            self._listening.close()
            with contextlib.suppress(OSError):
                (self._folder / _SOCKET).unlink()
        if self._idling is not None:
            self._idling.cancel()
        for task in self._connections:
            task.cancel()  # calls that were not read yet are made again by their callers
        await asyncio.gather(*self._connections, *self._answers, return_exceptions=True)
        for writer in self._connections.values():
            writer.close()
        if self._memory is not None:
            await asyncio.to_thread(self._memory.close)
            self._memory = None


def _look_after(memory: Memory, compaction: IdleCompaction) -> None:
    memory.tidy()
    memory.index()
    compaction.round()


class _Link:
    """A connection to the process that has the memory: calls by their numbers, any number at a time."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.closed = False
        self._reading = asyncio.ensure_future(self._read())

    async def call(self, tool: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Call a tool there. Raises ToolRefusedError, and ConnectionError if no answer comes any more."""
        if self.closed:
            raise ConnectionResetError
        number = next(self._numbers)
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        try:
            await _write(self._writer, [number, tool, dict(arguments)])
            return await answer
        finally:
            self._waiting.pop(number, None)

    async def _read(self) -> None:
        try:
            while (frame := await _read(self._reader)) is not None:
                number, result, refusal = msgspec.msgpack.decode(frame, type=tuple[int, dict[str, Any] | None, str])
                answer = self._waiting.get(number)
                if answer is None or answer.done():
                    continue
                if result is None:
                    answer.set_exception(ToolRefusedError(refusal))
                else:
                    answer.set_result(result)
        except (OSError, msgspec.MsgspecError):
            pass
        finally:
            self.close()

    def close(self) -> None:
        """Close it; calls that wait get a ConnectionError."""
        self.closed = True
        self._writer.close()
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(ConnectionResetError())
        self._reading.cancel()


async def _connect(folder: Path) -> _Link | None:
    with _short(folder) as path:
        try:
            return _Link(*await asyncio.open_unix_connection(path))
        except OSError:
            return None


def _listen(folder: Path) -> socket.socket:
    """Listen in a folder that this process owns, so that what lies there is left by one that has ended."""
    with _short(folder) as path:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            server.bind(path)
            os.chmod(path, 0o600)
        except OSError:
            server.close()
            raise
        return server


@contextlib.contextmanager
def _short(folder: Path) -> Any:
    """Return a path of the socket that is short, as those of sockets must be."""
    try:
        file = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        yield str(folder / _SOCKET)
        return
    try:
        yield f"/proc/self/fd/{file}/{_SOCKET}"
    finally:
        os.close(file)


async def _read(reader: asyncio.StreamReader) -> bytes | None:
    """Return the next frame; None: the connection has ended. Raises OSError for one that is too long."""
    try:
        (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        if length > _FRAME:
            raise ConnectionAbortedError
        return await reader.readexactly(length)
    except asyncio.IncompleteReadError:
        return None


async def _write(writer: asyncio.StreamWriter, message: list[Any]) -> None:
    frame = msgspec.msgpack.encode(message)
    writer.write(_LENGTH.pack(len(frame)) + frame)
    await writer.drain()

"""MCP servers attached to an edge daemon: one memory of many clients, while the daemon is killed and comes back."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from ctxreuse_agents import Memory
from mcp import Client

from support.edge_daemon import Daemon
from support.mcp_clients import call, http, refusal, stdio
from support.tiny_gguf import write_tiny_gguf

pytestmark = [pytest.mark.daemon, pytest.mark.slow]


@pytest.fixture
def daemon(tmp_path: Path, child_env: dict[str, str]) -> Iterator[Daemon]:
    """A daemon on a port of its own, which is not started yet."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    made = Daemon(tmp_path, write_tiny_gguf(tmp_path / "tiny.gguf"), child_env, port=port)
    yield made
    made.kill()


def test_clients_beside_a_daemon_share_one_memory_while_it_is_killed_and_comes_back(
    daemon: Daemon, tmp_path: Path
) -> None:
    folder, kept, engine = tmp_path / "memory", list[str](), ("--engine", f"http://127.0.0.1:{daemon.port}")

    async def write(client: Client, number: int, part: int) -> None:
        for n in range(4):
            kept.append(f"note {number} {part} {n}")
            await call(client, "remember", text=kept[-1], session="common")

    async def story() -> None:
        async with AsyncExitStack() as opened:
            clients = [await opened.enter_async_context(stdio(folder, *engine)) for _ in range(2)]
            assert "no daemon answers" in await refusal(clients[0], "remember", text="too early")
            await asyncio.to_thread(daemon.start)
            clients.append(await opened.enter_async_context(Client(opened.enter_context(http(folder, *engine))[0])))
            await asyncio.gather(*(write(client, n, 0) for n, client in enumerate(clients)))
            await asyncio.to_thread(daemon.kill)
            await asyncio.gather(*(write(client, n, 1) for n, client in enumerate(clients)))
            found = await call(clients[1], "recall", query="note", session="common", tokens=4000, limit=100)
            assert len(found["found"]) == len(kept) == 24
            single = await call(clients[2], "remember", text="for a while")
            assert "no daemon answers" in await refusal(clients[0], "forget", session=single["id"])
            await asyncio.to_thread(daemon.start)
            await call(clients[1], "forget", session=single["id"])
            assert (await call(clients[2], "list", prefix="memory-"))["sessions"] == []

    asyncio.run(story())
    with Memory.open(folder) as memory:
        assert sorted(turn.content for turn in memory.session("common").turns()) == sorted(kept), "each once"


def test_a_folder_that_another_program_has_is_refused_in_words_without_a_path(tmp_path: Path) -> None:
    async def story() -> str:
        async with stdio(tmp_path / "memory") as client:
            return await refusal(client, "remember", text="here?")

    with Memory.open(tmp_path / "memory"):
        said = asyncio.run(story())
    assert "another program" in said
    assert "--folder" in said
    assert str(tmp_path) not in said

"""Clients of the Model Context Protocol, the protocol's own, and the servers that they talk to as real processes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from mcp import Client, StdioServerParameters
from mcp.client.stdio import stdio_client

__all__ = ["COMMAND", "call", "every", "http", "refusal", "stdio"]

COMMAND = [sys.executable, "-m", "ctxreuse", "mcp", "--embedder", "none"]


@asynccontextmanager
async def stdio(folder: Path, *options: str) -> AsyncIterator[Client]:
    """A client that started its own server."""
    arguments = [*COMMAND[1:], "--folder", str(folder), *options]
    server = StdioServerParameters(command=COMMAND[0], args=arguments, env=dict(os.environ))
    async with Client(stdio_client(server)) as client:
        yield client


@contextmanager
def http(folder: Path, *options: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """A server over HTTP: its address and process."""
    command = [*COMMAND, "--folder", str(folder), "--http", "127.0.0.1:0", *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        try:
            line = server.stderr.readline()
            found = re.search(r"http://\S+", line)
            assert found, line + server.stderr.read()
            yield found[0], server
        finally:
            server.terminate()
            server.wait(20)


async def call(client: Client, tool: str, **arguments: Any) -> Any:
    result = await client.call_tool(tool, arguments)
    assert not result.is_error, result.content
    return result.structured_content


async def refusal(client: Client, tool: str, **arguments: Any) -> str:
    result = await client.call_tool(tool, arguments)
    assert result.is_error
    return str(result.content[0].text)  # type: ignore[union-attr]


async def every(client: Client, tool: str, key: str, **arguments: Any) -> list[Any]:
    """All entries of a list that is read in pages."""
    found: list[Any] = []
    cursor = ""
    while True:
        page = await call(client, tool, **arguments, cursor=cursor)
        found += page[key]
        if not (cursor := page.get("next", "")):
            return found

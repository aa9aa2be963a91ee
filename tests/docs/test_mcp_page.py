"""The configurations of MCP clients that the docs show start servers that the protocol's own client talks to."""

from __future__ import annotations

import asyncio
import json
import os
import sysconfig
from pathlib import Path

import pytest
from mcp import Client, StdioServerParameters
from mcp.client.stdio import stdio_client

from support.pages import blocks

CONFIGURATIONS = [text for page, text in blocks("json") if page.endswith("mcp.md")]


@pytest.mark.daemon
@pytest.mark.slow
@pytest.mark.parametrize("text", CONFIGURATIONS, ids=["plain", "graph"])
def test_a_configuration_starts_a_server(text: str, tmp_path: Path) -> None:
    [server] = json.loads(text)["mcpServers"].values()
    env = {**os.environ, "HOME": str(tmp_path), "XDG_DATA_HOME": str(tmp_path / "data")}
    env["PATH"] = f"{sysconfig.get_path('scripts')}{os.pathsep}{env['PATH']}"
    started = StdioServerParameters(command=server["command"], args=server["args"], env=env, cwd=tmp_path)

    async def story() -> None:
        async with Client(stdio_client(started)) as client:
            names = {tool.name for tool in (await client.list_tools()).tools}
            assert "read_graph" in names
            if "remember" in names:
                kept = await client.call_tool("remember", {"text": "My puppy sleeps."})
                assert not kept.is_error
                found = await client.call_tool("recall", {"query": "dogs", "explain": True})
                assert found.structured_content["found"][0]["explain"]["vectors"]["rank"] == 1
            else:
                made = await client.call_tool("create_entities", {"entities": [{"name": "Ann", "entityType": "x"}]})
                assert not made.is_error

    asyncio.run(story())
    where = tmp_path / "data" / "ctxreuse" / "memory" if "graph" not in server["args"] else tmp_path / "graph"
    assert (where / "ledger").is_dir()

"""The memory as a server of the Model Context Protocol: ``ctxreuse mcp``."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ctxreuse.errors import ConfigError
from ctxreuse.store.recall import check_language

if TYPE_CHECKING:
    from ctxreuse_agents.memory import Memory

__all__ = ["serve"]


def serve(
    folder: Path,
    *,
    http: tuple[str, int] | None = None,
    keys: str = "",
    tools: Sequence[str] = ("memory", "graph"),
    engine: str | None = None,
    embedder: str = "auto",
    language: str = "en",
    keep_seconds: float | None = None,
) -> None:
    """Serve the memory in a folder to one client on standard input and output, or by ``http`` to many.

    Args:
        folder: of the memory; it is created if necessary.
        http: host and port; None: standard input and output.
        keys: file of API keys that ``http`` requires.
        tools: sets of tools, see `server.TOOLSETS`.
        engine: see `Memory.open`: with the address of a daemon, ``why`` explains what its answers reused.
        embedder: ``auto``, ``multilingual`` or ``none``; see `Memory.open`.
        language: of the texts; see `Memory.open`.
        keep_seconds: sessions that were not changed for so long are deleted, unless pinned.

    Raises ConfigError without the extra ``mcp``, and for settings that cannot be.
    """
    try:
        from ctxreuse_agents.mcp.server import TOOLSETS, run_stdio
        from ctxreuse_agents.mcp.share import CommonMemory
    except ImportError as error:
        fix = "Run: pip install 'ctxreuse[mcp]'"
        raise ConfigError(f"the MCP server needs {error.name}", fix=fix) from None
    if unknown := [name for name in tools if name not in TOOLSETS]:
        raise ConfigError(f"there are no tools {unknown[0]!r}", fix=f"Use {' or '.join(TOOLSETS)}")
    if embedder not in ("auto", "multilingual", "none"):
        raise ConfigError(f"there is no embedder {embedder!r}", fix="Use auto, multilingual or none")
    check_language(language)

    def open_memory() -> Memory:
        from ctxreuse_agents.memory import Memory
        from ctxreuse_agents.retention import KeepLimits

        keep = None if keep_seconds is None else {"": KeepLimits(age=keep_seconds)}
        how: dict[str, Any] = {"embedder": embedder, "language": language, "keep": keep}
        return Memory.open(folder, engine, **how)

    async def run() -> None:
        shared = CommonMemory(folder, open_memory)
        if http is None:
            await run_stdio(shared, tuple(tools))
        else:
            from ctxreuse_agents.mcp.http import run_http

            await run_http(shared, tuple(tools), *http, keys)

    asyncio.run(run())

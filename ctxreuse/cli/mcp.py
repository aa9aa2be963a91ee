"""The command ``ctxreuse mcp``: the memory as a server of the Model Context Protocol."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path
from typing import Annotated

import typer

__all__ = ["EXAMPLES", "mcp"]

EXAMPLES = """[bold]Examples[/bold]

ctxreuse mcp                                   for one client, which starts it; any number share the memory

ctxreuse mcp --http 127.0.0.1:7361             one server for many clients

ctxreuse mcp --folder notes --tools graph      with the tools of the reference memory server alone

ctxreuse mcp --engine http://127.0.0.1:7351    beside an edge daemon, which computes and caches
"""


def mcp(
    folder: Annotated[
        Path | None,
        typer.Option("--folder", metavar="DIR", help="The memory's; default: one in the user's data folder."),
    ] = None,
    http: Annotated[
        str, typer.Option("--http", metavar="HOST:PORT", help="Serve streamable HTTP there; default: stdin and stdout.")
    ] = "",
    keys: Annotated[str, typer.Option("--keys", metavar="FILE", help="API keys that HTTP requires.")] = "",
    tools: Annotated[
        str, typer.Option("--tools", metavar="SET,SET", help="memory, and graph: the reference memory server's names.")
    ] = "memory,graph",
    engine: Annotated[
        str | None, typer.Option("--engine", help="A daemon's address, or a model; default: text only.")
    ] = None,
    embedder: Annotated[
        str, typer.Option("--embedder", help="auto: as installed; multilingual: its extra; none: words alone.")
    ] = "auto",
    language: Annotated[
        str, typer.Option("--language", metavar="CODE", help="Of the texts, such as de: finds words in their forms.")
    ] = "en",
    keep: Annotated[
        str, typer.Option("--keep", metavar="TIME", help="Delete what was unchanged for so long, such as 90d.")
    ] = "",
) -> None:
    """Serve the memory to clients of the Model Context Protocol (extra ``mcp``)."""
    import platformdirs

    from ctxreuse.errors import ConfigError
    from ctxreuse.private import make_private_folder
    from ctxreuse.units import parse_duration

    place = folder if folder is not None else platformdirs.user_data_path("ctxreuse", appauthor=False) / "memory"
    host, colon, port = http.rpartition(":")
    if http and not (colon and host and port.isascii() and port.isdigit() and int(port) < 65536):
        raise ConfigError(f"{http!r} is no address", fix="Give HOST:PORT, such as 127.0.0.1:7361")
    if folder is None:
        make_private_folder(place)
    [serve] = metadata.entry_points(group="ctxreuse.commands", name="mcp")
    serve.load()(
        place.expanduser().absolute(),
        http=(host.strip("[]"), int(port)) if http else None,
        keys=keys,
        tools=[name.strip() for name in tools.split(",")],
        engine=engine,
        embedder=embedder,
        language=language,
        keep_seconds=parse_duration(keep) if keep else None,
    )

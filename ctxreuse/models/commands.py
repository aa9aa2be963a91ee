"""The commands ``ctxreuse model get|ls|rm``."""

from __future__ import annotations

from typing import Annotated

import typer

__all__ = ["app"]

app = typer.Typer(help="Language models on this machine.", no_args_is_help=True)

_Name = Annotated[str, typer.Argument(help="A name from `ctxreuse model ls`.")]


@app.command("get")
def get_model(
    name: _Name,
    keep_gguf: Annotated[bool, typer.Option("--keep-gguf", help="Keep the original GGUF file as well.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress and no remarks.")] = False,
) -> None:
    """Fetch and convert a model, unless it is here already; prints its folder."""
    from ctxreuse.models import get
    from ctxreuse.models.catalog import find

    entry = find(name)
    if entry.remark and not quiet:
        typer.echo(entry.remark, err=True)
    typer.echo(get(name, progress=not quiet, keep_gguf=keep_gguf))


@app.command("ls")
def list_models() -> None:
    """Show all known models and which of them are on this machine."""
    from rich.console import Console
    from rich.table import Table

    from ctxreuse.models import ls

    table = Table("name", "model", "licence", "on disk", "weights sha256")
    for line in ls():
        size = f"{line.bytes / 1e6:.0f} MB" if line.card else f"no ({line.entry.download_bytes / 1e6:.0f} MB to fetch)"
        digest = line.card.weights_sha256[:16] if line.card else ""
        table.add_row(line.entry.name, line.entry.title, line.entry.licence, size, digest)
    Console().print(table)


@app.command("rm")
def remove_model(name: _Name) -> None:
    """Delete a model from this machine."""
    from ctxreuse.models import rm

    typer.echo(f"{name}: removed" if rm(name) else f"{name}: was not here")

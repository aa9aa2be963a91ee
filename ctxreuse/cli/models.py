"""The commands ``ctxreuse model get|build|ls|rm``."""

from __future__ import annotations

from typing import Annotated

import typer

__all__ = ["app"]

app = typer.Typer(help="Language models on this machine.", no_args_is_help=True)

_Name = Annotated[str, typer.Argument(help="A name from `ctxreuse model ls`.")]


@app.command("get")
def get_model(
    name: _Name,
    engine: Annotated[
        str, typer.Option(help="For which engine: torch (converted), llama_cpp (the GGUF), or auto.")
    ] = "auto",
    keep_gguf: Annotated[bool, typer.Option("--keep-gguf", help="Get both, converted and the GGUF.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress and no remarks.")] = False,
) -> None:
    """Fetch a model, unless it is here already; prints its folder, or its GGUF file."""
    from ctxreuse.engines.registry import choose_engine
    from ctxreuse.models import get, get_gguf
    from ctxreuse.models.catalog import find

    entry = find(name)
    if entry.remark and not quiet:
        typer.echo(entry.remark, err=True)
    if not keep_gguf and choose_engine(name, engine) == "llama_cpp":
        typer.echo(get_gguf(name, progress=not quiet))
    else:
        typer.echo(get(name, progress=not quiet, keep_gguf=keep_gguf))


@app.command("build")
def build_model(
    name: Annotated[str, typer.Argument(help="A name from `ctxreuse model ls`, or a Hugging Face folder.")],
    engine: Annotated[str, typer.Option(help="Engine to build for: onnxruntime.")] = "onnxruntime",
    precision: Annotated[str, typer.Option(help="Weights: int4, fp16 or fp32.")] = "int4",
    provider: Annotated[str, typer.Option(help="What is to compute it: cpu or cuda.")] = "cpu",
    out: Annotated[str, typer.Option(help="Folder to build; empty: beside the model, where engines find it.")] = "",
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")] = False,
) -> None:
    """Build a model for an engine, unless it is here already; prints the folder."""
    from ctxreuse.errors import ConfigError
    from ctxreuse.models.build import build

    if engine != "onnxruntime":
        raise ConfigError(f"nothing has to be built for the engine {engine!r}", fix="Use --engine onnxruntime")
    typer.echo(build(name, precision, provider=provider, out=out or None, progress=not quiet))


@app.command("ls")
def list_models() -> None:
    """Show all known models and which of them are on this machine."""
    from rich.console import Console
    from rich.table import Table

    from ctxreuse.models import built_of, ls

    table = Table("name", "model", "licence", "on disk", "weights sha256")
    for line in ls():
        built = [f"ONNX {name}" for name in built_of(line.entry.name)]
        here = " + ".join(["converted"] * bool(line.record) + ["GGUF"] * bool(line.gguf) + built)
        size = (
            f"{line.bytes / 1e6:.0f} MB: {here}" if here else f"no ({line.entry.download_bytes / 1e6:.0f} MB to fetch)"
        )
        digest = line.record.weights_sha256[:16] if line.record else ""
        table.add_row(line.entry.name, line.entry.title, line.entry.licence, size, digest)
    Console().print(table)


@app.command("rm")
def remove_model(name: _Name) -> None:
    """Delete a model from this machine."""
    from ctxreuse.models import rm

    typer.echo(f"{name}: removed" if rm(name) else f"{name}: was not here")

"""The command ``ctxreuse bench``: run one measurement, or list them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ctxreuse.errors import ConfigError

if TYPE_CHECKING:
    from ctxreuse.bench import Suite

__all__ = ["EXAMPLES", "bench", "command_of"]

EXAMPLES = """[bold]Examples[/bold]

ctxreuse bench ls                     what can be measured

ctxreuse bench store --quick          less data and fewer rounds

ctxreuse bench reuse --out reuse.json   keep the figures

ctxreuse bench replay --text traffic.jsonl   a recording of one's own traffic

Ours and the baseline take turns, so a busy machine slows both alike.

Exits with 1 if a figure misses its bar.
"""

#: Old names, and their new ones.
_RENAMED = {"bus": "link"}


def command_of(suite: Suite | None = None) -> Callable[..., None]:
    """Return the command that runs a benchmark of ``suite`` (default: those of the installed package)."""

    def bench(
        name: Annotated[str, typer.Argument(help="What to measure, or `ls` for the list.")],
        json: Annotated[bool, typer.Option("--json", help="Print JSON for programs instead of a table.")] = False,
        quick: Annotated[bool, typer.Option("--quick", help="Less data and fewer rounds; wider error.")] = False,
        out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Also write the JSON to FILE.")] = None,
        model: Annotated[
            str | None, typer.Option("--model", help="Of benchmarks of one model: another one than theirs.")
        ] = None,
        text: Annotated[
            list[Path] | None,
            typer.Option("--text", metavar="FILE", help="Of `codec`: texts to measure with; of `replay`: a trace."),
        ] = None,
        plot: Annotated[
            Path | None,
            typer.Option("--plot", metavar="PATH", help="Of `codec`, `chunks`: draw PATH.svg and PATH.png."),
        ] = None,
        gpu: Annotated[bool, typer.Option("--gpu", hidden=True)] = False,
    ) -> None:
        """Measure one part of ctxreuse: our figure, the plain baseline, the strongest peer here, and the bound."""
        if gpu:
            fix = "Run python -m benchmarks cuda in the repository of ctxreuse"
            raise ConfigError("--gpu was removed: the CUDA kernels have a benchmark of their own", fix=fix)
        benches = suite or _installed()
        if name == "ls":
            width = max(map(len, benches.modules))
            for known in benches.modules:
                typer.echo(f"{known:<{width}}  {benches.about(known)}")
            return
        if name in _RENAMED and name not in benches.modules:
            typer.echo(f"warning: benchmark {name!r} is called {_RENAMED[name]!r} now", err=True)
            name = _RENAMED[name]
        settings = {key: value for key, value in {"model": model, "texts": text, "plot": plot}.items() if value}
        report = benches.run(name, quick=quick, progress=not json, **settings)
        if out is not None:
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_bytes(report.json())
        if json:
            sys.stdout.buffer.write(report.json())
        else:
            from rich.console import Console

            from ctxreuse.bench.table import show

            show(report, Console(), benches.command)
        if not report.passed:
            raise typer.Exit(1)

    return bench


def _installed() -> Suite:
    from ctxreuse.bench import SUITE

    return SUITE


bench = command_of()

"""The command ``ctxreuse bench``: run one measurement, or list them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

__all__ = ["EXAMPLES", "bench"]

EXAMPLES = """[bold]Examples[/bold]

ctxreuse bench ls                     what can be measured

ctxreuse bench store --quick          less data and fewer rounds

ctxreuse bench tree --out tree.json   keep the figures

ctxreuse bench codec --plot rate      rate against divergence, as rate.svg and rate.png

Ours and the baseline take turns, so a busy machine slows both alike.

Exits with 1 if a figure misses its bar.
"""


def bench(
    name: Annotated[str, typer.Argument(help="What to measure, or `ls` for the list.")],
    json: Annotated[bool, typer.Option("--json", help="Print JSON for programs instead of a table.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Less data and fewer rounds; wider error.")] = False,
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Also write the JSON to FILE.")] = None,
    model: Annotated[
        str | None, typer.Option("--model", help="Of benches of one model: another one than theirs.")
    ] = None,
    text: Annotated[
        list[Path] | None, typer.Option("--text", metavar="FILE", help="Of `codec`: texts to measure with; repeatable.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="PATH", help="Of `codec`, `chunks`: draw PATH.svg and PATH.png.")
    ] = None,
    gpu: Annotated[bool, typer.Option("--gpu", help="Of `kernels`: the CUDA kernels on the device as well.")] = False,
) -> None:
    """Measure one part of ctxreuse: our figure, the plain baseline, the strongest peer here, and the bound."""
    from ctxreuse import bench as benches

    if name == "ls":
        width = max(map(len, benches.BENCHES))
        for known in benches.BENCHES:
            typer.echo(f"{known:<{width}}  {benches.about(known)}")
        return
    settings = {key: value for key, value in {"model": model, "texts": text, "plot": plot, "gpu": gpu}.items() if value}
    report = benches.run(name, quick=quick, progress=not json, **settings)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_bytes(report.json())
    if json:
        sys.stdout.buffer.write(report.json())
    else:
        from rich.console import Console

        from ctxreuse.bench.table import show

        show(report, Console())
    if not report.passed:
        raise typer.Exit(1)

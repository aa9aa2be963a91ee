"""The command ``ctxreuse replay``: what a cache would have done with a trace, under each policy."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

__all__ = ["EXAMPLES", "replay"]

EXAMPLES = """[bold]Examples[/bold]

ctxreuse replay traffic.jsonl --plot hits.svg      a recording of one's own traffic, capacities where policies differ

ctxreuse replay traffic.jsonl --capacity 1GB,4GB,16GB --policy lru,duel --model smollm2

ctxreuse replay conversation.jsonl.xz --capacity 1Mtok --token-bytes 128KiB --prefill 70us,2ns

ctxreuse replay --generate agents --requests 20000 for those who have no trace; `--generate ls` lists kinds

To record: `ctxreuse-edge serve --record FILE`, `ctxreuse-cloud serve --record FILE`, or Runtime(recorder=...).
A recording holds hashes and counts: no text, no token ids.

Known are also Mooncake's traces and sessions of kv-cache-tester, packed (.xz, .gz, .bz2) or not.
"""

#: KV of one token where neither the trace nor a flag says: 32 layers, 8 KV heads of 128, 16 bits.
_TOKEN_BYTES = 128 << 10
#: Blocks of all replays together from which processes of their own are started.
_WORTH = 2_000_000


def replay(
    ctx: typer.Context,
    trace: Annotated[Path | None, typer.Argument(metavar="[TRACE]", help="A trace file.", show_default=False)] = None,
    capacity: Annotated[
        str | None, typer.Option("--capacity", metavar="SIZE,SIZE", help="Bytes (4GB) or tokens (1Mtok).")
    ] = None,
    policy: Annotated[
        str | None, typer.Option("--policy", metavar="NAME,NAME", help="Default: all; also duel:lru+arc.")
    ] = None,
    format: Annotated[str, typer.Option("--format", help="auto, recording, mooncake or sessions.")] = "auto",
    block_bytes: Annotated[
        str | None, typer.Option("--block-bytes", metavar="SIZE", help="KV of one block of the trace.")
    ] = None,
    token_bytes: Annotated[str | None, typer.Option("--token-bytes", metavar="SIZE", help="KV of one token.")] = None,
    model: Annotated[
        str | None, typer.Option("--model", help="The model whose KV it would be: a fetched one, or a folder.")
    ] = None,
    prefill: Annotated[
        str | None,
        typer.Option("--prefill", metavar="TIME,TIME", help="Prefill: a token, and a token with one before it."),
    ] = None,
    cost: Annotated[
        Path | None,
        typer.Option("--cost", metavar="FILE", help="Costs that a daemon measured (cost.bin in its store)."),
    ] = None,
    warm_up: Annotated[
        float, typer.Option("--warm-up", min=0.0, max=0.99, help="Share of requests that only fill the cache.")
    ] = 0.0,
    generate: Annotated[
        str | None, typer.Option("--generate", metavar="KIND", help="Made-up traffic in place of a file; `ls` lists.")
    ] = None,
    requests: Annotated[int, typer.Option("--requests", min=1, help="Of --generate: how many.")] = 1_000,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of --generate.")] = 0,
    jobs: Annotated[
        int | None, typer.Option("--jobs", min=1, help="Replays side by side; default: one a core.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE", help="Draw hit rates, as .svg or .png.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON for programs instead of a table.")] = False,
) -> None:
    """Replay a trace through the store's eviction policies, with what nothing can beat beside them (simulation)."""
    if generate == "ls":
        from ctxreuse.lab.generate import KINDS

        for name, kind in KINDS.items():
            typer.echo(f"{name:<10} {kind.about}")
        return
    from rich.console import Console

    from ctxreuse.cli.replaying import Bars, cores, line_of, size_of, source
    from ctxreuse.lab import show
    from ctxreuse.lab.packed import pack
    from ctxreuse.lab.plot import check_plot, draw
    from ctxreuse.lab.study import Study, default_capacities, parse_capacity
    from ctxreuse.store.policy import NAMES

    if plot is not None:
        check_plot(plot)
    given = source(trace, format, generate, requests, seed)
    names = list(dict.fromkeys(name.strip() for name in policy.split(",") if name.strip())) if policy else [*NAMES]
    line, priced = line_of(prefill, cost, ctx.find_root().obj)
    each = size_of(given, trace, block_bytes, token_bytes, model, ctx.find_root().obj) or (
        _TOKEN_BYTES * given.block_tokens
    )
    wanted = [parse_capacity(one, each / given.block_tokens) for one in capacity.split(",")] if capacity else []
    console = Console(stderr=True)
    with Bars(console, quiet=json) as bars:
        packed = pack(given, bars.reading(given.rows))
        study = Study(packed, block_bytes=each, line=line, window=(int(len(packed) * warm_up), len(packed)))
        sizes = sorted(set(wanted)) or default_capacities(packed, each)
        bars.replaying(len(packed), len(names) * len(sizes))
        # Starting processes takes a second: less than that is not worth them.
        many = jobs or cores() if int(packed.length.sum()) * len(names) * len(sizes) >= _WORTH else 1
        outcomes = list(study.run(names, sizes, bars.at, jobs=many))
    if plot is not None:
        draw(outcomes, f"{packed.name}: {len(packed):,} requests (simulation)", plot)
    if json:
        import msgspec

        body = {"simulation": True, "about": study.about, "priced": priced, "outcomes": outcomes}
        sys.stdout.buffer.write(msgspec.json.format(msgspec.json.encode(body)) + b"\n")
        return
    out = Console()
    out.print(show.table(outcomes))
    out.print()
    out.print(show.sentence(outcomes), highlight=False)
    out.print(show.caption(study.about, *study.window), f"({priced})", style="dim", highlight=False)
    if plot is not None:
        console.print(f"[dim]{plot}[/dim]")

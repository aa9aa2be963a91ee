"""The command ``ctxreuse replay``: what a cache would have done with a trace, under each policy."""

from __future__ import annotations

import math
import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from ctxreuse.cli.common import Json, ProgressBars, print_json
from ctxreuse.errors import ConfigError
from ctxreuse.units import parse_bytes, parse_duration, rounded_bytes

if TYPE_CHECKING:
    from ctxreuse.lab.replay import Line
    from ctxreuse.lab.trace import Trace

__all__ = ["EXAMPLES", "replay"]

EXAMPLES = """[bold]Examples[/bold]

ctxreuse replay traffic.jsonl --plot hits.svg      a recording of one's own traffic, capacities where policies differ

ctxreuse replay traffic.jsonl --capacity 1GB,4GB,16GB --policy lru,adaptive --model smollm2

ctxreuse replay conversation.jsonl.xz --capacity 1Mtok --token-bytes 128KiB --prefill 70us,2ns

ctxreuse replay --generate agents --requests 20000 without a trace; `--generate ls` lists kinds

ctxreuse replay traffic.jsonl --nodes 8 --capacity 3Mtok        time to first token, by which node gets a request

To record: `ctxreuse-edge serve --record FILE`, `ctxreuse-cloud serve --record FILE`, or RuntimeOptions(recorder=...).
A recording holds hashes and counts: no text, no token ids.

Mooncake's traces and sessions of kv-cache-tester are read, too, also packed (.xz, .gz, .bz2).
"""

#: KV of one token where neither the trace nor a flag says: 32 layers, 8 KV heads of 128, 16 bits.
_TOKEN_BYTES = 128 << 10
#: Blocks of all replays together from which processes of their own are started.
_WORTH = 2_000_000
_COST_FILE = "cost.bin"


def replay(
    ctx: typer.Context,
    trace: Annotated[Path | None, typer.Argument(metavar="[TRACE]", help="A trace file.", show_default=False)] = None,
    capacity: Annotated[
        str | None, typer.Option("--capacity", metavar="SIZE,SIZE", help="Bytes (4GB) or tokens (1Mtok).")
    ] = None,
    policy: Annotated[
        str | None, typer.Option("--policy", metavar="NAME,NAME", help="Default: all; also adaptive:lru+arc.")
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
        str | None, typer.Option("--generate", metavar="KIND", help="Synthetic traffic in place of a file; `ls` lists.")
    ] = None,
    requests: Annotated[int, typer.Option("--requests", min=1, help="Of --generate: how many.")] = 1_000,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of --generate.")] = 0,
    nodes: Annotated[
        int | None,
        typer.Option("--nodes", min=1, max=1000, help="Send requests to so many nodes of one capacity, by --router."),
    ] = None,
    router: Annotated[
        str | None, typer.Option("--router", metavar="NAME,NAME", help="Of --nodes: rules; default: all.")
    ] = None,
    jobs: Annotated[
        int | None, typer.Option("--jobs", min=1, help="Replays side by side; default: one a core.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE", help="Draw hit rates, as .svg or .png.")
    ] = None,
    json: Json = False,
) -> None:
    """Replay a trace through the eviction policies, or --nodes, with the upper bounds (simulation)."""
    if generate == "ls":
        from ctxreuse.lab.generate import KINDS

        for name, kind in KINDS.items():
            typer.echo(f"{name:<10} {kind.about}")
        return
    from rich.console import Console

    from ctxreuse.lab import show
    from ctxreuse.lab.packed import pack
    from ctxreuse.lab.plot import check_plot, draw
    from ctxreuse.lab.study import Study, default_capacities, parse_capacity
    from ctxreuse.store.policy import NAMES

    if plot is not None:
        check_plot(plot)
    given = _source(trace, format, generate, requests, seed)
    names = list(dict.fromkeys(name.strip() for name in policy.split(",") if name.strip())) if policy else [*NAMES]
    line, priced = _prefill_line(prefill, cost, ctx.find_root().obj)
    each = _block_bytes(given, trace, block_bytes, token_bytes, model, ctx.find_root().obj) or (
        _TOKEN_BYTES * given.block_tokens
    )
    wanted = [parse_capacity(one, each / given.block_tokens) for one in capacity.split(",")] if capacity else []
    if nodes is not None:
        size = wanted[0] / each * given.block_tokens if wanted else math.inf
        _route(given, nodes, router, size, line, priced, json=json)
        return
    with ProgressBars(quiet=json) as bars:
        packed = pack(given, lambda done: bars.advance("reading", done, given.rows, f"reading: {done:,} requests"))
        study = Study(packed, block_bytes=each, line=line, window=(int(len(packed) * warm_up), len(packed)))
        sizes = sorted(set(wanted)) or default_capacities(packed, each)
        # Starting processes takes a second: less than that is not worth them.
        many = jobs or _cores() if int(packed.length.sum()) * len(names) * len(sizes) >= _WORTH else 1
        total = len(packed) * len(names) * len(sizes)

        def report(name: str, capacity: int, done: int) -> None:
            bars.advance("replaying", done, total, f"{name} at {rounded_bytes(capacity)}")

        outcomes = list(study.run(names, sizes, report, jobs=many))
    if plot is not None:
        draw(outcomes, f"{packed.name}: {len(packed):,} requests (simulation)", plot)
    if json:
        print_json({"simulation": True, "about": study.about, "priced": priced, "outcomes": outcomes})
        return
    out = Console()
    out.print(show.table(outcomes))
    out.print()
    out.print(show.sentence(outcomes), highlight=False)
    out.print(show.caption(study.about, *study.window), f"({priced})", style="dim", highlight=False)
    if plot is not None:
        Console(stderr=True).print(f"[dim]{plot}[/dim]")


def _route(trace: Trace, nodes: int, router: str | None, tokens: float, line: Line, priced: str, *, json: bool) -> None:
    """Show what each rule of choosing nodes comes to; ``tokens``: of KV that a node keeps."""
    from rich.console import Console

    from ctxreuse.lab import show
    from ctxreuse.lab.routing import BOUND, RULES, route_trace

    names = [name.strip() for name in router.split(",") if name.strip()] if router else [*RULES]
    requests, found = list(trace), []
    with ProgressBars(quiet=json) as bars:
        for done, name in enumerate([BOUND, *names]):
            bars.advance("routing", done, len(names) + 1, name)
            prefill = partial(_seconds, line)
            found.append(route_trace(requests, trace.block_tokens, name, nodes, tokens, prefill))
    if json:
        print_json({"simulation": True, "priced": priced, "outcomes": found})
        return
    out = Console()
    out.print(show.routed(found))
    kept = f"{tokens:,.0f} tokens" if math.isfinite(tokens) else "all"
    text = f"Simulation: {len(requests):,} requests of {trace.name} to {nodes} nodes that keep {kept} each ({priced})"
    out.print(text, style="dim", highlight=False)


def _seconds(line: Line, tokens: int, cached: int) -> float:
    return line.rebuild(cached, tokens)


def _cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _source(path: Path | None, format: str, kind: str | None, requests: int, seed: int) -> Trace:
    """Open or generate the trace. Raises ConfigError unless exactly one is named."""
    from ctxreuse.lab.generate import generate
    from ctxreuse.lab.opening import open_trace

    if (path is None) == (kind is None):
        raise ConfigError(
            "no trace: name a file or --generate KIND"
            if path is None
            else "both a trace file and --generate are given",
            fix="Run `ctxreuse replay --help` for examples",
        )
    return generate(kind, requests=requests, seed=seed) if kind is not None else open_trace(path or "", format)


def _block_bytes(
    trace: Trace,
    path: Path | None,
    block: str | None,
    token: str | None,
    model: str | None,
    config: str | None,
) -> int:
    """Return the bytes of a block, from flags, else from the recording; 0: unknown. Raises ConfigError."""
    from ctxreuse.lab.recording import recording_head

    if sum(flag is not None for flag in (block, token, model)) > 1:
        raise ConfigError("--block-bytes, --token-bytes and --model exclude each other", fix="Give one of them")
    size: int | None = None
    if block is not None:
        size = parse_bytes(block)
    elif token is not None:
        size = parse_bytes(token) * trace.block_tokens
    elif model is not None:
        size = _model_token_bytes(model, config) * trace.block_tokens
    if size is not None and size < 1:
        raise ConfigError("a block must have at least one byte", fix="Give a size such as 128KiB")
    if size is None and path is not None and trace.format == "recording":
        size = recording_head(path).token_bytes * trace.block_tokens
    return size or 0


class _ModelShape(msgspec.Struct):
    num_hidden_layers: int
    num_attention_heads: int
    hidden_size: int
    num_key_value_heads: int | None = None
    head_dim: int | None = None


def _model_token_bytes(name: str, config: str | None) -> int:
    """Return the bytes of K and V of a token, from the model's config and the engine's dtype."""
    from ctxreuse.config import load
    from ctxreuse.dtypes import ITEM_BYTES
    from ctxreuse.models import CATALOG
    from ctxreuse.models import path as model_path

    folder = model_path(name) if name in CATALOG else Path(name).expanduser()
    file = folder / "config.json"
    try:
        shape = msgspec.json.decode(file.read_bytes(), type=_ModelShape)
    except OSError as error:
        fix = f"Run: ctxreuse model get {name}" if name in CATALOG else "Name a Hugging Face folder, or --token-bytes"
        raise ConfigError(f"the model {name!r} is not on this machine", where=str(file), fix=fix) from error
    except msgspec.MsgspecError as error:
        raise ConfigError(
            f"the model's sizes are unknown: {error}", where=str(file), fix="Give --token-bytes"
        ) from None
    heads = shape.num_key_value_heads or shape.num_attention_heads
    wide = shape.head_dim or shape.hidden_size // max(shape.num_attention_heads, 1)
    return 2 * shape.num_hidden_layers * heads * wide * ITEM_BYTES[load(config).settings.engine.torch_dtype]


def _prefill_line(prefill: str | None, cost: Path | None, config: str | None) -> tuple[Line, str]:
    """Return the cost of prefill and its source: the flag, a file of measured costs, this device's, or a default."""
    from ctxreuse.config import load
    from ctxreuse.lab.replay import Line

    if prefill is not None:
        parts = [parse_duration(part) for part in prefill.split(",")]
        if cost is not None or len(parts) > 2:
            raise ConfigError(f"{prefill!r} is no price of prefill", fix="Write --prefill 1ms,100ns, without --cost")
        return Line(parts[0], parts[1] if len(parts) == 2 else 0.0), "prices as given"
    own = load(config).settings.store.folder() / _COST_FILE
    if cost is not None or own.is_file():
        found = _measured(cost or own)
        if found is not None:
            return found, "prices as this device measured them" if cost is None else f"prices of {cost.name}"
        if cost is not None:
            raise ConfigError("no prefill was measured there", where=str(cost), fix="Name the cost.bin of a daemon")
    return Line(), f"prices are a guess: {own} has no measured prefill; see --cost and --prefill"


def _measured(file: Path) -> Line | None:
    from ctxreuse.cost import CostModel
    from ctxreuse.lab.replay import Line

    model = CostModel()
    try:
        file = file / _COST_FILE if file.is_dir() else file
        known = model.restore(file.read_bytes())
    except OSError as error:
        fix = f"Name the {_COST_FILE} in the store of a daemon, or that folder"
        raise ConfigError(f"the costs cannot be read: {error.strerror}", where=str(file), fix=fix) from error
    found = model.prefill.coefficients if known else None
    return None if found is None else Line(found[1], found[2])

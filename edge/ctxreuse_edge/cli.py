"""The command ``ctxreuse-edge``: run the daemon of this device, or control the running one."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

import typer

from ctxreuse.cli.api_keys import key_commands
from ctxreuse.cli.common import (
    Json,
    Once,
    ProgressBars,
    Url,
    app_of,
    daemon_client,
    load_settings,
    print_json,
    print_rows,
)
from ctxreuse.cli.errors import run

if TYPE_CHECKING:
    from ctxreuse.daemon.client import Client

__all__ = ["app", "main"]

_EXAMPLES = """[bold]Examples[/bold]

ctxreuse-edge serve                                    on 127.0.0.1:7351, model and store of the settings

ctxreuse-edge serve --cloud tcp://127.0.0.1:7353       also fetch contexts from a cloud

ctxreuse-edge serve --cloud tcp://cloud.example:7353 --cloud-key cloud.pub --bus-key laptop

ctxreuse-edge serve --record traffic.jsonl             for `ctxreuse replay`: hashes and counts, no text

ctxreuse-edge status                                   state of the running daemon

ctxreuse-edge top                                      what it does, as it changes; a browser shows it at its address

ctxreuse-edge keys add laptop --expires 30d            create an API key

ctxreuse-edge pin manual                               protect a context's KV from eviction

curl 127.0.0.1:7351/v1/chat/completions -d '{"messages": [{"role": "user", "content": "Hello"}]}'

Settings: see `ctxreuse config show`; each can be set by CTXREUSE_SECTION__NAME, too.
"""

app = app_of(
    "ctxreuse-edge",
    "The daemon of a device: one model, one store, an OpenAI-compatible API for local programs.",
    _EXAMPLES,
)

app.add_typer(
    key_commands(
        "API keys of the daemon.",
        "edge.api_key_file",
        lambda ctx: load_settings(ctx).edge.api_key_file,
        "edge-keys.json",
    ),
    name="keys",
)

# Seconds between rounds of sync, and without progress after which the rest is left to the daemon.
_ROUND, _STALLED = 0.2, 15.0

_Name = Annotated[str, typer.Argument(help="Name or id of a context.")]


@app.command(epilog=_EXAMPLES)
def serve(
    ctx: typer.Context,
    host: Annotated[str | None, typer.Option(help="Address to listen on (edge.host).")] = None,
    port: Annotated[int | None, typer.Option(help="Port; 0: any free one (edge.port).")] = None,
    store: Annotated[str | None, typer.Option(metavar="DIR", help="Folder of the store (store.path).")] = None,
    model: Annotated[
        str | None, typer.Option(help="Model name, Hugging Face folder or GGUF file (engine.model).")
    ] = None,
    cloud: Annotated[
        list[str] | None,
        typer.Option(metavar="ENDPOINT", help="A cloud to fetch from, in place of bus.clouds; repeatable."),
    ] = None,
    cloud_key: Annotated[
        str, typer.Option(metavar="KEY|FILE|NAME", help="Public key of the --cloud; none: unencrypted.")
    ] = "",
    bus_key: Annotated[
        str | None, typer.Option(metavar="FILE|NAME", help="This device's secret key (bus.key_file).")
    ] = None,
    record: Annotated[
        str | None, typer.Option(metavar="FILE", help="Record requests as hashes and counts (edge.record).")
    ] = None,
    drain: Annotated[
        str | None, typer.Option(help="Time for running requests to finish on SIGTERM (edge.drain).")
    ] = None,
    log_format: Annotated[str | None, typer.Option(help="text or json (log.format).")] = None,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning or error (log.level).")] = None,
) -> None:
    """Run the daemon until SIGTERM or Ctrl-C; a second signal cancels running requests."""
    from ctxreuse.daemon import logs

    flags: dict[str, Any] = {
        "edge.host": host,
        "edge.port": port,
        "store.path": store,
        "engine.model": model,
        "edge.record": record,
        "edge.drain": drain,
        "log.format": log_format,
        "log.level": log_level,
        "bus.clouds": [{"endpoint": endpoint, "server_key": cloud_key} for endpoint in cloud] if cloud else None,
        "bus.key_file": bus_key,
    }
    settings = load_settings(ctx, flags)
    logs.setup(settings.log.format, settings.log.level)
    engine = None
    if settings.edge.isolate:
        from ctxreuse.engines.process import EngineStart

        engine = EngineStart.of(settings.engine)  # it loads the model while this process imports what it needs
    from ctxreuse_edge.app import serve as run_daemon

    raise typer.Exit(run_daemon(settings, engine))


@app.command()
def status(ctx: typer.Context, url: Url = "", json: Json = False) -> None:
    """Show the running daemon: model, store, requests, tokens by source, clouds."""
    found = _client(ctx, url).call("GET", "/api/status")
    if json:
        print_json(found)
        return
    from ctxreuse.units import rounded_bytes, rounded_duration

    stats, tokens = found["store"]["stats"], found["tokens"]
    reused = sum(count for source, count in tokens.items() if source != "compute")
    total = reused + tokens["compute"]
    levels = "".join(
        f", {contexts} of them ({tokens:,} tokens) {level}"
        for level, (contexts, tokens) in found["live"]["levels"].items()
        if level != "exact"
    )
    rows = [
        ("daemon", f"process {found['pid']}, up {rounded_duration(found['seconds'])}, version {found['version']}"),
        ("model", f"{found['model']['id']} ({found['model']['space'][:16]})"),
        ("engine", _engine(found["engine"])),
        ("store", f"{found['store']['path']}" + ("" if found["store"]["durable"] else " (in memory only!)")),
        ("KV", f"{stats['tokens']:,} tokens, {rounded_bytes(stats['nbytes'])} of {rounded_bytes(stats['capacity'])}"),
        ("memory", f"{found['live']['contexts']} contexts, {rounded_bytes(found['live']['bytes'])}" + levels),
        ("named", f"{found['contexts']:,} contexts"),
        ("requests", f"{found['requests']['running']} running or queued, {found['requests']['limit']} at most"),
        ("prompts", f"{total:,} tokens, {reused:,} of them reused: " + _counts(tokens)),
    ]
    if stats["unwritten"] or stats["failing"]:
        what = "full or failing: " if stats["failing"] else ""
        rows.insert(5, ("disk", f"{what}{rounded_bytes(stats['unwritten_bytes'])} of KV in memory only, tried again"))
    rows += [("cloud", f"{cloud['name']}: {cloud['state']}") for cloud in found["clouds"]]
    print_rows(rows)


@app.command()
def top(ctx: typer.Context, url: Url = "", once: Once = False, json: Json = False) -> None:
    """Show what the daemon does, as its page in a browser does: reuse, requests, contexts, links; Ctrl-C ends it."""
    from ctxreuse.cli.top import follow_top

    follow_top(_client(ctx, url), once=once, json=json)


@app.command()
def ls(
    ctx: typer.Context,
    url: Url = "",
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, max=1000, help="How many, newest first.")] = 50,
    json: Json = False,
) -> None:
    """List named contexts."""
    found = _client(ctx, url).call("GET", f"/api/contexts?limit={limit}")
    if json:
        print_json(found)
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table("context", "id", box=None, header_style="bold", pad_edge=False)
    for column in ("turns", "tokens", "cached"):
        table.add_column(column, justify="right")
    table.add_column("pinned")
    for c in found["contexts"]:
        counts = (str(c["turns"]), f"{c['tokens']:,}", f"{c['cached_tokens']:,}")
        table.add_row(escape(c["name"]), c["id"][:8], *counts, "yes" if c["pinned"] else "")
    Console().print(table)
    if found["total"] > len(found["contexts"]):
        typer.echo(f"{found['total'] - len(found['contexts'])} more; --limit shows them")


@app.command()
def pin(
    ctx: typer.Context,
    name: _Name,
    url: Url = "",
    undo: Annotated[bool, typer.Option("--undo", help="Remove the protection.")] = False,
) -> None:
    """Compute a context's KV and protect it from eviction."""
    found = _client(ctx, url).call("POST", f"/api/contexts/{quote(name, safe='')}/{'unpin' if undo else 'pin'}")[
        "context"
    ]
    state = "pinned" if found["pinned"] else "not pinned"
    typer.echo(f"{found['name']}: {state}, {found['cached_tokens']:,} of {found['tokens']:,} tokens cached")


@app.command()
def rm(ctx: typer.Context, name: _Name, url: Url = "") -> None:
    """Delete a context: its text, and KV that no other context shares."""
    found = _client(ctx, url).call("DELETE", f"/api/contexts/{quote(name, safe='')}")
    typer.echo(f"{name} deleted, with {found['blocks']:,} blocks of KV")


@app.command()
def forget(
    ctx: typer.Context,
    request: Annotated[str, typer.Argument(help="Id of one of the chat's requests, such as chatcmpl-….")] = "",
    text: Annotated[str, typer.Option("--text", help="All chats that contain this text.")] = "",
    url: Url = "",
    json: Json = False,
) -> None:
    """Delete what is kept of a chat that has no name, here and in the clouds; `rm` deletes a named context."""
    found = _client(ctx, url).call("POST", "/api/forget", {"text": text} if text else {"request": request})
    if json:
        print_json(found)
        return
    typer.echo(f"{found['requests']:,} requests forgotten, with {found['blocks']:,} blocks of KV")
    for name in found["contexts"]:
        typer.echo(f"the context {name} contains the text, too: `ctxreuse-edge rm` deletes it")
    for name, count in found["clouds"].items():
        typer.echo(f"{name} deletes {count:,} blocks with all below them as soon as it is connected")
    if found["requests"] or found["blocks"]:
        typer.echo("The files still hold it until they are rewritten, within a day: `ctxreuse store compact`")


@app.command()
def export(ctx: typer.Context, name: _Name, url: Url = "") -> None:
    """Print all that is kept of a context, as JSON."""
    print_json(_client(ctx, url).call("GET", f"/api/contexts/{quote(name, safe='')}/export"))


@app.command()
def sync(ctx: typer.Context, url: Url = "", json: Json = False) -> None:
    """Send the clouds the contexts they miss, now, and show progress; ends when nothing is pending."""
    client = _client(ctx, url)
    found = {"sync": _sync_all(client), "clouds": client.call("GET", "/api/status")["clouds"]}
    if json:
        print_json(found)
        return
    if not found["clouds"]:
        typer.echo("No cloud is configured: add one with `serve --cloud` or in [[bus.clouds]]")
    from ctxreuse.units import rounded_bytes

    for link in found["sync"]["links"]:
        sent, pending = rounded_bytes(link["sent_bytes"]), rounded_bytes(link["pending_bytes"])
        typer.echo(
            f"{link['name']}: {link['state']}, {link['sent_blocks']:,} blocks ({sent}) sent since the start, "
            f"{link['pending_blocks']:,} ({pending}) pending"
        )


@app.command()
def doctor(ctx: typer.Context, url: Url = "", json: Json = False) -> None:
    """Check this machine, its store, and the daemon if one runs; exits with 1 if anything is broken."""
    from ctxreuse.cli.doctor import report_findings
    from ctxreuse_edge.checks import check_edge

    report_findings(check_edge(ctx.find_root().obj, lambda: _client(ctx, url)), json=json)


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line; always ends in SystemExit."""
    run(app, "ctxreuse-edge", args)


def _sync_all(client: Client) -> dict[str, Any]:
    """Repeat rounds of sync until no block is pending on a link that is up, or nothing changes any more."""
    last, seconds = (0, 0), time.monotonic()
    with ProgressBars() as bars:
        while True:
            found: dict[str, Any] = client.call("POST", "/api/sync")
            links = found["links"]
            sent = sum(link["sent_blocks"] for link in links)
            pending = sum(link["pending_blocks"] for link in links if link["state"] == "up")
            bars.advance("sending", sent, sent + pending)
            if (sent, pending) != last:
                last, seconds = (sent, pending), time.monotonic()
            if not pending or time.monotonic() - seconds > _STALLED:
                return found
            time.sleep(_ROUND)


def _client(ctx: typer.Context, url: str) -> Client:
    from ctxreuse_edge.app import address_file

    settings = load_settings(ctx)
    edge = settings.edge
    return daemon_client(
        url, address_file(settings), (edge.host, edge.port), (edge.api_key_file, edge.admin_token_file)
    )


def _engine(engine: dict[str, Any]) -> str:
    where = f"process {engine['pid']}" if engine["pid"] else engine["state"]
    died = f", died {engine['restarts']} times" if engine["restarts"] else ""
    return where + died + (f": {engine['error']}" if engine["error"] else "")


def _counts(tokens: dict[str, int]) -> str:
    return ", ".join(f"{source} {count:,}" for source, count in tokens.items() if count) or "none yet"

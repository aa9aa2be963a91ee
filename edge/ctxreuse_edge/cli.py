"""The command ``ctxreuse-edge``: run the daemon of this device, or talk to the one that runs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ctxreuse.cli.errors import run

if TYPE_CHECKING:
    from ctxreuse.config import Settings
    from ctxreuse.daemon.client import Client

__all__ = ["app", "main"]

_EXAMPLES = """[bold]Examples[/bold]

ctxreuse-edge serve                                    on 127.0.0.1:7351, model and store of the settings

ctxreuse-edge serve --cloud tcp://127.0.0.1:7353       also ask a cloud for contexts

ctxreuse-edge serve --cloud tcp://cloud.example:7353 --cloud-key cloud.pub --bus-key laptop

ctxreuse-edge serve --record traffic.jsonl             for `ctxreuse replay`: hashes and counts, no text

ctxreuse-edge status                                   how does it stand?

ctxreuse-edge pin manual                               keep that context's KV

curl 127.0.0.1:7351/v1/chat/completions -d '{"messages": [{"role": "user", "content": "Hello"}]}'

Settings are those of `ctxreuse config show`; each has a variable too, CTXREUSE_SECTION__NAME.
"""

app = typer.Typer(
    name="ctxreuse-edge",
    help="The daemon of a device: one model, one store, an OpenAI-compatible API for local programs.",
    epilog=_EXAMPLES,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

_Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
_Url = Annotated[str, typer.Option("--url", metavar="URL", help="The daemon's address; else found by its store.")]
_Name = Annotated[str, typer.Argument(help="Name or id of a context.")]


@app.callback()
def root(
    ctx: typer.Context,
    config: Annotated[
        str | None, typer.Option("--config", metavar="FILE", help="Read settings from FILE instead of the default one.")
    ] = None,
) -> None:
    """The daemon of a device."""
    ctx.obj = config


@app.command(epilog=_EXAMPLES)
def serve(
    ctx: typer.Context,
    host: Annotated[str | None, typer.Option(help="Address to listen on (edge.host).")] = None,
    port: Annotated[int | None, typer.Option(help="Port; 0: any free one (edge.port).")] = None,
    store: Annotated[str | None, typer.Option(metavar="DIR", help="Folder of the store (store.path).")] = None,
    model: Annotated[str | None, typer.Option(help="Model name or Hugging Face folder (engine.model).")] = None,
    cloud: Annotated[
        list[str] | None, typer.Option(metavar="ENDPOINT", help="A cloud to ask, in place of bus.clouds; repeatable.")
    ] = None,
    cloud_key: Annotated[
        str, typer.Option(metavar="KEY|FILE|NAME", help="The public key of what --cloud names; none: plain.")
    ] = "",
    bus_key: Annotated[
        str | None, typer.Option(metavar="FILE|NAME", help="This device's secret key (bus.key_file).")
    ] = None,
    record: Annotated[
        str | None, typer.Option(metavar="FILE", help="Record requests as hashes and counts (edge.record).")
    ] = None,
    drain: Annotated[str | None, typer.Option(help="How long answers may take on SIGTERM (edge.drain).")] = None,
    log_format: Annotated[str | None, typer.Option(help="text or json (log.format).")] = None,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning or error (log.level).")] = None,
) -> None:
    """Run the daemon until SIGTERM or Ctrl-C; a second one does not wait for answers under way."""
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
    settings = _settings(ctx, flags)
    logs.setup(settings.log.format, settings.log.level)
    from ctxreuse_edge.app import serve as run_daemon

    raise typer.Exit(run_daemon(settings))


@app.command()
def status(ctx: typer.Context, url: _Url = "", json: _Json = False) -> None:
    """Show the running daemon: model, store, requests, where tokens came from, clouds."""
    found = _client(ctx, url).call("GET", "/api/status")
    if json:
        _print_json(found)
        return
    from ctxreuse.units import rounded_bytes, rounded_duration

    stats, tokens = found["store"]["stats"], found["tokens"]
    reused = sum(count for source, count in tokens.items() if source != "compute")
    total = reused + tokens["compute"]
    rows = [
        ("daemon", f"process {found['pid']}, up {rounded_duration(found['seconds'])}, version {found['version']}"),
        ("model", f"{found['model']['id']} ({found['model']['space'][:16]})"),
        ("store", f"{found['store']['path']}" + ("" if found["store"]["durable"] else " (in memory only!)")),
        ("KV", f"{stats['tokens']:,} tokens, {rounded_bytes(stats['nbytes'])} of {rounded_bytes(stats['capacity'])}"),
        ("live", f"{found['live']['contexts']} contexts, {rounded_bytes(found['live']['bytes'])}"),
        ("named", f"{found['contexts']:,} contexts"),
        ("requests", f"{found['requests']['held']} of {found['requests']['most']} places taken"),
        ("prompts", f"{total:,} tokens, {reused:,} of them reused: " + _counts(tokens)),
    ]
    rows += [("cloud", f"{cloud['name']}: {cloud['state']}") for cloud in found["clouds"]]
    for name, value in rows:
        typer.echo(f"{name:<9}{value}")


@app.command()
def ls(
    ctx: typer.Context,
    url: _Url = "",
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, max=1000, help="How many, newest first.")] = 50,
    json: _Json = False,
) -> None:
    """List named contexts."""
    found = _client(ctx, url).call("GET", f"/api/contexts?limit={limit}")
    if json:
        _print_json(found)
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table("context", "id", box=None, header_style="bold", pad_edge=False)
    for column in ("turns", "tokens", "held"):
        table.add_column(column, justify="right")
    table.add_column("pinned")
    for c in found["contexts"]:
        counts = (str(c["turns"]), f"{c['tokens']:,}", f"{c['held']:,}")
        table.add_row(escape(c["name"]), c["id"][:8], *counts, "yes" if c["pinned"] else "")
    Console().print(table)
    if found["total"] > len(found["contexts"]):
        typer.echo(f"{found['total'] - len(found['contexts'])} more; --limit shows them")


@app.command()
def pin(
    ctx: typer.Context,
    name: _Name,
    url: _Url = "",
    undo: Annotated[bool, typer.Option("--undo", help="Let it be evicted like everything else.")] = False,
) -> None:
    """Compute a context's KV and hold eviction off it."""
    found = _client(ctx, url).call("POST", f"/api/contexts/{_quoted(name)}/{'unpin' if undo else 'pin'}")["context"]
    state = "pinned" if found["pinned"] else "not pinned"
    typer.echo(f"{found['name']}: {state}, {found['held']:,} of {found['tokens']:,} tokens held")


@app.command()
def rm(ctx: typer.Context, name: _Name, url: _Url = "") -> None:
    """Delete a context: its text, and the KV that no other context shares."""
    found = _client(ctx, url).call("DELETE", f"/api/contexts/{_quoted(name)}")
    typer.echo(f"{name} is deleted, and {found['blocks']:,} blocks of KV with it")


@app.command()
def sync(ctx: typer.Context, url: _Url = "", json: _Json = False) -> None:
    """Give the clouds now what they lack, and show how much that is."""
    client = _client(ctx, url)
    found = {"sync": client.call("POST", "/api/sync"), "clouds": client.call("GET", "/api/status")["clouds"]}
    if json:
        _print_json(found)
        return
    if not found["clouds"]:
        typer.echo("No cloud is set: name one with `serve --cloud` or in [[bus.clouds]]")
    from ctxreuse.units import rounded_bytes

    for link in found["sync"]["links"]:
        given, lacking = rounded_bytes(link["sent_bytes"]), rounded_bytes(link["pending_bytes"])
        typer.echo(
            f"{link['name']}: {link['state']}, {link['sent_blocks']:,} blocks ({given}) given since the start, "
            f"{link['pending_blocks']:,} ({lacking}) to go"
        )


@app.command()
def doctor(ctx: typer.Context, url: _Url = "", json: _Json = False) -> None:
    """Look at this machine, its store, and the daemon if one runs; exits with 1 if anything is broken."""
    import msgspec

    from ctxreuse.doctor import Finding, examine
    from ctxreuse.errors import CtxReuseError

    findings = examine(ctx.obj)
    try:
        client = _client(ctx, url)
        found = client.call("GET", "/api/status")
        findings.append(Finding("daemon", "address", "ok", client.url))
        durable = found["store"]["durable"]
        fix = "" if durable else "Its log says why the store did not open"
        findings.append(Finding("daemon", "store", "ok" if durable else "slow", found["store"]["path"], fix))
        for cloud in found["clouds"]:
            state = {"up": "ok", "down": "missing"}.get(cloud["state"], "broken")
            findings.append(msgspec.convert(("daemon", cloud["name"], state, cloud["state"]), Finding))
    except CtxReuseError as error:
        findings.append(Finding("daemon", "running", "missing", error.what, error.fix))
    broken = any(finding.status == "broken" for finding in findings)
    if json:
        _print_json({"healthy": not broken, "findings": findings})
    else:
        for f in findings:
            typer.echo(f"{f.area:<9}{f.name:<18}{f.status:<8} {f.value}" + (f"  ({f.fix})" if f.fix else ""))
    raise typer.Exit(int(broken))


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line; always ends in SystemExit."""
    run(app, "ctxreuse-edge", args)


def _settings(ctx: typer.Context, flags: dict[str, Any] | None = None) -> Settings:
    from ctxreuse.config import load

    return load(ctx.find_root().obj, flags=flags).settings


def _client(ctx: typer.Context, url: str) -> Client:
    """The daemon at ``url``, else the one that has the store of the settings, else the one at the settings' port."""
    from ctxreuse.daemon.client import Client
    from ctxreuse.daemon.front import read_keys
    from ctxreuse.daemon.life import read_address
    from ctxreuse_edge.app import address_file

    settings = _settings(ctx)
    if not url:
        found = read_address(address_file(settings))
        url = found.url if found is not None else f"http://{settings.edge.host}:{settings.edge.port}"
    return Client(url, key=next(iter(read_keys(settings.edge.api_key_file)), ""))


def _counts(tokens: dict[str, int]) -> str:
    return ", ".join(f"{source} {count:,}" for source, count in tokens.items() if count) or "none yet"


def _quoted(name: str) -> str:
    from urllib.parse import quote

    return quote(name, safe="")


def _print_json(body: Any) -> None:
    import msgspec

    sys.stdout.buffer.write(msgspec.json.format(msgspec.json.encode(body)) + b"\n")

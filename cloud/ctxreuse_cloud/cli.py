"""The command ``ctxreuse-cloud``: run the sidecar, look at the one that runs, and say who may use it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ctxreuse.cli.errors import run

if TYPE_CHECKING:
    from pathlib import Path

    from ctxreuse.config import Settings
    from ctxreuse.daemon.client import Client
    from ctxreuse_cloud.proxy.tenants import KeyFile

__all__ = ["app", "main"]

_EXAMPLES = """[bold]Examples[/bold]

ctxreuse-cloud serve                                    bus and store on 127.0.0.1, no proxy

ctxreuse-cloud serve --bus-key cloud --bus tcp://0.0.0.0:7353

ctxreuse-cloud serve --backend http://127.0.0.1:8000    also a proxy in front of an inference server

ctxreuse-cloud serve --backend http://127.0.0.1:8000 --record traffic.jsonl    for `ctxreuse replay`

ctxreuse-cloud tenants add team-a                       make a key for the proxy

ctxreuse-cloud status                                   peers, store, workers, backends

Settings are those of `ctxreuse config show`; each has a variable too, CTXREUSE_SECTION__NAME.
"""

app = typer.Typer(
    name="ctxreuse-cloud",
    help="The sidecar of a cloud: shares contexts with devices and stands in front of inference servers.",
    epilog=_EXAMPLES,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
tenants = typer.Typer(help="Keys of the proxy, and whose they are.", no_args_is_help=True)
app.add_typer(tenants, name="tenants")

_Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
_Url = Annotated[str, typer.Option("--url", metavar="URL", help="The sidecar's address; else found by its store.")]


@app.callback()
def root(
    ctx: typer.Context,
    config: Annotated[
        str | None, typer.Option("--config", metavar="FILE", help="Read settings from FILE instead of the default one.")
    ] = None,
) -> None:
    """The sidecar of a cloud."""
    ctx.obj = config


@app.command(epilog=_EXAMPLES)
def serve(
    ctx: typer.Context,
    host: Annotated[str | None, typer.Option(help="Address to listen on (cloud.host).")] = None,
    port: Annotated[int | None, typer.Option(help="Port; 0: any free one (cloud.port).")] = None,
    bus: Annotated[str | None, typer.Option(metavar="ENDPOINT", help="Where devices connect (bus.bind).")] = None,
    bus_key: Annotated[
        str | None, typer.Option(metavar="FILE|NAME", help="The bus's secret key; none: plain (bus.key_file).")
    ] = None,
    store: Annotated[str | None, typer.Option(metavar="DIR", help="Folder of the store (cloud.store).")] = None,
    backend: Annotated[
        list[str] | None, typer.Option(metavar="URL", help="A server in place of cloud.backends; repeatable.")
    ] = None,
    workers: Annotated[int | None, typer.Option(help="Engine processes (cloud.prefill_workers).")] = None,
    model: Annotated[str | None, typer.Option(help="Model name or Hugging Face folder (engine.model).")] = None,
    keys: Annotated[str | None, typer.Option(metavar="FILE", help="Keys of the proxy (cloud.keys_file).")] = None,
    insecure: Annotated[
        bool | None, typer.Option("--insecure", help="Plain TCP for the bus beyond loopback (bus.insecure).")
    ] = None,
    record: Annotated[
        str | None, typer.Option(metavar="FILE", help="Record the proxy's requests as hashes (cloud.record).")
    ] = None,
    drain: Annotated[str | None, typer.Option(help="How long answers may take on SIGTERM (cloud.drain).")] = None,
    ready_file: Annotated[
        str | None, typer.Option(metavar="FILE", help="Write the address here when ready; default: in the store.")
    ] = None,
    log_format: Annotated[str | None, typer.Option(help="text or json (log.format).")] = None,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning or error (log.level).")] = None,
) -> None:
    """Run the sidecar until SIGTERM or Ctrl-C; a second one does not wait for answers under way."""
    from pathlib import Path

    from ctxreuse.daemon import logs

    flags: dict[str, Any] = {
        "cloud.host": host,
        "cloud.port": port,
        "bus.bind": bus,
        "bus.key_file": bus_key,
        "cloud.store": store,
        "cloud.backends": [{"url": url} for url in backend] if backend else None,
        "cloud.prefill_workers": workers,
        "engine.model": model,
        "cloud.keys_file": keys,
        "bus.insecure": insecure,
        "cloud.record": record,
        "cloud.drain": drain,
        "log.format": log_format,
        "log.level": log_level,
    }
    settings = _settings(ctx, flags)
    logs.setup(settings.log.format, settings.log.level)
    from ctxreuse_cloud.app import serve as run_daemon

    raise typer.Exit(run_daemon(settings, Path(ready_file) if ready_file else None))


@app.command()
def status(ctx: typer.Context, url: _Url = "", json: _Json = False) -> None:
    """Show the running sidecar: peers, store, workers, backends."""
    found = _client(ctx, url).call("GET", "/api/status")
    if json:
        _print_json(found)
        return
    from ctxreuse.units import rounded_bytes, rounded_duration

    stats, workers = found["store"]["stats"], found["workers"]
    rows = [
        ("sidecar", f"{found['state']}: process {found['pid']}, up {rounded_duration(found['seconds'])}"),
        ("bus", f"{found['bus']['endpoint']}{'' if found['bus']['secured'] else ', plain'}"),
        ("store", found["store"]["path"]),
    ]
    if stats:
        held = f"{rounded_bytes(stats['nbytes'])} of {rounded_bytes(stats['capacity'])}"
        rows.append(("KV", f"{stats['tokens']:,} tokens in {stats['blocks']:,} blocks, {held}"))
    rows.append(("moved", ", ".join(f"{name} {n:,}" for name, n in found["transfers"].items()) or "nothing yet"))
    rows += [
        ("worker", f"{w['number']}: {w['state']}, {w['jobs']:,} contexts, {w['tokens']:,} tokens" + _said(w))
        for w in workers["processes"]
    ]
    rows += [("peer", f"{p['user']} of {p['tenant']} at {p['address']}") for p in found["peers"]]
    rows += [
        (
            "backend",
            f"{b['name']}: {_wellness(b['healthy'])}, {b['outstanding']} now, {b['requests']:,} so far" + _said(b),
        )
        for b in found["backends"]
    ]
    for name, value in rows:
        typer.echo(f"{name:<9}{value}")


@app.command()
def doctor(ctx: typer.Context, url: _Url = "", json: _Json = False) -> None:
    """Look at this machine, the settings, and the sidecar if one runs; exits with 1 if anything is broken."""
    from ctxreuse_cloud.examine import examine_cloud

    findings = examine_cloud(ctx.find_root().obj, lambda: _client(ctx, url))
    broken = any(finding.status == "broken" for finding in findings)
    if json:
        _print_json({"healthy": not broken, "findings": findings})
    else:
        for f in findings:
            typer.echo(f"{f.area:<9}{f.name:<18}{f.status:<8} {f.value}" + (f"  ({f.fix})" if f.fix else ""))
    raise typer.Exit(int(broken))


@tenants.command("add")
def add(ctx: typer.Context, name: Annotated[str, typer.Argument(help="The tenant; it may have several keys.")]) -> None:
    """Make a key for a tenant and print it; it cannot be shown again."""
    file = _keys(ctx)
    typer.echo(file.add(name))
    typer.echo(f"{file.path} holds its hash; the sidecar must be told of the file: cloud.keys_file", err=True)


@tenants.command("list")
def list_(ctx: typer.Context, json: _Json = False) -> None:
    """List tenants and the ids of their keys."""
    from datetime import UTC, datetime

    keys = _keys(ctx).read().keys
    if json:
        _print_json([{"tenant": key.tenant, "id": key.id, "created": key.created} for key in keys])
        return
    for key in keys:
        typer.echo(f"{key.tenant:<24} {key.id}  {datetime.fromtimestamp(key.created, UTC):%Y-%m-%d %H:%M}")


@tenants.command("revoke")
def revoke(
    ctx: typer.Context, name: Annotated[str, typer.Argument(help="A tenant (all of its keys) or the id of a key.")]
) -> None:
    """Revoke keys; a running sidecar follows within a second."""
    typer.echo(f"{_keys(ctx).revoke(name)} revoked")


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line; always ends in SystemExit."""
    run(app, "ctxreuse-cloud", args)


def _settings(ctx: typer.Context, flags: dict[str, Any] | None = None) -> Settings:
    from ctxreuse.config import load

    return load(ctx.find_root().obj, flags=flags).settings


def _keys(ctx: typer.Context) -> KeyFile:
    """The key file of the settings, else ``tenants.json`` beside the config file."""
    from pathlib import Path

    from ctxreuse.config import config_path
    from ctxreuse_cloud.proxy.tenants import KeyFile

    named = _settings(ctx).cloud.keys_file
    place: Path = Path(named).expanduser() if named else config_path().with_name("tenants.json")
    return KeyFile(place)


def _client(ctx: typer.Context, url: str) -> Client:
    """The sidecar at ``url``, else the one that has the store of the settings, else the one at the settings' port."""
    from ctxreuse.daemon.client import Client
    from ctxreuse.daemon.life import read_address
    from ctxreuse_cloud.app import address_file

    settings = _settings(ctx)
    if not url:
        found = read_address(address_file(settings))
        url = found.url if found is not None else f"http://{settings.cloud.host}:{settings.cloud.port}"
    return Client(url)


def _wellness(row: dict[str, Any]) -> str:
    return {True: "well", False: "ill", None: "not looked at"}[row["healthy"]]


def _said(row: dict[str, Any]) -> str:
    return f" ({row['said']})" if row["said"] else ""


def _print_json(body: Any) -> None:
    import msgspec

    sys.stdout.buffer.write(msgspec.json.format(msgspec.json.encode(body)) + b"\n")

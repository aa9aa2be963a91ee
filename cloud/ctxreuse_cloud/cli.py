"""The command ``ctxreuse-cloud``: run the sidecar, inspect the running one, and manage API keys."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ctxreuse.cli.api_keys import key_commands
from ctxreuse.cli.common import Json, Once, Url, app_of, daemon_client, load_settings, print_json, print_rows
from ctxreuse.cli.errors import run

if TYPE_CHECKING:
    from ctxreuse.daemon.client import Client

__all__ = ["app", "main"]

_EXAMPLES = """[bold]Examples[/bold]

ctxreuse-cloud serve                                    bus and store on 127.0.0.1, no proxy

ctxreuse-cloud serve --bus-key cloud --bus tcp://0.0.0.0:7353

ctxreuse-cloud serve --backend http://127.0.0.1:8000    also a proxy in front of an inference server

ctxreuse-cloud serve --backend http://127.0.0.1:8000 --record traffic.jsonl    for `ctxreuse replay`

ctxreuse-cloud tenants add team-a                       create an API key for the proxy

ctxreuse-cloud status                                   peers, store, workers, backends

ctxreuse-cloud drain NAME --wait                        no new sessions for a backend, before it is stopped

ctxreuse-cloud top                                      the same and more, as it changes

Settings: see `ctxreuse config show`; each can be set by CTXREUSE_SECTION__NAME, too.
"""

app = app_of(
    "ctxreuse-cloud",
    "The sidecar of a cloud: shares contexts with devices and proxies requests to inference servers.",
    _EXAMPLES,
)
app.add_typer(
    key_commands(
        "API keys of the proxy, by tenant.",
        "cloud.keys_file",
        lambda ctx: load_settings(ctx).cloud.keys_file,
        "tenants.json",
        old_names=True,
    ),
    name="tenants",
)

#: Seconds between two looks at what runs.
_LOOK = 0.5
_TAKES = {"all": "all", "sessions": "only sessions that it has", "nothing": "nothing new"}
_HEALTH = {True: "healthy", False: "unhealthy", None: "unknown"}


@app.command(epilog=_EXAMPLES)
def serve(
    ctx: typer.Context,
    host: Annotated[str | None, typer.Option(help="Address to listen on (cloud.host).")] = None,
    port: Annotated[int | None, typer.Option(help="Port; 0: any free one (cloud.port).")] = None,
    bus: Annotated[
        str | None, typer.Option(metavar="ENDPOINT", help="Address on which devices connect (bus.bind).")
    ] = None,
    bus_key: Annotated[
        str | None, typer.Option(metavar="FILE|NAME", help="Secret key of the bus; none: unencrypted (bus.key_file).")
    ] = None,
    store: Annotated[str | None, typer.Option(metavar="DIR", help="Folder of the store (cloud.store).")] = None,
    backend: Annotated[
        list[str] | None,
        typer.Option(metavar="URL", help="An inference server, in place of cloud.backends; repeatable."),
    ] = None,
    workers: Annotated[int | None, typer.Option(help="Engine processes (cloud.prefill_workers).")] = None,
    model: Annotated[
        str | None, typer.Option(help="Model name, Hugging Face folder or GGUF file (engine.model).")
    ] = None,
    keys: Annotated[str | None, typer.Option(metavar="FILE", help="API keys of the proxy (cloud.keys_file).")] = None,
    insecure: Annotated[
        bool | None,
        typer.Option("--insecure", help="Allow unencrypted TCP for the bus beyond loopback (bus.insecure)."),
    ] = None,
    record: Annotated[
        str | None, typer.Option(metavar="FILE", help="Record the proxy's requests as hashes (cloud.record).")
    ] = None,
    drain: Annotated[
        str | None, typer.Option(help="Time for running requests to finish on SIGTERM (cloud.drain).")
    ] = None,
    ready_file: Annotated[
        str | None, typer.Option(metavar="FILE", help="Write the address here when ready; default: in the store.")
    ] = None,
    log_format: Annotated[str | None, typer.Option(help="text or json (log.format).")] = None,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning or error (log.level).")] = None,
) -> None:
    """Run the sidecar until SIGTERM or Ctrl-C; a second signal cancels running requests."""
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
    settings = load_settings(ctx, flags)
    logs.setup(settings.log.format, settings.log.level)
    from ctxreuse_cloud.app import serve as run_daemon

    raise typer.Exit(run_daemon(settings, Path(ready_file) if ready_file else None))


@app.command()
def status(ctx: typer.Context, url: Url = "", json: Json = False) -> None:
    """Show the running sidecar: peers, store, workers, backends."""
    found = _client(ctx, url).call("GET", "/api/status")
    if json:
        print_json(found)
        return
    from ctxreuse.units import rounded_bytes, rounded_duration

    stats, workers = found["store"]["stats"], found["workers"]
    rows = [
        ("sidecar", f"{found['state']}: process {found['pid']}, up {rounded_duration(found['seconds'])}"),
        ("bus", f"{found['bus']['endpoint']}{'' if found['bus']['secured'] else ', unencrypted'}"),
        ("store", found["store"]["path"]),
    ]
    if stats:
        size = f"{rounded_bytes(stats['nbytes'])} of {rounded_bytes(stats['capacity'])}"
        rows.append(("KV", f"{stats['tokens']:,} tokens in {stats['blocks']:,} blocks, {size}"))
    rows.append(
        ("blocks", ", ".join(f"{name} {n:,}" for name, n in found["transfers"].items()) or "none transferred yet")
    )
    rows += [
        ("worker", f"{w['number']}: {w['state']}, {w['jobs']:,} contexts, {w['tokens']:,} tokens" + _error(w))
        for w in workers["processes"]
    ]
    rows += [("peer", f"{p['user']} of {p['tenant']} at {p['address']}") for p in found["peers"]]
    rows += [
        (
            "backend",
            f"{b['name']}: {_HEALTH[b['healthy']]}, {b['outstanding']} running, {b['requests']:,} in total"
            + ("" if b["takes"] == "all" else f", takes {_TAKES[b['takes']]}")
            + _error(b),
        )
        for b in found["backends"]
    ]
    print_rows(rows)


@app.command()
def top(ctx: typer.Context, url: Url = "", once: Once = False, json: Json = False) -> None:
    """Show what the sidecar does, as its page in a browser does: requests, devices, backends; Ctrl-C ends it."""
    from ctxreuse.cli.top import follow_top

    follow_top(_client(ctx, url), once=once, json=json)


@app.command()
def drain(
    ctx: typer.Context,
    name: Annotated[str, typer.Argument(help="A backend, as `status` calls it.")],
    now: Annotated[bool, typer.Option("--now", help="Chats that it has go elsewhere, too.")] = False,
    wait: Annotated[bool, typer.Option("--wait", help="End when nothing runs there.")] = False,
    url: Url = "",
    json: Json = False,
) -> None:
    """Send a backend no new sessions, those that it has go on; until `undrain`, or until the sidecar starts again."""
    client = _client(ctx, url)
    _set_takes(client, name, "nothing" if now else "sessions", json=json)
    while wait and any(one["name"] == name and one["outstanding"] for one in _backends(client)):
        time.sleep(_LOOK)


@app.command()
def undrain(
    ctx: typer.Context,
    name: Annotated[str, typer.Argument(help="A backend, as `status` calls it.")],
    url: Url = "",
    json: Json = False,
) -> None:
    """Send a backend everything again."""
    _set_takes(_client(ctx, url), name, "all", json=json)


@app.command()
def doctor(ctx: typer.Context, url: Url = "", json: Json = False) -> None:
    """Check this machine, the settings, and the sidecar if one runs; exits with 1 if anything is broken."""
    from ctxreuse.cli.doctor import report_findings
    from ctxreuse_cloud.checks import check_cloud

    report_findings(check_cloud(ctx.find_root().obj, lambda: _client(ctx, url)), json=json)


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line; always ends in SystemExit."""
    run(app, "ctxreuse-cloud", args)


def _client(ctx: typer.Context, url: str) -> Client:
    from ctxreuse_cloud.app import address_file

    settings = load_settings(ctx)
    return daemon_client(
        url, address_file(settings), (settings.cloud.host, settings.cloud.port), program="ctxreuse-cloud"
    )


def _set_takes(client: Client, name: str, takes: str, *, json: bool) -> None:
    """Set what a backend is sent, and print its state."""
    from urllib.parse import quote

    found = client.call("POST", f"/api/backends/{quote(name, safe='')}/{takes}")
    if json:
        print_json(found)
    else:
        print_rows([(found["name"], f"takes {_TAKES[takes]}, {found['outstanding']} running")])


def _backends(client: Client) -> list[dict[str, Any]]:
    return list(client.call("GET", "/api/status")["backends"])


def _error(row: dict[str, Any]) -> str:
    return f" ({row['error']})" if row["error"] else ""

"""The command ``ctxreuse doctor``, and how findings are printed for all doctors."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from ctxreuse.cli.common import Json, print_json

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ctxreuse.config import StoreConfig
    from ctxreuse.doctor import Finding

__all__ = ["EXAMPLES", "doctor", "report_findings"]

EXAMPLES = """[bold]Examples[/bold]

ctxreuse doctor          all checks, and what to do about problems

ctxreuse doctor --json   for a bug report or a health check

Exits with 1 if anything is broken; missing optional parts are not errors.
"""

# Seconds to wait for the daemon.
_PATIENCE = 2.0

_MARKS = {
    "ok": "[green]ok[/green]",
    "missing": "[dim]-[/dim]",
    "slow": "[yellow]slow[/yellow]",
    "broken": "[red]broken[/red]",
}


def doctor(ctx: typer.Context, json: Json = False) -> None:
    """Check versions, processor features, kernels, models and the store: that of the running daemon, if one answers."""
    from ctxreuse.doctor import run_checks

    config = ctx.find_root().obj
    report_findings(run_checks(config, lambda settings: _running_store(config, settings)), json=json)


def _running_store(config: str | None, settings: StoreConfig) -> StoreConfig:
    """Return the store of the daemon that the settings describe, else that of the settings."""
    import msgspec

    from ctxreuse.cli.common import daemon_client
    from ctxreuse.config import load
    from ctxreuse.errors import CtxReuseError

    edge = load(config).settings.edge
    try:
        place = settings.folder() / "edge.json"
        client = daemon_client("", place, (edge.host, edge.port), edge.api_key_file, timeout=_PATIENCE)
        path = str(client.call("GET", "/api/status")["store"]["path"])
    except (CtxReuseError, KeyError, TypeError):
        return settings
    return msgspec.structs.replace(settings, path=path)


def report_findings(findings: Sequence[Finding], *, json: bool) -> None:
    """Print findings as a table or as JSON, and exit: with 1 if anything is broken, else with 0."""
    broken = any(finding.status == "broken" for finding in findings)
    if json:
        print_json({"healthy": not broken, "findings": findings})
        raise typer.Exit(int(broken))
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console()
    table = Table(box=None, pad_edge=False, show_header=False)
    for column in ("area", "name", "status"):
        table.add_column(column, no_wrap=True)
    table.add_column("value", overflow="fold")
    area = ""
    for finding in findings:
        head = "" if finding.area == area else f"[bold]{finding.area}[/bold]"
        area = finding.area
        text = escape(finding.value) + (f"  [dim]{escape(finding.fix)}[/dim]" if finding.fix else "")
        table.add_row(head, escape(finding.name), _MARKS[finding.status], text)
    console.print(table)
    console.print("[red]Something is broken.[/red]" if broken else "[green]Healthy.[/green]")
    raise typer.Exit(int(broken))

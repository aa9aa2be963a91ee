"""The command ``ctxreuse doctor``: what is here, which kernels run, and is anything broken?"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from ctxreuse.doctor import Finding

__all__ = ["EXAMPLES", "doctor"]

EXAMPLES = """[bold]Examples[/bold]

ctxreuse doctor          everything, with what to do about it

ctxreuse doctor --json   for a bug report or a health check

Exits with 1 if anything is broken; what is merely missing is not.
"""

_MARKS = {
    "ok": "[green]ok[/green]",
    "missing": "[dim]-[/dim]",
    "slow": "[yellow]slow[/yellow]",
    "broken": "[red]broken[/red]",
}


def doctor(
    ctx: typer.Context,
    json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
) -> None:
    """Show versions, processor features, kernels, models and the health of the store."""
    import msgspec

    from ctxreuse.doctor import examine

    findings = examine(ctx.find_root().obj)
    broken = any(finding.status == "broken" for finding in findings)
    if json:
        body = {"healthy": not broken, "findings": findings}
        sys.stdout.buffer.write(msgspec.json.format(msgspec.json.encode(body), indent=2) + b"\n")
    else:
        _print(findings, broken)
    if broken:
        raise typer.Exit(1)


def _print(findings: list[Finding], broken: bool) -> None:
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

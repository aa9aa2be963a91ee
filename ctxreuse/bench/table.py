"""Figures of a bench as a table for people."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from ctxreuse.bench.report import Figure, Report

__all__ = ["show"]


def _number(value: float) -> str:
    if value and (abs(value) >= 1e6 or abs(value) < 1e-3):
        return f"{value:.3g}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _compared(figure: Figure, other: float | None) -> str:
    ratio = figure.ratio(other)
    return "" if other is None else _number(other) + ("" if ratio is None else f" ({ratio:.3g}x)")


def _bar(figure: Figure) -> str:
    if figure.bar is None:
        return ""
    sign = "≥" if figure.better == "higher" else "≤"
    colour, word = ("green", "met") if figure.passed else ("red", "missed")
    return f"{sign} {_number(figure.bar)} [{colour}]{word}[/{colour}]"


def show(report: Report, console: Console, command: str = "ctxreuse bench") -> None:
    """Print a report: each figure with ratios (how many times better) and its bar, met or missed."""
    table = Table(title=f"{command} {report.name}{' --quick' if report.quick else ''}", title_justify="left")
    table.add_column("figure", overflow="fold")
    table.add_column("ours", justify="right", overflow="fold")
    # Columns that no figure fills would only narrow the others.
    columns = [
        name
        for name in ("baseline", "peer", "bound", "bar")
        if any(getattr(f, name) is not None for f in report.figures)
    ]
    for column in columns:
        table.add_column(column, justify="right", overflow="fold")
    for figure in report.figures:
        cells = [_bar(figure) if name == "bar" else _compared(figure, getattr(figure, name)) for name in columns]
        table.add_row(figure.metric, f"{_number(figure.value)} {figure.unit}", *cells)
    console.print(table)
    for figure in report.figures:
        if figure.note:
            console.print(f"[dim]{figure.metric}: {figure.note}[/dim]", highlight=False)
    where = report.machine
    console.print(
        f"[dim]{where['cpu']}, {where['cores']} cores, {where['system']}, Python {where['python']}, "
        f"kernels {where['kernels']}, load {where['load_1m']}[/dim]",
        highlight=False,
    )

"""Plots of profiles, in any format of matplotlib: rate, or work, against divergence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ctxreuse.errors import ConfigError
from ctxreuse.reuse.profile import PolicyMeasurement

__all__ = ["Point", "draw", "draw_policies"]

#: (bits a value, divergence in nats)
Point = tuple[float, float]


def draw(curves: Mapping[str, Sequence[Point]], title: str, path: Path) -> None:
    """Plot one curve a name, to a file whose suffix gives the format.

    Raises ConfigError if matplotlib is not installed, does not know the suffix, or the file cannot be written.
    """
    figure = _figure()
    axes = figure.add_subplot()
    for name, points in curves.items():
        seen = sorted((bits, kl) for bits, kl in points if kl > 0)
        axes.plot([bits for bits, _ in seen], [kl for _, kl in seen], marker="o", markersize=4, label=name)
    axes.set(xlabel="bits a K or V value, everything counted", ylabel="KL of the next token, nats", yscale="log")
    axes.set_title(title)
    axes.grid(which="both", alpha=0.3)
    if len(curves) > 1:
        axes.legend()
    _save(figure, path)


def draw_policies(measured: Sequence[PolicyMeasurement], title: str, path: Path) -> None:
    """Plot the divergence of each policy against its work, a curve for each kind and shape.

    Bars reach to the bound that the gate uses. Raises ConfigError as `draw`.
    """
    figure = _figure()
    axes = figure.add_subplot()
    curves: dict[str, list[PolicyMeasurement]] = {}
    for one in measured:
        curves.setdefault(f"{one.chunks} x {one.tokens}, {one.kind}", []).append(one)
    for name, points in curves.items():
        points.sort(key=lambda one: one.recomputed)
        work, kl = [100 * one.recomputed for one in points], [one.kl for one in points]
        above = [one.kl_high - one.kl for one in points]
        bars = axes.errorbar(work, kl, yerr=[[0.0] * len(kl), above], marker="o", markersize=4, capsize=2, label=name)
        for one in points:
            colour = bars.lines[0].get_color()
            at = (100 * one.recomputed, one.kl)
            axes.annotate(one.policy, at, (3, 4), textcoords="offset points", fontsize=7, color=colour)
    axes.set(xlabel="recomputed, % of layers times tokens", ylabel="KL of the next tokens, nats", yscale="log")
    axes.set_title(title)
    axes.grid(which="both", alpha=0.3)
    axes.legend()
    _save(figure, path)


def _figure() -> Any:
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ConfigError("a plot needs matplotlib", fix="Run: pip install 'ctxreuse[plot]'") from error
    return Figure(figsize=(7, 4.5), layout="constrained")


def _save(figure: Any, path: Path) -> None:
    try:
        # Without the date equal figures give equal files.
        figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"the plot cannot be written: {error}", where=str(path), fix="Name a writable .png or .svg"
        ) from error

"""Plots of profiles, in any format of matplotlib: rate, or work, against divergence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ctxreuse.errors import ConfigError
from ctxreuse.reuse.profile import PolicyMeasurement

__all__ = ["Point", "draw", "draw_policies", "label_points"]

#: (bits a value, divergence in nats)
Point = tuple[float, float]
#: Where a name may stand, seen from its point: right and up, in order of preference.
_SIDES = ((1, 1), (1, -1), (-1, 1), (-1, -1), (0, 1), (0, -1), (1, 0), (-1, 0))


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
    named: list[tuple[float, float, str, Any]] = []
    for one in measured:
        curves.setdefault(f"{one.chunks} x {one.tokens}, {one.kind}", []).append(one)
    for name, points in curves.items():
        points.sort(key=lambda one: one.recomputed)
        work, kl = [100 * one.recomputed for one in points], [one.kl for one in points]
        above = [one.kl_high - one.kl for one in points]
        bars = axes.errorbar(work, kl, yerr=[[0.0] * len(kl), above], marker="o", markersize=4, capsize=2, label=name)
        colour = bars.lines[0].get_color()
        named += [(100 * one.recomputed, one.kl, one.policy, colour) for one in points]
    axes.set(xlabel="recomputed, % of layers times tokens", ylabel="KL of the next tokens, nats", yscale="log")
    axes.set_title(title)
    axes.grid(which="both", alpha=0.3)
    axes.legend()
    label_points(axes, named)
    _save(figure, path)


def label_points(axes: Any, named: Sequence[tuple[float, float, str, Any]], size: float = 7) -> None:
    """Write a name beside each of these points ``(x, y, name, colour)``, none over another and all in the frame.

    A point without a name only takes room. Call it when the axes have their limits, scales and legend: it lays the
    figure out. A name stands as near as there is room, with a thin line to its point where that is not beside it.
    """
    from matplotlib.transforms import Bbox

    figure = axes.figure
    figure.draw_without_rendering()
    frame = axes.get_window_extent()
    dot = size / 2 * figure.dpi / 72
    taken = [] if axes.get_legend() is None else [axes.get_legend().get_window_extent()]
    for x, y, _, _ in named:
        at = axes.transData.transform((x, y))
        taken.append(Bbox([at - dot, at + dot]))
    for x, y, name, colour in sorted((one for one in named if one[2]), key=lambda one: one[:2]):
        text = axes.annotate(name, (x, y), (0, 0), textcoords="offset points", fontsize=size, color=colour)
        for away, (right, up) in ((away, side) for away in range(1, 12) for side in _SIDES):
            text.set(ha=("right", "center", "left")[right + 1], va=("top", "center", "bottom")[up + 1])
            text.set_position((right * size * 0.9 * away, up * size * 0.7 * away))
            box = text.get_window_extent()
            inside = frame.x0 < box.x0 and box.x1 < frame.x1 and frame.y0 < box.y0 and box.y1 < frame.y1
            if inside and not any(box.overlaps(other) for other in taken):
                taken.append(box)
                break
        if away > 1:
            axes.annotate(
                "", (x, y), text.get_position(), textcoords="offset points",
                arrowprops={"arrowstyle": "-", "color": colour, "lw": 0.5, "alpha": 0.6},
            )  # fmt: skip


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

"""The plot of rate against divergence, for people: one line a codec, ours in front."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.picture import OTHERS, OURS, picture
from benchmarks.rate.curve import Point

__all__ = ["draw"]

_MARKS = ("s", "^", "v", "D", "P", "X", "p", "h")
#: Beyond this nobody would call the answers the same: rivals that far out would squeeze the rest.
_MOST_KL = 0.5


def draw(points: Sequence[Point], path: Path, ours: Sequence[str], model: str, targets: Sequence[float]) -> None:
    """Write the plot as SVG and PNG; the folder is made. Raises ConfigError if matplotlib is not installed."""
    families: dict[str, list[Point]] = {}
    for point in points:
        families.setdefault(point.family, []).append(point)
    with picture(path, f"Rate and damage on {model}: further down and left is better") as axes:
        rivals = [name for name in families if name not in ours]
        for number, name in enumerate(rivals):
            _line(axes, name, families[name], OTHERS[number % 8], _MARKS[number % 8], False)
        own = [name for name in ours if name in families]
        for name, mark in zip(own, "os"):
            _line(axes, name, families[name], OURS, mark, True)
        for target in targets:
            axes.axhline(target, color="0.75", lw=0.8, ls=(0, (4, 3)), zorder=0)
            axes.annotate(
                f"KL {target:g}", (1.0, target), xycoords=("axes fraction", "data"), xytext=(-4, 2),
                textcoords="offset points", ha="right", va="bottom", color="0.45", fontsize=8,
            )  # fmt: skip
        shown = [p for p in points if p.kl <= _MOST_KL]
        axes.set_ylim(min(p.kl for p in shown) * 0.6, max(p.kl for p in shown) * 1.5)
        axes.set_xlim(0, max(p.bits for p in shown) + 0.4)
        axes.set_xlabel("bits a K/V value, everything counted")
        axes.set_ylabel("KL of the next token against the exact cache, nats")
        handles, labels = axes.get_legend_handles_labels()
        axes.legend(
            handles[-len(own) :] + handles[: -len(own)],
            labels[-len(own) :] + labels[: -len(own)],
            fontsize=9,
            framealpha=0.9,
            edgecolor="white",
        )


def _line(axes: object, name: str, points: Sequence[Point], colour: str, mark: str, ours: bool) -> None:
    shown = sorted((p for p in points if p.kl <= _MOST_KL), key=lambda point: point.bits)
    axes.plot(  # type: ignore[attr-defined]
        [p.bits for p in shown],
        [p.kl for p in shown],
        label=name,
        color=colour,
        marker=mark,
        lw=2.6 if ours else 1.3,
        ms=8 if ours else 6,
        zorder=5 if ours else 2,
        alpha=1.0 if ours else 0.85,
    )
    for p in shown if ours else ():
        axes.annotate(  # type: ignore[attr-defined]
            p.setting,
            (p.bits, p.kl),
            xytext=(-8, -10),
            textcoords="offset points",
            ha="right",
            color=colour,
            fontsize=9,
        )

"""The plot of rate against divergence, for people: one line a codec, ours in front."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ctxreuse.bench.rate.curve import Point
from ctxreuse.errors import ConfigError

__all__ = ["draw", "plot_paths"]

_OURS = "#c8102e"
_OTHERS = ("#1f6f8b", "#7a5195", "#3d8b37", "#b8860b", "#5b6770", "#2f4b9c", "#8c564b", "#008b8b")
_MARKS = ("s", "^", "v", "D", "P", "X", "p", "h")
#: Beyond this nobody would call the answers the same: rivals that far out would squeeze the rest.
_MOST_KL = 0.5


def plot_paths(path: Path) -> tuple[Path, Path]:
    """Where a plot goes: PATH.svg and PATH.png, whichever of the two endings PATH has or has not."""
    stem = path.with_suffix("") if path.suffix in (".svg", ".png") else path
    return stem.with_name(stem.name + ".svg"), stem.with_name(stem.name + ".png")


def draw(points: Sequence[Point], path: Path, ours: str, model: str, targets: Sequence[float]) -> tuple[Path, Path]:
    """Write the plot as SVG and PNG; the folder is made. Raises ConfigError if matplotlib is not installed."""
    try:
        import matplotlib as mpl

        mpl.use("Agg")
        from matplotlib import pyplot
    except ModuleNotFoundError as error:
        raise ConfigError("a plot needs matplotlib", fix="Run: pip install 'ctxreuse[bench]'") from error
    families: dict[str, list[Point]] = {}
    for point in points:
        families.setdefault(point.family, []).append(point)
    # Text stays text in the SVG, and a run gives the same file again.
    with mpl.rc_context({"font.size": 10, "svg.fonttype": "none", "svg.hashsalt": "ctxreuse"}):
        figure, axes = pyplot.subplots(figsize=(8.4, 5.2), layout="constrained")
        try:
            rivals = [name for name in families if name != ours]
            for number, name in enumerate(rivals):
                _line(axes, name, families[name], _OTHERS[number % 8], _MARKS[number % 8], False)
            _line(axes, ours, families[ours], _OURS, "o", True)
            for target in targets:
                axes.axhline(target, color="0.75", lw=0.8, ls=(0, (4, 3)), zorder=0)
                axes.annotate(
                    f"KL {target:g}", (1.0, target), xycoords=("axes fraction", "data"), xytext=(-4, 2),
                    textcoords="offset points", ha="right", va="bottom", color="0.45", fontsize=8,
                )  # fmt: skip
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter(lambda kl, _: f"{kl:g}")
            shown = [p for p in points if p.kl <= _MOST_KL]
            axes.set_ylim(min(p.kl for p in shown) * 0.6, max(p.kl for p in shown) * 1.5)
            axes.set_xlim(0, max(p.bits for p in shown) + 0.4)
            axes.set_xlabel("bits a K/V value, everything counted")
            axes.set_ylabel("KL of the next token against the exact cache, nats")
            axes.set_title(f"Rate and damage on {model}: further down and left is better", loc="left", fontsize=11)
            axes.grid(True, which="major", color="0.92", lw=0.7)
            axes.spines[["top", "right"]].set_visible(False)
            handles, labels = axes.get_legend_handles_labels()
            axes.legend(
                [handles[-1], *handles[:-1]], [labels[-1], *labels[:-1]], fontsize=9, framealpha=0.9, edgecolor="white"
            )
            paths = plot_paths(path)
            paths[0].parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(paths[0], metadata={"Date": None})
            figure.savefig(paths[1], dpi=160)
        finally:
            pyplot.close(figure)
    return paths


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

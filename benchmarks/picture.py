"""Pictures of benches: one pair of axes, written as SVG and PNG."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ctxreuse.errors import ConfigError

__all__ = ["OTHERS", "OURS", "picture", "plot_paths"]

OURS = "#c8102e"
#: Colours of what is beside ours.
OTHERS = ("#1f6f8b", "#7a5195", "#3d8b37", "#b8860b", "#5b6770", "#2f4b9c", "#8c564b", "#008b8b")


def plot_paths(path: Path) -> tuple[Path, Path]:
    """Where a plot goes: PATH.svg and PATH.png, whichever of the two endings PATH has or has not."""
    stem = path.with_suffix("") if path.suffix in (".svg", ".png") else path
    return stem.with_name(stem.name + ".svg"), stem.with_name(stem.name + ".png")


@contextmanager
def picture(path: Path, title: str) -> Iterator[Any]:
    """Axes to draw on with a logarithmic y; afterwards both files are there, and their folder.

    Raises ConfigError if matplotlib is not installed.
    """
    try:
        import matplotlib as mpl

        mpl.use("Agg")
        from matplotlib import pyplot
    except ModuleNotFoundError as error:
        raise ConfigError("a plot needs matplotlib", fix="Run: pip install 'ctxreuse[bench]'") from error
    # Text stays text in the SVG, and a run gives the same file again.
    with mpl.rc_context({"font.size": 10, "svg.fonttype": "none", "svg.hashsalt": "ctxreuse"}):
        figure, axes = pyplot.subplots(figsize=(8.4, 5.2), layout="constrained")
        try:
            yield axes
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
            axes.yaxis.set_minor_formatter(lambda value, _: f"{value:g}" if f"{value:e}"[0] in "235" else "")
            axes.set_title(title, loc="left", fontsize=11)
            axes.grid(True, which="major", color="0.92", lw=0.7)
            axes.spines[["top", "right"]].set_visible(False)
            svg, png = plot_paths(path)
            svg.parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(svg, metadata={"Date": None})
            figure.savefig(png, dpi=160)
        finally:
            pyplot.close(figure)

"""Hit rates against capacity as a picture: a line a policy, the bounds above them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ctxreuse.errors import ConfigError
from ctxreuse.lab.replay import BOUNDS, Outcome
from ctxreuse.units import rounded_bytes

__all__ = ["check_plot", "draw"]

_COLOURS = ("#1f6f8b", "#7a5195", "#3d8b37", "#b8860b", "#2f4b9c", "#8c564b", "#008b8b", "#5b6770")
_OURS = {"adaptive": "#c8102e"}
_MARKS = "os^vDPXp"


def check_plot(path: Path) -> None:
    """Raise ConfigError if `draw` could not write there: no matplotlib, an unknown ending, no such folder."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ConfigError("a plot needs matplotlib", fix="Run: pip install 'ctxreuse[plot]'") from error
    known = Figure().canvas.get_supported_filetypes()
    if path.suffix.removeprefix(".") not in known:
        raise ConfigError(f"no picture is called {path.suffix or path.name!r}", fix="Name a .svg or .png file")
    if not path.absolute().parent.is_dir():
        raise ConfigError("the plot's folder does not exist", where=str(path.parent), fix="Make it first")


def draw(outcomes: Sequence[Outcome], title: str, path: Path) -> None:
    """Write a picture, of the kind of the file's ending. Raises ConfigError as `check_plot`, and if writing fails."""
    check_plot(path)
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "ctxreuse"}):
        figure = Figure(figsize=(8, 4.8), layout="constrained")
        axes = figure.add_subplot()
        names = list(dict.fromkeys(o.policy for o in outcomes))
        sizes = sorted({o.capacity for o in outcomes if o.capacity})
        for number, name in enumerate(n for n in names if n not in BOUNDS):
            points = [(o.capacity, o.token_hit * 100) for o in outcomes if o.policy == name]
            ours = name in _OURS
            axes.plot(
                *zip(*points),
                label=name,
                color=_OURS.get(name, _COLOURS[number % len(_COLOURS)]),
                marker=_MARKS[number % len(_MARKS)],
                lw=2.4 if ours else 1.4,
                ms=6,
                zorder=5 if ours else 3,
            )
        known = [(o.capacity, o.token_hit * 100) for o in outcomes if o.policy == "belady"]
        if known:
            axes.plot(*zip(*known), label="belady (knows the future)", color="0.35", ls="--", lw=1.4, zorder=2)
        for o in outcomes:
            if o.policy == "infinite":
                axes.axhline(o.token_hit * 100, color="0.6", ls=":", lw=1.4, label="infinite cache", zorder=1)
        axes.set_xscale("log")
        axes.set_xticks(sizes, [rounded_bytes(size) for size in sizes])
        axes.minorticks_off()
        axes.set_ylim(bottom=0)
        axes.set_xlabel("capacity")
        axes.set_ylabel("prompt tokens served from the cache, %")
        axes.set_title(title, loc="left", fontsize=11)
        axes.grid(color="0.92", lw=0.7)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(fontsize=9, framealpha=0.9)
        try:
            # Without the date equal figures give equal files.
            figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"the plot cannot be written: {error}", where=str(path), fix="Name a writable .png or .svg"
            ) from error

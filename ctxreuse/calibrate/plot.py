"""Rate against divergence as a picture: PNG, SVG or whatever else matplotlib writes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from ctxreuse.errors import ConfigError

__all__ = ["Point", "draw"]

#: (bits a value, divergence in nats)
Point = tuple[float, float]


def draw(curves: Mapping[str, Sequence[Point]], title: str, path: Path) -> None:
    """Write a picture of one curve a name, to a file whose ending says the kind.

    Raises ConfigError if matplotlib is not installed, does not know the ending, or the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ConfigError("a plot needs matplotlib", fix="Run: pip install 'ctxreuse[plot]'") from error
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for name, points in curves.items():
        seen = sorted((bits, kl) for bits, kl in points if kl > 0)
        axes.plot([bits for bits, _ in seen], [kl for _, kl in seen], marker="o", markersize=4, label=name)
    axes.set(xlabel="bits a K or V value, everything counted", ylabel="KL of the next token, nats", yscale="log")
    axes.set_title(title)
    axes.grid(which="both", alpha=0.3)
    if len(curves) > 1:
        axes.legend()
    try:
        # Without the date equal figures give equal files.
        figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"the plot cannot be written: {error}", where=str(path), fix="Name a writable .png or .svg"
        ) from error

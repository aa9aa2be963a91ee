"""Plots that a person can read: no name over another or over a point, none outside the frame."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from ctxreuse.calibrate.plot import label_points

pytest.importorskip("matplotlib")


@pytest.mark.parametrize("seed", range(3))
def test_names_stand_apart(seed: int) -> None:
    from matplotlib.figure import Figure
    from matplotlib.text import Text

    chance = np.random.default_rng(seed)
    points = [*zip(chance.integers(0, 40, 10), chance.uniform(0.01, 0.3, 10)), (8.3, 0.04), (8.4, 0.041), (8.4, 0.041)]
    figure = Figure(figsize=(8.4, 5.2), layout="constrained")
    axes = figure.add_subplot()
    axes.scatter(*zip(*points), s=40, label="what is measured")
    axes.set_yscale("log")
    axes.legend()
    label_points(axes, [(x, y, f"first-{n}+every-20+drift", "black") for n, (x, y) in enumerate(points)])
    frame = axes.get_window_extent()
    names = [text for text in axes.texts if text.get_text()]
    boxes = [Text.get_window_extent(text) for text in names]  # without the line to the point
    assert len(names) == len(points)
    for box in boxes:
        assert frame.x0 <= box.x0 < box.x1 <= frame.x1
        assert frame.y0 <= box.y0 < box.y1 <= frame.y1
        assert not any(box.contains(*axes.transData.transform(point)) for point in points)
    assert not [pair for pair in itertools.combinations(boxes, 2) if pair[0].overlaps(pair[1])]

"""Windows coded at a step without coding them: quantise, reconstruct, and compare the model's scores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ctxreuse.calibrate.gather import Window, normalise, positions, window_rows
from ctxreuse.calibrate.transform import Basis
from ctxreuse.engines.calibration import CalibrationModel, Fidelity, Planes
from ctxreuse.identity.keys import Tokens

__all__ = ["Prepared", "by_kind", "compare", "decode", "mean_fidelity", "prepare"]

Floats = npt.NDArray[np.float32]


class Prepared(NamedTuple):
    """A window with its components y [rows, C] and scales [rows] of each group, and the scores of the exact cache."""

    window: Window
    components: tuple[Floats, ...]
    scales: tuple[Floats, ...]
    exact: Floats


def prepare(model: CalibrationModel, window: Window, basis: Basis, exact: Floats | None = None) -> Prepared:
    """Transform a window's planes and score it, unless the ``exact`` scores are known; 4 bytes a value and a score."""
    components, scales = [], []
    for transform in basis.transforms:
        stats = transform.stats
        z, scale = normalise(window_rows(window, stats.channels, basis.rotaries), stats)
        components.append(z @ transform.forward.T)
        scales.append(_rounded(scale))
    exact = model.scores(window.reading, window.following) if exact is None else exact
    return Prepared(window, tuple(components), tuple(scales), exact)


def _rounded(scale: Floats) -> Floats:
    """Scales as the codec stores them, in 32nds of an octave."""
    return np.asarray(np.exp2(np.rint(np.log2(scale) * 32) / 32), np.float32)


def decode(prepared: Prepared, basis: Basis, step: float, active: Sequence[int]) -> Planes:
    """The planes of a window as an engine gets them back: the first ``active`` components of each group at a step."""
    planes = {key: plane.copy() for key, plane in prepared.window.reading.planes.items()}
    for transform, y, scale, n in zip(basis.transforms, prepared.components, prepared.scales, active):
        stats, of = transform.stats, transform.stats.channels
        q = np.rint(y[:, :n] / np.float32(step))
        rows = (q @ transform.inverse_at(step, n).T) * (scale * np.float32(step))[:, None] + stats.mean.astype(
            np.float32
        )
        parts = rows.reshape(len(rows), len(of.places), of.heads, of.dim).transpose(1, 2, 0, 3)
        for (layer, role), heads in zip(of.places, parts):
            plane = planes[layer, role]
            at = positions(prepared.window.reading, plane.shape[1])
            kept = at >= of.sinks
            if role == "k":
                heads = basis.rotaries[layer].rotate(heads, at[kept])
            plane[of.first : of.first + of.heads, kept] = heads
    return planes


def compare(exact: Floats, other: Floats, following: Tokens) -> Fidelity:
    """Compare scores [S, vocab] of altered planes with those of exact ones; the last row has no successor."""
    total = 0.0
    for at in range(0, len(exact), 16):  # in pieces: whole products of a large vocabulary take hundreds of megabytes
        a, b = exact[at : at + 16], other[at : at + 16]
        total += float((np.exp(a) * (a - b)).sum(dtype=np.float64))
    rows = np.arange(len(following) - 1)
    worse = exact[rows, following[1:]] - other[rows, following[1:]]
    same = float((exact.argmax(1) == other.argmax(1)).mean())
    return Fidelity(max(total / len(exact), 0.0), same, float(worse.mean(dtype=np.float64)) if len(rows) else 0.0)


def by_kind(kinds: Sequence[str], values: Sequence[Fidelity]) -> dict[str, Fidelity]:
    """The mean of each kind over windows of those kinds."""
    grouped: dict[str, list[Fidelity]] = {}
    for kind, value in zip(kinds, values, strict=True):
        grouped.setdefault(kind, []).append(value)
    return {kind: mean_fidelity(found) for kind, found in grouped.items()}


def mean_fidelity(values: Sequence[Fidelity]) -> Fidelity:
    """The mean over windows."""
    kl, top1, dnll = np.mean(np.array(values), 0).tolist()
    return Fidelity(kl, top1, dnll)

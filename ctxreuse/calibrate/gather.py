"""Reads windows of text with the model and sums up, for each channel group, what the transform is made from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Literal, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from ctxreuse.codec.profile import SINKS
from ctxreuse.engines.calibration import CalibrationModel, Planes, Prefix
from ctxreuse.identity.keys import Tokens
from ctxreuse.rope import Rotary

__all__ = [
    "GroupStats",
    "Progress",
    "Window",
    "channel_groups",
    "gather",
    "normalise",
    "plane_rows",
    "positions",
    "window_rows",
]

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]
#: progress(what, done, of how many)
Progress = Callable[[str, int, int], None]

_MAX_CHANNELS = 256


class Window(NamedTuple):
    """A text that the model has read up to its cut, the ids that follow, and the kind of the text."""

    reading: Prefix
    following: Tokens
    kind: str


class GroupStats(NamedTuple):
    """What one channel group's transform is made from.

    ``mean`` [C]; ``log_rms``: log2 of the geometric mean of the tokens' RMS; ``moment`` [C, C]: second moments of
    centred vectors divided by their own scale s (RMS / 2^log_rms); ``fisher`` [C, C]: mean over cached rows of
    s^2 g g', g being the gradient of the log probabilities of the scored tokens, divided by how many were scored.
    """

    layer: int
    role: Literal["k", "v"]
    first: int
    heads: int
    dim: int
    mean: Doubles
    log_rms: float
    moment: Doubles
    fisher: Doubles

    @property
    def channels(self) -> slice:
        """Where the group lies among the plane's channels."""
        return slice(self.first * self.dim, (self.first + self.heads) * self.dim)


def channel_groups(heads: int, dim: int) -> Iterator[tuple[int, int]]:
    """(first head, heads) of groups of at most 256 channels, a head at least, as even as may be."""
    count = -(-heads // max(1, _MAX_CHANNELS // dim))
    for i in range(count):
        first = heads * i // count
        yield first, heads * (i + 1) // count - first


def positions(reading: Prefix, rows: int) -> npt.NDArray[np.int64]:
    """Position of each of the last ``rows`` tokens."""
    return np.arange(reading.n - rows, reading.n)


def plane_rows(reading: Prefix, planes: Planes, layer: int, role: str, rotary: Rotary) -> Floats:
    """A plane's vectors before rotation, [rows, heads * dim], the first tokens of the context left out."""
    plane = planes[layer, role]
    place = positions(reading, plane.shape[1])
    if role == "k":
        plane = rotary.rotate(plane, place, undo=True)
    kept = plane[:, place >= SINKS]
    return np.ascontiguousarray(kept.transpose(1, 0, 2).reshape(kept.shape[1], -1))


def normalise(rows: Floats, stats: GroupStats) -> tuple[Floats, Floats]:
    """The group's part of plane rows [n, heads * dim]: centred and divided by its scale, [n, C], and the scales [n]."""
    centred = rows[:, stats.channels] - stats.mean.astype(np.float32)
    rms = np.sqrt(np.square(centred).mean(1, dtype=np.float64))
    scale = np.where(rms > 0, rms * 2.0**-stats.log_rms, 1).astype(np.float32)
    centred /= scale[:, None]
    return centred, scale


def gather(
    model: CalibrationModel, windows: Sequence[Window], rotaries: dict[int, Rotary], draws: int, progress: Progress
) -> list[GroupStats]:
    """Statistics of all groups, in layer order, K before V; ``draws`` samples of what may follow are taken a window."""
    groups: list[GroupStats] = []
    for (layer, role), plane in sorted(windows[0].reading.planes.items()):
        rows = np.concatenate([window_rows(w, layer, role, rotaries) for w in windows])
        for first, heads in channel_groups(plane.shape[0], plane.shape[2]):
            groups.append(_moments(rows, layer, role, first, heads, plane.shape[2]))
    sums = [np.zeros_like(stats.moment) for stats in groups]
    for number in range(len(windows) * draws):
        progress("gradients", number, len(windows) * draws)
        window = windows[number // draws]
        gradients = model.gradients(window.reading, window.following, number)
        for total, stats in zip(sums, groups):
            at = stats.layer, stats.role
            _, scale = normalise(window_rows(window, *at, rotaries), stats)
            # K as kept is scale * R k, so a gradient with respect to k is scale * R' g.
            slope = plane_rows(window.reading, gradients, *at, rotaries[stats.layer])[:, stats.channels]
            slope = slope * scale[:, None] * (rotaries[stats.layer].scale ** 2 if stats.role == "k" else 1.0)
            total += slope.T @ slope / (len(slope) * len(window.following))
    progress("gradients", len(windows) * draws, len(windows) * draws)
    return [stats._replace(fisher=total / (len(windows) * draws)) for stats, total in zip(groups, sums)]


def window_rows(window: Window, layer: int, role: str, rotaries: dict[int, Rotary]) -> Floats:
    """A window's own vectors of a plane, see `plane_rows`."""
    return plane_rows(window.reading, window.reading.planes, layer, role, rotaries[layer])


def _moments(rows: Floats, layer: int, role: str, first: int, heads: int, dim: int) -> GroupStats:
    channels = rows[:, first * dim : (first + heads) * dim]
    mean = channels.mean(0, dtype=np.float64)
    rms = np.sqrt(np.square(channels - mean).mean(1))
    log_rms = float(np.log2(rms[rms > 0]).mean()) if (rms > 0).any() else 0.0
    blank = np.zeros((heads * dim, heads * dim))
    stats = GroupStats(layer, cast(Literal["k", "v"], role), first, heads, dim, mean, log_rms, blank, blank)
    normal, _ = normalise(rows, stats)
    return stats._replace(moment=(normal.T @ normal).astype(np.float64) / len(normal))

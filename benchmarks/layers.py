"""Bits a value at a divergence by how many neighbouring layers are coded as one, with ideal coders.

Joint levels code K and V of up to ten layers by one transform. Here it is made for one, five and ten layers as
calibration makes it, and as levels that code each plane by itself have it. Bits are what ideal coders would take whose
tables were learnt on the calibration texts: no block is made. Divergence is real: the model scores other texts, one of
each kind, on the K and V that come back. The first tokens are left as they are and cost nothing on either side.
``--model``: another known name; its layers must all keep all tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ctxreuse.bench.measure import Options
from ctxreuse.bench.report import Figure
from ctxreuse.calibrate import default_texts, settings_for
from ctxreuse.calibrate.gather import Channels, Window, channel_groups, gather, normalise, window_rows
from ctxreuse.calibrate.steps import active_components
from ctxreuse.calibrate.texts import Part, windows_by_kind
from ctxreuse.calibrate.transform import Basis, solve
from ctxreuse.calibrate.trial import Prepared, compare, decode, prepare
from ctxreuse.engines import open_for_calibration
from ctxreuse.engines.calibration import CalibrationModel
from ctxreuse.engines.text import TextModel

__all__ = ["OPTIONS", "bits_at", "prices", "run"]

OPTIONS = ("model",)
#: Neighbouring layers (0: each plane by itself); divergences at which bits are given; steps, by the one whose errors
#: alone would cost .05.
_LAYERS, _AT, _STEPS = (0, 1, 5, 10), (0.05, 0.01, 0.002), (1.6, 1.0, 0.6, 0.35, 0.2, 0.12)
#: Largest whole number with a count of its own; the share of each that is given to its neighbours, and that of all.
_WIDTH, _NEAR, _LEAST = 64, 0.01, 1e-5

Floats = npt.NDArray[np.float32]


def _counts(q: Floats) -> npt.NDArray[np.float64]:
    size, columns = 2 * _WIDTH + 1, q.shape[1]
    at = np.clip(q, -_WIDTH, _WIDTH).astype(np.int64) + _WIDTH + size * np.arange(columns)
    return np.bincount(at.reshape(-1), minlength=size * columns).reshape(columns, size).astype(np.float64)


def prices(learnt: Floats, step: float) -> Floats:
    """Bits of each whole number of each component, [components, 129], by what calibration texts have of them."""
    counts = _counts(np.rint(learnt / np.float32(step)))
    share = counts / counts.sum(1, keepdims=True)
    near = share * (1 - 2 * _NEAR)
    near[:, 1:] += _NEAR * share[:, :-1]
    near[:, :-1] += _NEAR * share[:, 1:]
    return np.asarray(-np.log2((near + _LEAST) / (near + _LEAST).sum(1, keepdims=True)), np.float32)


class _Texts(NamedTuple):
    """The model, texts that are learnt from, and others."""

    model: CalibrationModel
    learnt: list[Window]
    others: list[Window]
    draws: int
    epsilon: float

    @classmethod
    def read(cls, model: CalibrationModel, text: TextModel, learnt: int, others: int) -> _Texts:
        settings = settings_for(model)

        def windows(part: Part, count: int) -> list[Window]:
            length, prefix = settings.prefix + settings.scored, settings.prefix
            cut = windows_by_kind(default_texts()[part], text, count, length, prefix)
            return [Window(model.read(ids[:prefix]), ids[prefix:], kind) for kind, ids in cut]

        found = windows("calibration", learnt), windows("held-out", others)
        return cls(model, *found, settings.draws, settings.epsilon)

    def curve(self, groups: Sequence[Channels], steps: Sequence[float]) -> list[tuple[float, float]]:
        """(divergence, bits a value) at each step."""
        rotaries = self.model.rotaries()
        stats = gather(self.model, self.learnt, groups, rotaries, self.draws, lambda *_: None)
        basis = Basis([solve(one, epsilon=self.epsilon) for one in stats], rotaries)
        learnt = []
        for one in basis.transforms:
            rows = np.concatenate([window_rows(window, one.stats.channels, rotaries) for window in self.learnt])
            learnt.append(normalise(rows, one.stats)[0] @ one.forward.T)
        prepared = [prepare(self.model, window, basis) for window in self.others]
        values = sum(plane.size for window in self.others for plane in window.reading.planes.values())
        found = []
        for step in steps:
            active = active_components(learnt, step)
            bits = sum(_bits(prepared, i, y[:, :n], step) for i, (y, n) in enumerate(zip(learnt, active)))
            scored = [
                compare(
                    one.exact,
                    self.model.scores(one.window.reading, one.window.following, decode(one, basis, step, active)),
                    one.window.following,
                ).kl
                for one in prepared
            ]
            found.append((float(np.mean(scored)), bits / values))
        return found


def _bits(prepared: Sequence[Prepared], group: int, learnt: Floats, step: float) -> float:
    """Bits of a group's components on all texts."""
    price, columns, total = prices(learnt, step), np.arange(learnt.shape[1]), 0.0
    for one in prepared:
        q = np.rint(one.components[group][:, : len(columns)] / np.float32(step))
        total += float(price[columns, np.clip(q, -_WIDTH, _WIDTH).astype(np.int64) + _WIDTH].sum(dtype=np.float64))
    return total


def bits_at(curve: Sequence[tuple[float, float]], kl: float) -> float | None:
    """Bits at a divergence, of (divergence, bits) in any order, by straight lines between logarithms; None outside."""
    points = sorted(curve)
    if not points or not points[0][0] <= kl <= points[-1][0]:
        return None
    logs = np.log([one for one, _ in points]), np.log([bits for _, bits in points])
    return float(np.exp(np.interp(np.log(kl), *logs)))


def run(options: Options) -> list[Figure]:
    """Curves of bits over divergence, by how many layers are coded as one."""
    model, text = open_for_calibration(options.model or "smollm2")
    texts = _Texts.read(model, text, options.pick(5, 20), options.pick(2, 5))
    planes = texts.learnt[0].reading.planes
    alone = list(channel_groups(planes))
    rows = np.mean([len(window_rows(one, alone[0], model.rotaries())) for one in texts.others])
    channels = sum(len(one.places) * one.heads * one.dim for one in alone)
    unit = float((0.05 * 2 * 12 / (channels * rows)) ** 0.5)
    layers = sorted({layer for layer, _ in planes})
    curves, spans = dict[int, list[tuple[float, float]]](), options.pick((0, 2), _LAYERS)
    for number, span in enumerate(spans):
        options.step(f"{span or 'no'} layers together", number, len(spans))
        groups = alone
        if span:
            heads, _, dim = planes[layers[0], "k"].shape
            parts = [layers[at : at + span] for at in range(0, len(layers), span)]
            places = [tuple((layer, role) for layer in part for role in ("k", "v")) for part in parts]
            groups = [Channels(own, 0, heads, dim, joint=True) for own in places]
        curves[span] = texts.curve(groups, [unit * size for size in options.pick((1.0, 0.35), _STEPS)])
    return figures(curves)


def figures(curves: dict[int, list[tuple[float, float]]]) -> list[Figure]:
    """Bits at each divergence that all curves reach, of ``curves`` by the layers that are coded as one."""
    found = []
    for kl in _AT:
        values = {span: bits_at(curve, kl) for span, curve in curves.items()}
        for span, value in values.items():
            if span and value is not None:
                note = f"{16 / value:.0f} times under bfloat16; baseline: each plane by itself"
                name = f"KL {kl:g}, {span} layer{'s' if span > 1 else ''}"
                found.append(
                    Figure(metric=name, value=value, unit="bits", better="lower", baseline=values[0], note=note)
                )
    return found

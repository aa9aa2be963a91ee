"""What one transform of K and V over several layers would save: bits a value at a divergence, estimated.

The product's levels transform K or V of one layer at a time, so that a layer can be loaded while the one before it
computes. Here the components of all planes of some neighbouring layers, K and V, are turned together, by what goes
together on calibration texts, and share a token's scale. Bits are what ideal coders would take whose tables were learnt
on these texts: no block is made. Divergence is real: the model scores other texts, one of each kind, on the K and V
that come back. The first tokens are left as they are and cost nothing on either side. Baseline: each plane alone, in
the same way. ``--model``: another known name; its layers must all keep all tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ctxreuse.bench.measure import Options
from ctxreuse.bench.report import Figure
from ctxreuse.calibrate import default_texts, settings_for
from ctxreuse.calibrate.gather import Window, gather, normalise, plane_rows, positions, window_rows
from ctxreuse.calibrate.texts import Part, windows_by_kind
from ctxreuse.calibrate.transform import Basis, solve
from ctxreuse.calibrate.trial import compare
from ctxreuse.codec.profile import SINKS
from ctxreuse.engines import open_for_calibration
from ctxreuse.engines.calibration import CalibrationModel
from ctxreuse.engines.text import TextModel

__all__ = ["OPTIONS", "Turned", "bits_at", "run"]

OPTIONS = ("model",)
#: Neighbouring layers; divergences that bits are told at; steps, by the one whose errors alone would cost .05.
_LAYERS, _AT, _STEPS = (1, 5, 10), (0.05, 0.01, 0.002), (1.0, 0.6, 0.35, 0.2, 0.12, 0.07)
#: Largest whole number with a count of its own; the share of each that is given to its neighbours, and that of all.
_WIDTH, _NEAR, _LEAST = 64, 0.01, 1e-5

Floats = npt.NDArray[np.float32]


class Turned(NamedTuple):
    """Some planes' components of learnt texts and of others, turned together; ``back`` turns them back.

    ``planes``: their numbers; ``learnt`` [rows, C], ``others`` the same of each other text, ``scales`` [rows] of it.
    """

    planes: list[int]
    back: Floats
    learnt: Floats
    others: list[Floats]
    scales: list[Floats]

    def coded(self, step: float) -> tuple[list[float], list[Floats]]:
        """Return the bits that each other text takes at a step, and what comes back of its components."""
        step32 = np.float32(step)
        q = np.rint(self.learnt / step32)
        gain = (np.square(self.learnt) - np.square(self.learnt - q * step32)).mean(0, dtype=np.float64)
        counts = _counts(q)
        share = counts / counts.sum(1, keepdims=True)
        entropy = -(share * np.log2(np.where(share > 0, share, 1))).sum(1)
        # See `ctxreuse.calibrate.steps.active_components`.
        used = np.flatnonzero(gain > 2 * np.log(2) * step**2 / 12 * entropy)
        near = share * (1 - 2 * _NEAR)
        near[:, 1:] += _NEAR * share[:, :-1]
        near[:, :-1] += _NEAR * share[:, 1:]
        price = -np.log2((near + _LEAST) / (near + _LEAST).sum(1, keepdims=True))[used]
        bits, back = [], []
        for y in self.others:
            whole = np.zeros_like(y)
            whole[:, used] = np.rint(y[:, used] / step32)
            at = np.clip(whole[:, used], -_WIDTH, _WIDTH).astype(np.int64) + _WIDTH
            bits.append(float(price[np.arange(len(used)), at].sum()))
            back.append(np.asarray((whole * step32) @ self.back, np.float32))
        return bits, back


def _counts(q: Floats) -> npt.NDArray[np.float64]:
    size, columns = 2 * _WIDTH + 1, q.shape[1]
    at = np.clip(q, -_WIDTH, _WIDTH).astype(np.int64) + _WIDTH + size * np.arange(columns)
    return np.bincount(at.reshape(-1), minlength=size * columns).reshape(columns, size).astype(np.float64)


class _Texts:
    """The model, its transform of each plane, and the texts that are learnt from and measured on."""

    def __init__(self, model: CalibrationModel, text: TextModel, learnt: int, others: int) -> None:
        self.model, settings = model, settings_for(model)
        self.rotaries = model.rotaries()

        def read(part: Part, count: int) -> list[Window]:
            length, prefix = settings.prefix + settings.scored, settings.prefix
            cut = windows_by_kind(default_texts()[part], text, count, length, prefix)
            return [Window(model.read(ids[:prefix]), ids[prefix:], kind) for kind, ids in cut]

        self.learnt, self.others = read("calibration", learnt), read("held-out", others)
        stats = gather(model, self.learnt[:20], self.rotaries, settings.draws, lambda *_: None)
        self.basis = Basis([solve(one, epsilon=settings.epsilon) for one in stats], self.rotaries)
        self.exact = [model.scores(one.reading, one.following) for one in self.others]
        self.values = [sum(plane.size for plane in one.reading.planes.values()) for one in self.others]

    def components(self, windows: Sequence[Window], number: int) -> tuple[Floats, Floats]:
        """Components [rows, C] and scales [rows] of a plane."""
        transform = self.basis.transforms[number]
        rows = [window_rows(one, transform.stats.layer, transform.stats.role, self.rotaries) for one in windows]
        z, scale = normalise(np.concatenate(rows), transform.stats)
        return z @ transform.forward.T, scale

    def turned(self, numbers: list[int]) -> Turned:
        """Turn planes together; one alone stays as it is."""

        def joined(windows: Sequence[Window]) -> tuple[Floats, Floats]:
            found = [self.components(windows, number) for number in numbers]
            common = np.sqrt(np.mean([np.square(scale) for _, scale in found], 0))
            common = np.asarray(np.exp2(np.rint(np.log2(common) * 32) / 32), np.float32)
            return np.concatenate([y * (scale / common)[:, None] for y, scale in found], 1), common

        learnt, _ = joined(self.learnt)
        turn = np.eye(learnt.shape[1], dtype=np.float32)
        if len(numbers) > 1:
            turn = np.ascontiguousarray(np.linalg.eigh(learnt.T @ learnt)[1][:, ::-1])
        others = [joined([one]) for one in self.others]
        back = np.ascontiguousarray(turn.T)
        return Turned(numbers, back, learnt @ turn, [y @ turn for y, _ in others], [scale for _, scale in others])

    def divergence(self, groups: Sequence[Turned], back: Sequence[Sequence[Floats]]) -> float:
        """Mean divergence of the other texts on what came ``back`` of each group."""
        found = []
        for number, window in enumerate(self.others):
            planes = {at: plane.copy() for at, plane in window.reading.planes.items()}
            for group, parts in zip(groups, back):
                start = 0
                for plane in group.planes:
                    transform = self.basis.transforms[plane]
                    stats, size = transform.stats, len(transform.inverse)
                    y = parts[number][:, start : start + size]
                    rows = (y @ transform.inverse.T) * group.scales[number][:, None] + stats.mean.astype(np.float32)
                    heads = rows.reshape(len(rows), stats.heads, stats.dim).transpose(1, 0, 2)
                    target = planes[stats.layer, stats.role]
                    kept = positions(window.reading, target.shape[1]) >= SINKS
                    if stats.role == "k":
                        place = positions(window.reading, target.shape[1])[kept]
                        heads = self.rotaries[stats.layer].rotate(np.ascontiguousarray(heads), place)
                    target[stats.first : stats.first + stats.heads, kept] = heads
                    start += size
            scores = self.model.scores(window.reading, window.following, planes)
            found.append(compare(self.exact[number], scores, window.following).kl)
        return float(np.mean(found))


def bits_at(curve: Sequence[tuple[float, float]], kl: float) -> float | None:
    """Bits at a divergence, of (divergence, bits) in any order, by straight lines between logarithms; None outside."""
    points = sorted(curve)
    if not points or not points[0][0] <= kl <= points[-1][0]:
        return None
    logs = np.log([one for one, _ in points]), np.log([bits for _, bits in points])
    return float(np.exp(np.interp(np.log(kl), *logs)))


def run(options: Options) -> list[Figure]:
    """Curves of bits over divergence, by how many layers are turned together."""
    model, text = open_for_calibration(options.model or "smollm2")
    texts = _Texts(model, text, options.pick(5, 40), options.pick(2, 5))
    planes: dict[int, list[int]] = {}
    for number, transform in enumerate(texts.basis.transforms):
        planes.setdefault(transform.stats.layer, []).append(number)
    rows = sum(len(plane_rows(one.reading, one.reading.planes, 0, "v", texts.rotaries[0])) for one in texts.others)
    channels = sum(len(one.inverse) for one in texts.basis.transforms)
    unit = (0.05 * 2 * 12 / (channels * rows / len(texts.others))) ** 0.5
    curves: dict[int, list[tuple[float, float]]] = {}
    layers, spans = sorted(planes), options.pick((1, 2), _LAYERS)
    for step, span in enumerate(spans):
        options.step(f"{span} layers", step, len(spans))
        parts = [layers[at : at + span] for at in range(0, len(layers), span)]
        numbers = [[one for layer in part for one in planes[layer]] for part in parts]
        if span == 1:
            numbers = [[one] for some in numbers for one in some]
        groups = [texts.turned(some) for some in numbers]
        curves[span] = []
        for size in options.pick((1.0, 0.35), _STEPS):
            coded = [group.coded(unit * size) for group in groups]
            bits = sum(sum(one) for one, _ in coded) / sum(texts.values)
            curves[span].append((texts.divergence(groups, [back for _, back in coded]), bits))
    return figures(curves)


def figures(curves: dict[int, list[tuple[float, float]]]) -> list[Figure]:
    """Bits at each divergence that all curves reach, of ``curves`` by the layers that are turned together."""
    found = []
    for kl in _AT:
        values = {span: bits_at(curve, kl) for span, curve in curves.items()}
        for span, value in values.items():
            if span > 1 and value is not None:
                note = f"{16 / value:.0f} times under bfloat16; baseline: each plane alone"
                name = f"KL {kl:g}, {span} layers"
                found.append(
                    Figure(metric=name, value=value, unit="bits", better="lower", baseline=values[1], note=note)
                )
    return found
